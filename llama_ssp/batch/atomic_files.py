"""Writing so that a reader, after any crash, finds a file whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llama_ssp.errors import StorageError


@contextmanager
def storing(where: Path) -> Iterator[None]:
    """What the system says about a disk, as one line with its remedy."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write the journal: {error.strerror or error}", where=str(where),
            fix="make room or choose another folder, then start the same command again: nothing is lost",
        ) from error  # fmt: skip


def write_once(path: Path, data: bytes, unique: str) -> bool:
    """Gives the file its final name when it is safely on disk; whether this call was the first to do so."""
    draft = path.with_name(f".{path.name}.{unique}")
    with storing(path):
        try:
            _write(draft, data)
            os.link(draft, path)  # fails where the name exists, on every kind of shared disk
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(path.parent)
    return True


def replace_whole(path: Path, data: bytes, unique: str) -> None:
    """Puts a file in the place of an older one, in one step."""
    draft = path.with_name(f".{path.name}.{unique}")
    with storing(path):
        try:
            _write(draft, data)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes new names in a folder last; some file systems cannot be asked to."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
