"""Two samplings side by side on a terminal: the picture of a moment, and the drawing of it. No torch."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from llama_ssp.errors import StorageError
from llama_ssp.report.timeline import Track, View, speedup
from llama_ssp.text.detokenizer import visible

FRAMES_PER_S = 20
BESIDE = 60  # columns from which two panes stand side by side; below, one above the other
FRAME = 4  # columns that a pane's border and padding take
PROMPT_LINES = 3
FIGURE_LINES = 3
STYLES = {"drafted": "green", "corrected": "yellow", "bonus": "cyan", "sampled": ""}
LEGEND = {"drafted": "drafted and accepted", "corrected": "corrected", "bonus": "bonus", "sampled": "sampled"}
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Picture:
    """A moment. `whole` shows all of the texts; otherwise their ends, as far as the height goes."""

    prompt: str
    regular: View
    speculative: View
    note: str
    whole: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, views = options.max_width, (self.regular, self.speculative)
        beside = width >= BESIDE
        widths = (width // 2, width - width // 2) if beside else (width, width)
        bodies = [
            _body(view).wrap(console, max(own - FRAME, 2), overflow="fold")
            for view, own in zip(views, widths, strict=True)
        ]
        prompt = list(Text(visible(self.prompt), style="dim").wrap(console, max(width, 2), overflow="fold"))
        rows = [max(map(len, bodies))] * 2 if beside else list(map(len, bodies))
        if not self.whole:
            prompt, rows = self._fitted(prompt, options.height or console.height, 1 if beside else 2)
        panes = [
            _pane(view, Text("\n").join(body[-room:]), room, own)
            for view, body, room, own in zip(views, bodies, rows, widths, strict=True)
        ]
        yield Group(_legend(), *prompt)
        yield _in_a_row(panes, widths) if beside else Group(*panes)
        yield Text(self.note, style="bold", no_wrap=True, overflow="ellipsis")

    @staticmethod
    def _fitted(prompt: list[Text], height: int, stacked: int) -> tuple[list[Text], list[int]]:
        """The end of the prompt, and how many lines of each text, that a terminal of this height holds."""
        left = height - 2 - stacked * (2 + FIGURE_LINES)  # legend and note, borders and figures
        shown = prompt[len(prompt) - min(PROMPT_LINES, len(prompt), max(left - stacked, 0)) :]
        return shown, [max((left - len(shown)) // stacked, 1)] * 2


@dataclass(frozen=True)
class Scene:
    """A prompt and its two tracks: the picture of how they stand."""

    prompt: str
    regular: Track
    speculative: Track

    def now(self, note: str = "", whole: bool = False) -> Picture:
        return Picture(self.prompt, self.regular.view(), self.speculative.view(), note, whole)

    def end(self, whole: bool) -> Picture:
        """How it ended, and what that says."""
        last = self.now(whole=whole)
        return Picture(self.prompt, last.regular, last.speculative, verdict(last), whole)


class Screen:
    """Draws pictures on a terminal: whole screens while something moves, the last one to stay."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._drawn = 0.0

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While inside, the screen is ours; after it, the terminal is as it was.

        A screen of its own, as a terminal that is resized wraps what was printed, and moves it.
        """
        live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip
        with live:
            self._live, self._drawn = live, 0.0
            try:
                yield
            finally:
                self._live = None

    def draw(self, scene: Scene, note: str) -> None:
        """How it stands, unless that was drawn just now."""
        if self._live is None or time.monotonic() - self._drawn < 1 / FRAMES_PER_S:
            return
        self._live.update(scene.now(note), refresh=True)
        self._drawn = time.monotonic()

    def keep(self, scene: Scene) -> None:
        """Prints how it ended, to stay."""
        self._console.print(scene.end(whole=True))


def save(scenes: list[Scene], path: Path, width: int, title: str) -> None:
    """Writes how the comparisons ended, as .svg or .html. Raises StorageError where it cannot."""
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="256",
        highlight=False, legacy_windows=False, _environ={},
    )  # fmt: skip
    for scene in scenes:
        console.print(scene.end(whole=True))
    content = console.export_svg(title=title) if path.suffix == ".svg" else console.export_html()
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the picture: {error.strerror}", where=str(path)) from None


def verdict(picture: Picture) -> str:
    """What a finished picture says in a line."""
    faster = speedup(picture.regular, picture.speculative)
    if faster is None:
        return ""
    before, after = picture.regular.ms_per_token, picture.speculative.ms_per_token
    return f"{faster:.2f} times as fast: {before:.2f} ms a token, then {after:.2f}; prefill left out"


def figures(view: View) -> list[str]:
    """The lines under a text."""
    if not view.tokens:
        return ["", "", ""]
    speed = f"{view.tokens} tokens  {view.tokens_per_s or 0:.0f} tokens/s  {view.seconds:.2f} s"
    if not view.drafted:
        return [speed, "", ""]
    rate = f"{view.acceptance:.0%} accepted  {view.tokens_per_round:.2f} tokens a round"
    return [speed, rate, bars(view.lengths)]


def bars(lengths: list[int]) -> str:
    """How many rounds had 0, 1, 2 ... drafts accepted."""
    most = max(lengths, default=0)
    return "  ".join(f"{n}{BARS[_height(count, most)]}{count}" for n, count in enumerate(lengths))


def _height(count: int, most: int) -> int:
    return -(-count * (len(BARS) - 1) // most) if most else 0


def _body(view: View) -> Text:
    body = Text()
    for text, origin in view.pieces:
        body.append(visible(text), STYLES[origin])
    return body


def _pane(view: View, body: Text, rows: int, width: int) -> Panel:
    missing = rows - len(body.plain.split("\n"))
    lines = [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in figures(view)]
    ended = "" if view.finish is None else f" ({view.finish})"
    title = Text(view.title + ended, style="bold", no_wrap=True, overflow="ellipsis")
    return Panel(Group(body, *[Text("")] * missing, *lines), title=title, title_align="left", width=width)


def _in_a_row(panes: list[Panel], widths: tuple[int, int]) -> Table:
    grid = Table.grid(padding=0)
    for width in widths:
        grid.add_column(width=width)
    grid.add_row(*panes)
    return grid


def _legend() -> Text:
    marks = [Text("■ ", STYLES[origin]).append(meaning, "dim") for origin, meaning in LEGEND.items()]
    return Text("  ", no_wrap=True, overflow="ellipsis").join(marks)
