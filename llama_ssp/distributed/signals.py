"""Ends this process on a signal or at a deadline, also when its main thread runs no Python code. No torch.

A signal raises KeyboardInterrupt where Python code runs; a rank that waits inside a collective runs none.
So a thread, the guard, receives every signal, and keeps alarms: when one is due, the process prints the
alarm's line and exits. The state is one object a process, as signal handlers are; it changes in its methods.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from llama_ssp.errors import OK, one_line

CODE_FILE = "LLAMA_SSP_CODE_FILE"  # names the file for `leave_code`
STOPPING = (signal.SIGINT, signal.SIGTERM)
TICK_S = 1.0
AGAIN_S, REMINDER = 0.01, signal.SIGURG  # how a signal comes again that could not interrupt
# Code in which an exception is lost: Python drops it, or an import that it cuts short cannot be repeated.
LOSING = {"<frozen importlib._bootstrap>", weakref.__file__, weakref.WeakSet.__init__.__code__.co_filename}
PAUSED_S = 3.0  # a tick this late: the process itself was stopped, and no alarm is due for that
LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
PR_SET_PDEATHSIG = 1
BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
Call = Callable[[], None]


@dataclass
class Alarm:
    """When the process exits, with which code, and what it prints and does before."""

    at: float
    code: int
    line: str = ""
    last: Call | None = None


class Guard:
    """The process's signals and alarms; does nothing until it is started."""

    def __init__(self) -> None:
        self._reset(None)
        self._lock = threading.Lock()

    def _reset(self, grace_s: float | None) -> None:
        self.signalled = 0  # the first signal that came
        self.ending = False  # the cause of the end is known: no signal interrupts its report
        self.parted = False  # the ranks watch each other no more
        self.on_signal: list[Call] = []  # called in the guard's thread
        self._grace_s = grace_s
        self._warned = False  # by a first signal: the second one acts at once
        self._pending = 0  # a signal that has not interrupted yet
        self._held, self._parting = False, ""
        self._soft: Call | None = None  # what the next Ctrl-C calls, in place of ending the process
        self._spared = 0  # signals that the guard's thread leaves to it
        self._alarms: dict[str, Alarm] = {}

    def start(self, grace_s: float | None) -> None:
        """From the main thread. A signal is obeyed after `grace_s` at the latest; None is without limit."""
        self._reset(grace_s)
        self._handlers = dict[int, Any]()
        self._receiving, self._sending = os.pipe()
        os.set_blocking(self._sending, False)
        self._wakeup = signal.set_wakeup_fd(self._sending, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._thread.start()
        self._handlers[REMINDER] = signal.signal(REMINDER, self._remind)
        for number in STOPPING:  # last: a signal may come at once
            self._handlers[number] = signal.signal(number, self._interrupt)

    def stop(self) -> None:
        """Restores what was there before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._sending)  # ends the thread
        self._thread.join()
        os.close(self._receiving)
        self.signalled = 0

    @contextlib.contextmanager
    def held(self, line: str = "") -> Iterator[None]:
        """No signal interrupts what runs inside, which would lose the exception; it interrupts at the end.

        With a `line`, a process without other ranks prints it upon a signal and exits at once.
        """
        self._held, self._parting = True, line if self._grace_s is None else ""
        try:
            yield
        finally:
            self._held, self._parting = False, ""
        if self._pending:
            self._interrupt(self._pending, None)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Inside of `held`: signals interrupt here."""
        self._held = False
        try:
            if self._pending:
                self._interrupt(self._pending, None)
            yield
        finally:
            self._held = True

    @contextlib.contextmanager
    def softened(self, call: Call) -> Iterator[None]:
        """The first Ctrl-C inside only calls `call`, in the main thread; a second one ends the process."""
        self._soft, self._spared = call, 1
        try:
            yield
        finally:
            if self._soft is not None:
                self._soft, self._spared = None, 0

    def end(self, parted: bool = False, grace_s: float | None = None) -> None:
        """The process ends, for a known reason: from here on no signal interrupts."""
        self.ending = True
        self.parted = self.parted or parted
        self._grace_s = self._grace_s if grace_s is None else grace_s

    def arm(self, name: str, seconds: float, code: int, line: str = "", last: Call | None = None) -> None:
        """The process exits after this time, unless the alarm is disarmed or armed anew."""
        with self._lock:
            self._alarms[name] = Alarm(time.monotonic() + seconds, code, line, last)

    def disarm(self, name: str) -> None:
        with self._lock:
            self._alarms.pop(name, None)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """The first signal interrupts the main thread; later ones only reach the guard's thread.

        Where the exception would be lost, the interruption waits until that is over.
        """
        if number == signal.SIGINT and self._soft is not None:
            call, self._soft = self._soft, None
            return call()
        self._pending = 0 if self.ending else number
        if self._pending and not self._held and not _is_lost(frame):
            self.ending, self.signalled, self._pending = True, number, 0
            raise KeyboardInterrupt(number)

    def _remind(self, _: int, frame: FrameType | None) -> None:
        if self._pending:
            self._interrupt(self._pending, frame)

    def _watch(self) -> None:
        before = time.monotonic()
        while True:
            first = self._first_alarm()
            wait_s = min(TICK_S, max(0.0, first.at - time.monotonic())) if first else TICK_S
            ready, _, _ = select.select([self._receiving], [], [], wait_s)
            now = time.monotonic()
            if not ready and now - before > PAUSED_S:
                with self._lock:
                    for alarm in self._alarms.values():
                        alarm.at += now - before
            before = now
            received = os.read(self._receiving, 64) if ready else None
            if received == b"":
                return
            for number in received or b"":
                if number in STOPPING:
                    self._signal(number)
            first = self._first_alarm()
            if first and first.at <= time.monotonic():
                if first.last:
                    first.last()
                leave(first.code, first.line)
            if self._pending:
                time.sleep(AGAIN_S)
                signal.pthread_kill(threading.main_thread().ident or 0, REMINDER)

    def _first_alarm(self) -> Alarm | None:
        with self._lock:
            return min(self._alarms.values(), key=lambda alarm: alarm.at, default=None)

    def _signal(self, number: int) -> None:
        if number == signal.SIGINT and self._spared:
            self._spared -= 1
            return
        if self._warned or self._parting:
            leave(128 + number, "" if self._warned else self._parting)
        self._warned, self.signalled = True, self.signalled or number
        if self._grace_s is not None:
            self.arm("signal", self._grace_s, 128 + number)
        for call in self.on_signal:
            with contextlib.suppress(Exception):  # such as a full disk: the process ends all the same
                call()


GUARD = Guard()


def _is_lost(frame: FrameType | None) -> bool:
    """Whether an exception raised here may be lost: in a destructor, a weak callback, an import."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename in LOSING:
            return True
        frame = frame.f_back
    return False


def leave_code(code: int) -> None:
    """Writes the exit code for the process that started these ranks; the first that is not 0 counts."""
    name = os.environ.get(CODE_FILE)
    if name is None or code == OK:
        return
    # There already, or a full disk: then torchrun's own code has to do.
    with contextlib.suppress(OSError), open(name, "x", encoding="ascii") as file:
        file.write(f"{code}\n")


def leave(code: int, line: str = "") -> NoReturn:
    """Exits at once, past buffers that another thread may hold, and past destructors that may wait."""
    if line:
        with contextlib.suppress(OSError):
            os.write(2, f"error: {one_line(line)}\n".encode(errors="backslashreplace"))
    leave_code(code)
    os._exit(code)


def end_with_parent(number: signal.Signals) -> None:
    """Linux sends this process the signal when the one that started it is gone."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, number)


def end_with_launcher() -> None:
    """This process is killed when torchrun, which started it, is gone: nothing else would."""
    if BY_TORCHRUN in os.environ:
        parent = os.getppid()
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # it went before the kernel was asked
            leave(128 + signal.SIGKILL)
