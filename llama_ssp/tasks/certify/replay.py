"""Decisions as they were taken, compared with those that the rule takes with the same random numbers.

It does not matter whether a kernel or the rule's own functions took them. The acceptance chances and the
correction's distribution follow from the recorded probabilities, the random numbers from seed, prompt and
length (they are made anew, as rng.py defines them). So the decision is known, and any other one is a fault.
Where a number is within rounding of its chance, both outcomes are right.

rule_distribution.py shows that the rule's functions are right; `check_numbers`, that the random numbers are
independent of the drafts and of each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import exp, lgamma, log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llama_ssp.config import MAX_SIBLINGS
from llama_ssp.report.statistics import sum_band, uniform_band, uniform_distance
from llama_ssp.speculative.rng import CounterDraws, Purpose, heat
from llama_ssp.speculative.round_protocol import RoundResult
from llama_ssp.speculative.state import State
from llama_ssp.speculative.verification import DraftBlock, Rule, TreeRule
from llama_ssp.tasks.certify.children import children, siblings_that_stand
from llama_ssp.tasks.certify.verdict import Check, Outcome, judged

TIE = 1e-9  # a number this close to its chance may pass or not
ROUNDING = 1e-12  # of a probability; a chance that is a quotient of small differences may move by more
COIN_BITS = 53  # of rng.py's uniforms
RARE = 1e-3  # of the false-alarm rate: the share of the repeated coins
MOST = 32  # drafts and siblings of a round that are looked at

Numbers = NDArray[np.float64]


@dataclass
class Decisions:
    """Replays decisions, and collects the numbers that decided."""

    rule: Rule
    seed: int
    most: int = 0  # siblings of a draft
    taken: int = 0
    lengths_wrong: int = 0
    tokens_wrong: int = 0
    coins: list[float] = field(default_factory=list)
    products: Numbers | None = None
    counts: Numbers | None = None

    def __post_init__(self) -> None:
        self._uniforms = np.random.Generator(np.random.Philox(self.seed ^ 1))

    def see(self, state: State, block: DraftBlock, result: RoundResult) -> None:
        """One round over the batch, before it is committed. Ended and damaged rows decide nothing."""
        source, device = CounterDraws(self.seed), block.drafted_BK.device
        rows = [row for row, ended in enumerate(state.ended) if not (ended or result.damaged[row])]
        coin_BKC = _coins(source, state, block)
        length, token = refuted(self.rule, source, state, block, result, coin_BKC)
        self.taken += len(rows)
        self.lengths_wrong += sum(length[row] for row in rows)
        self.tokens_wrong += sum(token[row] for row in rows)
        clock_BN = source._clocks(state.slot(Purpose.CORRECT), 2 * heat(block.target_BWV.shape[-1]), device)
        self._collect(rows, block, coin_BKC.cpu().numpy(), clock_BN.cpu().numpy())

    def _collect(self, rows: list[int], block: DraftBlock, coin_BKC: Numbers, clock_BN: Numbers) -> None:
        """Sums of products of two numbers of a round, each less its mean, and how often both were there."""
        shape = (*block.drafted_BK.shape, self.most + 1)
        real, place, coin = np.zeros(shape, dtype=bool), np.zeros(shape), np.zeros(shape)
        coin[..., : coin_BKC.shape[-1]] = coin_BKC
        taken_B11 = np.isin(np.arange(shape[0]), rows)[:, None, None]
        for c, (probs_BKV, token_BK, drawn_BK) in enumerate(children(block)):
            real[..., c] = drawn_BK.cpu().numpy()
            place[..., c] = places(probs_BKV, token_BK, self._uniforms.random(shape[:2]))
        real &= taken_B11
        self.coins += coin[real].tolist()
        real_BN, *number_2BN = (array.reshape(shape[0], -1)[:, :MOST] for array in (real, place, coin))
        own = np.zeros((shape[0], 2 * MOST))
        there = np.zeros_like(own)
        for first, number_BN in zip((0, MOST), number_2BN, strict=True):
            own[:, first : first + real_BN.shape[1]] = np.where(real_BN, number_BN - 0.5, 0)
            there[:, first : first + real_BN.shape[1]] = real_BN
        race = np.where(real_BN[:, :1], np.exp(-clock_BN) - 0.5, 0)
        products = own.T @ np.concatenate([own, race], 1)
        counts = there.T @ np.concatenate([there, np.repeat(real_BN[:, :1], race.shape[1], 1)], 1)
        self.products = products if self.products is None else self.products + products
        self.counts = counts if self.counts is None else self.counts + counts


def _coins(source: CounterDraws, state: State, block: DraftBlock) -> Tensor:
    """The numbers that decide each draft and its siblings, (B, K, C)."""
    device, k = block.drafted_BK.device, block.k
    coin_BKC = source._uniforms(state.slot(Purpose.ACCEPT), k, device)[..., None]
    if block.branches is None:
        return coin_BKC
    side_BN = source._uniforms(state.slot(Purpose.ACCEPT_SIBLING), k * MAX_SIBLINGS, device)
    side_BKS = side_BN.reshape(len(side_BN), k, MAX_SIBLINGS)[..., : block.branches.token_BKS.shape[-1]]
    return torch.cat([coin_BKC, side_BKS], -1)


def refuted(
    rule: Rule, source: CounterDraws, state: State, block: DraftBlock, result: RoundResult, coin_BKC: Tensor
) -> tuple[list[bool], list[bool]]:
    """For each row, whether other drafts and siblings stand, and whether another token follows them."""
    device = block.drafted_BK.device
    taken_B = torch.tensor(_outcomes(block, result), device=device)
    wrong_B = _beyond(rule, coin_BKC, taken_B, _chances(rule, block))
    if bool(wrong_B.any()):
        near = [replace(block, target_BWV=block.target_BWV * (1 + sign * ROUNDING)) for sign in (-1, 1)]
        chance_3BKC = torch.stack([_chances(rule, one) for one in (block, *near)])
        wrong_B &= _beyond(rule, coin_BKC, taken_B, chance_3BKC.amin(0), chance_3BKC.amax(0))
    probs_BV = _probs_after(rule, block, taken_B)
    token_B = source.categorical(probs_BV, state.slot(Purpose.CORRECT))
    other_B = token_B != torch.tensor(result.token, device=device)
    return wrong_B.tolist(), other_B.tolist()


def _beyond(
    rule: Rule, coin_BKC: Tensor, taken_B: Tensor, least_BKC: Tensor, most_BKC: Tensor | None = None
) -> Tensor:
    """Whether less or more stands than with any chances in between."""
    fewest_B = _outcome(rule, coin_BKC < least_BKC - TIE)
    most_B = _outcome(rule, coin_BKC < (least_BKC if most_BKC is None else most_BKC) + TIE)
    return torch.as_tensor((taken_B < fewest_B) | (taken_B > most_B))


def _outcomes(block: DraftBlock, result: RoundResult) -> list[int]:
    """What stands in each row, as `accepted` of the rule counts it, or `outcome` where there are siblings."""
    if block.branches is None:
        return result.accepted
    size = block.branches.token_BKS.shape[-1] + 1
    rows = zip(result.accepted, siblings_that_stand(block, result), strict=True)
    return [accepted * size + (size - 1 - sibling[1] if sibling else 0) for accepted, sibling in rows]


def _chances(rule: Rule, block: DraftBlock) -> Tensor:
    """Of the draws of each draft and its siblings, (B, K, C)."""
    if block.branches is None:
        return torch.as_tensor(rule.accept_chances(block)[..., None])
    assert isinstance(rule, TreeRule)
    return torch.as_tensor(rule.tree_chances(block))


def _outcome(rule: Rule, passed_BKC: Tensor) -> Tensor:
    if passed_BKC.shape[-1] == 1:
        return torch.as_tensor(rule.accepted(passed_BKC[..., 0]))
    assert isinstance(rule, TreeRule)
    return torch.as_tensor(rule.outcome(passed_BKC[..., 0], passed_BKC[..., 1:]))


def _probs_after(rule: Rule, block: DraftBlock, taken_B: Tensor) -> Tensor:
    if block.branches is None:
        return torch.as_tensor(rule.correction_probs(block, torch.minimum(taken_B, block.count_B)))
    assert isinstance(rule, TreeRule)
    return torch.as_tensor(rule.probs_after(block, taken_B))


def places(probs_BKV: Tensor, token_BK: Tensor, uniform_BK: Numbers) -> Numbers:
    """Where each token lies in its distribution, in the order of token ids: the uniform number it was drawn
    with, up to the token's own width, within which `uniform_BK` places it."""
    own_BK1 = token_BK[..., None]
    end_BK = probs_BKV.cumsum(-1).gather(2, own_BK1)[..., 0].cpu().numpy()
    share_BK = probs_BKV.gather(2, own_BK1)[..., 0].cpu().numpy()
    return np.asarray(np.clip(end_BK - share_BK * uniform_BK, 0, 1))


def check_decisions(seen: Decisions) -> Check:
    """Whether every decision is the one that the rule takes with its random numbers."""
    figures = {
        "decisions": seen.taken,
        "accepted_otherwise": seen.lengths_wrong,
        "tokens_otherwise": seen.tokens_wrong,
    }
    if not seen.taken:
        return Check("decisions", Outcome.blind, "no decision could be replayed", figures)
    fault = f"of {seen.taken} decisions {seen.lengths_wrong} keep other drafts than the rule, "
    fault += f"{seen.tokens_wrong} another token after them"
    right = f"{seen.taken} decisions, replayed from their random numbers, are the rule's"
    return judged("decisions", [(seen.lengths_wrong or seen.tokens_wrong, fault)], right, figures)


def check_numbers(seen: Decisions, level: float) -> Check:
    """Whether coins are uniform, new, and independent of the drafts' draws and of the race."""
    figures: dict[str, object] = {"coins": len(seen.coins), "coins_repeated": 0}
    if not seen.coins or seen.products is None or seen.counts is None:
        return Check("numbers", Outcome.blind, "no number was drawn", figures)
    repeated = len(seen.coins) - len(set(seen.coins))
    off, band = uniform_distance(seen.coins), uniform_band(len(seen.coins), level / 2)
    worst, where, pairs = _dependence(seen.products, seen.counts, level * (1 / 2 - RARE), seen.most + 1)
    figures |= {
        "coins_repeated": repeated,
        "largest_distance": off,
        "largest_distance_by_chance": band,
        "pairs": pairs,
        "largest_correlation_over_band": worst,
        "largest_correlation_of": where,
    }
    coins = len(seen.coins)
    uneven = f"acceptance coins are not uniform: {off:.1%} of {coins} lie elsewhere, "
    uneven += f"by chance at most {band:.1%} would"
    depend = f"{where} depend on each other: their correlation is {worst:.1f} times what chance explains"
    drawn = f"{repeated} of {coins} acceptance coins were drawn before"
    often = chance_of_repeats(len(seen.coins), repeated) < level * RARE
    faults = [(often, drawn), (off > band, uneven), (worst > 1, depend)]
    right = f"{coins} coins are uniform within {off:.1%}, and independent of drafts and races: "
    right += f"no correlation of {pairs} pairs exceeds {worst:.0%} of its band"
    return judged("numbers", faults, right, figures)


def chance_of_repeats(coins: int, repeated: int) -> float:
    """A bound of the chance that so many of these coins, or more, equal an earlier coin.

    Coin i is, whatever came before, with a chance of at most i / 2^COIN_BITS, so r given coins with the
    product of theirs, and any r with the sum of these products, at most (sum of the chances)^r / r!.
    """
    if not repeated:
        return 1.0
    return exp(repeated * log(coins * (coins - 1) / 2 / 2**COIN_BITS) - lgamma(repeated + 1))


def _dependence(products: Numbers, counts: Numbers, level: float, size: int) -> tuple[float, str, int]:
    """The largest sum of products over its band, of which pair, and the number of pairs.

    Four times a product of two independent uniforms, each less a half, is in -1..1, with variance 1/9.
    """
    pairs = np.argwhere(np.triu(counts, 1) > 0).tolist()
    if not pairs:
        return 0.0, "nothing", 0
    share = level / len(pairs)
    over = [abs(4 * products[i, j]) / sum_band(counts[i, j] / 9, share) for i, j in pairs]
    worst = int(np.argmax(over))
    one, other = (_named(column, size) for column in pairs[worst])
    return float(over[worst]), f"{one} and {other}", len(pairs)


def _named(column: int, size: int) -> str:
    """A column of the products; of each draft there are `size`, with its siblings."""
    kind, number = divmod(column, MOST)
    if kind > 1:
        return f"clock {column - 2 * MOST + 1}"
    draft, sibling = divmod(number, size)
    name = f"{('draft', 'coin')[kind]} {draft + 1}"
    return f"{name}, sibling {sibling}" if sibling else name
