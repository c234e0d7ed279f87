"""Tries a chat template in a process of its own, with little memory and time, before this one runs it.

Jinja's sandbox keeps a template from files and from Python, but not from writing gigabytes of text. A process
with a GPU cannot have its memory bounded, so a copy of it, which ends after one conversation, has the bounds.
"""

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

TRIAL_S = 5.0
TRIAL_BYTES = 2**30  # beyond what the process has
MAX_LETTERS = 2**24  # of a conversation: a template adds marks, not books
# How a trial ends; any other way: as `render` ends here, too.
FINE = 0
TOO_LONG = 3
TOO_MUCH = 4
TOO_SLOW = 5
LOOK_S = 0.002
ENDED = {
    TOO_LONG: f"more than {MAX_LETTERS} characters",
    TOO_MUCH: f"more than {TRIAL_BYTES >> 30} GiB of memory",
    TOO_SLOW: f"no end after {TRIAL_S:g} s",
}


def excess_of(render: Callable[[], str]) -> str | None:
    """Renders a conversation in a forked process; returns what was too much, None if nothing was.

    An error that the template raises is none of this function's: it comes again when `render` is called.
    """
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads: the copy runs Python's own code alone
        child = os.fork()
    if child == 0:
        os._exit(_tried(render))

    until = time.monotonic() + TRIAL_S
    try:
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                child = 0
                return ENDED.get(os.waitstatus_to_exitcode(status))
            if time.monotonic() > until:
                return ENDED[TOO_SLOW]
            time.sleep(LOOK_S)
    finally:
        if child:  # it is still running, perhaps because this process is being stopped
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _tried(render: Callable[[], str]) -> int:
    """Renders in the copy; returns how it ended."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + TRIAL_BYTES, resource.RLIM_INFINITY))
        return TOO_LONG if len(render()) > MAX_LETTERS else FINE
    except MemoryError:
        return TOO_MUCH
    except BaseException:  # whatever a template raises
        return FINE
