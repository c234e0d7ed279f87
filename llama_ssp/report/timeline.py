"""One sampling of one prompt as it comes: its text so far, and what it took. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from llama_ssp.speculative.stats import Counts, ratio

Piece = tuple[str, str]
"""Text, and where its token came from: drafted, sibling, corrected, bonus or sampled."""


@dataclass
class Track:
    """Grows with every round. `counts` are the run's own, with its clocks.

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
        """Prefill left out."""
        return ratio(1000 * self.counts.decode_s, self.counts.committed.total())

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces())

    def pieces(self) -> list[Piece]:
        """The pieces up to the text's end; neighbours of one origin are one piece."""
        found, left = list[Piece](), self.length
        for origin, group in groupby(self.arrived, key=lambda piece: piece[1]):
            text = "".join(text for text, _ in group)[:left]
            left = None if left is None else left - len(text)
            found.append((text, origin))
        return found


def speedup(regular: Track, speculative: Track) -> float | None:
    """How many times as fast a token came, prefill left out."""
    if regular.ms_per_token is None or speculative.ms_per_token is None:
        return None
    return ratio(regular.ms_per_token, speculative.ms_per_token)
