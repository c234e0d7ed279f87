"""Chooses how many tokens to draft next, row by row.

A row's choice is made before anything of the round is drawn: so the output distribution stays exact. With
given costs (`speculation.cost_ratio`) it depends on this row's past alone, and in fp32 a row chooses the same
K in any batch. Measured costs differ from run to run; with them, the run's earlier texts count, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llama_ssp.config import USUAL_COST_RATIO, RunConf
from llama_ssp.speculative.stats import RowStep


@dataclass
class FixedDraftLength:
    """Drafts the same number of tokens in every round: it learns nothing from what it is told."""

    k: int
    rows: int

    def choose(self) -> list[int]:
        """Returns how many tokens to draft, by row."""
        return [self.k] * self.rows

    def observe(self, rows: Sequence[RowStep]) -> None:
        """Takes in what a round decided."""

    def took(self, rows: Sequence[RowStep], seconds: float) -> None:
        """Takes in how long a round took."""

    def restart(self, row: int) -> None:
        """Forgets the row's text: another one was admitted."""


# Probabilities that a first draft and a later one stand, assumed before anything was seen.
FIRST = 0.6
LATER = 0.8

GUESS = 4.0  # weight of these two, in rounds: as if so many had been seen
MEMORY = 0.98  # each round multiplies the weight of all earlier ones by this
# A row that does not draft goes through cycles: TRIES rounds with one draft, then none up to the cycle's end.
# The first cycle begins with the text.
TRIES = 3
PAUSE = 64  # rounds of the shortest cycle, its TRIES included
READING = 0.02  # share of the time that the draft model may spend on reading, at tries, what it missed


@dataclass
class Mean:
    """Keeps a weighted mean that begins with a guess: each round takes weight from earlier ones.

    `weight` is in rounds of one row.
    """

    value: float
    weight: float = GUESS

    def see(self, total: float, weight: float) -> None:
        """Takes in values, as their weighted sum and their weight.

        What was known before loses weight, but keeps that of one round.
        """
        known = max(MEMORY * self.weight, 1.0)
        self.weight = known + weight
        self.value = (known * self.value + total) / self.weight


class Acceptance:
    """Estimates how likely drafts stand: the first of a round, and each later one if those before it do.

    The two differ. A first draft follows a token that the draft model may just have missed. A later one
    follows tokens that both models like; and by block verification a likely draft can make up for an unlikely
    one before it. Both are computed from the distributions of every draft, accepted or not, so a few rounds
    tell as much as the outcomes of many.
    """

    def __init__(self, first: float = FIRST, later: float = LATER) -> None:
        """Begins with these two, such as what is usual in the run's texts."""
        self.first = Mean(first)
        self.later = Mean(later)

    def observe(self, steps: Sequence[RowStep]) -> None:
        """Takes in rounds, which all count as one moment: none of them takes weight from another."""
        drafted = [step for step in steps if step.overlap]
        if not drafted:
            return
        self.first.see(sum(step.overlap[0] for step in drafted), len(drafted))

        # Of each later draft: the chances that all before it stand, and that it stands with them. It counts
        # by the first, which is how likely it is reached at all.
        chances = [pair for step in drafted for pair in step.standing[1:]]
        stood = sum(with_it for _, with_it in chances)
        reached = sum(before for before, _ in chances)
        self.later.see(stood, reached)


@dataclass(kw_only=True)
class Costs:
    """Holds what rounds cost: `rounds[k]` is the cost of a round of k drafts; equal costs have equal ones.

    Given costs may have any unit. Measured ones are in seconds; a run that measures is not repeatable, so its
    texts may learn from each other (`learns`). `usual` is how likely drafts stand in the run's texts, and
    `pause` is the cycle of rows that do not draft (see PAUSE). `k_for_all` is the K by which the texts that
    the costs were measured on were the fastest: a batch job keeps it.
    """

    rounds: list[float]
    usual: Acceptance = field(default_factory=Acceptance, compare=False)
    pause: int = field(default=PAUSE, compare=False)  # in rounds
    drafter: str | None = field(default=None, compare=False)  # whose drafts these rounds have
    learns: bool = field(default=False, compare=False)
    k_for_all: int = field(default=0, compare=False)

    @property
    def k_max(self) -> int:
        return len(self.rounds) - 1

    def best(self, first: float, later: float) -> int:
        """Returns the K with the most expected tokens per cost.

        The first draft stands with probability a = `first`, each later one, if all before it do, with b =
        `later`. So a round of k drafts commits 1 + a + a b + ... + a b^(k-1) tokens; the 1 is the target's.
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

    A row whose best K is 0 tries one draft for some rounds when its text begins, and again in each cycle of
    `costs.pause` rounds, to notice where drafting pays. The draft model first has to read what it has missed:
    where that takes long, the cycle is longer.
    """

    def __init__(self, costs: Costs, rows: int) -> None:
        self.costs = costs
        self.acceptance = [Acceptance() for _ in range(rows)]
        self._idle = [0] * rows  # rounds of the cycle that have gone; below TRIES the row tries a draft
        self._drafted = [1] * rows  # drafts of the last round; 0: the draft model has to catch up first
        for row in range(rows):
            self.restart(row)

    def restart(self, row: int) -> None:
        """Begins another text: nothing is known of it, and the draft model has read its prompt."""
        usual = self.costs.usual
        self.acceptance[row] = Acceptance(usual.first.value, usual.later.value)
        self._idle[row] = 0
        self._drafted[row] = 1

    def choose(self) -> list[int]:
        """Returns how many tokens to draft, by row. It counts a round, so it is called once in each."""
        return [self._k(row) for row in range(len(self.acceptance))]

    def _k(self, row: int) -> int:
        acceptance = self.acceptance[row]
        k = self.costs.best(acceptance.first.value, acceptance.later.value)
        if k:
            self._idle[row] = TRIES  # when it stops drafting, it needs no tries at once
            return k

        # The best K is 0: what was seen counts less in each such round, and so what tries show counts more.
        acceptance.first.see(0, 0)
        acceptance.later.see(0, 0)
        is_try = self._idle[row] < TRIES
        self._idle[row] = (self._idle[row] + 1) % self.costs.pause
        return 1 if is_try else 0

    def observe(self, rows: Sequence[RowStep]) -> None:
        """Takes in a round; `usual` remembers as many rounds of rows, however many rows a batch has."""
        for step in rows:
            self.acceptance[step.row].observe([step])
            if self.costs.learns:
                self.costs.usual.observe([step])

    def took(self, rows: Sequence[RowStep], seconds: float) -> None:
        """Takes in how long a round took, and from it how long the draft model read what it had missed.

        A round in which a row drafts again, after rounds without drafts, takes longer than usual by e usual
        rounds. Once in a cycle of e / READING rounds, that is a share READING of the time.
        """
        catches_up = any(step.k and not self._drafted[step.row] for step in rows)
        if catches_up and self.costs.learns:  # so costs are in seconds
            usual_s = max(self.costs.rounds[step.k] for step in rows)
            extra_rounds = seconds / usual_s - 1
            self.costs.pause = max(PAUSE, int(extra_rounds / READING))
        for step in rows:
            self._drafted[step.row] = step.k


DraftLength = FixedDraftLength | AdaptiveDraftLength


def lookahead_for(run: RunConf, rows: int, costs: Costs | None = None) -> DraftLength:
    """Returns how K is chosen for a batch of this many rows; an adaptive K goes by `costs`, if known."""
    spec = run.speculation
    if not spec.adaptive:
        return FixedDraftLength(spec.k or 0, rows)
    fits = costs is not None and costs.k_max <= spec.k_max and costs.drafter == run.drafter_name
    if costs is None or not fits or spec.cost_ratio is not None:
        ratio = USUAL_COST_RATIO if spec.cost_ratio is None else spec.cost_ratio
        at_once = run.draft is not None and run.draft.head_block > 0
        costs = Costs.of_ratio(ratio, spec.k_max, at_once)
    return AdaptiveDraftLength(costs, rows)


@dataclass(frozen=True)
class AcceptanceCurve:
    """Holds what was measured of a pair: `tokens[k]` a round of k drafts, from k = 0 on; `source` says
    where."""

    tokens: tuple[float, ...]
    source: str

    @property
    def k_max(self) -> int:
        return len(self.tokens) - 1

    @property
    def first(self) -> float:
        """Returns how likely the first draft of a round stands."""
        return self.tokens[1] - 1


# What is known of a pair: how likely each draft stands, if those before it do, or what was measured at each
# K.
PairAcceptance = float | AcceptanceCurve


def first_stands(acceptance: PairAcceptance) -> float:
    """Returns how likely the first draft of a round stands."""
    return acceptance.first if isinstance(acceptance, AcceptanceCurve) else acceptance


def all_stand(acceptance: PairAcceptance, k: int) -> float:
    """Returns how likely all k drafts of a round stand."""
    if not isinstance(acceptance, AcceptanceCurve):
        return float(acceptance**k)
    return max(acceptance.tokens[k] - acceptance.tokens[k - 1], 0.0) if k else 1.0


def tokens_per_round(acceptance: PairAcceptance, k: int) -> float:
    """Returns the expected committed tokens: those measured, or 1 + a + ... + a^K, where each stands with a.

    So the papers have it. `Costs.best` tells the first draft from later ones.
    """
    if isinstance(acceptance, AcceptanceCurve):
        return acceptance.tokens[k]
    return float(sum(acceptance**i for i in range(k + 1)))
