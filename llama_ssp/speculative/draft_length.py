"""How many tokens to draft next, row by row.

A row's choice depends on that row's past and on given costs, never on its neighbours, and is made before
anything of the round is drawn: so the output distribution stays exact. With given costs
(`speculation.cost_ratio`) and in fp32, a row chooses the same K in any batch; measured costs differ from run
to run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

from llama_ssp.config import MAX_SIBLINGS
from llama_ssp.speculative.stats import RowStep


@dataclass
class FixedDraftLength:
    """The same K always."""

    k: int
    rows: int
    each: int = 0  # siblings of each draft

    def choose(self) -> list[int]:
        """How many tokens to draft in each row."""
        return [self.k] * self.rows

    def siblings(self) -> list[int]:
        """How many siblings each of these drafts has, by row."""
        return [self.each] * self.rows

    def observe(self, rows: Sequence[RowStep]) -> None:
        """Learns from a round."""

    def restart(self, row: int) -> None:
        """Another text was admitted to the row."""


@dataclass(frozen=True)
class Costs:
    """A round's cost, in any unit: `draft` a drafted token, `verify[n]` the target's step over n tokens more
    than one, `sibling` what a sibling costs besides its token. A draft has at most `most` siblings. `once` is
    what drafts cost however many there are: the pass of a head that gives all at once.
    """

    draft: float
    verify: tuple[float, ...]
    most: int = 0
    sibling: float = 0.0
    once: float = 0.0

    @property
    def k_max(self) -> int:
        return (len(self.verify) - 1) // (1 + self.most)

    def round(self, k: int, siblings: int = 0) -> float:
        aside = k * siblings
        return self.proposal(k) + self.verify[k + aside] + aside * self.sibling

    def proposal(self, k: int) -> float:
        """What K drafts cost."""
        return k * self.draft + (self.once if k else 0.0)

    def best_k(self, first: float, later: float) -> int:
        return self.best(first, later)[0]

    def best(
        self, first: float, later: float, gain: Sequence[float] = (), only: int | None = None
    ) -> tuple[int, int]:
        """The K, if it is not to be `only` that, and the siblings of each draft, with the most expected
        tokens per cost.

        The first draft stands with chance `first`, each later one, if all before it do, with `later`. If not
        all K stand, s siblings bring `gain[s - 1]` tokens.
        """
        best, most, tokens, standing = (0, 0), 0.0, 1.0, first
        stand, gains = 1.0, (0.0, *gain)  # the chance that all K stand
        for k, costs in enumerate(self._rounds):
            if only in (None, k):
                for siblings, (more, cost) in enumerate(zip(gains, costs, strict=False)):
                    expected = tokens + (1 - stand) * more
                    if expected > most * cost:
                        best, most = (k, siblings), expected / cost
            tokens, stand, standing = tokens + standing, standing, standing * later
        return best

    @cached_property
    def _rounds(self) -> list[list[float]]:
        """What a round of each K costs, by siblings: a choice reads them all."""
        each = [range(1 + (self.most if k else 0)) for k in range(self.k_max + 1)]
        return [[self.round(k, siblings) for siblings in own] for k, own in enumerate(each)]

    @staticmethod
    def of_ratio(cost_ratio: float, k_max: int, siblings: int = 0, at_once: bool = False) -> Costs:
        """As in the papers: a target step costs 1 for any K, a draft step `cost_ratio`.

        `at_once`: one draft step gives all drafts.
        """
        draft, once = (0.0, cost_ratio) if at_once else (cost_ratio, 0.0)
        return Costs(draft, (1.0,) * (k_max * (1 + siblings) + 1), siblings, once=once)

    @staticmethod
    def between(draft: float, verify: dict[int, float], most: int, once: float = 0.0) -> Costs:
        """Interpolates target steps measured over some tokens, including 0; constant beyond the last."""
        known = sorted(verify)
        steps = []
        for k in range(most + 1):
            above = next((n for n in known if n >= k), known[-1])
            below = max(n for n in known if n <= k)
            share = (k - below) / (above - below) if above > below else 0.0
            steps.append((1 - share) * verify[below] + share * verify[above])
        return Costs(draft, tuple(steps), once=once)

    def of_chains(self) -> Costs:
        """The same without siblings."""
        return Costs(self.draft, self.verify[: self.k_max + 1], once=self.once)

    def with_trees(self, rounds: dict[tuple[int, int], float], most: int) -> Costs:
        """The same costs where drafts may have `most` siblings, from rounds measured with some shapes.

        Of a round whose width is known, what is left is the siblings' own cost; wider rounds, less these
        costs, tell what their width costs.
        """
        known = dict(enumerate(self.verify))
        spare = {shape: spent - self.proposal(shape[0]) for shape, spent in rounds.items()}
        shares = [
            (spent - known[k * (1 + s)]) / (k * s) for (k, s), spent in spare.items() if k * (1 + s) in known
        ]
        sibling = max(fmean(shares), 0.0) if shares else 0.0
        for (k, s), spent in sorted(spare.items()):
            wide, width = spent - k * s * sibling, k * (1 + s)
            known.setdefault(width, max(wide, self.verify[-1]))
        whole = Costs.between(self.draft, known, self.k_max * (1 + most), self.once)
        return replace(whole, most=most, sibling=sibling)


GAIN = (0.25, 0.38, 0.44)  # tokens that 1, 2, 3 siblings are assumed to bring where a draft fails
HOPE = 2.0  # siblings are tried where they would pay if they brought so many times what is assumed,
TRIALS = 0.01  # as long as all that is tried takes this share of the time
PRIOR = 0.7  # the assumed overlap of a row's distributions before anything was seen
GUESS = 3.0  # observations that the guess of a chance counts as: a few bad rounds say little of a text
MEMORY = 0.97  # the weight of earlier rounds shrinks by this factor with each round of drafts
PROBE_FIRST, PROBE_LAST = 32, 64  # rounds without drafts between tries; they double


@dataclass
class Mean:
    """A fading weighted mean; a guess counts as more observations, which fade like others."""

    weight: float = 0.0
    total: float = 0.0
    fresh: float = 1.0

    def see(self, total: float, weight: float) -> None:
        self.weight, self.total = MEMORY * self.weight + weight, MEMORY * self.total + total
        self.fresh *= MEMORY

    def with_guess(self, guess: float, weight: float = GUESS) -> float:
        weight *= self.fresh
        return (self.total + weight * guess) / (self.weight + weight)


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
    beside: list[Mean] = field(default_factory=lambda: [Mean() for _ in range(MAX_SIBLINGS)])

    @property
    def first(self) -> float:
        return self.at_first.with_guess(self.overlap.with_guess(PRIOR))

    @property
    def later(self) -> float:
        return self.behind.with_guess(math.sqrt(self.first))

    def gain(self, most: int, hope: float = 1.0) -> list[float]:
        """The tokens that 1, 2, ... siblings of each draft bring where a draft fails.

        More siblings than were ever drawn are assumed to bring `hope` times as many more as they would
        without a past.
        """
        found, known = [], 0.0
        for s in range(most):
            guess = known + hope * (usual_gain(s + 1) - usual_gain(s))
            known = self.beside[s].with_guess(guess, 1)
            found.append(known)
        return found

    def observe_siblings(self, gain: list[float], missed: float) -> None:
        """Takes in what the siblings of a round were expected to bring: `TreeResult`."""
        for mean, more in zip(self.beside, gain, strict=False):
            mean.see(more, missed)

    def observe(self, overlap: list[float], standing: list[tuple[float, float]]) -> None:
        """Takes in a round of drafts: `overlap` and `standing` of `RoundResult`."""
        self.overlap.see(sum(overlap), len(overlap))
        self.at_first.see(overlap[0], 1)
        before, with_it = (sum(chances) for chances in zip((0.0, 0.0), *standing[1:], strict=True))
        self.behind.see(with_it, before)


class AdaptiveDraftLength:
    """The K with the most tokens per unit of time, at the row's recent acceptance.

    A row whose best K is 0 tries one token from time to time, to notice when drafting pays again. One whose
    best is a chain tries siblings where they may pay. These bring tokens or nothing: what they add to the
    time is the most that is lost, and it stays a small share of it.
    """

    def __init__(self, costs: Costs, rows: int) -> None:
        self.costs = costs
        self.acceptance = [AcceptanceStats() for _ in range(rows)]
        self._idle, self._pause = [0] * rows, [PROBE_FIRST] * rows
        self._siblings = [0] * rows
        self._spent, self._tried = [0.0] * rows, [0.0] * rows  # the time of all rounds, and what trials added

    def restart(self, row: int) -> None:
        self.acceptance[row] = AcceptanceStats()
        self._idle[row], self._pause[row] = 0, PROBE_FIRST
        self._spent[row], self._tried[row] = 0.0, 0.0

    def choose(self) -> list[int]:
        shapes = [self._shape(row) for row in range(len(self.acceptance))]
        wanted, self._siblings = (list(column) for column in zip(*shapes, strict=True))
        for row, k in enumerate(wanted):
            if k:
                self._idle[row], self._pause[row] = 0, PROBE_FIRST
                continue
            self._idle[row] += 1
            if self._idle[row] >= self._pause[row]:
                wanted[row], self._idle[row] = 1, 0
                self._pause[row] = min(2 * self._pause[row], PROBE_LAST)
        return wanted

    def _shape(self, row: int) -> tuple[int, int]:
        """The best K and siblings, or siblings beside this K that are worth a trial."""
        costs, one = self.costs, self.acceptance[row]
        chances = one.first, one.later
        k, siblings = costs.best(*chances, one.gain(costs.most))
        if k and costs.most and not siblings:
            hoped = costs.best(*chances, one.gain(costs.most, HOPE), k)
            more = costs.round(*hoped) - costs.round(k)
            if self._tried[row] + more <= TRIALS * self._spent[row]:
                siblings, self._tried[row] = hoped[1], self._tried[row] + more
        self._spent[row] += costs.round(k, siblings)
        return k, siblings

    def siblings(self) -> list[int]:
        return self._siblings

    def observe(self, rows: Sequence[RowStep]) -> None:
        for step in rows:
            if step.overlap:
                self.acceptance[step.row].observe(step.overlap, step.standing)
            if step.tree:
                self.acceptance[step.row].observe_siblings(step.tree.gain, step.tree.missed)


DraftLength = FixedDraftLength | AdaptiveDraftLength


def tokens_per_round(rate: float, k: int, siblings: int = 0) -> float:
    """Expected committed tokens: 1 + a + ... + a^K; with siblings, what they bring where a draft fails."""
    return float(sum(rate**i for i in range(k + 1))) + (1 - rate**k) * usual_gain(siblings)


def usual_gain(siblings: int) -> float:
    """The tokens that siblings are assumed to bring where a draft fails."""
    return GAIN[min(siblings, len(GAIN)) - 1] if siblings else 0.0


def best_k(rate: float, cost_ratio: float, k_max: int) -> int:
    """The K that maximises expected tokens over expected time (Leviathan et al., section 3)."""
    return Costs.of_ratio(cost_ratio, k_max).best_k(rate, rate)
