"""Ends this process when it does not end by itself. No torch.

A signal raises KeyboardInterrupt where Python code runs; a rank that waits inside a collective runs none.
The guard is a thread that hears every signal, and keeps alarms: at the first one due, the process says its
line, if it is the one to speak, and is gone.
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
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn

from llama_ssp.errors import OK, one_line

CODE_FILE = "LLAMA_SSP_CODE_FILE"  # names the file for `leave_code`
STOPPING = (signal.SIGINT, signal.SIGTERM)
TICK_S = 1.0
AGAIN_S, REMINDER = 0.01, signal.SIGURG  # how a signal comes again that could not interrupt
# Code in which an exception is lost: Python forgets it, or an import that it cuts short cannot be repeated.
LOSING = {"<frozen importlib._bootstrap>", weakref.__file__, weakref.WeakSet.__init__.__code__.co_filename}
PAUSED_S = 3.0  # a tick this late: the process itself was stopped, and no alarm is due for that
PR_SET_PDEATHSIG = 1
BY_TORCHRUN = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Alarm:
    """When the process leaves, with which code, and what it says and does then."""

    at: float
    code: int
    line: str = ""
    last: Callable[[], None] | None = None


class Guard:
    """The process's signals and alarms; does nothing until it is started."""

    def __init__(self) -> None:
        self.signalled = 0  # the first signal that came
        self._warned = False
        self.ending = False  # what ends the run is known: no signal interrupts that
        self.parted = False  # the ranks look after each other no more
        self.on_signal: list[Callable[[], None]] = []  # called in the guard's thread
        self._owed = 0  # a signal that has not interrupted yet
        self._held, self._parting = False, ""
        self.grace_s: float | None = None
        self._alarms: dict[str, Alarm] = {}
        self._lock = threading.Lock()

    def start(self, grace_s: float | None) -> None:
        """From the main thread. `grace_s` is how long a signal may take to be obeyed; None is for ever."""
        self.signalled, self.ending, self.parted, self._warned, self._owed = 0, False, False, False, 0
        self.on_signal, self.grace_s, self._alarms = [], grace_s, {}
        self._held, self._parting, self._handlers = False, "", dict[int, Any]()
        self._hearing, self._calling = os.pipe()
        os.set_blocking(self._calling, False)
        self._called = signal.set_wakeup_fd(self._calling, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._thread.start()
        self._handlers[REMINDER] = signal.signal(REMINDER, self._remind)
        for number in STOPPING:  # last: a signal may come at once
            self._handlers[number] = signal.signal(number, self._interrupt)

    def stop(self) -> None:
        """Puts everything back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._called)
        os.close(self._calling)  # ends the thread
        self._thread.join()
        os.close(self._hearing)

    @contextlib.contextmanager
    def held(self, line: str = "") -> Iterator[None]:
        """No signal interrupts what runs inside, which would lose the exception; it interrupts at the end.

        With a `line`, a process without other ranks says it upon a signal and leaves at once.
        """
        self._held, self._parting = True, line if self.grace_s is None else ""
        try:
            yield
        finally:
            self._held, self._parting = False, ""
        if self._owed:
            self._interrupt(self._owed, None)

    def arm(
        self, name: str, seconds: float, code: int, line: str = "", last: Callable[[], None] | None = None
    ) -> None:
        """The process leaves after so many seconds, unless the alarm is taken back or set anew."""
        with self._lock:
            self._alarms[name] = Alarm(time.monotonic() + seconds, code, line, last)

    def disarm(self, name: str) -> None:
        with self._lock:
            self._alarms.pop(name, None)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """The first signal interrupts what the main thread does; later ones are the guard's business.

        Where the exception would be lost, the interruption waits until that is over.
        """
        self._owed = 0 if self.ending else number
        if self._owed and not self._held and not _is_lost(frame):
            self.ending, self.signalled, self._owed = True, number, 0
            raise KeyboardInterrupt(number)

    def _remind(self, _: int, frame: FrameType | None) -> None:
        if self._owed:
            self._interrupt(self._owed, frame)

    def _watch(self) -> None:
        before = time.monotonic()
        while True:
            ready, _, _ = select.select([self._hearing], [], [], self._wait_s())
            now = time.monotonic()
            if not ready and now - before > PAUSED_S:
                self._postpone(now - before)
            before = now
            heard = os.read(self._hearing, 64) if ready else None
            if heard == b"":
                return
            for number in heard or b"":
                if number in STOPPING:
                    self._signal(number)
            self._leave_if_due(time.monotonic())
            if self._owed:
                time.sleep(AGAIN_S)
                signal.pthread_kill(threading.main_thread().ident or 0, REMINDER)

    def _wait_s(self) -> float:
        with self._lock:
            first = min((alarm.at for alarm in self._alarms.values()), default=None)
        return TICK_S if first is None else min(TICK_S, max(0.0, first - time.monotonic()))

    def _signal(self, number: int) -> None:
        if self._warned:
            leave(128 + number)
        if self._parting:
            leave(128 + number, self._parting)
        self._warned, self.signalled = True, self.signalled or number
        if self.grace_s is not None:
            self.arm("signal", self.grace_s, 128 + number)
        for call in self.on_signal:
            with contextlib.suppress(Exception):  # a full disk, say: whoever is signalled ends all the same
                call()

    def _postpone(self, seconds: float) -> None:
        with self._lock:
            for name, alarm in self._alarms.items():
                self._alarms[name] = replace(alarm, at=alarm.at + seconds)

    def _leave_if_due(self, now: float) -> None:
        with self._lock:
            due = sorted((a for a in self._alarms.values() if a.at <= now), key=lambda alarm: alarm.at)
        if due:
            if due[0].last:
                due[0].last()
            leave(due[0].code, due[0].line)


GUARD = Guard()


def _is_lost(frame: FrameType | None) -> bool:
    """Whether an exception that is raised here may be lost: in a destructor, a weak reference's callback,
    an import."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename in LOSING:
            return True
        frame = frame.f_back
    return False


def leave_code(code: int) -> None:
    """Tells who started this group how it ended: the first rank to end with anything but 0 says it."""
    name = os.environ.get(CODE_FILE)
    if name is None or code == OK:
        return
    with contextlib.suppress(OSError):  # there already, or a full disk: then torchrun's own code has to do
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(handle, b"%d\n" % code)
        os.close(handle)


def leave(code: int, line: str = "") -> NoReturn:
    """At once, past buffers that another thread may hold, and past destructors that may wait."""
    if line:
        with contextlib.suppress(OSError):
            os.write(2, f"error: {one_line(line)}\n".encode(errors="backslashreplace"))
    leave_code(code)
    os._exit(code)


def end_with_launcher() -> None:
    """Linux kills this process when torchrun, which started it, is gone: nobody else would."""
    if BY_TORCHRUN not in os.environ or not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the kernel knew
        leave(128 + signal.SIGKILL)
