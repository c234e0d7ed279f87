"""Processes forked from a server that has imported torch, transformers and the package once for all tests.

Importing them takes five seconds of a core; a process from here starts in a moment. Tests of what a process
imports, or of how it starts, start Python themselves.
"""

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.processes import MARK, STARTS

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch" / "run.py"
PATIENCE_S = 600.0
IMPORTED = [
    "pytest", "llama_ssp.cli", "llama_ssp.tasks.runner", "transformers.models.llama.modeling_llama",
    "tests.distributed.pairs",
]  # fmt: skip


def server() -> Any:
    """The multiprocessing context that forks from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with patch.dict(os.environ):
        os.environ.pop(MARK, None)  # the server does not end with the test that starts it
        forkserver.ensure_running()
    STARTS.append("forkserver")
    return context


def start(
    words: Sequence[object], folder: Path, streams: Sequence[Path | str],
    env: Mapping[str, str] | None = None, first: Callable[[], object] | None = None,
) -> Any:  # fmt: skip
    """Starts Python with `words`: a script, or -m and a module, and its arguments. Returns the process.

    `streams` are the files of standard input, output and error; a terminal is one for all three. `first` is
    called before the script.
    """
    names, variables = [str(stream) for stream in streams], dict(env or os.environ)
    args = [str(word) for word in words], folder, names, variables, first
    process = server().Process(target=_run, args=args, daemon=True)
    process.start()
    return process


class Answer(NamedTuple):
    """What a process said, and its exit code; None if it had not ended."""

    code: int | None
    out: str
    err: str
    summary: dict[str, Any] | None = None  # of the run, where no output=json printed it

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document: the run's, or the last line of standard output."""
        document: dict[str, Any] = self.summary or json.loads(self.out.splitlines()[-1])
        return document


def answers(processes: Sequence[Any], said: Sequence[Sequence[Path]], patience_s: float) -> list[Answer]:
    """When all have ended: what they said. Who has not after this long gives None, and is killed."""
    until = time.monotonic() + patience_s
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    texts = [[stream.read_text(encoding="utf-8", errors="replace") for stream in both] for both in said]
    return [Answer(code, *both) for code, both in zip(codes, texts, strict=True)]


def python(
    words: Sequence[object], folder: Path, env: Mapping[str, str] | None = None, stdin: str = ""
) -> Answer:
    """Runs Python with these words, as `start` does, to its end."""
    with tempfile.TemporaryDirectory() as scratch:
        streams = [Path(scratch) / name for name in ("in", "out", "err")]
        streams[0].write_text(stdin, encoding="utf-8")
        (answer,) = answers([start(words, folder, streams, env)], [streams[1:]], PATIENCE_S)
    assert answer.code is not None, f"{words} had not ended after {PATIENCE_S:g} s: {answer}"
    folders = folder.glob("outputs/**/summary.json") if "{" not in answer.out else ()
    latest = max(folders, key=lambda file: file.stat().st_mtime, default=None)
    return answer._replace(summary=latest and json.loads(latest.read_text(encoding="utf-8")))


def launcher_store() -> Any:
    """A store as torchrun keeps it, which outlives the ranks."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def as_launched(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment of a rank that torchrun starts on one machine."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


class Started:
    """Ranks of a program that are running, as torchrun would start them, in a folder for what they say.

    torchrun itself, and the imports of its ranks, take fifteen seconds of a core.
    """

    def __init__(
        self, folder: Path, world: int, *words: object, program: Path | str = LAUNCH,
        fault: Callable[[int], object] | None = None, stdin: str = "",
    ) -> None:  # fmt: skip
        """`fault(rank)` goes first on each rank."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stdin").write_text(stdin, encoding="utf-8")
        self._store = launcher_store()
        self._said = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(world)]
        self.processes = [
            start(
                [program, *words], folder, [folder / "stdin", *said],
                os.environ | as_launched(rank, world, self._store.port), fault and partial(fault, rank),
            )
            for rank, said in enumerate(self._said)
        ]  # fmt: skip

    def has_come(self, rank: int) -> bool:
        """Whether the rank waits for the others, or did."""
        return bool(self._store.check([f"llama_ssp/0/0/rank/{rank}"]))

    def finish(self, patience_s: float = PATIENCE_S) -> list[Answer]:
        return answers(self.processes, self._said, patience_s)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def _run(
    words: list[str], folder: Path, streams: list[str], env: dict[str, str], first: Callable[[], Any] | None
) -> None:
    os.environ.clear()
    os.environ.update(env)
    if len(set(streams)) == 1:
        os.login_tty(os.open(streams[0], os.O_RDWR))
    for number, stream in enumerate(streams):
        anew = os.O_TRUNC if number else 0
        os.dup2(os.open(stream, os.O_RDWR | os.O_CREAT | anew, 0o600), number)
    sys.stdin, sys.stdout = os.fdopen(0, "r", closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(folder)
    util._flush_std_streams = _flush  # as Python itself ends where a terminal has gone
    multiprocessing.current_process()._config["daemon"] = False  # it may have children
    sys.argv = words[1:] if words[0] == "-m" else words
    if first:
        first()
    if words[0] == "-m":
        sys.path.insert(0, str(folder))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
