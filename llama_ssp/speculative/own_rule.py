"""Runs a verification rule from outside of the package, and refuses tensors of another shape.

A tensor of shape (B, 1) in place of (B, K) would be spread over all drafts, and give other texts silently.
Whether the numbers are right, only task=certify can tell.
"""

import torch
from torch import Tensor

from llama_ssp.errors import UsageError
from llama_ssp.speculative.array_ops import Array
from llama_ssp.speculative.verification import DraftBlock, Rule

WHERE_TO_LOOK = "docs/own.md shows a rule"
WHOLE = (torch.int64, torch.int32)


class GuardedRule(Rule):
    """Calls another rule, and checks the shape and the kind of what each of its functions returns."""

    def __init__(self, own: Rule) -> None:
        self._own = own
        has_name = "name" in vars(type(own))
        self.name = own.name if has_name else type(own).__name__

    def accept_chances(self, block: DraftBlock) -> Array:
        chance_BK = self._own.accept_chances(block)
        self._require("accept_chances", chance_BK, tuple(block.drafted_BK.shape), is_whole=False)
        return chance_BK

    def accepted(self, passed_BK: Array) -> Array:
        accepted_B = self._own.accepted(passed_BK)
        self._require("accepted", accepted_B, (passed_BK.shape[0],), is_whole=True)
        return accepted_B

    def correction_probs(self, block: DraftBlock, accepted_B: Array) -> Array:
        probs_BV = self._own.correction_probs(block, accepted_B)
        rows, _, vocab = block.target_BWV.shape
        self._require("correction_probs", probs_BV, (rows, vocab), is_whole=False)
        return probs_BV

    def standing(self, block: DraftBlock, prob_BK: Array) -> tuple[Array, Array]:
        return self._own.standing(block, prob_BK)

    def _require(self, function: str, found: object, shape: tuple[int, ...], is_whole: bool) -> None:
        """Raises UsageError unless it is a tensor of this shape, of whole numbers or of fractions."""
        kind = "whole numbers" if is_whole else "floating-point numbers"
        said = type(found).__name__
        if isinstance(found, Tensor):
            is_right = found.dtype in WHOLE if is_whole else found.is_floating_point()
            if is_right and tuple(found.shape) == shape:
                return
            said = f"{tuple(found.shape)}, {found.dtype}"
        raise UsageError(
            f"{function} returns another tensor",
            where=f"rule {self.name}",
            found=said,
            allowed=f"{shape}, {kind}",
            fix=WHERE_TO_LOOK,
        )
