"""Chooses how many tokens to draft next, row by row.

A row's choice is made before anything of the round is drawn: so the output distribution stays exact. With
given costs (`speculation.cost_ratio`) it depends on this row's past alone, and in fp32 a row chooses the same
K in any batch. Measured costs differ from run to run; with them, the run's earlier texts count, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llama_ssp.speculative.stats import RowStep


@dataclass
class FixedDraftLength:
    """Drafts the same number of tokens in every round."""

    k: int
    rows: int

    def choose(self) -> list[int]:
        """Returns how many tokens to draft, by row."""
        return [self.k] * self.rows

    def observe(self, rows: Sequence[RowStep]) -> None:
        """Learns from a round."""

    def took(self, rows: Sequence[RowStep], seconds: float) -> None:
        """Learns from a round's time."""

    def restart(self, row: int) -> None:
        """Forgets the row's text: another one was admitted."""


# Probabilities that a first draft and a later one stand, assumed before anything was seen.
FIRST = 0.6
LATER = 0.8

GUESS = 4.0  # rounds of drafts that what is assumed counts as
MEMORY = 0.98  # the weight of earlier rounds shrinks by this factor with each round
TRIES = 3  # rounds with one draft, when a text begins and after each pause
PAUSE = 64  # rounds between tries, at least
READING = 0.02  # of the time: the share that the draft model may read for tries


@dataclass
class Mean:
    """Keeps a weighted mean that begins with a guess: each round takes weight from earlier ones."""

    value: float
    weight: float = GUESS

    def see(self, total: float, weight: float) -> None:
        """Takes in values of this sum and weight. What was known keeps the weight of one round at least."""
        known = max(MEMORY * self.weight, 1.0)
        self.weight = known + weight
        self.value = (known * self.value + total) / self.weight


class Acceptance:
    """Estimates how likely drafts stand: the first of a round, and each later one if those before it do.

    The two differ. A first draft follows a token that the draft model may just have missed; a later one
    follows tokens that both models like, and the block rule makes up there for what it lost before. Both are
    computed from the distributions of every draft, accepted or not, so a few rounds tell as much as the
    outcomes of many.
    """

    def __init__(self, first: float = FIRST, later: float = LATER) -> None:
        """Begins with what is usual in the run's texts."""
        self.first = Mean(first)
        self.later = Mean(later)

    def observe(self, steps: Sequence[RowStep]) -> None:
        """Takes in rounds of rows, all with the weight of the latest."""
        drafted = [step for step in steps if step.overlap]
        if not drafted:
            return
        self.first.see(sum(step.overlap[0] for step in drafted), len(drafted))

        # A later draft counts by the chance that it was reached at all.
        later = [standing for step in drafted for standing in step.standing[1:]]
        stood = sum(stands for _, stands in later)
        reached = sum(before for before, _ in later)
        self.later.see(stood, reached)


@dataclass(kw_only=True)
class Costs:
    """Holds what rounds cost, in any unit: `rounds[k]` is the cost of a round of k drafts.

    `usual` is how likely drafts stand, and `pause` after how many rounds without drafts a text tries some. A
    run that measures its costs is not repeatable, so its texts learn from each other (`learns`). `k_for_all`
    is the K that made the texts fastest on which they were measured.
    """

    rounds: list[float]
    usual: Acceptance = field(default_factory=Acceptance, compare=False)
    pause: int = field(default=PAUSE, compare=False)
    drafter: str | None = field(default=None, compare=False)  # whose drafts these rounds have
    learns: bool = field(default=False, compare=False)
    k_for_all: int = field(default=0, compare=False)

    @property
    def k_max(self) -> int:
        return len(self.rounds) - 1

    def best(self, first: float, later: float) -> int:
        """Returns the K with the most expected tokens per cost.

        The first draft stands with probability a = `first`, each later one, if all before it do, with b =
        `later`. So a round of k drafts commits 1 + a + a b + a b^2 + ... tokens, k terms and the one.
        """
        best = 0
        best_rate = 0.0
        tokens = 1.0
        next_stands = first
        for k, cost in enumerate(self.rounds):
            rate = tokens / cost
            if rate > best_rate:
                best = k
                best_rate = rate
            tokens += next_stands
            next_stands *= later
        return best

    @staticmethod
    def of_ratio(cost_ratio: float, k_max: int, at_once: bool = False) -> Costs:
        """Assumes, as the papers do, that a target step costs 1 for any K, and a draft step `cost_ratio`.

        `at_once`: one draft step gives all drafts.
        """
        steps = [min(k, 1) if at_once else k for k in range(k_max + 1)]
        return Costs(rounds=[1 + cost_ratio * n for n in steps])


class AdaptiveDraftLength:
    """Chooses the K with the most tokens per cost, at the row's recent acceptance.

    A row whose best K is 0 tries one draft when its text begins and after each pause, to notice where
    drafting pays. The draft model first has to read what it has missed: where that takes long, pauses are
    longer.
    """

    def __init__(self, costs: Costs, rows: int) -> None:
        self.costs = costs
        self.acceptance = [Acceptance()] * rows
        self._idle = [0] * rows  # rounds of the pause, the tries before it included
        self._drafted = [1] * rows  # drafts of the last round
        for row in range(rows):
            self.restart(row)

    def restart(self, row: int) -> None:
        usual = self.costs.usual
        self.acceptance[row] = Acceptance(usual.first.value, usual.later.value)
        self._idle[row] = 0
        self._drafted[row] = 1

    def choose(self) -> list[int]:
        return [self._k(row) for row in range(len(self.acceptance))]

    def _k(self, row: int) -> int:
        acceptance = self.acceptance[row]
        k = self.costs.best(acceptance.first.value, acceptance.later.value)
        if k:
            self._idle[row] = TRIES
            return k

        acceptance.first.see(0, 0)  # a round without drafts: what was seen before it counts less
        acceptance.later.see(0, 0)
        is_try = self._idle[row] < TRIES
        self._idle[row] = (self._idle[row] + 1) % self.costs.pause
        return 1 if is_try else 0

    def observe(self, rows: Sequence[RowStep]) -> None:
        for step in rows:
            self.acceptance[step.row].observe([step])
            if self.costs.learns:
                self.costs.usual.observe([step])

    def took(self, rows: Sequence[RowStep], seconds: float) -> None:
        catches_up = any(step.k and not self._drafted[step.row] for step in rows)
        if catches_up and self.costs.learns:
            usual_s = max(self.costs.rounds[step.k] for step in rows)
            self.costs.pause = max(PAUSE, int((seconds / usual_s - 1) / READING))
        for step in rows:
            self._drafted[step.row] = step.k


DraftLength = FixedDraftLength | AdaptiveDraftLength


def tokens_per_round(rate: float, k: int) -> float:
    """Returns the expected committed tokens: 1 + a + ... + a^K, where each draft stands with a = `rate`."""
    return float(sum(rate**i for i in range(k + 1)))
