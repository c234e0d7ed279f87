"""One input and what became of it; a watch that reports what hangs."""

from __future__ import annotations

import faulthandler
import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

LIMIT_S = 10.0
WAIT = 6
STUCK_S = 180.0  # in code that no signal interrupts: the whole command ends and shows where it was
DOCUMENTED = (0, 1, 2, 3, 4, 5, 6)
LONGEST_LINE = 1500


class Hang(BaseException):
    """No Exception: what catches those must not swallow it."""


@dataclass(frozen=True)
class Trial:
    """What became of an input: a word for the table, and what is wrong with that."""

    outcome: str
    wrong: tuple[str, ...] = ()
    shown: str = ""  # the input, for a report


@dataclass(frozen=True)
class Said:
    """What the command said."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]


@contextmanager
def watched(seconds: float = LIMIT_S) -> Iterator[None]:
    """Raises Hang in what takes more CPU time, or WAIT times as long by the clock.

    CPU time first: a busy machine makes no hang.
    """

    def ring(*_: object) -> NoReturn:
        raise Hang

    kinds = (signal.ITIMER_PROF, signal.SIGPROF, 1), (signal.ITIMER_REAL, signal.SIGALRM, WAIT)
    before = [signal.signal(number, ring) for _, number, _ in kinds]
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    for timer, _, times in kinds:
        signal.setitimer(timer, times * seconds)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(kinds, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
        faulthandler.cancel_dump_traceback_later()


def judged(try_: Callable[[], Trial], shown: str, seconds: float = LIMIT_S) -> Trial:
    """The trial; an exception or a hang of it is a fault."""
    began = time.process_time()
    try:
        with watched(seconds):
            found = try_()
    except Hang:
        return Trial("hang", (f"not done after {seconds:g} s",), shown)
    except Exception as error:
        return Trial("exception", (f"{type(error).__name__}: {error}"[:300],), shown)
    if time.process_time() - began > seconds:  # in code that no signal interrupts
        return Trial("hang", (f"took {time.process_time() - began:.0f} s",), shown)
    return found


def command(main: Callable[[], NoReturn], words: list[str], stdin: bytes = b"") -> Said:
    """The command in this process, with streams of its own."""
    before = sys.argv, sys.stdin, sys.stdout, sys.stderr
    streams = [
        io.TextIOWrapper(io.BytesIO(first), "utf-8", write_through=True) for first in (stdin, b"", b"")
    ]
    sys.argv, (sys.stdin, sys.stdout, sys.stderr) = ["llama-ssp", *words], streams
    code = 0
    try:
        main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        sys.argv, sys.stdin, sys.stdout, sys.stderr = before
    out, err = (stream.buffer.getvalue().decode(errors="replace") for stream in streams[1:])  # type: ignore[attr-defined]
    return Said(code, out, err)


def ill_said(said: Said) -> list[str]:
    """What no answer may be, whatever the input."""
    wrong = [] if said.code in DOCUMENTED else [f"exit code {said.code}"]
    if len(said.errors) != (said.code != 0):
        wrong.append(f"{len(said.errors)} lines of error with exit code {said.code}: {said.err[-200:]!r}")
    if "Traceback" in said.err:
        wrong.append("a traceback")
    if any(len(line) > LONGEST_LINE for line in said.errors):
        wrong.append("a line too long")
    return wrong
