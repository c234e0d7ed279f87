"""Draws two samplings side by side on a terminal, and the rounds of a trace. No torch."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

from llama_ssp.errors import visible, writing
from llama_ssp.speculative.stats import Counts, ratio

PICTURE = "compare"  # what the names of a picture's styles begin with
SIDE_BY_SIDE = 60  # columns that two panes need; a narrower terminal gets plain lines
FRAME = 4  # columns that a pane's border and padding take
PROMPT_LINES = 3
FIGURE_LINES = 4
STYLES = {  # of a token by its origin: in colours, and with NO_COLOR
    "drafted": ("green", "underline"),
    "corrected": ("yellow", "reverse"),
    "bonus": ("cyan", "bold"),
    "sampled": ("", ""),
}
TRACE_LEGEND = (
    "prompt at the place of the round's first token: 'accepted' and ~'rejected'~ drafts (how many were "
    "accepted), and the target's token: corrected after a rejected draft, bonus after the last draft, "
    "sampled without drafts"
)
ONE_PROMPT = "one prompt, one seed: task=measure gives an interval"
BARS = " ▁▂▃▄▅▆▇█"

Piece = tuple[str, str]
"""Text, and where its token came from: a key of STYLES."""


@dataclass
class Track:
    """One sampling of one prompt: its text so far, and what it took. `counts` are the run's, with its clocks.

    `length` is the text's, in characters, once it has ended: a stop string that ends it is cut off, though
    its tokens count.
    """

    title: str
    counts: Counts = field(default_factory=Counts)
    arrived: list[Piece] = field(default_factory=list)
    finish: str | None = None
    length: int | None = None

    @property
    def ms_per_token(self) -> float | None:
        """Returns decoding time over tokens, without prefill."""
        return ratio(1000 * self.counts.decode_s, self.counts.committed)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces())

    def pieces(self) -> list[Piece]:
        """Returns the pieces up to the text's end; neighbours of one origin are one piece."""
        pieces = list[Piece]()
        left = self.length  # characters; without an end all
        for origin, group in groupby(self.arrived, key=lambda piece: piece[1]):
            text = "".join(text for text, _ in group)[:left]
            if left is not None:
                left -= len(text)
            pieces.append((text, origin))
        return pieces


@dataclass(frozen=True)
class Scene:
    """A prompt, its two tracks and a note, as drawn: `whole`, or the ends of texts that fit the height."""

    prompt: str
    regular: Track
    speculative: Track
    note: str = ""
    whole: bool = False

    def end(self, whole: bool) -> Scene:
        """Returns the last picture, with the verdict below."""
        return replace(self, note=verdict(self), whole=whole)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        widths = width // 2, width - width // 2
        tracks = self.regular, self.speculative
        bodies = [
            _wrapped(track, console, max(pane_width - FRAME, 2))
            for track, pane_width in zip(tracks, widths, strict=True)
        ]
        prompt = list(Text(visible(self.prompt), style="dim").wrap(console, width, overflow="fold"))

        height = max(map(len, bodies))
        if not self.whole:  # the ends of prompt and texts that fit with legend, note and borders
            room = (options.height or console.height) - 4 - FIGURE_LINES
            prompt_lines = min(PROMPT_LINES, len(prompt), max(room - 1, 0))
            prompt = prompt[len(prompt) - prompt_lines :]
            height = max(room - prompt_lines, 1)

        grid = Table.grid(*(Column(width=pane_width) for pane_width in widths), padding=0)
        panes = [
            _pane(track, Text("\n").join(body[-height:]), height, pane_width)
            for track, body, pane_width in zip(tracks, bodies, widths, strict=True)
        ]
        grid.add_row(*panes)

        note = Text(self.note, style="bold", no_wrap=True, overflow="ellipsis")
        yield Group(_legend(console.no_color), *prompt, grid, note)
        if self.whole and self.note:
            yield Text(ONE_PROMPT, style="dim")


class Screen:
    """Draws pictures on a terminal: whole screens while something moves, the last one to stay."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._drawn = 0.0

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Uses the terminal's alternate screen while inside: a resized terminal wraps what was printed."""
        with Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as live:
            self._live = live
            self._drawn = 0.0
            try:
                yield
            finally:
                self._live = None

    def draw(self, scene: Scene, note: str) -> None:
        """Draws the tracks as they are, at most twenty times a second."""
        if self._live is not None and time.monotonic() - self._drawn >= 0.05:
            self._live.update(replace(scene, note=note), refresh=True)
            self._drawn = time.monotonic()

    def keep(self, scene: Scene) -> None:
        """Prints the last picture, which stays."""
        self._console.print(scene.end(whole=True))


def save(scenes: list[Scene], path: Path, width: int, title: str) -> None:
    """Writes how the comparisons ended, as .svg or .html. Raises StorageError where it cannot."""
    console = Console(
        record=True,
        width=width,
        file=io.StringIO(),
        highlight=False,
        force_terminal=True,
        color_system="256",
        legacy_windows=False,
        _environ={},
    )
    for scene in scenes:
        console.print(scene.end(whole=True))

    content = _drawn(console, title) if path.suffix == ".svg" else console.export_html()
    with writing("picture", path, fix="choose another place with task.plot"):
        path.write_text(content, encoding="utf-8")


def _drawn(console: Console, title: str) -> str:
    """Returns what was printed as SVG, in dark colours or in light ones, as the viewer prefers.

    It names no font of the network, which rich would have a browser fetch.
    """
    themes = (SVG_EXPORT_THEME, DEFAULT_TERMINAL_THEME)
    dark, light = (
        console.export_svg(title=title, theme=theme, clear=False, unique_id=PICTURE) for theme in themes
    )
    in_light = re.findall(rf"\.{PICTURE}-r\d+ {{.*?}}", light)
    rules = [
        "svg > rect { fill: #ffffff; stroke: rgba(0, 0, 0, 0.35) }",
        f".{PICTURE}-title {{ fill: #000000 }}",
        *in_light,
    ]
    media = "\n".join(["@media (prefers-color-scheme: light) {", *rules, "}", "</style>"])
    return re.sub(r"@font-face \{.*?\}\s*", "", dark, flags=re.DOTALL).replace("</style>", media, 1)


def verdict(scene: Scene) -> str:
    """Returns how the comparison ended, in a line."""
    before = scene.regular.ms_per_token
    after = scene.speculative.ms_per_token
    if not before or not after:
        return ""
    return f"{before / after:.2f} times as fast: {before:.2f} ms/token, then {after:.2f}; prefill excluded"


def figures(track: Track) -> list[str]:
    """Returns the lines under a text: before the first token none, without drafts one."""
    counts = track.counts
    summary = counts.summary()
    if not summary["tokens_committed"]:
        return []

    seconds = counts.prefill_s + counts.decode_s
    rate = counts.tokens_per_s or 0
    speed = f"{summary['tokens_committed']} tokens  {rate:.0f} tokens/s  {seconds:.2f} s"
    if not summary["tokens_drafted"]:
        return [speed]

    accepted = summary["acceptance_rate"]
    a_round = summary["tokens_per_target_forward"]
    shares = f"{accepted:.0%} accepted  {a_round:.2f} tokens a round"
    return [speed, shares, "rounds by accepted drafts:", bars(summary["blocks_by_accepted"])]


def bars(lengths: list[int]) -> str:
    """Returns how many rounds had 0, 1, 2 ... drafts accepted, each count with a bar."""
    highest = max(lengths, default=0) or 1
    heights = (-(-count * (len(BARS) - 1) // highest) for count in lengths)
    return "  ".join(f"{n}{BARS[height]}{lengths[n]}" for n, height in enumerate(heights))


def _wrapped(track: Track, console: Console, width: int) -> list[Text]:
    """Returns the lines of a track's text, each token in the style of its origin."""
    pieces = [(visible(text), STYLES[origin][console.no_color]) for text, origin in track.pieces()]
    return list(Text.assemble(*pieces).wrap(console, width, overflow="fold"))


def _pane(track: Track, body: Text, height: int, width: int) -> Panel:
    """Returns a text of `height` lines in a frame, with its figures below."""
    lines = [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in figures(track)]
    below_text = [Text("")] * (height - len(body.plain.split("\n")))
    below_figures = [Text("")] * (FIGURE_LINES - len(lines))
    return Panel(
        Group(body, *below_text, *lines, *below_figures),
        title=Text(track.title, style="bold", no_wrap=True, overflow="ellipsis"),
        title_align="left",
        subtitle=None if track.finish is None else f"ended by: {track.finish}",
        subtitle_align="left",
        width=width,
    )


def _legend(is_plain: bool) -> Text:
    """Returns what the marks mean."""
    marks = list[Text]()
    for origin, styles in STYLES.items():
        meaning = "drafted and accepted" if origin == "drafted" else origin
        style = styles[is_plain]
        if is_plain:
            marks.append(Text(meaning, style))
        else:
            marks.append(Text("■ ", style).append(meaning, "dim"))
    return Text("  ", no_wrap=True, overflow="ellipsis").join(marks)


def trace_line(record: dict[str, Any], is_plain: bool = False) -> Text:
    """Returns a round of rounds.jsonl as a line; `is_plain` marks without colours."""
    line = Text(f"{record['id']} at {record['position']}: ")
    accepted = record["accepted"]
    for number, text in enumerate(record["drafted_text"]):
        if number < accepted:
            line.append(repr(text), STYLES["drafted"][is_plain])
        else:
            line.append(f"~{text!r}~", "red strike")
        line.append(" ")
    if record["drafted"]:
        line.append(f"({accepted} of {len(record['drafted'])}), ")

    origin = record["last_origin"]
    style = STYLES.get(origin, ("", ""))[is_plain]
    return line.append(f"{origin} ").append(repr(record["last_text"]), style)
