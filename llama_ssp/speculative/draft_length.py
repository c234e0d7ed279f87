"""How many tokens to draft next, row by row.

A row's choice is made before anything of the round is drawn: so the output distribution stays exact. It
depends on that row's past and on costs. With given costs (`speculation.cost_ratio`) and in fp32, a row
chooses the same K in any batch. Measured costs differ from run to run; with them, the run's other rounds
and texts count, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

from llama_ssp.config import MAX_SIBLINGS
from llama_ssp.speculative.stats import RowStep, Shape


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

    def took(self, rows: Sequence[RowStep], seconds: float) -> None:
        """Learns from a round's time."""

    def restart(self, row: int) -> None:
        """Another text was admitted to the row."""


JUMP = 1.5  # a round's time counts as at most this many times what is known
REMEMBERED = 400  # rounds of a shape; earlier ones are forgotten


@dataclass(frozen=True)
class Costs:
    """A round's cost, in any unit: `draft` a drafted token, `verify[n]` the target's step over n tokens more
    than one, `sibling` what a sibling costs besides its token. A draft has at most `most` siblings. `once` is
    what drafts cost however many there are: the pass of a head that gives all at once. `experience` corrects
    costs that are measured, in seconds.
    """

    draft: float
    verify: tuple[float, ...]
    most: int = 0
    sibling: float = 0.0
    once: float = 0.0
    experience: Experience | None = field(default=None, compare=False)

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
        """The K and the siblings of each draft with the most expected tokens per cost; `only` fixes K.

        The first draft stands with chance `first`, each later one, if all before it do, with `later`. If not
        all K stand, s siblings bring `gain[s - 1]` tokens.
        """
        best, most, tokens, standing = (0, 0), 0.0, 1.0, first
        stand, gains = 1.0, (0.0, *gain)  # the chance that all K stand
        for k, costs in enumerate(self.experience.rounds if self.experience else self.rounds):
            if only in (None, k):
                for siblings, (more, cost) in enumerate(zip(gains, costs, strict=False)):
                    expected = tokens + (1 - stand) * more
                    if expected > most * cost:
                        best, most = (k, siblings), expected / cost
            tokens, stand, standing = tokens + standing, standing, standing * later
        return best

    @cached_property
    def rounds(self) -> list[list[float]]:
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
        return replace(self, verify=self.verify[: self.k_max + 1], most=0, sibling=0.0)

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
HOPE = 2.0  # siblings are tried where they would pay if they brought this many times what is assumed,
TRIALS = 0.01  # as long as all that is tried takes this share of the time
PRIOR = 0.7  # the assumed overlap of a row's distributions before anything was seen
GUESS = 3.0  # observations that the guess of a chance counts as: a few bad rounds say little of a text
MEMORY = 0.97  # the weight of earlier rounds shrinks by this factor with each round of drafts
MEMORY_OF_ALL = 0.998  # of the run's earlier rounds, of all texts
PROBE_FIRST, PROBE_LAST = 32, 64  # rounds without drafts between tries; they double
READING = 0.02  # of a row's time: the most that the draft model may read for a try
READS, FADE = 5, 0.8  # reads that the mean remembers; it shrinks by FADE when it keeps a text from a try
UNKNOWN = 2.5  # the weight of the rounds that a text drafts at least, whatever earlier texts say


@dataclass
class Mean:
    """A fading weighted mean; a guess counts as more observations, which fade like others."""

    memory: float = 1.0
    weight: float = 0.0
    total: float = 0.0
    fresh: float = 1.0

    def see(self, total: float, weight: float) -> None:
        self.weight, self.total = self.memory * self.weight + weight, self.memory * self.total + total
        self.fresh *= self.memory

    def with_guess(self, guess: float, weight: float = GUESS) -> float:
        weight *= self.fresh
        return (self.total + weight * guess) / (self.weight + weight)


class AcceptanceStats:
    """How likely a row's drafts stand: the first of a round, and each later one if those before it do.

    The two differ. A first draft follows a token that the draft model may just have missed; a later one
    follows tokens that both models like, and the block rule makes up there for what it lost before. Both are
    computed from the distributions of every draft, accepted or not, so a few rounds tell as much as the
    outcomes of many. What is not known yet is as in `before`, all texts of the run so far; or else it is
    guessed: the first draft's chance from all overlaps, the later ones' from the first's.
    """

    def __init__(self, before: AcceptanceStats | None = None, memory: float = MEMORY) -> None:
        self._before = before
        self.overlap, self.at_first, self.behind = Mean(memory), Mean(memory), Mean(memory)
        self.beside = [Mean(memory) for _ in range(MAX_SIBLINGS)]

    @property
    def first(self) -> float:
        usual = self._before.first if self._before else self.overlap.with_guess(PRIOR)
        return self.at_first.with_guess(usual)

    @property
    def later(self) -> float:
        usual = self._before.later if self._before else math.sqrt(self.first)
        return self.behind.with_guess(usual)

    def gain(self, most: int, hope: float = 1.0) -> list[float]:
        """The tokens that 1, 2, ... siblings of each draft bring where a draft fails.

        Siblings beyond those that were ever drawn are assumed to bring `hope` times what `usual_gain` says.
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


class Experience:
    """What a run has learned of its pair, for all texts: how likely drafts stand, and what rounds take.

    Only where costs are measured, as such a run is not repeatable anyway. A few rounds were measured when the
    run began, on a machine that may change, so each round corrects what its shape costs. A shape that was
    timed n times may cost less than its mean says, by about `spread` over the root of n, and is taken for
    that. So what may be the best shape is tried, and seldom if it was often tried.
    """

    def __init__(self, costs: Costs, apart: float, timed: int, rows: int) -> None:
        """Each shape was timed `timed` times with `rows` rows; `apart`: standard deviation over mean."""
        self.acceptance = AcceptanceStats(memory=MEMORY_OF_ALL)
        self.reading = 0.0  # seconds that a draft model reads a token that it missed; not known at first
        self._rows, self._reads, self._most = rows, 0, costs.draft + costs.once  # as a step of its own takes
        self._spread = 2 * apart  # a slow round seldom comes alone: n rounds say less than n
        self._known = [[(cost, timed) for cost in own] for own in costs.rounds]  # means, and of how many
        # Seconds that a round of each K may take, by siblings.
        self.rounds = [[self._hoped(*known) for known in own] for own in self._known]

    def _hoped(self, mean: float, timed: int) -> float:
        return mean * (1 - min(self._spread / math.sqrt(timed), 0.5))

    def see(self, shape: Shape, seconds: float, missed: Sequence[int]) -> None:
        """Takes in a round with all rows of this shape; their draft model first read what it had missed."""
        k, siblings = shape
        mean, timed = self._known[k][siblings]
        if len(missed) != self._rows or (k and len(set(missed)) > 1):
            return  # not as rounds were measured
        if k and missed[0]:
            self._reads = min(self._reads + 1, READS)
            reading = min(max(seconds - mean, 0.0) / missed[0], self._most)
            self.reading += (reading - self.reading) / self._reads
        else:
            timed = min(timed + 1, REMEMBERED)
            mean += (min(max(seconds, mean / JUMP), mean * JUMP) - mean) / timed
            self._known[k][siblings] = mean, timed
            self.rounds[k][siblings] = self._hoped(mean, timed)


class AdaptiveDraftLength:
    """The K with the most tokens per unit of time, at the row's recent acceptance.

    A row whose best K is 0 tries one token from time to time, to notice when drafting pays again. It does not
    if the draft model would first have to read for a long time. A row whose best is a chain tries
    siblings where they may pay. These bring tokens or nothing: what they add to the time is the most that is
    lost, and it stays a small share of it.
    """

    def __init__(self, costs: Costs, rows: int) -> None:
        self.costs = costs
        self.acceptance = [self._unknown() for _ in range(rows)]
        self._idle, self._pause = [0] * rows, [PROBE_FIRST] * rows
        self._siblings = [0] * rows
        self._missed = [0] * rows  # tokens that the draft model did not read
        # The time of all rounds, what trials of siblings added, and what the draft model read for tries.
        self._spent, self._tried, self._read = [0.0] * rows, [0.0] * rows, [0.0] * rows

    def _unknown(self) -> AcceptanceStats:
        return AcceptanceStats(self.costs.experience.acceptance if self.costs.experience else None)

    def restart(self, row: int) -> None:
        self.acceptance[row] = self._unknown()
        self._idle[row], self._pause[row], self._missed[row] = 0, PROBE_FIRST, 0
        self._spent[row], self._tried[row], self._read[row] = 0.0, 0.0, 0.0

    def choose(self) -> list[int]:
        shapes = [self._shape(row) for row in range(len(self.acceptance))]
        wanted, self._siblings = (list(column) for column in zip(*shapes, strict=True))
        experience = self.costs.experience
        for row, k in enumerate(wanted):
            if k:
                self._idle[row], self._pause[row] = 0, PROBE_FIRST
                continue
            self._idle[row] += 1
            if self._idle[row] < self._pause[row]:
                continue
            reading = self._idle[row] * experience.reading if experience else 0.0
            if self._read[row] + reading <= READING * self._spent[row]:
                wanted[row], self._idle[row] = 1, 0
                self._pause[row] = min(2 * self._pause[row], PROBE_LAST)
                self._read[row] += reading
            elif experience:
                experience.reading *= FADE if self._pause[row] <= PROBE_LAST else 1.0  # once a text
                self._pause[row] += PROBE_LAST
        return wanted

    def _shape(self, row: int) -> tuple[int, int]:
        """The best K and siblings, or siblings beside this K that are worth a trial."""
        costs, one = self.costs, self.acceptance[row]
        chances = one.first, one.later
        k, siblings = costs.best(*chances, one.gain(costs.most))
        if not k and costs.experience and one.at_first.weight < UNKNOWN:
            k = 1  # others' texts may be unlike this one, and the draft model has nothing to read yet
        if k and costs.most and not siblings and self._tried[row] < TRIALS * self._spent[row]:
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
                if self.costs.experience:
                    self.costs.experience.acceptance.observe(step.overlap, step.standing)
            if step.tree:
                self.acceptance[step.row].observe_siblings(step.tree.gain, step.tree.missed)

    def took(self, rows: Sequence[RowStep], seconds: float) -> None:
        shapes = {step.shape for step in rows}
        if self.costs.experience and len(shapes) == 1:  # as rounds are measured
            missed = [self._missed[step.row] for step in rows]
            self.costs.experience.see(shapes.pop(), seconds, missed)
        for step in rows:
            self._missed[step.row] = 0 if step.shape[0] else self._missed[step.row] + 1


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
