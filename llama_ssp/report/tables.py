"""Tables: one object that writes text for a terminal or a log, CSV and HTML. No torch."""

import csv
import io
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

Row = dict[str, Any]
MIB = 2**20
NONE = "-"  # a cell without a value
GAP = 2  # columns between two columns of a table
BROKEN = 12  # columns that text which may be broken takes at least


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: its key in the rows, its title, and how its cells are written.

    A column of `intervals` shows `KEY_low` and `KEY_high` of a row. `optional` columns are left out where a
    terminal is too narrow, the highest first.
    """

    key: str
    title: str | None = None
    digits: int = 2
    is_text: bool = False
    is_interval: bool = False
    is_percent: bool = False
    optional: int = 0

    @property
    def head(self) -> str:
        return self.key if self.title is None else self.title

    def fields(self) -> list[str]:
        """Returns the row's keys that it shows."""
        return [f"{self.key}_low", f"{self.key}_high"] if self.is_interval else [self.key]

    def cell(self, row: Row) -> str:
        values: list[Any] = [row.get(key) for key in self.fields()]
        if None in values:
            return NONE
        if self.is_percent:
            return "..".join(figure(100 * value, self.digits) for value in values) + " %"
        texts = [figure(value, self.digits) if isinstance(value, float) else str(value) for value in values]
        return "..".join(texts)


@dataclass(frozen=True)
class Table:
    """Rows under columns, below a `title`; `name` is its file's. Text may be broken into lines."""

    name: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    empty: str = "(nothing)"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(f"\n{self.title}", style="bold")
        if not self.rows:
            yield Text(self.empty)
            return

        shown = self.fitting(options.max_width)
        heads = [column.head for column in shown]
        cells = [[column.cell(row) for column in shown] for row in self.rows]
        words = [number for number, column in enumerate(shown) if column.is_text]
        yield fitted(_rich_table(heads, cells, words, wraps=True), options.max_width)

        missing = [column.head for column in self._filled() if column not in shown]
        if missing:
            yield Text(f"too narrow for: {', '.join(missing)} ({self.name}.csv has them)", style="dim")

    def fitting(self, width: int) -> list[Column]:
        """Returns the columns that fit this width: optional ones go, from the right, the highest first."""
        shown = self._filled()
        while sum(map(self._width, shown)) + GAP * (len(shown) - 1) > width:
            highest = max(column.optional for column in shown)
            if not highest:
                break
            shown.remove([column for column in shown if column.optional == highest][-1])
        return shown

    def _filled(self) -> list[Column]:
        """Returns the columns without optional ones that have no value: intervals of one repeat."""
        return [
            column
            for column in self.columns
            if not column.optional or any(column.cell(row) != NONE for row in self.rows)
        ]

    def csv(self) -> str:
        """Returns the values as they are, not rounded, under the columns' keys."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        keys = [key for column in self.columns for key in column.fields()]
        writer.writerow(keys)
        writer.writerows([row.get(key) for key in keys] for row in self.rows)
        return text.getvalue()

    def html(self) -> str:
        heads = "".join(f"<th{_kind(column)}>{escape(column.head)}</th>" for column in self.columns)
        rows = list[str]()
        for row in self.rows:
            cells = [f"<td{_kind(column)}>{escape(column.cell(row))}</td>" for column in self.columns]
            rows.append("".join(cells))
        title = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        body = "".join(f"<tr>{row}</tr>\n" for row in rows)

        return f"<table>{title}<thead><tr>{heads}</tr></thead>\n<tbody>{body}</tbody></table>\n"

    def _width(self, column: Column) -> int:
        """Returns the width of a column; of text that may be broken no more than BROKEN."""
        words = [column.head, *(column.cell(row) for row in self.rows)]
        widest = max(map(cell_len, words))
        may_break = column.is_text and column is not self.columns[0]
        return min(widest, BROKEN) if may_break else widest


Items = list[Table | str]
"""What a task shows: tables, and lines between them."""


def text_of(items: Iterable[Any]) -> list[str]:
    """Returns tables, lines and what else rich can draw as plain lines of any width."""
    pieces = (item.split("\n") if isinstance(item, str) else rendered(item) for item in items)
    return [line for piece in pieces for line in piece]


def aligned(lines: list[list[str]], words: int) -> list[str]:
    """Returns lines with columns of one width each: the first `words` to the left, figures to the right."""
    return rendered(_rich_table(lines[0], lines[1:], range(words), wraps=False))


def rendered(item: Any) -> list[str]:
    """Returns what rich draws as plain lines of any width."""
    drawn = io.StringIO()  # at a closed standard output rich would end the process
    Console(file=drawn, width=100_000, color_system=None, force_terminal=False, _environ={}).print(item)
    return [line.rstrip() for line in drawn.getvalue().removesuffix("\n").split("\n")]


def fitted(table: RichTable, width: int) -> RenderableType:
    """Returns the table; where its columns do not fit the width, several tables below one another.

    Each of them begins with the first column, which names the rows, and has the rows with a cell in it.
    """
    names, *others = table.columns
    room = width - _least_width(names)
    bands: list[list[RichColumn]] = [[]]
    left = room
    for column in others:
        needed = GAP + _least_width(column)
        if needed > left and bands[-1]:
            bands.append([])
            left = room
        bands[-1].append(column)
        left -= needed
    if len(bands) == 1:
        return table

    parts = list[RenderableType]()
    for band in bands:
        part = _lineless_table()
        for column in (names, *band):
            part.add_column(
                column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow
            )
        for name, *cells in zip(names.cells, *(column.cells for column in band), strict=True):
            if any(str(cell) for cell in cells):
                part.add_row(name, *cells)
        parts += [part, ""]
    return Group(*parts[:-1])


def _least_width(column: RichColumn) -> int:
    """Returns the width that a column needs to be read."""
    widest = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
    return widest if column.no_wrap else min(widest, BROKEN)


def figure(value: float | None, digits: int = 2) -> str:
    """Returns a number as text, or a dash where there is none."""
    return NONE if value is None else f"{value:.{digits}f}"


def _rich_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], words: Container[int], wraps: bool
) -> RichTable:
    """Returns a table without lines: columns of `words` are text, to the left, and broken if it `wraps`."""
    table = _lineless_table()
    for number, head in enumerate(heads):
        is_text = number in words
        side: Any = "left" if is_text else "right"
        table.add_column(Text(head), justify=side, no_wrap=not (is_text and wraps), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _lineless_table() -> RichTable:
    return RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")


def _kind(column: Column) -> str:
    return "" if column.is_text else ' class="n"'
