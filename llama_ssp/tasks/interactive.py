"""What is typed on a terminal, or piped, line by line; and how the other ranks wait for it."""

from __future__ import annotations

import _thread
import io
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from typing import Any

from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.signals import GUARD, LEAVING, UNWAITED, kept_terminal
from llama_ssp.errors import RunError
from llama_ssp.report.console import waiting

ASK = "prompt> "
MORE = "... "
FENCE = '"""'  # around a text of several lines
# What the leader's messages begin with, while it works and once it has done so.
STILL_BUSY = 0
DONE = 1
WAKE_S = 0.1
EVERY_S = 10.0  # well below the time that ranks wait for a message


def while_others_wait(ranks: Ranks, work: Callable[[], Any]) -> Any:
    """Returns on every rank what `work` returns on the leader, elsewhere through JSON. It may take any time.

    Ranks that get no message for minutes end the run, so the leader sends one every few seconds.
    """
    if ranks.world == 1:
        return work()
    if not ranks.is_leader:
        while (message := ranks.broadcast_ints([]))[0] == STILL_BUSY:
            pass
        return json.loads(bytes(message[1:]))

    done = threading.Event()
    lost = list[RunError]()

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
        result = work()
        encoded = json.dumps(result, default=asdict).encode()
    finally:
        done.set()
        sender.join()
        if lost:
            raise lost[0]
    ranks.broadcast_ints([DONE, *encoded])
    return result


@contextmanager
def _awake() -> Iterator[None]:
    """Lets signals end the main thread's wait for keys.

    readline acts on a Ctrl-C just before it listens only at the next key. So after a first signal this sends
    SIGURG, which does nothing else, until the wait ends.
    """
    main = threading.get_ident()
    done = threading.Event()

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


def typed_lines(ranks: Ranks, terminal: Terminal | None) -> Iterator[str]:
    """Yields on every rank the texts that are typed at the leader's terminal, until the input ends."""

    def typed() -> str | None:
        assert terminal is not None, "the leader has a terminal"
        return terminal.ask()

    while True:
        ranks.enter("waiting for a message")
        text = while_others_wait(ranks, typed)
        if not text:
            return
        yield text


def typed_while(work: Callable[[], object], lines: Iterator[str]) -> list[str]:
    """Runs `work` in a thread while the first line is typed, then waits for it; returns the line.

    Raises what `work` raised. Where the input ends there is no line, and `work` is not waited for. Its log
    and its bars would stand in the user's line: only warnings are shown until that is typed.
    """
    failed = list[BaseException]()
    package = logging.getLogger("llama_ssp")
    level = package.level

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    worker = threading.Thread(target=run, name=UNWAITED, daemon=True)
    package.setLevel(max(level, logging.WARNING))
    worker.start()
    if first := list(islice(lines, 1)):  # else the process ends, and shows nothing more of it
        package.setLevel(level)
        with waiting("getting ready"):
            worker.join()
    if failed:
        raise failed[0]
    return first


class Terminal:
    """Asks for one text after the other, with line editing and a history.

    Where `has_blocks` is set, a line that begins with FENCE begins a text of several lines, up to a line that
    ends with it; the text has both.
    """

    def __init__(self, ask: str = ASK, has_blocks: bool = False) -> None:
        # input() edits lines once readline is imported, where both streams are a terminal.
        if sys.stdout.isatty() and find_spec("readline"):
            import readline  # noqa: F401
        LEAVING.append(kept_terminal())
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        self._ask = ask
        self._has_blocks = has_blocks

    def ask(self) -> str | None:
        """Returns the next text that is not empty; None at the end of the input."""
        while True:
            try:
                with _awake():
                    text = self._line(self._ask)
                    begins = self._has_blocks and text.lstrip().startswith(FENCE)
                    while begins and block_of(text) is None:
                        text += "\n" + self._line(MORE)
            except EOFError:
                return None
            if text.strip():
                return text

    @staticmethod
    def _line(ask: str) -> str:
        if sys.stdin is None:
            raise EOFError
        if sys.stdout.isatty() and sys.stdin.isatty():
            try:
                return input(ask)
            except (EOFError, KeyboardInterrupt):
                with suppress(OSError):  # the terminal may be gone
                    sys.stdout.write("\n")
                raise
        if sys.stdin.isatty():  # standard output goes elsewhere
            sys.stderr.write(ask)
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


def block_of(text: str) -> str | None:
    """Returns what stands between the fences of a text; None without them."""
    text = text.strip()
    is_whole = text.startswith(FENCE) and text.endswith(FENCE) and len(text) >= 2 * len(FENCE)
    return text[len(FENCE) : -len(FENCE)].strip("\n") if is_whole else None
