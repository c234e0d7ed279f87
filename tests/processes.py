"""Processes, found by their environment however they were started; what a test starts ends with the test."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

PATIENCE_S = 150.0
LIMIT_S = 600.0  # of a test that starts processes, on the slowest machine
MARK = "STARTED_BY_TEST"
STARTS: list[str] = []  # by which way this test started processes: to look at all takes milliseconds
sys.addaudithook(lambda event, _: STARTS.append(event) if event == "subprocess.Popen" else None)


def living(**variables: str) -> list[dict[str, Any]]:
    """pid, ppid, cmdline and environ of every other living process that has these environment variables."""
    every = [process.info for process in psutil.process_iter(["pid", "ppid", "cmdline", "environ"])]
    others = [each for each in every if each["pid"] != os.getpid()]
    return [each for each in others if variables.items() <= (each["environ"] or {}).items()]


def kill(*pids: int, by: int = signal.SIGKILL) -> None:
    """Sends the signal to those that have not gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, by)


def stands_still(pid: int) -> bool:
    """Whether the process has stopped, as a signal asked of it, or has gone."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_for(happened: Callable[[], object], otherwise: Callable[[], str] = str) -> None:
    """Waits for something that must happen, however slow the machine is; else fails with `otherwise()`."""
    until = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < until, f"waited {PATIENCE_S:.0f} s in vain: {otherwise()}"
        time.sleep(0.05)


@contextmanager
def ends_its_processes() -> Iterator[None]:
    """Kills in the end, and after LIMIT_S, whatever is started inside, and what that starts.

    Children that this process forks itself are left alone.
    """
    mark = uuid.uuid4().hex

    def end() -> None:
        for process in multiprocessing.active_children():  # of the server in tests/warm.py
            process.kill()
        if STARTS:
            kill(*(each["pid"] for each in living(**{MARK: mark})))

    limit = threading.Timer(LIMIT_S, end)
    limit.daemon = True
    limit.start()
    os.environ[MARK] = mark
    try:
        yield
    finally:
        limit.cancel()
        end()
        STARTS.clear()
        os.environ.pop(MARK, None)
