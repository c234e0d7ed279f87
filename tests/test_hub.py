"""Models from the Hugging Face hub: a hub on this machine, the real library, and each way to fail."""

import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import constants, utils

from llama_ssp.config import ModelConf
from llama_ssp.config.presets import HUB_PAGE, model_words
from llama_ssp.errors import ModelError
from llama_ssp.models.checkpoint import find
from llama_ssp.models.hub import commit_of, hub_copy

COMMIT = "0123456789abcdef0123456789abcdef01234567"
KEPT = ["config.json", "merges.txt", "model.safetensors", "tokenizer.model"]
PACKED = ["m-Q4_K_M.gguf", "m-q8_0.gguf", "m.Q4_K-00001-of-00002.gguf", "m.Q4_K-00002-of-00002.gguf"]
OTHERS = ["pytorch_model.bin", "modeling.py", "consolidated.safetensors", "original/model.safetensors"]
FILES = {name: name.encode() for name in [*KEPT, *OTHERS, *PACKED]}
STATUS = {"gated/model": (403, "GatedRepo"), "no/model": (404, "RepoNotFound"), "busy/model": (451, "")}


class Hub(BaseHTTPRequestHandler):
    """What the library asks of a hub, for one repository; others fail, each in its way."""

    asked: ClassVar[Counter[str]] = Counter()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        repo = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
        if repo in STATUS:
            status, code = STATUS[repo]
            return self._answer(b"", status, {"X-Error-Code": code, "X-Error-Message": "no"})
        if path.endswith("/revision/none") or "/resolve/none/" in path:
            return self._answer(b"", 404, {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/") and "/tree/" in path:
            listed = [{"type": "file", "path": n, "size": len(b), "oid": _sha(b)} for n, b in FILES.items()]
            return self._answer(json.dumps(listed).encode())
        if path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in FILES]
            return self._answer(json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())
        name = path.rpartition("/")[2]
        Hub.asked[f"{self.command} {name}"] += 1
        own = {"ETag": f'"{_sha(FILES[name])}"', "X-Repo-Commit": COMMIT}
        self._answer(FILES[name], headers=own)

    def _answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _sha(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                        constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}")  # fmt: skip
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(constants, name, str(tmp_path / "cache"), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    Hub.asked.clear()
    yield server
    server.shutdown()
    server.server_close()


def of(repo: str, revision: str | None = None) -> ModelConf:
    return ModelConf(name=repo, repo=repo, revision=revision)


@pytest.mark.usefixtures("hub")
def test_a_repository_is_not_fetched_unasked() -> None:
    with pytest.raises(ModelError, match=r"model a/b is not at hand; .*add download=true, or give a folder"):
        find(of("a/b"), "model")


@pytest.mark.usefixtures("hub")
def test_a_repository_is_fetched_without_what_python_would_run() -> None:
    """Pickles, and code."""
    path = find(of("a/b"), "model", download=True)
    assert {file.name for file in path.iterdir()} == set(KEPT)
    assert {name.partition(" ")[2] for name in Hub.asked} == set(KEPT)


@pytest.mark.usefixtures("hub")
def test_the_commit_of_a_repository_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """And how to keep to it."""
    caplog.set_level(logging.INFO)
    path = find(of("a/b"), "model", download=True)
    assert commit_of(path) == COMMIT and commit_of(path.parent) is None
    assert caplog.messages[-1].endswith(f"a/b at commit {COMMIT}; model.revision={COMMIT} keeps to it")
    assert find(of("a/b", COMMIT), "model") == path and caplog.messages[-1].endswith(f"at commit {COMMIT}")


@pytest.mark.usefixtures("hub")
def test_a_preset_is_fetched_at_its_commit(caplog: pytest.LogCaptureFixture) -> None:
    """Not at the newest one; its licence is said before."""
    caplog.set_level(logging.INFO)
    preset = replace(of("a/b"), commit=COMMIT, licence="MIT")
    path = find(preset, "model", download=True)
    assert path.name == COMMIT
    assert not (path.parents[1] / "refs").exists(), "the main branch was asked for"
    assert caplog.messages[0] == "model a/b: a/b, whose licence is MIT"
    assert caplog.messages[-1] == f"model a/b: a/b at commit {COMMIT}"
    assert find(preset, "model") == path


@pytest.mark.usefixtures("hub")
def test_a_copy_of_another_commit_serves_a_preset() -> None:
    """The user fetched it, or an earlier version of the preset did."""
    path = find(of("a/b"), "model", download=True)
    preset = replace(of("a/b"), commit="f" * 40)
    assert find(preset, "model") == path


@pytest.mark.usefixtures("hub")
def test_a_commit_that_the_user_names_is_the_one() -> None:
    path = find(of("a/b"), "model", download=True)
    preset = replace(of("a/b"), commit=COMMIT, revision="f" * 40)
    with pytest.raises(ModelError, match="is not at hand"):
        find(preset, "model")
    assert find(replace(preset, revision=COMMIT), "model") == path


@pytest.mark.usefixtures("hub")
def test_a_repository_is_fetched_once() -> None:
    path = find(of("a/b"), "model", download=True)
    fetched = Counter(Hub.asked)
    assert find(of("a/b"), "model") == path == find(of("a/b"), "model", download=True)
    assert all(Hub.asked[name] == fetched[name] for name in Hub.asked if name.startswith("GET"))
    assert find(of("a/b", COMMIT), "model") == path
    assert {name.partition(" ")[2] for name in Hub.asked} == set(KEPT)


@pytest.mark.parametrize(
    ("end", "files"),
    [("q4_k_m", PACKED[:1]), ("Q8_0", PACKED[1:2]), ("Q4_K", PACKED[2:]), ("Q5", [])],
    ids=["Q4_K_M", "Q8_0", "in parts", "missing"],
)
def test_a_gguf_file_of_a_repository_is_fetched_by_its_end(
    end: str, files: list[str], hub: ThreadingHTTPServer
) -> None:
    """Alone, with all its parts; what is at hand is named where it is another."""
    words = dict(word.split("=", 1) for word in model_words("model", f"{HUB_PAGE}a/b:{end}"))
    assert [words[f"model.{key}"].strip("'") for key in ("repo", "file")] == ["a/b", end]
    model = replace(of("a/b"), file=end)
    with pytest.raises(ModelError, match="add download=true"):
        find(model, "model")
    if not files:
        with pytest.raises(ModelError, match=r"found no GGUF file, allowed \*Q5\.gguf"):
            find(model, "model", download=True)
        return
    path = find(model, "model", download=True)
    assert path.name == files[0] == find(model, "model").name
    assert {file.name for file in path.parent.iterdir()} == set(files)
    assert len(files) > 1 or find(of("a/b"), "model") == path, "the only file of a copy needs no end"
    with pytest.raises(ModelError, match=files[0].replace(".", r"\.")):
        find(replace(model, file="F16"), "model")


def test_the_leader_alone_shows_progress(hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = list[str]()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(utils, "disable_progress_bars", lambda rank=rank: quiet.append(rank))
        find(of("a/b"), "model", download=True)
    assert quiet == ["1"]


def test_an_interrupted_download_goes_on_with_the_files_that_lack(hub: ThreadingHTTPServer) -> None:
    weights = find(of("a/b"), "model", download=True) / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    with pytest.raises(ModelError, match="model a/b is not at hand"):
        find(of("a/b"), "model")
    assert find(of("a/b"), "model", download=True) == weights.parent and weights.is_file()
    assert (Hub.asked["GET model.safetensors"], Hub.asked["GET config.json"]) == (2, 1)


def test_ranks_of_one_machine_fetch_each_file_once(hub: ThreadingHTTPServer) -> None:
    with ThreadPoolExecutor(3) as ranks:
        assert len(set(ranks.map(lambda _: find(of("a/b"), "model", True), range(3)))) == 1
    assert Hub.asked["GET model.safetensors"] == Hub.asked["GET config.json"] == 1


@pytest.mark.parametrize(
    ("repo", "revision", "says"),
    [
        ("gated/model", None, "it is gated; .*gated/model; .*ask for access on this page, and set HF_TOKEN"),
        ("no/model", None, "there is no such repository, or .*private one set HF_TOKEN"),
        ("a/b", "none", "there is no such revision; .*correct draft.revision"),
        ("busy/model", None, "the hub refuses, or .*451"),
    ],
)
def test_why_it_cannot_be_fetched(
    repo: str, revision: str | None, says: str, hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1, raising=False)
    for file in (None, "config.json"):
        with pytest.raises(ModelError, match=f"draft {repo} cannot be fetched: {says}") as raised:
            hub_copy(of(repo, revision), "draft", True, file)
        assert "\n" not in str(raised.value) and "add download=true" not in str(raised.value), file


def test_without_a_network(hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    says = r"cannot be reached; http://127\.0\.0\.1:9/a/b; .*or give a folder: model=PATH"
    with pytest.raises(ModelError, match=says):
        find(of("a/b"), "model", download=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        find(of("a/b"), "model", download=True)
