"""How many tokens to draft next, row by row.

A row's choice depends on that row's past and on given costs, never on its neighbours, and is made before
anything of the round is drawn: so the output distribution stays exact. With given costs
(`speculation.cost_ratio`) and in fp32, a row chooses the same K in any batch; measured costs differ from run
to run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from llama_ssp.speculative.stats import RowStep


@dataclass
class FixedDraftLength:
    """The same K always."""

    k: int
    rows: int

    def choose(self) -> list[int]:
        """How many tokens to draft in each row."""
        return [self.k] * self.rows

    def observe(self, rows: Sequence[RowStep]) -> None:
        """Learns from a round."""

    def restart(self, row: int) -> None:
        """Another text was admitted to the row."""


@dataclass(frozen=True)
class Costs:
    """A round's cost, in any unit: `draft` a drafted token, `verify[k]` the target's step over k drafts."""

    draft: float
    verify: tuple[float, ...]

    @property
    def k_max(self) -> int:
        return len(self.verify) - 1

    def round(self, k: int) -> float:
        return k * self.draft + self.verify[k]

    def best_k(self, first: float, later: float) -> int:
        """The K with the most expected tokens per cost.

        The first draft stands with chance `first`, each later one, if all before it do, with `later`.
        """
        best, most, tokens, standing = 0, 0.0, 1.0, first
        for k in range(len(self.verify)):
            if tokens > most * self.round(k):
                best, most = k, tokens / self.round(k)
            tokens, standing = tokens + standing, standing * later
        return best

    @staticmethod
    def of_ratio(cost_ratio: float, k_max: int) -> Costs:
        """As in the papers: a target step costs 1 for any K, a draft step `cost_ratio`."""
        return Costs(cost_ratio, (1.0,) * (k_max + 1))

    @staticmethod
    def between(draft: float, verify: dict[int, float], k_max: int) -> Costs:
        """Interpolates target steps measured at some K, including 0; constant beyond the last."""
        known = sorted(verify)
        steps = []
        for k in range(k_max + 1):
            above = next((n for n in known if n >= k), known[-1])
            below = max(n for n in known if n <= k)
            share = (k - below) / (above - below) if above > below else 0.0
            steps.append((1 - share) * verify[below] + share * verify[above])
        return Costs(draft, tuple(steps))


PRIOR = 0.7  # the assumed overlap of a row's distributions before anything was seen
MEMORY = 0.97  # the weight of earlier rounds shrinks by this factor with each round of drafts
PROBE_FIRST, PROBE_LAST = 32, 64  # rounds without drafts between tries; they double


@dataclass
class Mean:
    """A fading weighted mean; a guess counts as one more observation."""

    weight: float = 0.0
    total: float = 0.0

    def see(self, total: float, weight: float) -> None:
        self.weight, self.total = MEMORY * self.weight + weight, MEMORY * self.total + total

    def with_guess(self, guess: float) -> float:
        return (self.total + guess) / (self.weight + 1)


@dataclass
class AcceptanceStats:
    """How likely a row's drafts stand: the first of a round, and each later one if those before it do.

    The two differ. A first draft follows a token that the draft model may just have missed; a later one
    follows tokens that both models like, and the block rule makes up there for what it lost before. Both are
    computed from the distributions of every draft, accepted or not, so a few rounds tell as much as the
    outcomes of many. What is not known yet is guessed: the first draft's chance from all overlaps, the later
    ones' from the first's.
    """

    overlap: Mean = field(default_factory=Mean)
    at_first: Mean = field(default_factory=Mean)
    behind: Mean = field(default_factory=Mean)

    @property
    def first(self) -> float:
        return self.at_first.with_guess(self.overlap.with_guess(PRIOR))

    @property
    def later(self) -> float:
        return self.behind.with_guess(math.sqrt(self.first))

    def observe(self, overlap: list[float], standing: list[tuple[float, float]]) -> None:
        """Takes in a round of drafts: `overlap` and `standing` of `RoundResult`."""
        self.overlap.see(sum(overlap), len(overlap))
        self.at_first.see(overlap[0], 1)
        before, with_it = (sum(chances) for chances in zip((0.0, 0.0), *standing[1:], strict=True))
        self.behind.see(with_it, before)


class AdaptiveDraftLength:
    """The K with the most tokens per unit of time, at the row's recent acceptance.

    A row whose best K is 0 tries one token from time to time, to notice when drafting pays again.
    """

    def __init__(self, costs: Costs, rows: int) -> None:
        self.costs = costs
        self.acceptance = [AcceptanceStats() for _ in range(rows)]
        self._idle, self._pause = [0] * rows, [PROBE_FIRST] * rows

    def restart(self, row: int) -> None:
        self.acceptance[row] = AcceptanceStats()
        self._idle[row], self._pause[row] = 0, PROBE_FIRST

    def choose(self) -> list[int]:
        wanted = [self.costs.best_k(known.first, known.later) for known in self.acceptance]
        for row, k in enumerate(wanted):
            if k:
                self._idle[row], self._pause[row] = 0, PROBE_FIRST
                continue
            self._idle[row] += 1
            if self._idle[row] >= self._pause[row]:
                wanted[row], self._idle[row] = 1, 0
                self._pause[row] = min(2 * self._pause[row], PROBE_LAST)
        return wanted

    def observe(self, rows: Sequence[RowStep]) -> None:
        for step in rows:
            if step.overlap:
                self.acceptance[step.row].observe(step.overlap, step.standing)


DraftLength = FixedDraftLength | AdaptiveDraftLength


def tokens_per_round(rate: float, k: int) -> float:
    """Expected committed tokens: 1 + a + ... + a^K."""
    return float(sum(rate**i for i in range(k + 1)))


def best_k(rate: float, cost_ratio: float, k_max: int) -> int:
    """The K that maximises expected tokens over expected time (Leviathan et al., section 3)."""
    return Costs.of_ratio(cost_ratio, k_max).best_k(rate, rate)
