"""Writes results to standard output, the log and progress to standard error; drawn where that is a terminal.

On a terminal, sys.stdout and sys.stderr show text alone (report/terminal.py): what would steer the terminal
is written out. What is drawn here (colours, tables, the bar) goes to the streams behind them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from rich.console import RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column as Cell
from rich.table import Table as RichTable
from rich.text import Text

from llama_ssp.config import Output
from llama_ssp.errors import StorageError, visible
from llama_ssp.report.tables import Table, fitted, text_of
from llama_ssp.report.terminal import rich_console, undrawn

log = logging.getLogger(__name__)

# What tells a terminal how to write what follows.
DIM = "\x1b[2m"
USUAL = "\x1b[0m"

_PROGRESS_IS_ASKED = ContextVar("progress is asked for", default=False)

Item = Table | RenderableType
"""What a task shows: tables, lines of text, and what else rich can draw."""


class Console:
    """Standard output, of the leader alone: on other ranks it is `silent`.

    Its methods raise StorageError where writing fails.
    """

    def __init__(self, silent: bool = False) -> None:
        self._silent = silent
        self.is_terminal = sys.stdout.isatty()

    def write(self, text: str, is_dim: bool = False) -> None:
        """Writes a text as it is, to a terminal as text alone; with `is_dim` a terminal writes it dim."""
        if is_dim and self.is_terminal and rich_console().color_system:  # a dumb terminal has no colours
            self._put(undrawn(sys.stdout), f"{DIM}{visible(text)}{USUAL}")
        else:
            self._put(sys.stdout, text)

    def _put(self, stream: TextIO, text: str) -> None:
        if self._silent:
            return
        try:
            with above_progress():
                stream.write(text)
                stream.flush()
        except BrokenPipeError:
            raise StorageError("standard output was closed by its reader") from None
        except OSError as error:
            raise StorageError(f"cannot write to standard output: {error.strerror}") from None

    def line(self, text: str) -> None:
        self.write(text + "\n")

    def show(self, items: Iterable[Item]) -> None:
        """Prints tables and lines: on a terminal in colours, fitted to its width; else plain."""
        if self._silent:
            return
        if not self.is_terminal:
            self.write("".join(f"{line}\n" for line in text_of(items)))
            return

        screen = rich_console()
        with screen.capture() as drawn:
            for item in items:
                if isinstance(item, RichTable):
                    screen.print(fitted(item, screen.width))
                else:
                    screen.print(Text(item) if isinstance(item, str) else item)
        self._put(undrawn(sys.stdout), drawn.get())

    def document(self, summary: dict[str, Any], output: Output) -> None:
        """Ends a task: prints its JSON document if that is asked for; else logs where the run folder is."""
        if output is Output.json:
            self.line(json.dumps(summary))
        elif summary.get("run_folder"):
            log.debug("run folder: %s", summary["run_folder"])


class Progress:
    """Shows how much is done: a bar on a terminal, lines now and then in a log.

    `what` is done in `units`, `total` of them; 0 if that is unknown. With "bytes" the counts are shown in kB,
    MB or GB. Without `ends_in_log` a log has no line at the end. With `ticks` a thread shows the time that
    goes by: it must not run where something is timed. See also `showing_progress`.
    """

    LOG_EVERY_S = 15.0
    DRAW_EVERY_S = 0.1
    # The time left is shown once this share is done, and so many seconds are spent.
    FORESEEN = 0.05
    FORESEEN_S = 2.0

    def __init__(
        self,
        what: str,
        total: int,
        units: str,
        ends_in_log: bool = True,
        ticks: bool = False,
    ) -> None:
        self._what = what
        self._total = total
        self._units = units
        self._ends_in_log = ends_in_log
        self._ticks = ticks
        self._done = 0
        self._before = 0  # how many of these earlier processes have done
        self._bars: Bars | None = None  # None: it is said in the log

    def __enter__(self) -> Progress:
        self._began = time.perf_counter()
        self._told = self._began  # when it was last drawn or logged
        cursor_moves = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
        is_asked = _PROGRESS_IS_ASKED.get()
        is_wanted = (is_asked or log.isEnabledFor(logging.INFO)) and not _SHOWN
        in_notebook = is_asked and rich_console(is_error=True).is_jupyter
        if is_wanted and ((_is_terminal() and cursor_moves) or in_notebook):
            self._bars = _new_bars(self._ticks)
            # rich finds the bar's place by the width of the words before it, so they are made visible first.
            self._bar = self._bars.add_task(visible(self._what), total=self._total or None, words="")
            self._bars.start()
            _SHOWN.append(self._bars.live)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            _SHOWN.remove(self._bars.live)
            self._bars.stop()
        if self._ends_in_log and self._done > self._before:
            log.info("%s: %s", self._what, self._words(time.perf_counter()))

    def start(self, done: int) -> None:
        """Counts what an earlier process has done."""
        self._done = self._before = done

    def advance(self, count: int) -> None:
        """Counts what has been done, and shows it if the last time is long enough ago."""
        self._done += count
        now = time.perf_counter()
        if self._bars is not None:
            if now - self._told >= self.DRAW_EVERY_S or self._done == self._total:
                self._told = now
                self._bars.update(self._bar, completed=self._done, words=self._words(now), refresh=True)
        elif now - self._told >= self.LOG_EVERY_S and self._done < self._total:
            self._told = now
            log.info("%s: %s", self._what, self._words(now))

    def _words(self, now: float) -> str:
        """Returns how much is done, how fast, and the time that is left once it can be foreseen."""
        done = self._done - self._before
        left = self._total - self._done
        spent = now - self._began
        rate = done / max(spent, 1e-9)
        is_foreseen = left and done >= self.FORESEEN * self._total and spent >= self.FORESEEN_S
        seconds = f"{left / rate:.0f} s left" if is_foreseen else f"{spent:.1f} s"
        if self._units == "bytes":
            return f"{decimal(self._done)} of {decimal(self._total)}, {decimal(int(rate))}/s, {seconds}"
        return f"{self._done} of {self._total} {self._units}, {rate:.1f}/s, {seconds}"


@contextmanager
def showing_progress(is_asked: bool) -> Iterator[None]:
    """If it `is_asked` for, draws what begins inside, whatever the log has; in a notebook, too."""
    before = _PROGRESS_IS_ASKED.set(is_asked)
    try:
        yield
    finally:
        _PROGRESS_IS_ASKED.reset(before)


def _new_bars(ticks: bool) -> Bars:
    """Returns rich's display of bars, none in it yet; with `ticks` it shows the time, drawn by a thread."""
    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(20),
        TextColumn("{task.fields[words]}", table_column=Cell(no_wrap=True)),
        console=rich_console(is_error=True),
        transient=True,
        auto_refresh=ticks,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    if ticks:
        bars.columns = (*bars.columns, TimeElapsedColumn())
    return bars


class LogHandler(logging.StreamHandler[Any]):
    """Writes records to standard error; on a terminal above the bar, and broken between words."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_terminal():
            super().emit(record)
            return
        try:
            rich_console(is_error=True).print(Text(self.format(record)), overflow="fold")
        except Exception:  # a log that cannot be written ends no run
            self.handleError(record)


def waiting(what: str) -> Progress:
    """Shows on a terminal that something goes on which has no steps to count; it leaves no line."""
    return Progress(what, 0, "", ends_in_log=False, ticks=True)


_SHOWN: list[Live] = []  # the display on the terminal, if any: there is room for one


@contextmanager
def above_progress() -> Iterator[None]:
    """Takes the bar off the terminal while something is written."""
    shown = list(_SHOWN)
    for live in shown:
        live.stop()
    try:
        yield
    finally:
        for live in shown:
            live.start()


def _is_terminal() -> bool:
    """Returns whether standard error is a terminal; it may be closed, and is then None."""
    return sys.stderr is not None and sys.stderr.isatty()
