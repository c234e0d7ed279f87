"""Models are copied to a node's own disk once, whole or not at all, and read there."""

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.config import ModelConf
from llama_ssp.errors import StorageError
from llama_ssp.models import staged as staging
from llama_ssp.models.checkpoint import find
from llama_ssp.models.folder import fingerprint
from llama_ssp.models.staged import DRAFT, STAGED, stage, staged


@pytest.fixture
def model(saved: Any, tmp_path: Path) -> Path:
    """A folder of a model, with files that no run reads."""
    folder = tmp_path / "server" / "m"
    shutil.copytree(saved.whole, folder)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1000)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCAL_DISK", str(tmp_path / "disk"))
    monkeypatch.setenv(STAGED, "$LOCAL_DISK/models")
    return tmp_path / "disk" / "models"


def test_a_copy_is_read_in_place_of_the_model(
    model: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = ModelConf(name="m", path=str(model))
    assert find(conf, "model") == model, "nothing is copied yet"
    assert stage(model, place).endswith(" GB")
    copy = find(conf, "model")
    assert copy.is_relative_to(place) and copy.name == model.name
    assert fingerprint(copy) == fingerprint(model)
    assert (copy / "additional_chat_templates" / "tool.jinja").is_file()
    assert not (copy / "pytorch_model.bin").exists()
    monkeypatch.delenv(STAGED)
    assert find(conf, "model") == model


def test_a_file_of_gguf_is_copied_with_its_tokenizer(tmp_path: Path, place: Path) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    for name in ("m.gguf", "tokenizer.json", "other.gguf", "model.safetensors"):
        (folder / name).write_bytes(name.encode())
    stage(folder / "m.gguf", place)
    copy = staged(folder / "m.gguf")
    assert copy.is_relative_to(place)
    assert sorted(file.name for file in copy.parent.iterdir()) == ["m.gguf", "tokenizer.json"]


def test_a_model_that_has_changed_is_not_read_from_its_old_copy(model: Path, place: Path) -> None:
    stage(model, place)
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    assert staged(model) == model
    stage(model, place)
    assert staged(model) != model


def test_processes_of_a_node_copy_once(model: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    copyfile = shutil.copyfile

    def counted(source: Path, target: Path) -> None:
        copies.append(source.name)
        copyfile(source, target)

    monkeypatch.setattr(staging.shutil, "copyfile", counted)
    ready = threading.Barrier(4)

    def one(_: int) -> str:
        ready.wait(30)
        return stage(model, place)

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(one, range(4)))
    assert sum("already" in line for line in said) == 3
    assert len(copies) == len(set(copies))


def test_what_a_killed_process_left_is_removed_and_never_read(model: Path, place: Path) -> None:
    left = place / f"{DRAFT}{fingerprint(model)[:32]}"
    shutil.copytree(model, left / model.name)
    assert staged(model) == model
    stage(model, place)
    assert not left.exists() and staged(model) != model


def test_without_room_nothing_is_left(model: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(model)._replace(free=2**30)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match=r"there is no room for a copy.*found 1\.1 GB free"):
        stage(model, place)
    assert staged(model) == model and [path.name for path in place.iterdir()] == [staging.LOCK]


def test_a_disk_that_fails_leaves_nothing(model: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_source: Path, _target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging.shutil, "copyfile", fail)
    with pytest.raises(StorageError, match=r"cannot be copied.*No space left"):
        stage(model, place)
    assert staged(model) == model and [path.name for path in place.iterdir()] == [staging.LOCK]


def test_a_damaged_copy_gets_no_name(model: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.shutil, "copyfile", lambda _, target: Path(target).write_bytes(b"{}"))
    with pytest.raises(Exception, match=r"differs|damaged|no weight|index"):
        stage(model, place)
    assert staged(model) == model and [path.name for path in place.iterdir()] == [staging.LOCK]


def test_a_copy_of_another_user_is_not_read(
    model: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(model, place)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert staged(model) == model


def test_the_command_of_the_script_says_what_it_did(model: Path, place: Path) -> None:
    """A model that is not there does not end it: ranks will say so."""
    words = [
        sys.executable,
        "-m",
        "llama_ssp.batch.slurm.stage",
        "$LOCAL_DISK/models",
        str(model),
        "/no/such",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    copied, failed = done.stderr.splitlines()
    assert f"{model} is copied to {place}" in copied
    assert "not copied, and read from /no/such: the model cannot be copied" in failed
    assert staged(model) != model
