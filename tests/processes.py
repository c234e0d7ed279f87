"""Processes, found by their environment however they were started; what a test starts ends with the test."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE_S = 150.0
LIMIT_S = 600.0  # of a test that starts processes, on the slowest machine
LOOK_S = 0.5
MARK = "STARTED_BY_TEST"
_STARTED: list[str] = []  # by which way: to look at all processes takes milliseconds


def living(*variables: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Number and environment of every other living process that has all these NAME=VALUE."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            found = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has gone, or is another user's
            continue
        if set(variables) <= set(found):  # that of a zombie is empty
            yield int(entry.name), dict(one.split("=", 1) for one in found if "=" in one)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_all(*variables: str) -> None:
    """Kills every process with these variables in its environment."""
    for pid, _ in living(*variables):
        kill(pid)


def parent(pid: int) -> int:
    """0 where the process has gone."""
    return int(_stat(pid)[1])


def stands_still(pid: int) -> bool:
    """Whether the process has stopped, as a signal asked of it, or has gone."""
    return _stat(pid)[0] in "TZX"


def _stat(pid: int) -> list[str]:
    """What the kernel says: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def wait_for(
    happened: Callable[[], object], otherwise: Callable[[], str] = str, patience_s: float = PATIENCE_S
) -> None:
    """Waits for something that must happen, however slow the machine is; else fails with `otherwise()`."""
    until = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < until, f"waited {patience_s:.0f} s in vain: {otherwise()}"
        time.sleep(0.05)


def note_start(way: str) -> None:
    """Says that a process is started, or may be."""
    _STARTED.append(way)


@contextmanager
def outliving() -> Iterator[None]:
    """What is started inside is not the test's that runs: it goes on for the next one."""
    mark = os.environ.pop(MARK, None)
    try:
        yield
    finally:
        if mark is not None:
            os.environ[MARK] = mark


def note_starts() -> None:
    """From now on every start by `subprocess` is noted."""
    sys.addaudithook(lambda event, _: note_start(event) if event == "subprocess.Popen" else None)


@contextmanager
def ends_its_processes(limit_s: float = LIMIT_S) -> Iterator[None]:
    """Kills in the end, and from `limit_s` on, whatever is started inside, and what that starts.

    Children that this process forks itself are left alone.
    """
    mark, over = uuid.uuid4().hex, threading.Event()

    def end() -> None:
        for process in multiprocessing.active_children():  # of the server in tests/warm.py
            process.kill()
        if _STARTED:
            kill_all(f"{MARK}={mark}")

    def watch() -> None:
        over.wait(limit_s)
        while not over.wait(LOOK_S):
            end()

    os.environ[MARK] = mark
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        end()
        _STARTED.clear()
        os.environ.pop(MARK, None)
