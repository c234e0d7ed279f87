"""Decisions as they were taken, held against those that the rule takes with the numbers of their slots.

Whether a kernel took them or the rule's own functions: the rule's acceptance chances and the correction's
distribution follow from the recorded probabilities, the numbers that decide from seed, prompt and length
(they are made anew, by the definition in rng.py). So the decision is known, and any other one is a fault. A
decision that falls within rounding of its chance may go either way.

That the rule's functions are right is shown by rule_distribution.py; that the numbers are independent of the
drafts and of each other, by `check_numbers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llama_ssp.report.statistics import sum_band, uniform_band
from llama_ssp.speculative.rng import CounterDraws, Draws, Purpose, heat
from llama_ssp.speculative.round_protocol import RoundResult
from llama_ssp.speculative.state import State
from llama_ssp.speculative.verification import Block, CoupledRule, Rule
from llama_ssp.tasks.certify.verdict import Check, Outcome

TIE = 1e-9  # a number this close to its chance may pass or not
ROUNDING = 1e-12  # of a probability; a chance may move by more, where it is a quotient of small differences
MOST_DRAFTS = 32  # places of a round that are looked at

Numbers = NDArray[np.float64]


@dataclass
class Decisions:
    """Replays decisions, and collects the numbers that decided."""

    seed: int
    taken: int = 0
    lengths_wrong: int = 0
    tokens_wrong: int = 0
    coupled: bool = False
    coins: list[float] = field(default_factory=list)
    products: Numbers | None = None
    counts: Numbers | None = None

    def __post_init__(self) -> None:
        self._uniforms = np.random.Generator(np.random.Philox(self.seed ^ 1))

    def see(self, rule: Rule, draws: Draws, state: State, block: Block, verdict: RoundResult) -> None:
        """One round over the batch, before it is committed. Finished and damaged rows decide nothing."""
        self.coupled = isinstance(rule, CoupledRule)
        if self.coupled or not isinstance(draws, CounterDraws):
            return
        source = CounterDraws(draws.seed, draws.own)
        rows = [row for row, ended in enumerate(state.finished) if ended is None and not verdict.damaged[row]]
        coin_BK = source._uniforms(state.slot(Purpose.ACCEPT), block.k, block.drafted_BK.device)
        length, token = refuted(rule, source, state, block, verdict, coin_BK)
        self.taken += len(rows)
        self.lengths_wrong += sum(length[row] for row in rows)
        self.tokens_wrong += sum(token[row] for row in rows)
        vocab = block.target_BWV.shape[-1]
        clock_BN = source._clocks(state.slot(Purpose.CORRECT), 2 * heat(vocab), block.drafted_BK.device)
        self._collect(rows, block, coin_BK.cpu().numpy(), clock_BN.cpu().numpy())

    def _collect(self, rows: list[int], block: Block, coin_BK: Numbers, clock_BN: Numbers) -> None:
        """Sums of products of two numbers of a round, each less its mean, and how often both were there."""
        count_B, k = block.count_B.cpu().numpy(), min(block.k, MOST_DRAFTS)
        real_BK = (np.arange(k) < count_B[:, None]) & np.isin(np.arange(len(count_B)), rows)[:, None]
        self.coins += coin_BK[:, :k][real_BK].tolist()
        place_BK = places(block, self._uniforms.random(block.drafted_BK.shape))[:, :k]
        own = np.zeros((len(count_B), 2 * MOST_DRAFTS))
        there = np.zeros_like(own)
        for first, number_BK in ((0, place_BK), (MOST_DRAFTS, coin_BK[:, :k])):
            own[:, first : first + k] = np.where(real_BK, number_BK - 0.5, 0)
            there[:, first : first + k] = real_BK
        race = np.where(real_BK[:, :1], np.exp(-clock_BN) - 0.5, 0)
        products = own.T @ np.concatenate([own, race], 1)
        counts = there.T @ np.concatenate([there, np.repeat(real_BK[:, :1], race.shape[1], 1)], 1)
        self.products = products if self.products is None else self.products + products
        self.counts = counts if self.counts is None else self.counts + counts


def refuted(
    rule: Rule, source: CounterDraws, state: State, block: Block, verdict: RoundResult, coin_BK: Tensor
) -> tuple[list[bool], list[bool]]:
    """Of each row, whether another number of drafts stands, and whether another token follows them."""
    device = block.drafted_BK.device
    taken_B = torch.tensor(verdict.accepted, device=device)
    wrong_B = _beyond(rule, coin_BK, taken_B, rule.accept_chances(block))
    if bool(wrong_B.any()):
        near = [replace(block, target_BWV=block.target_BWV * (1 + sign * ROUNDING)) for sign in (-1, 1)]
        chance_3BK = torch.stack([rule.accept_chances(one) for one in (block, *near)])
        wrong_B &= _beyond(rule, coin_BK, taken_B, chance_3BK.amin(0), chance_3BK.amax(0))
    probs_BV = rule.correction_probs(block, torch.minimum(taken_B, block.count_B))
    token_B = source.categorical(probs_BV, state.slot(Purpose.CORRECT))
    other_B = token_B != torch.tensor(verdict.token, device=device)
    return wrong_B.tolist(), other_B.tolist()


def _beyond(
    rule: Rule, coin_BK: Tensor, taken_B: Tensor, least_BK: Tensor, most_BK: Tensor | None = None
) -> Tensor:
    """Whether fewer or more drafts stand than by any chance in between."""
    fewest_B = rule.accepted(coin_BK < least_BK - TIE)
    most_B = rule.accepted(coin_BK < (least_BK if most_BK is None else most_BK) + TIE)
    return torch.as_tensor((taken_B < fewest_B) | (taken_B > most_B))


def places(block: Block, uniform_BK: Numbers) -> Numbers:
    """Where each draft lies in its distribution, in the order of token ids: its own uniform number, but for
    what the token leaves open, which `uniform_BK` fills."""
    own_BK1 = block.drafted_BK[..., None]
    rising_BKV = block.draft_BKV.cumsum(-1)
    end_BK = rising_BKV.gather(2, own_BK1)[..., 0].cpu().numpy()
    share_BK = block.draft_BKV.gather(2, own_BK1)[..., 0].cpu().numpy()
    return np.asarray(np.clip(end_BK - share_BK * uniform_BK, 0, 1))


def check_decisions(seen: Decisions) -> Check:
    """Whether every decision is the one that the rule takes with the numbers of its slot."""
    figures = {
        "decisions": seen.taken,
        "accepted_otherwise": seen.lengths_wrong,
        "tokens_otherwise": seen.tokens_wrong,
    }
    if seen.coupled:
        return Check("decisions", Outcome.skipped, "coupled rounds are replayed by the law check", figures)
    if not seen.taken:
        return Check("decisions", Outcome.blind, "no decision could be replayed", figures)
    if seen.lengths_wrong or seen.tokens_wrong:
        says = (
            f"of {seen.taken} decisions {seen.lengths_wrong} keep another number of drafts than the rule, "
            f"{seen.tokens_wrong} another token behind them"
        )
        return Check("decisions", Outcome.failed, says, figures)
    says = f"{seen.taken} decisions, replayed from their random numbers, are the rule's"
    return Check("decisions", Outcome.passed, says, figures)


def check_numbers(seen: Decisions, level: float) -> Check:
    """Whether coins are uniform and new, and independent of the drafts' draws and of the race."""
    figures: dict[str, object] = {"coins": len(seen.coins), "coins_repeated": 0}
    if seen.coupled:
        return Check("numbers", Outcome.skipped, "coupled rounds have no numbers beside the drafts'", figures)
    if not seen.coins or seen.products is None or seen.counts is None:
        return Check("numbers", Outcome.blind, "no number was drawn", figures)
    coins, rank = np.sort(np.asarray(seen.coins)), np.arange(len(seen.coins))
    repeated = int((np.diff(coins) == 0).sum())
    off = float(max(np.max((rank + 1) / len(coins) - coins), np.max(coins - rank / len(coins))))
    band = uniform_band(len(coins), level / 2)
    worst, where, pairs = _dependence(seen.products, seen.counts, level / 2)
    figures |= {
        "coins_repeated": repeated,
        "largest_distance": off,
        "largest_distance_by_chance": band,
        "pairs": pairs,
        "largest_correlation_over_band": worst,
        "largest_correlation_of": where,
    }
    if repeated:
        says = f"{repeated} of {len(coins)} acceptance coins were drawn before"
        return Check("numbers", Outcome.failed, says, figures)
    if off > band:
        says = f"acceptance coins are not uniform: {off:.1%} of {len(coins)} lie elsewhere"
        return Check("numbers", Outcome.failed, f"{says}, by chance {band:.1%} would at most", figures)
    if worst > 1:
        says = f"{where} depend on each other: their correlation is {worst:.1f} times what chance explains"
        return Check("numbers", Outcome.failed, says, figures)
    says = f"{len(coins)} coins are uniform within {off:.1%}, and independent of drafts and races: of {pairs}"
    return Check("numbers", Outcome.passed, f"{says} pairs none is beyond {worst:.0%} of its band", figures)


def _dependence(products: Numbers, counts: Numbers, level: float) -> tuple[float, str, int]:
    """The largest sum of products over its band, of which pair, and of how many pairs.

    Four times a product of two independent uniforms, each less a half, is in -1..1, with variance 1/9.
    """
    pairs = np.argwhere(np.triu(counts, 1) > 0)
    if not len(pairs):
        return 0.0, "nothing", 0
    over = [
        abs(4 * products[i, j]) / sum_band(counts[i, j] / 9, level / len(pairs)) for i, j in pairs.tolist()
    ]
    worst = int(np.argmax(over))
    one, other = (_named(index) for index in pairs[worst].tolist())
    return float(over[worst]), f"{one} and {other}", len(pairs)


def _named(column: int) -> str:
    kind, number = divmod(column, MOST_DRAFTS)
    if kind < 2:
        return f"{('draft', 'coin')[kind]} {number + 1}"
    return f"clock {column - 2 * MOST_DRAFTS + 1}"
