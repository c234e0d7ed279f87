"""Decides a round by the rule, and carries what was decided from the device to the host and to other ranks.

`decide` is a function of tensors alone, so that a model can run it as a CUDA graph: after a forward, kernel
launches cost more than what a decision computes (`CounterDraws.round`).

Shapes: B rows, K drafts, W = K+1 positions, V vocabulary, N numbers of a packed row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from torch import Tensor

from llama_ssp.speculative.array_ops import order
from llama_ssp.speculative.sampling import has_nan
from llama_ssp.speculative.verification import DraftBlock, RoundDraws, Rule, acceptance_prob
from llama_ssp.text.logprobs import ScoredToken


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Holds what a round decided, on the host. Row b commits its first `accepted[b]` drafts, then `token[b]`.

    `token` is the correction where a draft was rejected, and the token after all drafts where none was; with
    K = 0 it is all that the row gets.

    `damaged` rows had logits that were not numbers. For each draft, accepted or not, `overlap` is
    sum(min(target, draft)), and `standing` the two chances of `Rule.standing`, before and with it. Ranks that
    do not lead have zeros instead.
    """

    drafted: list[list[int]]
    accepted: list[int]
    token: list[int]
    overlap: list[list[float]]
    damaged: list[bool]
    standing: list[list[tuple[float, float]]]
    logprobs: list[list[ScoredToken]] = field(default_factory=list)  # of the tokens; empty unless asked for

    def tokens(self, row: int) -> list[int]:
        """Returns the row's block: what it commits, if nothing ends it before."""
        return [*self.drafted[row][: self.accepted[row]], self.token[row]]

    @staticmethod
    def pack(
        accepted_B: Tensor,
        token_B: Tensor,
        damaged_B: Tensor,
        drafted_BK: Tensor,
        overlap_BK: Tensor,
        before_BK: Tensor,
        standing_BK: Tensor,
    ) -> Tensor:
        """Joins a decision's parts for one transfer to the host; chances are fp64, so ids are exact to 2**53:

        | accepted | token | damaged | drafted, K | overlap, K | before, K | standing, K |

        Returns (B, 3 + 4 K).
        """
        heads = (part_B[:, None] for part_B in (accepted_B, token_B, damaged_B))
        return torch.cat([*heads, drafted_BK, overlap_BK, before_BK, standing_BK], 1)

    @staticmethod
    def unpack(packed_BN: Tensor, count: Sequence[int]) -> Decision:
        """Reads what `pack` wrote; the first `count` drafts of each row are real."""
        rows = packed_BN.cpu().tolist()  # waits for the device
        k = (packed_BN.shape[1] - 3) // 4

        def per_draft(part: int) -> list[list[float]]:
            """Returns one of the four parts that have K columns, cut to each row's drafts."""
            first = 3 + part * k
            return [row[first:][:drafts] for row, drafts in zip(rows, count, strict=True)]

        before = per_draft(2)
        standing = per_draft(3)
        return Decision(
            drafted=[[int(token) for token in row] for row in per_draft(0)],
            accepted=[int(row[0]) for row in rows],
            token=[int(row[1]) for row in rows],
            overlap=per_draft(1),
            damaged=[bool(int(row[2])) for row in rows],
            standing=[list(zip(*chances, strict=True)) for chances in zip(before, standing, strict=True)],
        )

    def to_ints(self) -> list[int]:
        """Returns the decision for a message, without what only the leader's choice of K needs.

        | drafts a row, B | accepted, B | token, B | damaged, B | drafted, row after row |
        """
        counts = map(len, self.drafted)
        damaged = map(int, self.damaged)
        return [*counts, *self.accepted, *self.token, *damaged, *chain(*self.drafted)]

    @staticmethod
    def from_ints(values: Iterator[int], rows: int) -> Decision:
        """Reads what `to_ints` wrote, and leaves in `values` what follows."""
        counts = [*islice(values, rows)]
        accepted = [*islice(values, rows)]
        token = [*islice(values, rows)]
        damaged = [*islice(values, rows)]
        return Decision(
            drafted=[[*islice(values, count)] for count in counts],
            accepted=accepted,
            token=token,
            overlap=[[0.0] * count for count in counts],
            damaged=[bool(flag) for flag in damaged],
            standing=[[(0.0, 0.0)] * count for count in counts],
        )


def decide(
    rule: Rule,
    draws: RoundDraws,
    probs_BWV: Tensor,
    draft_BKV: Tensor,
    drafted_BK: Tensor,
    count_B: Tensor,
) -> Tensor:
    """Decides a round by the rule; `Decision.unpack` reads the result. `probs_BWV` is the target's.

    Only the leader calls it: other ranks get its result by message (round_protocol.py). `draws` tosses a coin
    for each draft, with the chance that the rule gives it, and draws the token after the accepted ones. Both
    take numbers that are keyed by seed, prompt and length of text.

    Without drafts (K = 0) the token is drawn from the target's probabilities: regular sampling.
    A row is damaged if a distribution that counts is NaN.
    """
    damaged_BW = has_nan(probs_BWV)
    if drafted_BK.shape[1]:
        # The target's column i follows i drafts: it counts only if the distribution of the last of them,
        # in the draft's column i - 1, is sound, too.
        damaged_BW[:, 1:] |= has_nan(draft_BKV)
        block = block_of(probs_BWV, draft_BKV, drafted_BK, count_B)
        accepted_B, token_B = rule.decide(block, draws)
        overlap_BK = acceptance_prob(block)
        before_BK, standing_BK = rule.standing(block, overlap_BK)
    else:
        accepted_B = torch.zeros_like(count_B)
        token_B = draws.categorical(probs_BWV[:, 0])
        # (B, 0): there is nothing to say of drafts.
        overlap_BK = before_BK = standing_BK = probs_BWV[:, 0, :0].double()

    # Of a row with n drafts the columns 0..n count; those after are undefined.
    damaged_B = (damaged_BW & (order(damaged_BW) <= count_B[:, None])).any(1)
    return Decision.pack(
        accepted_B=accepted_B,
        token_B=token_B,
        damaged_B=damaged_B,
        drafted_BK=drafted_BK,
        overlap_BK=overlap_BK,
        before_BK=before_BK,
        standing_BK=standing_BK,
    )


def block_of(probs_BWV: Tensor, draft_BKV: Tensor, drafted_BK: Tensor, count_B: Tensor) -> DraftBlock:
    """Returns what a rule decides on, in fp64, normalised.

    Ratios and differences of probabilities decide: in fp32, sums over a vocabulary would be off by more than
    the residual max(p - q, 0) of two models that agree. The caller's probabilities stay as they are.
    """
    target_BWV = probs_BWV.to(torch.float64, copy=True)
    target_BWV.div_(target_BWV.sum(-1, keepdim=True))
    wide_BKV = draft_BKV.to(torch.float64, copy=True)
    wide_BKV.div_(wide_BKV.sum(-1, keepdim=True))
    return DraftBlock(target_BWV, wide_BKV, drafted_BK, count_B)
