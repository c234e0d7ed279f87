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
    def drafted(self) -> list[int]: ...
    @property
    def accepted(self) -> int: ...


class Lookahead(Protocol):
    """Chooses K for each row."""

    def choose(self) -> list[int]: ...

    def observe(self, rows: Sequence[Observed]) -> None: ...

    def restart(self, row: int) -> None:
        """Another text has come into the row."""


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


PRIOR_RATE, PRIOR_WEIGHT, MEMORY, PROBE_EVERY = 0.7, 4.0, 0.9, 16


@dataclass
class AdaptiveLookahead:
    """The K with the most tokens per unit of time, at the acceptance the row has shown lately.

    `cost_ratio` is one draft step over one target step. A row whose best K is 0 tries one token now
    and then, to notice when drafting pays again.
    """

    k_max: int
    cost_ratio: float
    rows: int
    _tried: list[float] = field(init=False)
    _stood: list[float] = field(init=False)
    _idle: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._tried, self._stood, self._idle = [0.0] * self.rows, [0.0] * self.rows, [0] * self.rows
        for row in range(self.rows):
            self.restart(row)

    def restart(self, row: int) -> None:
        self._tried[row], self._stood[row], self._idle[row] = PRIOR_WEIGHT, PRIOR_RATE * PRIOR_WEIGHT, 0

    def rate(self, row: int) -> float:
        """The row's acceptance rate lately; it begins at the prior, which fades as rounds come in."""
        return self._stood[row] / self._tried[row]

    def choose(self) -> list[int]:
        wanted = [best_k(self.rate(row), self.cost_ratio, self.k_max) for row in range(self.rows)]
        for row, k in enumerate(wanted):
            self._idle[row] = 0 if k else self._idle[row] + 1
            if self._idle[row] == PROBE_EVERY:
                wanted[row], self._idle[row] = 1, 0
        return wanted

    def observe(self, rows: Sequence[Observed]) -> None:
        for step in rows:
            decided = min(step.accepted + 1, len(step.drafted))
            if not decided:
                continue
            self._tried[step.row] = MEMORY * self._tried[step.row] + decided
            self._stood[step.row] = MEMORY * self._stood[step.row] + step.accepted


def tokens_per_round(rate: float, k: int) -> float:
    """Expected committed tokens: 1 + a + ... + a^K."""
    return float(sum(rate**i for i in range(k + 1)))


def best_k(rate: float, cost_ratio: float, k_max: int) -> int:
    """The K that maximises expected tokens over expected time (Leviathan et al., section 3)."""
    return max(range(k_max + 1), key=lambda k: tokens_per_round(rate, k) / (k * cost_ratio + 1))
