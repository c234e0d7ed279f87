"""Exact verification rules: which drafted tokens are accepted, and which token follows them.

Shapes: B rows, K drafted positions, V vocabulary. Position i holds the distributions given i accepted drafts:

    target_BWV   the target's probabilities at W = K+1 positions
    draft_BKV    the probabilities each drafted token was drawn from (one-hot for a deterministic drafter)
    drafted_BK   the drafted tokens
    count_B      how many of the K drafts are real in this row (0: this row decodes plainly)

A rule is made of pure functions: `accept_chances` gives the chance of each draft's coin; given which coins
passed, `accepted` gives how many drafts are kept; `correction_probs` is the distribution of the token after
them. `Rule.decide` puts them together; its caller makes the draws. K is at least 1. The functions run on
torch tensors, and on numpy arrays of fractions, in which tests enumerate them.

Two rules, both exact: the committed tokens have the target's distribution, under the same sampling controls.

`token` (Chen et al. 2302.01318, Leviathan et al. 2211.17192) keeps draft x with probability p(x) / q(x), at
most 1, where p is the target's distribution and q the draft's. The first draft that fails is replaced by a
draw from max(p - q, 0), normalised. So x is committed with probability min(p, q) by acceptance and
max(p - q, 0) by correction: p in all.

`block` (Sun et al. 2403.10444) decides over the whole block, and keeps at least as many drafts on average:
ratios are multiplied along the block, so a draft that is likelier under the target makes up for one before.

In both a uniform number must be strictly below the chance: a token that the target cannot produce is never
accepted. Drafts that are all kept are followed by a draw from the target's own distribution.

To add a rule: a subclass of `Rule` in `RULES`, its name in `config.Verification`, a preset in
conf/speculation.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from llama_ssp.speculative.array_ops import (
    Array,
    excess,
    joined,
    largest,
    order,
    pick,
    row_by_row,
    shifted,
    smaller,
    stack_last,
    where,
)


@dataclass(frozen=True)
class DraftBlock:
    """One round's drafts and both models' probabilities; see the shapes above."""

    target_BWV: Array
    draft_BKV: Array
    drafted_BK: Array
    count_B: Array

    @property
    def k(self) -> int:
        return int(self.drafted_BK.shape[1])

    @cached_property
    def carried_BW(self) -> Array:
        """The block rule's P[0..K]: P[0] = 1, P[i] = min(P[i-1] * p(x_i) / q(x_i), 1).

        P[i] is the chance that at least i drafts are kept, given the first i.
        """
        return _carried(self)

    @cached_property
    def spare_BJ(self) -> Array:
        """S[i] = sum(max(P[i] * p - q, 0)) after i = 1..K-1 drafts (J of them): a correction's mass."""
        carried_BJ1 = self.carried_BW[:, 1:-1, None]
        return excess(carried_BJ1, self.target_BWV[:, 1:-1], self.draft_BKV[:, 1:]).sum(-1)


class RoundDraws(Protocol):
    """The draws of one round."""

    def bernoulli(self, chance_BK: Array) -> Array:
        """Tosses a coin for each draft, independent of the others: True with the given chance."""

    def categorical(self, probs_BV: Array) -> Array:
        """Draws one token a row from its distribution: the one after those that stand."""


class Rule(ABC):
    """An exact rule. What it declares here is all that the engine and task=certify know of it."""

    name: str

    def decide(self, block: DraftBlock, draws: RoundDraws) -> tuple[Array, Array]:
        """How many drafts stand in each row, and the token that follows them."""
        passed_BK = draws.bernoulli(self.accept_chances(block))
        accepted_B = self.accepted(passed_BK)
        return accepted_B, draws.categorical(self.correction_probs(block, accepted_B))

    @abstractmethod
    def accept_chances(self, block: DraftBlock) -> Array:
        """The chance of each draft's independent draw, (B, K); 0 beyond a row's count."""

    @abstractmethod
    def accepted(self, passed_BK: Array) -> Array:
        """How many drafts stand, (B,), given which draws passed."""

    @abstractmethod
    def correction_probs(self, block: DraftBlock, accepted_B: Array) -> Array:
        """The distribution of the token after the accepted ones, (B, V)."""

    @abstractmethod
    def standing(self, block: DraftBlock, prob_BK: Array) -> tuple[Array, Array]:
        """For the adaptive draft length, two chances of each draft before it is drawn, (B, K) each: that all
        drafts before it are kept, and that it is kept, too. `prob_BK` is `acceptance_prob(block)`."""


class TokenRule(Rule):
    """Each draft stands with probability target / draft; the first that fails ends the block."""

    name = "token"

    def accept_chances(self, block: DraftBlock) -> Array:
        ratio_BK = _ratios(block)
        return _within_count(block, where(ratio_BK < 1, ratio_BK, 1))

    def accepted(self, passed_BK: Array) -> Array:
        return where(passed_BK, 1, 0).cumprod(-1).sum(-1)

    def correction_probs(self, block: DraftBlock, accepted_B: Array) -> Array:
        return _residual_probs(block, accepted_B, accepted_B * 0 + 1)

    def standing(self, block: DraftBlock, prob_BK: Array) -> tuple[Array, Array]:
        ratio_BK = _ratios(block)
        before_BK = shifted(where(ratio_BK < 1, ratio_BK, 1).cumprod(-1), 1)
        return before_BK, before_BK * prob_BK


class BlockRule(Rule):
    """The block stands up to the last position whose draw passes, whatever happened before it."""

    name = "block"

    def accept_chances(self, block: DraftBlock) -> Array:
        # Coin i < count passes with chance S[i] / (S[i] + 1 - P[i]), the last one with P[count].
        carried_BK, inner_BJ = block.carried_BW[:, 1:], block.carried_BW[:, 1:-1]
        whole_BJ = block.spare_BJ + 1 - inner_BJ
        chance_BJ = block.spare_BJ / where(whole_BJ > 0, whole_BJ, 1)
        last_BK = block.count_B[:, None] == order(carried_BK) + 1
        chance_BK = where(last_BK, carried_BK, joined(chance_BJ, carried_BK[:, -1:]))
        return _within_count(block, chance_BK)

    def accepted(self, passed_BK: Array) -> Array:
        return largest(where(passed_BK, order(passed_BK) + 1, 0))[:, 0]

    def correction_probs(self, block: DraftBlock, accepted_B: Array) -> Array:
        carried_B = row_by_row(block.carried_BW, accepted_B)
        return _residual_probs(block, accepted_B, carried_B)

    def standing(self, block: DraftBlock, prob_BK: Array) -> tuple[Array, Array]:
        before_BK = block.carried_BW[:, :-1]
        return before_BK, joined(prob_BK[:, :1], before_BK[:, 1:] - block.spare_BJ)


RULES: dict[str, Rule] = {rule.name: rule for rule in (TokenRule(), BlockRule())}


def acceptance_prob(block: DraftBlock) -> Array:
    """sum(min(p, q)) at each drafted position: the chance that the token rule keeps a draft it reaches."""
    return smaller(block.target_BWV[:, : block.k], block.draft_BKV).sum(-1)


def _ratios(block: DraftBlock) -> Array:
    """target / draft for each drafted token; 0 where a row drafted nothing."""
    index = block.drafted_BK[:, :, None]
    target_BK = pick(block.target_BWV[:, : block.k], index, 2)[:, :, 0]
    draft_BK = pick(block.draft_BKV, index, 2)[:, :, 0]
    real_BK = draft_BK > 0
    return where(real_BK, target_BK / where(real_BK, draft_BK, 1), 0)


def _carried(block: DraftBlock) -> Array:
    ratio_BK = _ratios(block)
    carried = [ratio_BK[:, 0] * 0 + 1]
    for ratio_B in ratio_BK.T:
        carried.append(smaller(carried[-1] * ratio_B, carried[0]))
    return stack_last(carried)


def _within_count(block: DraftBlock, chance_BK: Array) -> Array:
    return where(block.count_B[:, None] > order(chance_BK), chance_BK, 0)


def _residual_probs(block: DraftBlock, accepted_B: Array, weight_B: Array) -> Array:
    """max(weight * target - draft, 0) after the accepted drafts, normalised."""
    target_BV, draft_BV = _probs_after(block, accepted_B)
    return _probs_of(excess(weight_B[:, None], target_BV, draft_BV), target_BV, block, accepted_B)


def _probs_after(block: DraftBlock, accepted_B: Array) -> tuple[Array, Array]:
    """The target's and the draft's probabilities after `accepted` drafts.

    After all K there is no draft's distribution: the last one fills its place and is not used.
    """
    last_B = where(accepted_B < block.k, accepted_B, block.k - 1)
    return row_by_row(block.target_BWV, accepted_B), row_by_row(block.draft_BKV, last_B)


def _probs_of(rest_BV: Array, target_BV: Array, block: DraftBlock, accepted_B: Array) -> Array:
    """What remains, normalised; the target's own probabilities where the whole block is accepted.

    Also where nothing remains: both distributions are then equal up to rounding, and only rounding can have
    made the draft's draw fail.
    """
    mass_B1 = rest_BV.sum(-1, keepdims=True)
    whole_B1 = (accepted_B == block.count_B)[:, None] | (mass_B1 <= 0)
    return where(whole_B1, target_BV, rest_BV / where(mass_B1 > 0, mass_B1, 1))
