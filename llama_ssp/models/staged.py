"""Copies of models on a node's own disk: made once a node, and read in place of a server's files. No torch.

    PLACE/HASH/NAME     the copy of a model's folder, or of its GGUF file; HASH is `fingerprint`'s

A copy has its name only when it is whole. So a model that has changed on the server has another place, and a
process that is killed while it copies leaves nothing that is read.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama_ssp.errors import StorageError
from llama_ssp.models.folder import READ_BY_LIBRARIES, TEMPLATES, fingerprint, is_gguf, weight_files

STAGED = "LLAMA_SSP_STAGED"  # names the place; variables in it are those of the process that reads it
LOCK = ".lock"
DRAFT = ".part-"  # how the folder of a copy that is not whole begins
ROOM = 2**30  # bytes that stay free on that disk
GB = 1e9


def place_of(text: str) -> Path:
    """Returns the folder that a setting names, with ~ and the variables of this process."""
    return Path(os.path.expandvars(os.path.expanduser(text)))


def staged(path: Path) -> Path:
    """Returns the copy of a model that this node has, if it is this user's; else the path itself."""
    place = os.environ.get(STAGED)
    if not place:
        return path
    copy = _copy_of(place_of(place), path)
    return copy if copy.exists() and copy.parent.lstat().st_uid == os.geteuid() else path


def stage(path: Path, place: Path) -> str:
    """Copies a model to the place, unless it is there; returns a line that says what was done.

    Processes of one node take turns: the second one finds the copy of the first. Raises StorageError, and
    leaves nothing, where there is no room, or the disk fails.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        with _turn(place):
            copy = _copy_of(place, path)
            if copy.exists():
                return f"{path} is at {copy} already"
            for left in place.glob(f"{DRAFT}*"):  # by a process that was killed: this one has the lock
                shutil.rmtree(left, ignore_errors=True)

            files = _files_of(path)
            size = sum(file.stat().st_size for file in files)
            free = shutil.disk_usage(place).free
            if size + ROOM > free:
                raise StorageError(
                    "there is no room for a copy of the model",
                    where=place,
                    found=f"{free / GB:.1f} GB free",
                    allowed=f"{(size + ROOM) / GB:.1f} GB for {path}",
                    fix="name a larger disk: cluster.slurm.stage=FOLDER",
                )
            _copy(path, files, copy)
            return f"{path} is copied to {copy}, {size / GB:.1f} GB"
    except OSError as error:
        raise StorageError(
            "the model cannot be copied",
            where=place,
            found=error.strerror or error,
            fix="name a folder on the nodes' own disks: cluster.slurm.stage=FOLDER",
        ) from error


def _copy_of(place: Path, path: Path) -> Path:
    return place / fingerprint(path)[:32] / path.name


def _files_of(path: Path) -> list[Path]:
    """Returns the files that are read of a model: its weights, and small ones of its folder."""
    weights = weight_files(path)
    folder = path.parent if is_gguf(path) else path
    kinds = {*READ_BY_LIBRARIES} - {".safetensors"}  # others are not this model's weights
    small = [file for file in folder.iterdir() if file.suffix in kinds and file.is_file()]
    templates = [file for file in (folder / TEMPLATES).glob("*") if file.is_file()]
    return sorted({*weights, *small, *templates})


def _copy(path: Path, files: list[Path], copy: Path) -> None:
    """Copies the files next to the copy's place, compares, and gives them their place in one step."""
    draft = copy.parent.with_name(f"{DRAFT}{copy.parent.name}")
    folder = path.parent if is_gguf(path) else path
    target = draft if is_gguf(path) else draft / path.name
    draft.mkdir(mode=0o700)
    try:
        for file in files:
            place = target / file.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        if fingerprint(draft / path.name) != fingerprint(path):
            raise StorageError("the copy of a model differs from it", where=draft, fix="look at that disk")
        draft.rename(copy.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _turn(place: Path) -> Iterator[None]:
    """Waits for the other processes of this node that copy to the place. A killed one's turn is over."""
    lock = os.open(place / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
