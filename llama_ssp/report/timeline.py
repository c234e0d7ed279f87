"""One sampling of one prompt as it comes: what arrived when, and how it stands. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from llama_ssp.speculative.stats import ratio

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


@dataclass(frozen=True)
class View:
    """How a track stands. Rates are of decoding: prefill is left out."""

    title: str
    pieces: list[Piece]
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    lengths: list[int]
    seconds: float
    prefill_s: float
    finish: str | None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def ms_per_token(self) -> float | None:
        return ratio(1000 * (self.seconds - self.prefill_s), self.tokens)

    @property
    def tokens_per_s(self) -> float | None:
        return ratio(self.tokens, self.seconds - self.prefill_s)

    @property
    def acceptance(self) -> float | None:
        return ratio(self.accepted, self.drafted)

    @property
    def tokens_per_round(self) -> float | None:
        return ratio(self.tokens, self.rounds)


@dataclass
class Track:
    """Grows as rounds come in. `length` is the text's, in characters, once it has ended: a stop string
    that ended it is no part of it, though its tokens have come."""

    title: str
    prefill_s: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)
    finish: str | None = None
    length: int | None = None

    @property
    def seconds(self) -> float:
        """When the last tokens came."""
        return self.arrivals[-1].at_s if self.arrivals else self.prefill_s

    def view(self) -> View:
        """All that has come."""
        seen = self.arrivals
        lengths = Counter(arrival.accepted for arrival in seen if arrival.drafted)
        return View(
            title=self.title,
            pieces=list(self._pieces()),
            tokens=sum(arrival.tokens for arrival in seen),
            rounds=len(seen),
            drafted=sum(arrival.drafted for arrival in seen),
            accepted=sum(arrival.accepted for arrival in seen),
            lengths=[lengths[n] for n in range(max((a.drafted for a in seen), default=-1) + 1)],
            seconds=self.seconds,
            prefill_s=self.prefill_s,
            finish=self.finish,
        )

    def _pieces(self) -> Iterator[Piece]:
        """The pieces up to the text's end; neighbours of one origin are one piece."""
        left, last = self.length, None
        for text, origin in (piece for arrival in self.arrivals for piece in arrival.pieces):
            kept = text if left is None else text[:left]
            left = None if left is None else left - len(kept)
            if last is not None and last[1] == origin:
                last = (last[0] + kept, origin)
            else:
                if last is not None:
                    yield last
                last = (kept, origin)
        if last is not None:
            yield last


def speedup(regular: View, speculative: View) -> float | None:
    """How many times as fast a token came, prefill left out."""
    if regular.ms_per_token is None or speculative.ms_per_token is None:
        return None
    return ratio(regular.ms_per_token, speculative.ms_per_token)
