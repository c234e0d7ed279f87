"""Which drafted tokens stand, and what follows them: the exact rules, as pure functions.

Shapes: B rows, K drafted positions, V vocabulary. Position i holds the laws given i accepted drafts:

    target_BWV   the target's law at W = K+1 positions
    draft_BKV    the law each drafted token was drawn from (one-hot for a deterministic drafter)
    drafted_BK   the drafted tokens
    count_B      how many of the K are real in this row (0: this row decodes plainly)

The functions hold no randomness: `accept_chances` gives probabilities, the caller draws, `accepted`
and `correction_law` say what follows. K is at least 1: with nothing drafted there is nothing to verify.
They run on torch tensors and on numpy arrays of fractions.

Two rules, both exact. `token` (Chen et al. 2302.01318, Leviathan et al. 2211.17192) accepts each
token by its own ratio. `block` (Sun et al. 2403.10444) decides over the whole block and accepts at
least as many. In both a chance is compared strictly: a token the target cannot produce is never kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llama_ssp.arrays import (
    Array,
    excess,
    joined,
    largest,
    order,
    pick,
    row_by_row,
    smaller,
    stack_last,
    total,
    where,
)


@dataclass(frozen=True)
class Block:
    """One round's proposal beside the target's laws; see the shapes above."""

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

    def correction_law(self, block: Block, accepted_B: Array) -> Array:
        """The law of the one token that follows the accepted ones."""
        return _remaining_law(block, accepted_B, accepted_B * 0 + 1)


class BlockRule:
    """The block stands up to the last position whose draw passes, whatever happened before it."""

    name = "block"

    def accept_chances(self, block: Block) -> Array:
        """The probability of each drafted position's independent draw; 0 beyond a row's count."""
        carried_BK, inner_BJ = block.carried_BW[:, 1:], block.carried_BW[:, 1:-1]
        spare_BJ = excess(inner_BJ[..., None], block.target_BWV[:, 1:-1], block.draft_BKV[:, 1:]).sum(-1)
        whole_BJ = spare_BJ + 1 - inner_BJ
        chance_BJ = spare_BJ / where(whole_BJ > 0, whole_BJ, 1)
        last_BK = block.count_B[:, None] == order(carried_BK) + 1
        chance_BK = where(last_BK, carried_BK, joined(chance_BJ, carried_BK[:, -1:]))
        return _within_count(block, chance_BK)

    def accepted(self, passed_BK: Array) -> Array:
        """How many drafted tokens stand: up to the last draw that passed."""
        return largest(where(passed_BK, order(passed_BK) + 1, 0))[:, 0]

    def correction_law(self, block: Block, accepted_B: Array) -> Array:
        """The law of the one token that follows the accepted ones."""
        carried_B = row_by_row(block.carried_BW, accepted_B)
        return _remaining_law(block, accepted_B, carried_B)


Rule = TokenRule | BlockRule
RULES: dict[str, Rule] = {"token": TokenRule(), "block": BlockRule()}


def overlap(block: Block) -> Array:
    """Sum of min(target, draft) at each drafted position: the chance a token-rule draw accepts."""
    return smaller(block.target_BWV[:, : block.k], block.draft_BKV).sum(-1)


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


def _remaining_law(block: Block, accepted_B: Array, weight_B: Array) -> Array:
    """What of `weight` times the target's law the draft did not cover after `accepted` drafts.

    After a whole block it is the target's own law. So it is where nothing remains: both laws are then
    equal up to rounding, and the draw that led here had probability zero but for that rounding.
    """
    target_BV = row_by_row(block.target_BWV, accepted_B)
    last_B = where(accepted_B < block.k, accepted_B, block.k - 1)
    rest_BV = excess(weight_B[:, None], target_BV, row_by_row(block.draft_BKV, last_B))
    mass_B1 = total(rest_BV)
    whole_B1 = (accepted_B == block.count_B)[:, None] | (mass_B1 <= 0)
    return where(whole_B1, target_BV, rest_BV / where(mass_B1 > 0, mass_B1, 1))
