"""How many tokens to draft next, row by row.

A row's choice rests on that row's own past and on given costs, never on its neighbours, and is made before
anything of the round is drawn: so the output distribution stays exact. With given costs
(`speculation.cost_ratio`) and in fp32, a row chooses the same K in any batch; measured costs differ from run
to run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Observed(Protocol):
    """What a lookahead learns from: the part of a row's step that it reads."""

    @property
    def row(self) -> int: ...
    @property
    def overlap(self) -> list[float]:
        """What both distributions have in common at each drafted position."""

    @property
    def standing(self) -> list[tuple[float, float]]:
        """Of each draft, how likely it was that those before it stand, and that it stands with them."""


class DraftLength(Protocol):
    """Chooses K for each row."""

    def choose(self) -> list[int]: ...

    def observe(self, rows: Sequence[Observed]) -> None: ...

    def restart(self, row: int) -> None:
        """Another text has come into the row."""


@dataclass
class FixedDraftLength:
    """The same K always."""

    k: int
    rows: int

    def choose(self) -> list[int]:
        return [self.k] * self.rows

    def observe(self, rows: Sequence[Observed]) -> None:
        pass

    def restart(self, row: int) -> None:
        pass


@dataclass(frozen=True)
class Costs:
    """What a round takes, in any unit: `draft` each drafted token, `verify[k]` the target's step over k."""

    draft: float
    verify: tuple[float, ...]

    @property
    def k_max(self) -> int:
        return len(self.verify) - 1

    def round(self, k: int) -> float:
        return k * self.draft + self.verify[k]

    def best_k(self, first: float, later: float) -> int:
        """The K with the most expected tokens over time.

        The first draft stands with the chance `first`, each later one, if all before it do, with `later`.
        """
        best, most, tokens, standing = 0, 0.0, 1.0, first
        for k in range(len(self.verify)):
            if tokens > most * self.round(k):
                best, most = k, tokens / self.round(k)
            tokens, standing = tokens + standing, standing * later
        return best

    @staticmethod
    def of_ratio(cost_ratio: float, k_max: int) -> Costs:
        """As the papers have it: a target step costs the same for any K, a draft step so much of it."""
        return Costs(cost_ratio, (1.0,) * (k_max + 1))

    @staticmethod
    def between(draft: float, verify: dict[int, float], k_max: int) -> Costs:
        """From target steps measured at some K, 0 among them; beyond the last they are taken for the same."""
        known = sorted(verify)
        steps = []
        for k in range(k_max + 1):
            above = next((n for n in known if n >= k), known[-1])
            below = max(n for n in known if n <= k)
            share = (k - below) / (above - below) if above > below else 0.0
            steps.append((1 - share) * verify[below] + share * verify[above])
        return Costs(draft, tuple(steps))


PRIOR = 0.7  # what the distributions of a row have in common, of which nothing has been seen
MEMORY = 0.97  # of what was seen before, for each round of drafts seen since
PROBE_FIRST, PROBE_LAST = 32, 64  # rounds without drafts between tries; they double


@dataclass
class Mean:
    """A weighted mean of what was seen lately; where little was, of that and a guess that counts as one."""

    weight: float = 0.0
    total: float = 0.0

    def fade(self) -> None:
        self.weight, self.total = MEMORY * self.weight, MEMORY * self.total

    def see(self, total: float, weight: float) -> None:
        self.weight, self.total = self.weight + weight, self.total + total

    def beside(self, guess: float) -> float:
        return (self.total + guess) / (self.weight + 1)


@dataclass
class AcceptanceStats:
    """How likely a row's drafts stand: the first of a round, and each later one where those before it do.

    These two differ. A first draft follows a token that the draft model may just have missed; a later one
    follows tokens that both models like, and the block rule makes good there what it lost before. Both are
    read off the distributions, of every draft, kept or not, so that a few rounds tell what outcomes alone
    would tell after many. What is not known yet is guessed from what is: the first draft's chance from all
    overlaps, and the later ones' from the first one's.
    """

    overlap: Mean = field(default_factory=Mean)
    at_first: Mean = field(default_factory=Mean)
    behind: Mean = field(default_factory=Mean)

    @property
    def first(self) -> float:
        return self.at_first.beside(self.overlap.beside(PRIOR))

    @property
    def later(self) -> float:
        return self.behind.beside(math.sqrt(self.first))

    def observe(self, overlap: list[float], standing: list[tuple[float, float]]) -> None:
        """What a round of drafts has shown."""
        for mean in (self.overlap, self.at_first, self.behind):
            mean.fade()
        self.overlap.see(sum(overlap), len(overlap))
        self.at_first.see(overlap[0], 1)
        before, with_it = (sum(chances) for chances in zip((0.0, 0.0), *standing[1:], strict=True))
        self.behind.see(with_it, before)


@dataclass
class AdaptiveDraftLength:
    """The K with the most tokens per unit of time, at the agreement the row has shown lately.

    A row whose best K is 0 tries one token now and then, to notice when drafting pays again.
    """

    costs: Costs
    rows: int
    agreement: list[AcceptanceStats] = field(init=False)
    _idle: list[int] = field(init=False)
    _pause: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.agreement = [AcceptanceStats() for _ in range(self.rows)]
        self._idle, self._pause = [0] * self.rows, [PROBE_FIRST] * self.rows

    def restart(self, row: int) -> None:
        self.agreement[row] = AcceptanceStats()
        self._idle[row], self._pause[row] = 0, PROBE_FIRST

    def choose(self) -> list[int]:
        wanted = [self.costs.best_k(known.first, known.later) for known in self.agreement]
        for row, k in enumerate(wanted):
            if k:
                self._idle[row], self._pause[row] = 0, PROBE_FIRST
                continue
            self._idle[row] += 1
            if self._idle[row] >= self._pause[row]:
                wanted[row], self._idle[row] = 1, 0
                self._pause[row] = min(2 * self._pause[row], PROBE_LAST)
        return wanted

    def observe(self, rows: Sequence[Observed]) -> None:
        for step in rows:
            if step.overlap:
                self.agreement[step.row].observe(step.overlap, step.standing)


def tokens_per_round(rate: float, k: int) -> float:
    """Expected committed tokens: 1 + a + ... + a^K."""
    return float(sum(rate**i for i in range(k + 1)))


def best_k(rate: float, cost_ratio: float, k_max: int) -> int:
    """The K that maximises expected tokens over expected time (Leviathan et al., section 3)."""
    return Costs.of_ratio(cost_ratio, k_max).best_k(rate, rate)
