"""The coupled rule without its noise: how often draft and target draw the same token, and what else.

A newcomer may skip this: the engine needs coupled.py alone. task=certify and the proofs use it.
"""

from __future__ import annotations

from llama_ssp.speculative.array_ops import Array, pick, shifted, where


class Race:
    """The target's race after the draft's race was won at time t.

    No exponential of the draft's race ended before t, so that of token z exceeds t draft(z), and beyond this
    point it is memoryless; the winner's ends there. In the target's race, with time in units of t, token z
    starts at draft(z) / target(z) and from then on wins at the rate t target(z); the draft's winner wins when
    it starts, unless another token won before. Given t, nobody has won by s with probability exp(-t H(s)),
    H(s) being the sum of target(z) (s - start(z)) over the tokens that have started. Over t, which is
    exponential, that becomes 1 / (1 + H(s)); and the chance that z wins before s is target(z) times the
    integral of 1 / (1 + H)^2 from start(z) to s. H is piecewise linear, so both are sums of fractions.
    """

    def __init__(self, target_BV: Array, draft_BV: Array) -> None:
        possible_BV = target_BV > 0
        start_BV = where(possible_BV, draft_BV / where(possible_BV, target_BV, 1), 0)
        order_BV = start_BV.argsort(-1)
        rate_BV, at_BV = pick(target_BV, order_BV, 1), pick(start_BV, order_BV, 1)
        # 1 + H where each token starts
        waited_BV = 1 + at_BV * rate_BV.cumsum(-1) - (rate_BV * at_BV).cumsum(-1)
        gone_BV = at_BV - shifted(at_BV, 0)
        integral_BV = (gone_BV / (waited_BV * shifted(waited_BV, 1))).cumsum(-1)
        self._possible_BV = possible_BV
        self._last_B1 = integral_BV[:, -1:] + 1 / (waited_BV[:, -1:] * rate_BV.sum(-1, keepdims=True))
        self.level_BV = pick(integral_BV, order_BV.argsort(-1), 1)
        self.meeting_B = (rate_BV * at_BV / waited_BV).sum(-1)

    def until(self, token_B1: Array) -> Array:
        """The integral up to where this token starts: to the end if it never does."""
        possible_B1 = pick(self._possible_BV, token_B1, 1)
        return where(possible_B1, pick(self.level_BV, token_B1, 1), self._last_B1)
