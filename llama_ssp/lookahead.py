"""How many tokens to draft next, row by row.

A row's choice rests on that row's own past alone. So a text does not depend on its batch, and the
output law stays exact: the choice is made before anything of the round is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Observed(Protocol):
    """What a lookahead learns from: the part of a row's step that it reads."""

    @property
    def row(self) -> int: ...
    @property
    def overlap(self) -> list[float]:
        """What both laws have in common at each drafted position."""


class Lookahead(Protocol):
    """Chooses K for each row."""

    def choose(self) -> list[int]: ...

    def observe(self, rows: Sequence[Observed]) -> None: ...

    def restart(self, row: int) -> None:
        """Another text has come into the row."""


USUAL_COST_RATIO = 0.1  # a draft step over a target step, where it is neither given nor measured


@dataclass
class FixedLookahead:
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

    def best_k(self, rate: float) -> int:
        """The K with the most expected tokens over time, where each draft stands with this chance."""
        return max(range(len(self.verify)), key=lambda k: tokens_per_round(rate, k) / self.round(k))

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


PRIOR_RATE, PRIOR_WEIGHT = 0.7, 1.0  # what is thought of a row of which nothing has been seen
MEMORY = 0.99  # of what was seen before, for each draft seen since
PROBE_FIRST, PROBE_LAST = 16, 64  # rounds without drafts between tries; they double


@dataclass
class AdaptiveLookahead:
    """The K with the most tokens per unit of time, at the agreement the row has shown lately.

    Agreement is read off the laws themselves, of which every draft shows a pair, kept or not: the overlap is
    the chance to be kept. So a few rounds tell what outcomes alone would tell after many. A row whose best K
    is 0 tries one token now and then, to notice when drafting pays again.
    """

    costs: Costs
    rows: int
    _tried: list[float] = field(init=False)
    _stood: list[float] = field(init=False)
    _idle: list[int] = field(init=False)
    _pause: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._tried, self._stood = [0.0] * self.rows, [0.0] * self.rows
        self._idle, self._pause = [0] * self.rows, [0] * self.rows
        for row in range(self.rows):
            self.restart(row)

    def restart(self, row: int) -> None:
        self._tried[row], self._stood[row] = PRIOR_WEIGHT, PRIOR_RATE * PRIOR_WEIGHT
        self._idle[row], self._pause[row] = 0, PROBE_FIRST

    def rate(self, row: int) -> float:
        """The chance of a draft to be kept, lately; it begins at the prior, which fades as drafts come in."""
        return self._stood[row] / self._tried[row]

    def choose(self) -> list[int]:
        wanted = [self.costs.best_k(self.rate(row)) for row in range(self.rows)]
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
            for share in step.overlap:
                self._tried[step.row] = MEMORY * self._tried[step.row] + 1
                self._stood[step.row] = MEMORY * self._stood[step.row] + share


def tokens_per_round(rate: float, k: int) -> float:
    """Expected committed tokens: 1 + a + ... + a^K."""
    return float(sum(rate**i for i in range(k + 1)))


def best_k(rate: float, cost_ratio: float, k_max: int) -> int:
    """The K that maximises expected tokens over expected time (Leviathan et al., section 3)."""
    return Costs.of_ratio(cost_ratio, k_max).best_k(rate)
