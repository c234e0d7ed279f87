"""One sampling of one prompt as it comes: what arrived when, and its figures so far. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby

from llama_ssp.speculative.stats import by_position, ratio

Piece = tuple[str, str]
"""Text, and where its token came from: drafted, corrected, bonus or sampled."""


@dataclass(frozen=True)
class Arrival:
    """What one round brought, `at_s` seconds after the prompt was given."""

    at_s: float
    pieces: tuple[Piece, ...]
    tokens: int
    drafted: int
    accepted: int


@dataclass
class Track:
    """Grows with every round. Rates are of decoding: prefill is left out.

    `length` is the text's, in characters, once it has ended: a stop string that ends it is cut off, though
    its tokens count.
    """

    title: str
    prefill_s: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)
    finish: str | None = None
    length: int | None = None

    @property
    def seconds(self) -> float:
        """When the last tokens came."""
        return self.arrivals[-1].at_s if self.arrivals else self.prefill_s

    @property
    def tokens(self) -> int:
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def drafted(self) -> int:
        return sum(arrival.drafted for arrival in self.arrivals)

    @property
    def accepted_lengths(self) -> list[int]:
        """How many rounds had 0, 1, 2 ... drafts accepted."""
        drafting = [arrival for arrival in self.arrivals if arrival.drafted]
        counts = Counter(arrival.accepted for arrival in drafting)
        counts[max((arrival.drafted for arrival in drafting), default=-1)] += 0
        return by_position(counts)

    @property
    def ms_per_token(self) -> float | None:
        return ratio(1000 * (self.seconds - self.prefill_s), self.tokens)

    @property
    def tokens_per_s(self) -> float | None:
        return ratio(self.tokens, self.seconds - self.prefill_s)

    @property
    def acceptance_rate(self) -> float | None:
        return ratio(sum(arrival.accepted for arrival in self.arrivals), self.drafted)

    @property
    def tokens_per_round(self) -> float | None:
        return ratio(self.tokens, len(self.arrivals))

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces())

    def pieces(self) -> list[Piece]:
        """The pieces up to the text's end; neighbours of one origin are one piece."""
        every = [piece for arrival in self.arrivals for piece in arrival.pieces]
        found, left = list[Piece](), self.length
        for origin, group in groupby(every, key=lambda piece: piece[1]):
            text = "".join(text for text, _ in group)[:left]
            left = None if left is None else left - len(text)
            found.append((text, origin))
        return found


def speedup(regular: Track, speculative: Track) -> float | None:
    """How many times as fast a token came, prefill left out."""
    if regular.ms_per_token is None or speculative.ms_per_token is None:
        return None
    return ratio(regular.ms_per_token, speculative.ms_per_token)
