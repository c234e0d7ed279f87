"""Which drafted tokens stand, and what follows them: the exact rules, as pure functions.

Shapes: B rows, K drafted positions, V vocabulary. Position i holds the distributions given i accepted drafts:

    target_BWV   the target's distribution at W = K+1 positions
    draft_BKV    the distribution each drafted token was drawn from (one-hot for a deterministic drafter)
    drafted_BK   the drafted tokens
    count_B      how many of the K are real in this row (0: this row decodes plainly)

The functions hold no randomness: `accept_chances` gives probabilities, the caller draws, `accepted`
and `correction_probs` say what follows. K is at least 1: with nothing drafted there is nothing to verify.
They run on torch tensors and on numpy arrays of fractions.

Three rules, all exact. `token` (Chen et al. 2302.01318, Leviathan et al. 2211.17192) accepts each
token by its own ratio. `block` (Sun et al. 2403.10444) decides over the whole block and accepts at
least as many. In both a chance is compared strictly: a token the target cannot produce is never kept.
`coupled` (Daliri et al. 2408.07978) accepts the token that the target, drawing with the noise that the
draft drew with, has drawn itself (coupled.py): a few fewer, but the text does not know of the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llama_ssp.speculative.array_ops import (
    Array,
    excess,
    joined,
    largest,
    order,
    order_up,
    pick,
    positive,
    row_by_row,
    shifted,
    smaller,
    stack_last,
    total,
    where,
)


@dataclass(frozen=True)
class Block:
    """One round's proposal beside the target's distributions; see the shapes above."""

    target_BWV: Array
    draft_BKV: Array
    drafted_BK: Array
    count_B: Array

    @property
    def k(self) -> int:
        return int(self.drafted_BK.shape[1])

    @cached_property
    def carried_BW(self) -> Array:
        """What the block rule carries from draft to draft."""
        return _carried(self)

    @cached_property
    def spare_BJ(self) -> Array:
        """What of the chance that the block rule carries the next draft does not take up."""
        carried_BJ1 = self.carried_BW[:, 1:-1, None]
        return excess(carried_BJ1, self.target_BWV[:, 1:-1], self.draft_BKV[:, 1:]).sum(-1)


class TokenRule:
    """Each drafted token stands by its own ratio; the first that falls ends the block."""

    name = "token"

    def accept_chances(self, block: Block) -> Array:
        """The probability of each drafted position's independent draw; 0 beyond a row's count."""
        ratio_BK = _ratios(block)
        return _within_count(block, where(ratio_BK < 1, ratio_BK, 1))

    def accepted(self, passed_BK: Array) -> Array:
        """How many drafted tokens stand: those before the first draw that failed."""
        return where(passed_BK, 1, 0).cumprod(-1).sum(-1)

    def correction_probs(self, block: Block, accepted_B: Array) -> Array:
        """The distribution of the one token that follows the accepted ones."""
        return _residual_probs(block, accepted_B, accepted_B * 0 + 1)

    def standing(self, block: Block, overlap_BK: Array) -> tuple[Array, Array]:
        """The chances that those before each draft stand, and that it does with them, before it is drawn.

        The coupled rule, which accepts a few fewer, takes this for its own.
        """
        ratio_BK = _ratios(block)
        before_BK = shifted(where(ratio_BK < 1, ratio_BK, 1).cumprod(-1), 1)
        return before_BK, before_BK * overlap_BK


class BlockRule:
    """The block stands up to the last position whose draw passes, whatever happened before it."""

    name = "block"

    def accept_chances(self, block: Block) -> Array:
        """The probability of each drafted position's independent draw; 0 beyond a row's count."""
        carried_BK, inner_BJ = block.carried_BW[:, 1:], block.carried_BW[:, 1:-1]
        whole_BJ = block.spare_BJ + 1 - inner_BJ
        chance_BJ = block.spare_BJ / where(whole_BJ > 0, whole_BJ, 1)
        last_BK = block.count_B[:, None] == order(carried_BK) + 1
        chance_BK = where(last_BK, carried_BK, joined(chance_BJ, carried_BK[:, -1:]))
        return _within_count(block, chance_BK)

    def accepted(self, passed_BK: Array) -> Array:
        """How many drafted tokens stand: up to the last draw that passed."""
        return largest(where(passed_BK, order(passed_BK) + 1, 0))[:, 0]

    def correction_probs(self, block: Block, accepted_B: Array) -> Array:
        """The distribution of the one token that follows the accepted ones."""
        carried_B = row_by_row(block.carried_BW, accepted_B)
        return _residual_probs(block, accepted_B, carried_B)

    def standing(self, block: Block, overlap_BK: Array) -> tuple[Array, Array]:
        """The chances that those before each draft stand, and that it does with them, before it is drawn."""
        before_BK = block.carried_BW[:, :-1]
        return before_BK, joined(overlap_BK[:, :1], before_BK[:, 1:] - block.spare_BJ)


class CoupledRule(TokenRule):
    """A drafted token stands if the target's own token of that position is the same.

    Both are winners of one race: of token x, which has the exponential e_x, the time is e_x over its chance,
    in the target's distribution as in the draft's. So nothing is left to chance once both have drawn, and
    `agreed` says all. The two distributions say how that looks to those who know the draft but not the noise:
    how often the winners are the same, and who else wins the target's race. Monitors and proofs go by them;
    that they are the races' own is shown by tests/test_coupled.py.
    """

    name = "coupled"

    def agreed(self, block: Block, chosen_BW: Array) -> Array:
        """Which drafts are the tokens that the target has drawn; none beyond a row's count."""
        same_BK = block.drafted_BK == chosen_BW[:, : block.k]
        return stack_last([same_BK[:, i] & (block.count_B > i) for i in range(block.k)])

    def accept_chances(self, block: Block) -> Array:
        """How often the target's winner is the draft's, of those races that the draft wins with it."""
        ratio_BK = _ratios(block)
        scaled_BKV = ratio_BK[:, :, None] * block.draft_BKV
        target_BKV = block.target_BWV[:, : block.k]
        whole_BK = where(target_BKV > scaled_BKV, target_BKV, scaled_BKV).sum(-1)
        return _within_count(block, ratio_BK / whole_BK)

    def correction_probs(self, block: Block, accepted_B: Array) -> Array:
        """Who wins the target's race when the draft's winner does not."""
        target_BV, draft_BV = _probs_after(block, accepted_B)
        last_B = where(accepted_B < block.k, accepted_B, block.k - 1)
        race = _Race(target_BV, draft_BV)
        until_B1 = race.until(pick(block.drafted_BK, last_B[:, None], 1))
        return _probs_of(target_BV * positive(until_B1 - race.level_BV), target_BV, block, accepted_B)


Rule = TokenRule | BlockRule
RULES: dict[str, Rule] = {"token": TokenRule(), "block": BlockRule(), "coupled": CoupledRule()}


def overlap(block: Block) -> Array:
    """Sum of min(target, draft) at each drafted position: the chance a token-rule draw accepts.

    No rule that looks at one position accepts more.
    """
    return smaller(block.target_BWV[:, : block.k], block.draft_BKV).sum(-1)


def meeting(block: Block) -> Array:
    """The same of the coupled rule: the chance that both races of a position have the same winner."""
    races = [_Race(block.target_BWV[:, i], block.draft_BKV[:, i]) for i in range(block.k)]
    return stack_last([race.meeting_B for race in races])


def _ratios(block: Block) -> Array:
    """target / draft for each drafted token; 0 where a row drafted nothing."""
    index = block.drafted_BK[:, :, None]
    target_BK = pick(block.target_BWV[:, : block.k], index, 2)[:, :, 0]
    draft_BK = pick(block.draft_BKV, index, 2)[:, :, 0]
    real_BK = draft_BK > 0
    return where(real_BK, target_BK / where(real_BK, draft_BK, 1), 0)


def _carried(block: Block) -> Array:
    """P[0..K]: P[i] = min(P[i-1] * ratio_i, 1), the chance that the first i drafts stand together."""
    ratio_BK = _ratios(block)
    carried = [ratio_BK[:, 0] * 0 + 1]
    for ratio_B in ratio_BK.T:
        carried.append(smaller(carried[-1] * ratio_B, carried[0]))
    return stack_last(carried)


def _within_count(block: Block, chance_BK: Array) -> Array:
    """No chance for the positions a row did not draft."""
    return where(block.count_B[:, None] > order(chance_BK), chance_BK, 0)


def _residual_probs(block: Block, accepted_B: Array, weight_B: Array) -> Array:
    """What of `weight` times the target's distribution the draft did not cover after `accepted` drafts."""
    target_BV, draft_BV = _probs_after(block, accepted_B)
    return _probs_of(excess(weight_B[:, None], target_BV, draft_BV), target_BV, block, accepted_B)


def _probs_after(block: Block, accepted_B: Array) -> tuple[Array, Array]:
    """The target's distribution and the draft's after `accepted` drafts; after the whole block, the last
    draft's."""
    last_B = where(accepted_B < block.k, accepted_B, block.k - 1)
    return row_by_row(block.target_BWV, accepted_B), row_by_row(block.draft_BKV, last_B)


def _probs_of(rest_BV: Array, target_BV: Array, block: Block, accepted_B: Array) -> Array:
    """What remains, as a distribution. After a whole block it is the target's own distribution.

    So it is where nothing remains: both distributions are then equal up to rounding, and the draw that led
    here had probability zero but for that rounding.
    """
    mass_B1 = total(rest_BV)
    whole_B1 = (accepted_B == block.count_B)[:, None] | (mass_B1 <= 0)
    return where(whole_B1, target_BV, rest_BV / where(mass_B1 > 0, mass_B1, 1))


class _Race:
    """The target's race, seen from the moment t at which the draft's has been won.

    Then no token's exponential is over before t times its chance in the draft's distribution; behind that
    point it is as good as new, and the winner's ends there. In the target's time, in units of t, token z
    joins the race at draft(z) / target(z) and wins from then on at the rate t target(z), and the draft's
    winner wins where it joins, if nobody has before. Given t, nobody has won by s with probability exp(-t
    H(s)), H(s) being the sum of target(z) (s - joins(z)) over those that have joined. Over t, which is
    exponential, that makes 1 / (1 + H(s)); and the chance that z is the one who wins before s is target(z)
    times the integral of 1 / (1 + H)^2 from joins(z) to s. H is made of straight pieces, so both are sums of
    fractions.
    """

    def __init__(self, target_BV: Array, draft_BV: Array) -> None:
        possible_BV = target_BV > 0
        joins_BV = where(possible_BV, draft_BV / where(possible_BV, target_BV, 1), 0)
        order_BV = order_up(joins_BV)
        rate_BV, at_BV = pick(target_BV, order_BV, 1), pick(joins_BV, order_BV, 1)
        # 1 + H where each token joins
        waited_BV = 1 + at_BV * rate_BV.cumsum(-1) - (rate_BV * at_BV).cumsum(-1)
        gone_BV = at_BV - shifted(at_BV, 0)
        integral_BV = (gone_BV / (waited_BV * shifted(waited_BV, 1))).cumsum(-1)
        self._possible_BV = possible_BV
        self._last_B1 = integral_BV[:, -1:] + 1 / (waited_BV[:, -1:] * total(rate_BV))
        self.level_BV = pick(integral_BV, order_up(order_BV), 1)
        self.meeting_B = (rate_BV * at_BV / waited_BV).sum(-1)

    def until(self, token_B1: Array) -> Array:
        """The integral up to where this token joins: to the end if it never does."""
        joined_B1 = pick(self._possible_BV, token_B1, 1)
        return where(joined_B1, pick(self.level_BV, token_B1, 1), self._last_B1)
