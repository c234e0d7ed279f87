"""A terminal shows text and obeys none of it: what this process prints on one comes through here.

There are two ways to a terminal. Whatever writes to sys.stdout or sys.stderr (tasks, logs, warnings,
tracebacks, libraries) meets a `TextTerminal`; what rich draws, a `DrawingConsole`. Both write out what would
steer the terminal (`visible`), whoever wrote it: a user, a model, the author of a file. Files and pipes get
every text as it is.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from llama_ssp.errors import visible


class TextTerminal(io.TextIOBase):
    """A terminal's stream for text: each character that would steer the terminal is written out.

    Characters are looked at one by one, so a sequence that comes in several pieces is found, too. Controls of
    our own (colours, the moving bar) go to `rich_proxied_file`, where rich looks for the stream itself.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str, /) -> int:
        self.rich_proxied_file.write(visible(text))
        return len(text)

    def flush(self) -> None:
        self.rich_proxied_file.flush()

    def fileno(self) -> int:
        return self.rich_proxied_file.fileno()

    def isatty(self) -> bool:
        return self.rich_proxied_file.isatty()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Closes nothing: the stream is the process's."""

    @property
    def buffer(self) -> Any:
        return self.rich_proxied_file.buffer

    # `input` asks for these two; TextIOBase has them as attributes without a value.
    encoding = property(lambda self: self.rich_proxied_file.encoding)
    errors = property(lambda self: self.rich_proxied_file.errors)


class DrawingConsole(Console):
    """rich's console; the texts in what it draws are written out as a `TextTerminal` writes them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


@cache
def rich_console(is_error: bool = False) -> Console:
    """Returns rich's console of standard output, or of standard error. There is one of each."""
    return DrawingConsole(stderr=is_error, highlight=False, markup=False, emoji=False, legacy_windows=False)


def show_text_alone() -> None:
    """Makes sys.stdout and sys.stderr show text alone, where they are terminals."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty() and not isinstance(stream, TextTerminal):
            setattr(sys, name, TextTerminal(stream))


def undrawn(stream: TextIO) -> TextIO:
    """Returns the stream that takes controls as they are, for what this program has drawn itself."""
    return getattr(stream, "rich_proxied_file", stream)
