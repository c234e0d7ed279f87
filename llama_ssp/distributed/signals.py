"""What signals do to this process, and how it leaves when its main thread cannot."""

import contextlib
import ctypes
import os
import signal
import sys
import termios
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from llama_ssp.errors import OK, one_line

CODE_FILE = "LLAMA_SSP_CODE_FILE"  # names the file for `leave_code`
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How a signal comes again that could not interrupt.
AGAIN_S = 0.01
REMINDER = signal.SIGURG
# Code in which an exception is lost: Python drops it, or an import that it cuts short cannot be repeated.
LOSING = {"<frozen importlib._bootstrap>", weakref.__file__, weakref.WeakSet.__init__.__code__.co_filename}
LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
PR_SET_PDEATHSIG = 1
UNWAITED = "unwaited"  # the name of a thread that the process does not wait for when it ends
BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
Call = Callable[[], None]
Soft = Callable[[], bool]
HARD = 255  # to the guard's thread, in place of a signal: a Ctrl-C ends the process after all
LEAVING: list[Call] = []  # called just before this process leaves at once
PASTE_OFF = b"\x1b[?2004l"  # a terminal then no longer marks what is pasted


class Guard:
    """The signals of this process; does nothing until it is started.

    The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt in the main thread, once. A thread of the
    guard hears signals also while the main thread is in C code: it ends the process when that takes too long.
    Under nohup, SIGHUP does nothing.
    """

    def __init__(self) -> None:
        self._reset(None)

    def _reset(self, grace_s: float | None) -> None:
        self.signalled = 0  # the first signal that came
        self.ending = False  # the process ends for a known reason: no signal interrupts its report
        # Called in the guard's thread: upon a signal that ends the process, and upon a Ctrl-C that does not.
        self.on_signal: list[Call] = []
        self.on_soft: list[Call] = []
        # Called there with True before a Ctrl-Z stops this process, which has ranks, and with False after it.
        self.on_pause: list[Callable[[bool], None]] = []
        self._grace_s = grace_s
        self._warned = False  # by a first signal: the second one acts at once
        self._pending = 0  # a signal that has not interrupted yet
        self._parting = ""  # said upon a signal that ends the process at once
        self._soft: Soft | None = None  # what a Ctrl-C calls, in place of ending the process
        # The main thread decides what a Ctrl-C is, and counts those that it has asked `_soft` about. The
        # guard's thread, which may hear them later, counts those that it has left to the main thread.
        self._asked = 0
        self._left = 0

    def start(self, grace_s: float | None) -> None:
        """Starts, in the main thread. A signal is obeyed after `grace_s` at the latest; None is no limit."""
        self._reset(grace_s)
        self._receiving, self._sending = os.pipe()
        os.set_blocking(self._sending, False)
        self._wakeup = signal.set_wakeup_fd(self._sending, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._thread.start()
        self._handlers: dict[int, Any] = {REMINDER: signal.signal(REMINDER, self._remind)}
        if grace_s is not None and signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, lambda _number, _frame: None)
        for number in heeded():  # last: a signal may come at once
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
    def aside(self) -> Iterator[None]:
        """Signals inside are not the guard's."""
        grace_s = self._grace_s
        self.stop()
        try:
            yield
        finally:
            self.start(grace_s)

    @contextlib.contextmanager
    def parting(self, line: str) -> Iterator[None]:
        """While nothing is begun, a signal ends a process without other ranks at once, with this line."""
        self._parting = line if self._grace_s is None else ""
        try:
            yield
        finally:
            self._parting = ""

    @contextlib.contextmanager
    def softened(self, call: Soft) -> Iterator[None]:
        """Has a Ctrl-C inside call `call`, in the main thread; it ends the process if that returns False."""
        before = self._soft
        self._soft = call
        try:
            yield
        finally:
            self._soft = before

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Interrupts the main thread, or waits until the exception would not be lost."""
        if not self._pending and self._is_soft(number) and self._soft is not None:
            self._asked += 1
            if self._soft():
                return
            os.write(self._sending, bytes([HARD]))
        self._pending = 0 if self.ending else number
        if self._pending and not _is_lost(frame):
            self.ending = True
            self.signalled = number
            self._pending = 0
            raise KeyboardInterrupt(number)
        if self._pending:
            os.write(self._sending, bytes([REMINDER]))  # asks the guard's thread to send it again

    def _is_soft(self, number: int) -> bool:
        return number == signal.SIGINT and self._soft is not None and not self.ending

    def _remind(self, _: int, frame: FrameType | None) -> None:
        if self._pending:
            self._interrupt(self._pending, frame)

    def _watch(self) -> None:
        while received := os.read(self._receiving, 64):
            for number in received:
                if number == signal.SIGINT and (self._left < self._asked or self._is_soft(number)):
                    self._left += 1
                    self._tell(self.on_soft)
                elif number in STOPPING:
                    self._hear(number)
                elif number == signal.SIGTSTP:
                    self._pause()
                elif number == HARD and not self._warned:  # else the signal itself was heard as one that ends
                    self._hear(signal.SIGINT)
            if self._pending:
                time.sleep(AGAIN_S)
                signal.pthread_kill(threading.main_thread().ident or 0, REMINDER)

    def _hear(self, number: int) -> None:
        if self._warned and number == signal.SIGHUP:
            return  # a terminal that is closed sends it more than once
        if self._warned or self._parting:
            leave(128 + number, "" if self._warned else self._parting)
        self._warned = True
        self.signalled = self.signalled or number
        if self._grace_s is not None:
            leave_within(self._grace_s, 128 + number)
        self._tell(self.on_signal)

    def _pause(self) -> None:
        """Stops this process, after the other ranks have been told so."""
        for pauses in (True, False):
            for call in list(self.on_pause):
                with contextlib.suppress(Exception):
                    call(pauses)
            if pauses:
                os.kill(os.getpid(), signal.SIGSTOP)

    @staticmethod
    def _tell(calls: list[Call]) -> None:
        for call in list(calls):
            with contextlib.suppress(Exception):  # such as a full disk: the process ends all the same
                call()


GUARD = Guard()


def heeded() -> list[signal.Signals]:
    """Returns the signals that stop this process: not SIGHUP where whoever started it ignores that."""
    hang_up = signal.SIGHUP
    return [one for one in STOPPING if one != hang_up or signal.getsignal(one) is not signal.SIG_IGN]


def _is_lost(frame: FrameType | None) -> bool:
    """Returns whether an exception raised here may be lost: in a destructor, a weak callback, an import."""
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
    for call in LEAVING:
        with contextlib.suppress(Exception):
            call()
    if line:
        with contextlib.suppress(OSError):
            os.write(2, f"error: {one_line(line)}\n".encode(errors="backslashreplace"))
    leave_code(code)
    os._exit(code)


def kept_terminal() -> Call:
    """Returns what gives the terminal of standard input the settings back that it has now."""
    try:
        settings = termios.tcgetattr(0)
    except termios.error:  # there is none
        return lambda: None

    def restore() -> None:
        with contextlib.suppress(termios.error, OSError):  # it may be gone
            if os.tcgetpgrp(0) == os.getpgrp() and termios.tcgetattr(0) != settings:
                termios.tcsetattr(0, termios.TCSANOW, settings)
                os.write(0, PASTE_OFF)

    return restore


def leave_within(seconds: float, code: int, line: str = "") -> threading.Timer:
    """Ends the process after this time if it still runs, unless the returned timer is cancelled."""
    timer = threading.Timer(seconds, leave, (code, line))
    timer.daemon = True
    timer.start()
    return timer


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
