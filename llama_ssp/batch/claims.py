"""Who is at work on a shard: kept by a heartbeat, so that others take over what a dead process held.

A claim only saves double work. What is published stays right without: the first to publish wins.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from llama_ssp.batch.atomic_files import replace_whole, storing, write_once

BEAT_S = 10.0
STALE_S = 60.0


class Claim:
    """Held while in use (`with`); its file is touched now and then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._released = threading.Event()
        self._heart = threading.Thread(target=self._beat, name=f"claim {path.name}", daemon=True)

    def __enter__(self) -> Claim:
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._heart.join()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with suppress(OSError):
                os.utime(self._path)


def claim(path: Path, unique: str) -> Claim | None:
    """The right to work on what the file stands for; None while a living process has it."""
    me = json.dumps(_me()).encode()
    if write_once(path, me, unique):
        return Claim(path)
    if not _is_abandoned(path):
        return None
    replace_whole(path, me, unique)  # two may do so at once: then both work
    return Claim(path)


def release_jobs(folder: Path) -> None:
    """Takes away what jobs of a scheduler claimed, once none of them lives: nobody needs to wait for it."""
    for path in folder.glob("*"):
        with suppress(OSError, ValueError):
            if json.loads(path.read_bytes()).get("job") is not None:
                path.unlink()


def _me() -> dict[str, object]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    }


def _is_abandoned(path: Path) -> bool:
    """Whether nobody stands behind a claim: its process is gone, or has been silent for long."""
    try:
        age = _now_there(path.parent) - path.stat().st_mtime
        holder = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return True  # it was released meanwhile, or is no claim
    me = _me()
    restarted = me["job"] is not None and holder.get("job") == me["job"] and holder["restart"] < me["restart"]
    return bool(
        age > STALE_S or restarted or (holder.get("host") == me["host"] and not _lives(holder["pid"]))
    )


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
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
