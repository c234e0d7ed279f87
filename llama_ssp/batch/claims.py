"""Which process works on a shard: a file kept by a heartbeat, so that others take over from a dead process.

A claim only saves double work. What is published stays right without: the first to publish wins.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from llama_ssp.batch.atomic_files import replace_whole, storing, write_once

BEAT_S = 10.0
STALE_S = 60.0


def claim(path: Path) -> AbstractContextManager[None] | None:
    """The right to work on what the file stands for, for a `with`; None while a living process has it."""
    own = json.dumps(_own()).encode()
    if not write_once(path, own):
        if not _is_abandoned(path):
            return None
        replace_whole(path, own)  # two may do so at once: then both work
    return _held(path)


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Touches the file now and then, and deletes it at the end."""
    released = threading.Event()

    def beat() -> None:
        while not released.wait(BEAT_S):
            with suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, name=f"claim {path.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        released.set()
        thread.join()
        with suppress(OSError):
            path.unlink(missing_ok=True)


def release_jobs(folder: Path) -> None:
    """Deletes the claims of a scheduler's jobs, once none of them lives."""
    for path in folder.glob("*"):
        with suppress(OSError, ValueError):
            if json.loads(path.read_bytes()).get("job") is not None:
                path.unlink()


def _own() -> dict[str, object]:
    job, restart = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return {"host": socket.gethostname(), "pid": os.getpid(), "job": job, "restart": restart}


def _is_abandoned(path: Path) -> bool:
    """Whether the claim's process is gone, or has been silent for long."""
    try:
        age = _now_there(path.parent) - path.stat().st_mtime
        holder = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return True  # it was released meanwhile, or is no claim
    own = _own()
    if own["job"] is not None and holder.get("job") == own["job"] and holder["restart"] < own["restart"]:
        return True
    return bool(age > STALE_S or (holder.get("host") == own["host"] and not _lives(holder["pid"])))


def _now_there(folder: Path) -> float:
    """The time by the clock that stamps the folder's files, which may be another machine's."""
    probe = folder / f".now.{socket.gethostname()}.{os.getpid()}"
    with storing(probe):
        try:
            probe.touch()
            return probe.stat().st_mtime
        except FileNotFoundError:
            return time.time()
        finally:
            probe.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
