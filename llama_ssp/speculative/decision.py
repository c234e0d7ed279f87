"""Decides a round by the rule, and carries what was decided from the device to the host and to other ranks.

`decide` is a function of tensors alone, so that a model can run it as a CUDA graph: after a forward, kernel
launches cost more than what a decision computes (`CounterDraws.round`).
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


@dataclass(frozen=True)
class Decision:
    """What a round decided, on the host. Row b commits its first `accepted[b]` drafts, then `token[b]`.

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
        return [*self.drafted[row][: self.accepted[row]], self.token[row]]

    @staticmethod
    def pack(
        accepted_B: Tensor, token_B: Tensor, damaged_B: Tensor, drafted_BK: Tensor, overlap_BK: Tensor,
        before_BK: Tensor, standing_BK: Tensor,
    ) -> Tensor:  # fmt: skip
        """Joins a decision's parts for one transfer to the host; chances are fp64, so ids are exact to 2**53:

        | accepted | token | damaged | drafted, K | overlap, K | before, K | standing, K |
        """
        heads = (part_B[:, None] for part_B in (accepted_B, token_B, damaged_B))
        return torch.cat([*heads, drafted_BK, overlap_BK, before_BK, standing_BK], 1)

    @staticmethod
    def unpack(packed_BN: Tensor, count: Sequence[int]) -> Decision:
        """Reads what `pack` wrote; the first `count` drafts of each row are real."""
        rows, k = packed_BN.cpu().tolist(), (packed_BN.shape[1] - 3) // 4
        drafted, overlap, before, standing = (
            [row[3 + part * k :][:n] for row, n in zip(rows, count, strict=True)] for part in range(4)
        )
        ids = [[int(token) for token in row] for row in drafted]
        accepted, token, damaged = ([int(row[part]) for row in rows] for part in range(3))
        stands = [list(zip(*chances, strict=True)) for chances in zip(before, standing, strict=True)]
        return Decision(ids, accepted, token, overlap, list(map(bool, damaged)), stands)

    def to_ints(self) -> list[int]:
        """For a message, without `overlap` and `standing`, which only the leader's draft length needs."""
        counts, damaged = map(len, self.drafted), map(int, self.damaged)
        return [*counts, *self.accepted, *self.token, *damaged, *chain(*self.drafted)]

    @staticmethod
    def from_ints(values: Iterator[int], rows: int) -> Decision:
        """Reads what `to_ints` wrote."""
        counts, accepted, token, damaged = ([*islice(values, rows)] for _ in range(4))
        drafted = [[*islice(values, count)] for count in counts]
        overlap, standing = [[0.0] * count for count in counts], [[(0.0, 0.0)] * count for count in counts]
        return Decision(drafted, accepted, token, overlap, list(map(bool, damaged)), standing)


def decide(
    rule: Rule, draws: RoundDraws, probs_BWV: Tensor, draft_BKV: Tensor, drafted_BK: Tensor, count_B: Tensor
) -> Tensor:
    """Decides a round by the rule; `Decision.unpack` reads the result. `probs_BWV` is the target's.

    Without drafts (K = 0) the token is drawn from the target's probabilities: regular sampling.
    A row is damaged if a distribution that counts is NaN.
    """
    damaged_BW = has_nan(probs_BWV)
    if drafted_BK.shape[1]:
        damaged_BW[:, 1:] |= has_nan(draft_BKV)
        block = block_of(probs_BWV, draft_BKV, drafted_BK, count_B)
        accepted_B, token_B = rule.decide(block, draws)
        overlap_BK = acceptance_prob(block)
        seen_BK = overlap_BK, *rule.standing(block, overlap_BK)
    else:
        accepted_B, token_B = torch.zeros_like(count_B), draws.categorical(probs_BWV[:, 0])
        seen_BK = (probs_BWV[:, 0, :0].double(),) * 3
    damaged_B = (damaged_BW & (order(damaged_BW) <= count_B[:, None])).any(1)
    return Decision.pack(accepted_B, token_B, damaged_B, drafted_BK, *seen_BK)


def block_of(probs_BWV: Tensor, draft_BKV: Tensor, drafted_BK: Tensor, count_B: Tensor) -> DraftBlock:
    """Returns what a rule decides on, in fp64, normalised."""
    wide = (probs.to(torch.float64, copy=True) for probs in (probs_BWV, draft_BKV))
    target_BWV, draft_BKV = (probs.div_(probs.sum(-1, keepdim=True)) for probs in wide)
    return DraftBlock(target_BWV, draft_BKV, drafted_BK, count_B)
