"""Exact verification rules: which drafted tokens are accepted, and which token follows them.

Shapes: B rows, K drafted positions, V vocabulary. Position i holds the distributions given i accepted drafts:

    target_BWV   the target's probabilities at W = K+1 positions
    draft_BKV    the probabilities each drafted token was drawn from (one-hot for a deterministic drafter)
    drafted_BK   the drafted tokens
    count_B      how many of the K drafts are real in this row (0: this row decodes plainly)

K is the largest count of the batch. What stands in a row's columns from its count on is not used. Drafts are
numbered from 1 in formulas, x_1..x_K, and columns from 0: draft x_i stands in column i - 1 of `drafted_BK`.

A rule is made of pure functions: `accept_chances` gives the chance of each draft's coin; given which coins
passed, `accepted` gives how many drafts are kept; `correction_probs` is the distribution of the token after
them. `Rule.decide` puts them together; its caller makes the draws. K is at least 1. The functions run on
torch tensors, and on numpy arrays of fractions, in which tests enumerate them.

Two rules, both exact: the committed tokens have the target's distribution, under the same sampling controls.

`token` (Chen et al. 2302.01318, Leviathan et al. 2211.17192) keeps draft x with probability p(x) / q(x), at
most 1, where p is the target's distribution and q the draft's. The first draft that fails is replaced by a
draw from max(p - q, 0), normalised. Why this is exact: x is drafted and accepted with probability
q(x) * min(1, p(x) / q(x)) = min(p(x), q(x)). A draft is rejected with probability 1 - sum(min(p, q)), which
is sum(max(p - q, 0)), the number that the residual is divided by. So x is committed by a correction with
probability max(p(x) - q(x), 0), and p(x) in all. Nothing is asked of q but that x was drawn from it.

`block` (Sun et al. 2403.10444) decides over the whole block, and keeps at least as many drafts on average:
ratios are multiplied along the block, so a draft that is likelier under the target makes up for one before.
With a row's drafts x_1..x_n, and p_i and q_i the distributions of the token after i of them:

    P[0] = 1, P[i] = min(P[i-1] * p_{i-1}(x_i) / q_{i-1}(x_i), 1)    the weight that the first i drafts carry
    S[i] = sum(max(P[i] * p_i - q_i, 0))                  what q_i leaves of the target's mass after i drafts
    coin i passes with S[i] / (S[i] + 1 - P[i]) if i < n, and coin n with P[n]
    kept: up to the last i whose coin passes, none if no coin does
    then: a draw from max(P[i] * p_i - q_i, 0) / S[i] if i < n, and from p_n after all n drafts

Why this is exact, from the last coin back. Claim: given the first i drafts, i or more of them are kept with
probability P[i]. For i = n that is coin n. If it holds for i + 1, then the next draft is x, and is kept too,
with probability q_i(x) * min(P[i] * p_i(x) / q_i(x), 1) = min(P[i] * p_i(x), q_i(x)). Over all x that is
P[i] - S[i]. Coin i decides only where no later one passes, in 1 - (P[i] - S[i]) of all cases, and there with
the chance S[i] / (1 - (P[i] - S[i])): so the block ends after i with probability S[i], and i or more drafts
are kept with probability P[i] - S[i] + S[i] = P[i], as claimed.

The correction is x with probability max(P[i] * p_i(x) - q_i(x), 0). With the draft x that was kept, x follows
the i drafts with probability P[i] * p_i(x): the target's p_i(x), in all cases in which i or more are kept.

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
    """Holds one round's drafts and both models' probabilities; see the shapes above."""

    target_BWV: Array
    draft_BKV: Array
    drafted_BK: Array
    count_B: Array

    @property
    def k(self) -> int:
        return int(self.drafted_BK.shape[1])

    @cached_property
    def ratio_BK(self) -> Array:
        """Returns p(x) / q(x) of each drafted token x, (B, K); 0 where a row drafted nothing."""
        index = self.drafted_BK[:, :, None]  # (B, K, 1): one token of V at each position
        target_BK = pick(self.target_BWV[:, : self.k], index, 2)[:, :, 0]
        draft_BK = pick(self.draft_BKV, index, 2)[:, :, 0]
        real_BK = draft_BK > 0
        return where(real_BK, target_BK / where(real_BK, draft_BK, 1), 0)

    def within_count(self, chance_BK: Array) -> Array:
        """Returns the chances, 0 where a row has no draft: a uniform number is never below 0."""
        return where(self.count_B[:, None] > order(chance_BK), chance_BK, 0)

    def probs_after(self, accepted_B: Array) -> tuple[Array, Array]:
        """Returns the target's and the draft's probabilities after `accepted` drafts, (B, V) each.

        They stand in column `accepted` of the K+1 positions of the target, and of the K of the draft. After
        all of a row's drafts there is no draft's distribution: another one fills its place and is not used.
        """
        last_B = where(accepted_B < self.k, accepted_B, self.k - 1)
        return row_by_row(self.target_BWV, accepted_B), row_by_row(self.draft_BKV, last_B)

    def correction(self, rest_BV: Array, accepted_B: Array) -> Array:
        """Returns what a rule leaves for the token after the accepted drafts, normalised, (B, V).

        It is the target's own where the whole block is accepted. Then no draft was rejected, and nothing has
        to be made up for: the token after the last draft is free. A row without drafts is such a block: 0 of
        0 are accepted.

        Also where nothing remains: both distributions are then equal up to rounding, and only rounding can
        have made the draft's draw fail.
        """
        target_BV = row_by_row(self.target_BWV, accepted_B)
        mass_B1 = rest_BV.sum(-1, keepdims=True)
        whole_B1 = (accepted_B == self.count_B)[:, None] | (mass_B1 <= 0)
        return where(whole_B1, target_BV, rest_BV / where(mass_B1 > 0, mass_B1, 1))

    @cached_property
    def carried_BW(self) -> Array:
        """Returns the block rule's P[0..K], (B, K+1): P[0] = 1, P[i] = min(P[i-1] * p(x_i) / q(x_i), 1).

        P[i] is the chance that at least i drafts are kept, given the first i.
        """
        return _carried(self)

    @cached_property
    def spare_BJ(self) -> Array:
        """Returns S[i] = sum(max(P[i] * p - q, 0)) after i = 1..K-1 drafts (J of them), (B, J).

        It is the mass that a correction after i drafts has. After i drafts both models have position i: in
        the target's K+1 positions that leaves out the first and the last, in the draft's K the first.
        """
        carried_BJ1 = self.carried_BW[:, 1:-1, None]
        target_BJV = self.target_BWV[:, 1:-1]
        draft_BJV = self.draft_BKV[:, 1:]
        return excess(carried_BJ1, target_BJV, draft_BJV).sum(-1)


class RoundDraws(Protocol):
    """Makes the draws of one round: by random numbers (rng.py), or in tests by walking every branch."""

    def bernoulli(self, chance_BK: Array) -> Array:
        """Tosses a coin for each draft, independent of the others: (B, K), True with the given chance."""

    def categorical(self, probs_BV: Array) -> Array:
        """Draws one token a row from its distribution, (B,): the one after those that stand."""


class Rule(ABC):
    """Decides exactly. What it declares here is all that the engine and task=certify know of it."""

    name: str = "own"

    def decide(self, block: DraftBlock, draws: RoundDraws) -> tuple[Array, Array]:
        """Returns how many drafts stand in each row, (B,), and the token that follows them, (B,)."""
        chance_BK = self.accept_chances(block)
        passed_BK = draws.bernoulli(chance_BK)
        accepted_B = self.accepted(passed_BK)

        # With a random number of its own: the coins have been used to choose its distribution.
        probs_BV = self.correction_probs(block, accepted_B)
        return accepted_B, draws.categorical(probs_BV)

    @abstractmethod
    def accept_chances(self, block: DraftBlock) -> Array:
        """Returns the chance of each draft's independent coin, (B, K); 0 beyond a row's count."""

    @abstractmethod
    def accepted(self, passed_BK: Array) -> Array:
        """Returns how many drafts stand, (B,), given which coins passed."""

    @abstractmethod
    def correction_probs(self, block: DraftBlock, accepted_B: Array) -> Array:
        """Returns the distribution of the token after the accepted ones, (B, V)."""

    def standing(self, block: DraftBlock, prob_BK: Array) -> tuple[Array, Array]:
        """Returns two chances of each draft before it is drawn, (B, K) each, for the adaptive draft length.

        They are: that all drafts before it are kept, and that it is kept, too. `prob_BK` is
        `acceptance_prob(block)`. A rule that does not say it is taken for one that decides draft by draft.
        """
        before_BK = shifted(prob_BK.cumprod(-1), 1)
        return before_BK, before_BK * prob_BK


class TokenRule(Rule):
    """Keeps each draft with probability min(1, p / q); the first that fails ends the block."""

    name = "token"

    def accept_chances(self, block: DraftBlock) -> Array:
        ratio_BK = block.ratio_BK
        chance_BK = where(ratio_BK < 1, ratio_BK, 1)  # min(1, p / q)
        return block.within_count(chance_BK)

    def accepted(self, passed_BK: Array) -> Array:
        # 1 1 0 1 -> 1 1 0 0 -> 2: drafts after the first failure continue a rejected token.
        return where(passed_BK, 1, 0).cumprod(-1).sum(-1)

    def correction_probs(self, block: DraftBlock, accepted_B: Array) -> Array:
        one_B = accepted_B * 0 + 1
        return _residual_probs(block, accepted_B, one_B)  # max(p - q, 0) / sum

    def standing(self, block: DraftBlock, prob_BK: Array) -> tuple[Array, Array]:
        ratio_BK = block.ratio_BK
        # Draft i is reached if those before it passed, each with its own chance.
        before_BK = shifted(where(ratio_BK < 1, ratio_BK, 1).cumprod(-1), 1)
        return before_BK, before_BK * prob_BK


class BlockRule(Rule):
    """Keeps the block up to the last position whose coin passes, whatever happened before it."""

    name = "block"

    def accept_chances(self, block: DraftBlock) -> Array:
        # Coin i < count passes with chance S[i] / (S[i] + 1 - P[i]), the last one with P[count].
        carried_BK = block.carried_BW[:, 1:]  # P[1..K]
        inner_BJ = block.carried_BW[:, 1:-1]  # P[1..K-1]

        # Where S[i] = 0 and P[i] = 1 all of the target's mass goes to longer blocks, and 0 / 0 is 0.
        whole_BJ = block.spare_BJ + 1 - inner_BJ
        chance_BJ = block.spare_BJ / where(whole_BJ > 0, whole_BJ, 1)

        # In a ragged batch a row's last draft may stand in any column: column i - 1 is that of draft i.
        last_BK = block.count_B[:, None] == order(carried_BK) + 1
        chance_BK = where(last_BK, carried_BK, joined(chance_BJ, carried_BK[:, -1:]))
        return block.within_count(chance_BK)

    def accepted(self, passed_BK: Array) -> Array:
        # 0 1 0 1 0 -> 0 2 0 4 0 -> 4: a coin that passes keeps all drafts before it.
        return largest(where(passed_BK, order(passed_BK) + 1, 0))[:, 0]

    def correction_probs(self, block: DraftBlock, accepted_B: Array) -> Array:
        carried_B = row_by_row(block.carried_BW, accepted_B)  # P[i] of the i accepted drafts
        return _residual_probs(block, accepted_B, carried_B)  # max(P[i] * p - q, 0) / S[i]

    def standing(self, block: DraftBlock, prob_BK: Array) -> tuple[Array, Array]:
        # After i drafts, the next one, x, will carry min(P[i] * p(x) / q(x), 1). On average over x, drawn
        # from q, that is sum(min(P[i] * p, q)) = P[i] - S[i]; for i = 0 it is `prob_BK`.
        before_BK = block.carried_BW[:, :-1]
        return before_BK, joined(prob_BK[:, :1], before_BK[:, 1:] - block.spare_BJ)


RULES: dict[str, Rule] = {rule.name: rule for rule in (TokenRule(), BlockRule())}


def acceptance_prob(block: DraftBlock) -> Array:
    """Returns sum(min(p, q)) at each drafted position, (B, K).

    It is the chance that the token rule keeps a draft that it reaches, whichever is drawn.
    """
    return smaller(block.target_BWV[:, : block.k], block.draft_BKV).sum(-1)


def _carried(block: DraftBlock) -> Array:
    """Returns P[0..K] of the block rule, (B, K+1)."""
    ratio_BK = block.ratio_BK
    carried = [ratio_BK[:, 0] * 0 + 1]  # P[0] = 1, in the block's own kind of number
    for ratio_B in ratio_BK.T:
        carried.append(smaller(carried[-1] * ratio_B, carried[0]))
    return stack_last(carried)


def _residual_probs(block: DraftBlock, accepted_B: Array, weight_B: Array) -> Array:
    """Returns max(weight * p - q, 0) after the accepted drafts, divided by its sum, (B, V)."""
    target_BV, draft_BV = block.probs_after(accepted_B)
    rest_BV = excess(weight_B[:, None], target_BV, draft_BV)
    return block.correction(rest_BV, accepted_B)
