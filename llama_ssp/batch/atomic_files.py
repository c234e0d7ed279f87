"""Writes files so that a reader, after any crash, finds a file, or a line of one, whole or not at all."""

import errno
import functools
import json
import logging
import os
import secrets
import socket
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from llama_ssp.distributed.identity import own_element
from llama_ssp.errors import StorageError, writing
from llama_ssp.text.prompts import reading

log = logging.getLogger(__name__)

# What a file system says of an operation that it does not have.
NOT_ABLE = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK}


def storing(where: Path) -> AbstractContextManager[None]:
    """Raises StorageError, one line with its remedy, where the system cannot write a file of a job."""
    fix = "make room or choose another folder, then start the same command again: nothing is lost"
    return writing("journal", where, fix)


def write_once(path: Path, data: bytes) -> bool:
    """Gives the file its final name when it is safely on disk; whether this call was the first to do so."""
    with drafted(path) as (draft, file):
        file.write(data)
        synced(file)
        try:
            os.link(draft, path)  # fails where the name exists, on every kind of shared disk
        except FileExistsError:
            return draft.stat().st_nlink == 2  # NFS may send a link twice: 2 means that it was ours
    return True


def replace_whole(path: Path, data: bytes) -> None:
    """Puts a file in the place of an older one, in one step."""
    with drafted(path) as (draft, file):
        file.write(data)
        synced(file)
        draft.replace(path)


@contextmanager
def drafted(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Opens a new file, which the body writes and gives its final name; else it is deleted.

    Makes the file's folder, but not the folders above it: a job whose folder has been removed must not
    begin to grow a new one.
    """
    draft = path.with_name(f".{path.name[:40]}.{unique_name()}")  # `path` may have the longest name allowed
    with storing(path):
        path.parent.mkdir(exist_ok=True)
        try:
            with draft.open("xb") as file:
                yield draft, file
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(path.parent)


def sealed(entry: dict[str, Any]) -> bytes:
    """The entry as a line with its checksum in front."""
    body = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Appends a line in one write: two processes do not mix theirs, and a torn line spoils no other."""
    with storing(path):
        path.parent.mkdir(exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(b"\n" + sealed(entry))


def lines_in(path: Path) -> list[dict[str, Any]]:
    """The entries of the lines in a file; none where it is not there, or no longer."""
    data = b""
    with reading("the journal", path), suppress(FileNotFoundError):
        data = path.read_bytes()
    lines = [line.lstrip(b"\0").partition(b" ") for line in data.split(b"\n") if line]
    entries = [json.loads(body) for crc, _, body in lines if crc == b"%08x" % zlib.crc32(body)]
    if damaged := len(lines) - len(entries):  # torn by a kill, or on their way from another machine
        log.warning("%s: %d damaged lines are left out", path, damaged)
    return entries


def synced(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes new names in a folder last; some file systems cannot do it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def unique_name() -> str:
    """Returns a name that no other process has, whatever their hosts and containers are called.

    It begins with the scheduler's job and restart, or else with the host. Two containers may have equal host
    names and equal process ids, so the name ends with a random part.
    """
    element = own_element()
    where = f"{element.job}-{element.restart}" if element else socket.gethostname()
    pid = os.getpid()
    return f"{where}-{pid}-{_random_part(pid)}"


@functools.cache
def _random_part(pid: int) -> str:
    """Returns 48 random bits, the same for all calls of a process; a forked process has another id."""
    return secrets.token_hex(6)


def require_file_system(folder: Path) -> None:
    """Raises StorageError where the folder's file system cannot append, sync, or link without replacing."""
    path = folder / f".probe.{unique_name()}"
    lacking = "append"
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            path.write_bytes(b"a")
            with path.open("ab", buffering=0) as file:
                file.write(b"b")
                lacking = "fsync"
                synced(file)
            lacking = "hard links" if path.read_bytes() == b"ab" else "append"
            path.unlink()
            if write_once(path, b"") and not write_once(path, b"") and lacking != "append":
                return
        except (OSError, StorageError) as error:
            if getattr(error.__context__ or error, "errno", None) not in NOT_ABLE:
                raise
        finally:
            path.unlink(missing_ok=True)
        raise StorageError(
            "a job cannot be kept on this file system",
            where=folder,
            found=f"no {lacking}",
            allowed="a disk, NFS, Lustre, CephFS",
            fix="choose another task.work: a mounted object store (s3fs, gcsfuse) is not enough",
        )
