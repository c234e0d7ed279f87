"""Writes files so that a reader, after any crash, finds a file whole or not at all."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llama_ssp.errors import StorageError


@contextmanager
def storing(where: Path) -> Iterator[None]:
    """Raises StorageError, one line with its remedy, for what the system says about a disk."""
    try:
        yield
    except OSError as error:
        fix = "make room or choose another folder, then start the same command again: nothing is lost"
        raise StorageError(f"cannot write the journal: {error.strerror or error}", where, fix=fix) from error


def write_once(path: Path, data: bytes) -> bool:
    """Gives the file its final name when it is safely on disk; whether this call was the first to do so."""
    with _draft(path, data) as draft:
        try:
            os.link(draft, path)  # fails where the name exists, on every kind of shared disk
        except FileExistsError:
            return False
    return True


def replace_whole(path: Path, data: bytes) -> None:
    """Puts a file in the place of an older one, in one step."""
    with _draft(path, data) as draft:
        draft.replace(path)


@contextmanager
def _draft(path: Path, data: bytes) -> Iterator[Path]:
    """A file with the data, safely on disk, which the caller gives its final name."""
    draft = path.with_name(f".{path.name}.{unique_name()}")
    with storing(path):
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield draft
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes new names in a folder last; some file systems cannot do it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def unique_name() -> str:
    """A name no other attempt has: of a scheduler's job and restart, else of the host, and of the process."""
    job = os.environ.get("SLURM_JOB_ID")
    where = f"{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else socket.gethostname()
    return f"{where}-{os.getpid()}"
