"""Required figures: what is asked, what was found, and whether it is met or by how much it is not."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """A figure, and the least (with `at_most` the most) that is asked; None: nothing is asked.

    `found` is None where it was not measured; then `note` says why.
    """

    what: str
    found: float | None
    asked: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None where nothing is asked, or nothing was measured."""
        if self.asked is None or self.found is None:
            return None
        return self.found <= self.asked if self.at_most else self.found >= self.asked

    @property
    def verdict(self) -> str:
        """`met`, or by how much not: in percent, of a count in numbers."""
        if self.found is None:
            return "not measured"
        if self.met is not False:
            return "met" if self.met else ""
        assert self.asked is not None
        far = abs(self.found - self.asked)
        by = f"{100 * far / self.asked:.0f} %" if self.asked else f"{far:g}"
        return f"NO, by {by}"

    def document(self) -> dict[str, object]:
        """For JSON, with the verdict."""
        return {**vars(self), "verdict": self.verdict}

    def cells(self) -> list[str]:
        limit = "" if self.asked is None else f"{'<=' if self.at_most else '>='} {self.asked:.4g}"
        found = "-" if self.found is None else f"{self.found:.4g}"
        return [self.what, limit, found, " ".join(self.note.split())[:60], self.verdict]


ENDS = ": ends"
HEAD = ["what", "asked", "found", "", "met"]


def most(what: str, found: float | None, asked: float, note: str = "") -> Bar:
    """A figure that may be `asked` at most."""
    return Bar(what, found, asked, True, note)


def counted(differing: int, of: int, what: str) -> Bar:
    """How many of some things are not as they should be: none may."""
    return most(what, differing, 0, f"of {of}")


def needs(what: str, thing: str = "a GPU") -> Bar:
    """A figure that cannot be measured here."""
    return Bar(what, None, note=f"needs {thing}")


def failed(what: str, why: object) -> Bar:
    """Something that should have ended and did not."""
    return Bar(what + ENDS, 0, 1, note=" ".join(str(why).split())[:200])


def safely(what: str, bars: Iterator[Bar]) -> Iterator[Bar]:
    """The figures; an error ends them, and is one of them."""
    try:
        yield from bars
    except Exception as error:  # whatever a device or a library raises: other figures follow
        traceback.print_exc()
        yield failed(what, f"{type(error).__name__}: {error}")


def bars_table(bars: Sequence[Bar]) -> list[str]:
    """As lines of text."""
    from llama_ssp.report.tables import aligned  # bench/gpu.py installs what this needs first

    return aligned([HEAD, *(bar.cells() for bar in bars)], 1)


def all_met(bars: Sequence[Bar]) -> bool:
    """Whether no figure misses what is asked."""
    return all(bar.met is not False for bar in bars)
