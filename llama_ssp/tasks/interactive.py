"""Prompts typed on a terminal, and how the other ranks wait for them."""

from __future__ import annotations

import _thread
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.signals import GUARD
from llama_ssp.errors import RunError

ASK = "prompt> "
STILL_BUSY, DONE = 0, 1
WAKE_S = 0.1
EVERY_S = 10.0  # well below the time that ranks wait for a message


def while_others_wait(ranks: Ranks, work: Callable[[], list[int]]) -> list[int]:
    """What `work` returns on the leader, on every rank. It may take any time.

    Ranks that get no message for minutes end the run, so the leader sends one every few seconds.
    """
    if ranks.world == 1:
        return work()
    if not ranks.is_leader:
        while (message := ranks.broadcast_ints([]))[0] == STILL_BUSY:
            pass
        return message[1:]
    done, lost = threading.Event(), list[RunError]()

    def send() -> None:
        try:
            while not done.wait(EVERY_S):
                ranks.broadcast_ints([STILL_BUSY])
        except RunError as error:
            lost.append(error)
            _thread.interrupt_main()

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        found = work()
    finally:
        done.set()
        sender.join()
        if lost:
            raise lost[0]
    return ranks.broadcast_ints([DONE, *found])[1:]


@contextmanager
def _awake() -> Iterator[None]:
    """Lets signals end the main thread's wait for keys.

    readline acts on a Ctrl-C just before it listens only at the next key. So after a first signal this sends
    SIGURG, which does nothing else, until the wait ends.
    """
    main, done = threading.get_ident(), threading.Event()

    def wake() -> None:
        while not done.wait(WAKE_S):
            signal.pthread_kill(main, signal.SIGURG)

    def begin() -> None:
        threading.Thread(target=wake, daemon=True).start()

    before = signal.signal(signal.SIGURG, lambda _number, _frame: None)
    GUARD.on_signal.append(begin)
    try:
        yield
    finally:
        done.set()
        GUARD.on_signal.remove(begin)
        signal.signal(signal.SIGURG, before)


class Terminal:
    """Asks for one prompt after the other, with line editing and a history."""

    def __init__(self) -> None:
        # input() edits lines once readline is imported, where both streams are a terminal.
        if sys.stdout.isatty() and find_spec("readline"):
            import readline  # noqa: F401
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")

    def ask(self) -> str | None:
        """The next line that is not empty; None at the end of the input."""
        while True:
            try:
                with _awake():
                    line = self._line()
            except EOFError:
                return None
            if line.strip():
                return line

    @staticmethod
    def _line() -> str:
        if sys.stdout.isatty():
            try:
                return input(ASK)
            except (EOFError, KeyboardInterrupt):
                sys.stdout.write("\n")
                raise
        sys.stderr.write(ASK)  # standard output goes elsewhere
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")
