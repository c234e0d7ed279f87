"""What is typed on a terminal, or piped, line by line; and how the other ranks wait for it."""

from __future__ import annotations

import _thread
import io
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from typing import Any

from llama_ssp.distributed.comm import Ranks, broadcast_json
from llama_ssp.distributed.signals import GUARD, LEAVING, UNWAITED, kept_terminal
from llama_ssp.errors import RunError
from llama_ssp.report.console import waiting

ASK = "prompt> "
MORE = "... "
FENCE = '"""'  # around a text of several lines
FENCE_ALONE = f"(This text began with {FENCE} alone, so it ends with a line that is {FENCE} alone.)"
# What the leader's messages begin with, while it works and once it has done so.
STILL_BUSY = 0
DONE = 1
WAKE_S = 0.1
EVERY_S = 10.0  # at most, and well below the time that ranks wait for a message


def between_signs_s(ranks: Ranks) -> float:
    """Returns how many seconds the leader works without a sign: well below what the others wait for one."""
    return min(EVERY_S, ranks.patience_s / 3) if ranks.patience_s else EVERY_S


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

    every_s = between_signs_s(ranks)
    done = threading.Event()
    lost = list[RunError]()

    def send() -> None:
        try:
            while not done.wait(every_s):
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
    GUARD.on_soft.append(begin)
    try:
        yield
    finally:
        done.set()
        GUARD.on_signal.remove(begin)
        GUARD.on_soft.remove(begin)
        signal.signal(signal.SIGURG, before)


def typed_lines(ranks: Ranks, terminal: Terminal | None) -> Iterator[str]:
    """Yields on every rank the texts that are typed at the leader's terminal, until the input ends.

    The others wait for a person however long it takes.
    """

    while True:
        ranks.enter("waiting for a message")
        text = terminal.ask() if terminal is not None else None
        ranks.await_leader()
        text = broadcast_json(text, ranks)
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


class LineDropped(Exception):
    """A Ctrl-C has ended the wait for a line."""


class Terminal:
    """Asks for one text after the other, with line editing and a history.

    Where `has_blocks` is set, texts of several lines are blocks between FENCEs, which the text has, too
    (`block_of`): a line that is FENCE alone begins one up to the next such line, and a line that begins with
    it, one up to a line that ends with it. What is pasted becomes a block, and so does a line that begins
    with a path, which would look like one of the `commands`.
    """

    def __init__(
        self, ask: str = ASK, has_blocks: bool = False, commands: Container[str] = (), hint: str = ""
    ) -> None:
        """`hint` is said where a Ctrl-C has dropped a line."""
        # input() edits lines once readline is imported, where both streams are a terminal.
        if sys.stdin is not None and sys.stdin.isatty() and find_spec("readline"):
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")
            readline.parse_and_bind("tab: tab-insert")
        LEAVING.append(kept_terminal())
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        self._ask = ask
        self._has_blocks = has_blocks
        self._commands = commands
        self._hint = hint
        self._lines: list[str] = []  # of a block that has begun
        self.is_listening = False
        self._is_dropped = False  # the next line
        self._may_leave = False  # a line was dropped, and nothing typed since

    def ask(self) -> str | None:
        """Returns the next text that is not empty; None at the end of the input.

        What `drop` ends is forgotten.
        """
        self._may_leave = False
        while True:
            try:
                with _awake():
                    text = self._text()
            except EOFError:
                return None
            except LineDropped:
                self._may_leave = True
                self._say(self._hint)
                continue
            self._may_leave = False
            if text.strip():
                return text

    def drop(self) -> bool:
        """Ends the wait for a line, in a signal's handler; of one not yet waited for, as soon as it is.

        Returns False, and drops nothing, where a line was dropped before and nothing is typed: the program
        ends, as by any signal that stops it.
        """
        if not self.is_listening:
            self._is_dropped = not self._may_leave
            return self._is_dropped
        readline = sys.modules.get("readline")
        typed = readline.get_line_buffer() if readline else ""
        if self._may_leave and not (typed.strip() or self._lines):
            return False
        raise LineDropped

    def _text(self) -> str:
        self._lines = []
        line = self._line(self._ask)
        if not self._has_blocks or block_of(line) is not None:
            return line
        if "\n" in line or names_path(line, self._commands):
            return as_block(line)
        if not line.lstrip().startswith(FENCE):
            return line

        is_bare = line.strip() == FENCE
        self._lines = [line]
        while True:
            try:
                self._lines.append(self._line(MORE))
            except EOFError:  # what was written is a message, too
                self._lines.append(FENCE)
            text = "\n".join(self._lines)
            last = self._lines[-1].strip()
            if last == FENCE if is_bare else block_of(text) is not None:
                return text
            if is_bare and last.endswith(FENCE) and last.count(FENCE) == 1:
                self._say(FENCE_ALONE)

    def _line(self, ask: str) -> str:
        """Returns the next line, or several that were pasted at once. Raises EOFError."""
        if sys.stdin is None:
            raise EOFError
        try:
            self.is_listening = True
            if self._is_dropped:
                self._is_dropped = False
                raise LineDropped
            with _outputs_to_terminal() as is_terminal:
                if is_terminal:
                    return input(ask)
                line = sys.stdin.readline()
        except (EOFError, KeyboardInterrupt, LineDropped):
            self._say("")
            raise
        finally:
            self.is_listening = False
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    @staticmethod
    def _say(line: str) -> None:
        """Prints a line for whoever types."""
        stream = sys.stdout if sys.stdout.isatty() else sys.stderr
        if sys.stdin is not None and sys.stdin.isatty():
            with suppress(OSError):  # the terminal may be gone
                stream.write(f"{line}\n")
                stream.flush()


@contextmanager
def _outputs_to_terminal() -> Iterator[bool]:
    """Makes the terminal that is read from standard output, too, while a line is typed; says whether it is.

    Nothing else edits the line, and without it a line ends after 4,095 bytes, and has no paste.
    """
    if not sys.stdin.isatty() or sys.stdout.isatty():
        yield sys.stdin.isatty()
        return
    try:
        terminal = os.open(os.ttyname(sys.stdin.fileno()), os.O_WRONLY)
    except OSError:
        yield False
        return
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(terminal, 1)
    os.close(terminal)
    try:
        yield True
    finally:
        os.dup2(output, 1)
        os.close(output)


def names_path(line: str, commands: Container[str]) -> bool:
    """Returns whether a line that begins with / begins with a path, and not with a command."""
    word = line.split(maxsplit=1)[0] if line.startswith("/") else ""
    return bool(word) and word not in commands and ("/" in word[1:] or os.path.exists(word))


def as_block(text: str) -> str:
    """Returns the text between fences."""
    return f"{FENCE}\n{text}\n{FENCE}"


def block_of(text: str) -> str | None:
    """Returns what stands between the fences of a text; None without them."""
    text = text.strip()
    is_whole = text.startswith(FENCE) and text.endswith(FENCE) and len(text) >= 2 * len(FENCE)
    return text[len(FENCE) : -len(FENCE)].strip("\n") if is_whole else None
