"""Draws pictures of boxes, lines and texts as SVG. bench/diagrams.py says what is in them.

A picture is 900 wide and has its own background, so it is readable on any page. Its colours follow the
reader's light or dark scheme, also where the file is shown as an image. Texts stay texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH = 900
MARGIN = 20

# What a class of the style draws with, on a light and on a dark background.
COLOURS = {
    "page": ("#ffffff", "#0d1117"),
    "panel": ("#f3f5f7", "#1b222b"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#a3adb8"),
    "edge": ("#8c959f", "#6e7681"),
    "target": ("#b9d9f0", "#1d4f7c"),
    "target-edge": ("#0072b2", "#58a6ff"),
    "draft": ("#fbdc9a", "#6e4d08"),
    "draft-edge": ("#b36b00", "#e3a93c"),
    "rest": ("#a9e2cc", "#0d5f47"),
    "rest-edge": ("#00714f", "#3fc79a"),
    "bad": ("#b42318", "#ff7b72"),
}
TEXTS = {
    "h": "font-size: 16px; font-weight: 600",
    "b": "font-weight: 600",
    "code": "font-family: ui-monospace, Menlo, Consolas, monospace",
}


@dataclass
class Drawing:
    """A picture that is being drawn. Shapes are drawn in the order of the calls; x goes right, y down."""

    title: str
    description: str
    height: int
    shapes: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = "", dashed: bool = False
    ) -> None:
        """Draws a rectangle; `fill` and `edge` are names of colours."""
        style = f"f-{fill}"
        if edge:
            style += f" s-{edge}"
        if dashed:
            style += " dashed"
        size = f'width="{number(width)}" height="{number(height)}"'
        self.shapes.append(f'<rect class="{style}" x="{number(x)}" y="{number(y)}" {size} rx="3"/>')

    def text(self, x: float, y: float, words: str, style: str = "", colour: str = "ink") -> None:
        """Writes a line on the base line y. `style` has names of TEXTS, and `mid` or `end` for its anchor."""
        classes = f"{style} f-{colour}".strip()
        self.shapes.append(f'<text class="{classes}" x="{number(x)}" y="{number(y)}">{escape(words)}</text>')

    def lines(self, x: float, y: float, words: Sequence[str], style: str = "", colour: str = "ink") -> None:
        """Writes lines below each other."""
        for place, line in enumerate(words):
            self.text(x, y + 17 * place, line, style=style, colour=colour)

    def line(self, points: Sequence[tuple[float, float]], colour: str = "edge", dashed: bool = False) -> None:
        """Draws a line through the points."""
        style = f"none s-{colour}"
        if dashed:
            style += " dashed"
        way = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.shapes.append(f'<polyline class="{style}" points="{way}"/>')

    def arrow(
        self,
        start: float,
        end: float,
        y: float,
        colour: str = "ink",
        dashed: bool = False,
        both: bool = False,
    ) -> None:
        """Draws a horizontal arrow from x = start to x = end; with `both` a head at each end."""
        self.line([(start, y), (end, y)], colour=colour, dashed=dashed)
        self._head(end, y, 1 if end > start else -1, colour)
        if both:
            self._head(start, y, 1 if start > end else -1, colour)

    def _head(self, x: float, y: float, way: int, colour: str) -> None:
        back = x - 9 * way
        corners = [(x, y), (back, y - 4), (back, y + 4)]
        way_round = " ".join(f"{number(a)},{number(b)}" for a, b in corners)
        self.shapes.append(f'<polygon class="f-{colour}" points="{way_round}"/>')

    def svg(self) -> str:
        """Returns the file's text."""
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="desc">{escape(self.description)}</desc>',
                "<style>",
                *style_rules(),
                "</style>",
                f'<rect class="f-page" width="{WIDTH}" height="{self.height}" rx="6"/>',
                *self.shapes,
                "</svg>",
                "",
            ]
        )


def number(value: float) -> str:
    """Returns a coordinate with at most one decimal place."""
    return f"{value:.1f}".removesuffix(".0")


def style_rules() -> list[str]:
    """Returns the style: colours of the light scheme, then those that replace them in the dark one."""

    def colours(scheme: int) -> str:
        fills = [f".f-{name} {{ fill: {pair[scheme]} }}" for name, pair in COLOURS.items()]
        strokes = [f".s-{name} {{ stroke: {pair[scheme]} }}" for name, pair in COLOURS.items()]
        return " ".join([*fills, *strokes])

    return [
        "text { font: 13px system-ui, 'Segoe UI', Helvetica, Arial, sans-serif }",
        *(f".{name} {{ {rule} }}" for name, rule in TEXTS.items()),
        ".mid { text-anchor: middle } .end { text-anchor: end }",
        ".none { fill: none } .dashed { stroke-dasharray: 5 4 }",
        colours(0),
        f"@media (prefers-color-scheme: dark) {{ {colours(1)} }}",
    ]
