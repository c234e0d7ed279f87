"""Tables that people read, as lines of text. No torch."""

from __future__ import annotations


def aligned(lines: list[list[str]], words: int) -> list[str]:
    """Columns of one width each: the first `words` columns to the left, figures to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(_cells(line, widths, words)).rstrip() for line in lines]


def figure(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _cells(line: list[str], widths: list[int], words: int) -> list[str]:
    return [
        cell.ljust(width) if column < words else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
