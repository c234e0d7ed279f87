"""Drafts and their siblings, the children of a round's nodes: what they were drawn from, and what to expect.

It shares no code with the rule.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llama_ssp.speculative.round_protocol import RoundResult
from llama_ssp.speculative.verification import DraftBlock


def children(block: DraftBlock) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The drafts of all rows, then their first siblings, and so on: what each was drawn from, (B, K, V), the
    tokens, and which were drawn, (B, K)."""
    left_BKV, token_BK = block.draft_BKV, block.drafted_BK
    drawn_BK = torch.arange(block.k, device=token_BK.device) < block.count_B[:, None]
    yield left_BKV, token_BK, drawn_BK
    branches = block.branches
    for j in range(branches.token_BKS.shape[-1] if branches else 0):
        assert branches is not None
        left_BKV = left_BKV.scatter(2, token_BK[..., None], 0)
        mass_BK1 = left_BKV.sum(-1, keepdim=True)
        drawn_BK = drawn_BK & (branches.count_BK > j) & (mass_BK1[..., 0] > 0)
        token_BK = branches.token_BKS[..., j]
        yield left_BKV / torch.where(mass_BK1 > 0, mass_BK1, 1), token_BK, drawn_BK


def expected_siblings(block: DraftBlock) -> Tensor:
    """The chance that each sibling stands, (B, K, S), given the drafts up to its own and the siblings before
    it."""
    found, weight_B = [], torch.ones_like(block.target_BWV[:, 0, 0])
    drawn = list(children(block))
    for i in range(block.k):
        node_B, target_BV, failed_B = weight_B, block.target_BWV[:, i], torch.ones_like(weight_B)
        for c, (probs_BKV, token_BK, drawn_BK) in enumerate(drawn):
            child_BV, token_B1 = probs_BKV[:, i], token_BK[:, i, None]
            covered_BV = torch.minimum(node_B[:, None] * target_BV, child_BV)
            kept_B, own_B = (probs_BV.gather(1, token_B1)[:, 0] for probs_BV in (covered_BV, child_BV))
            stands_B = torch.where(drawn_BK[:, i] & (own_B > 0), kept_B / own_B, 0)
            if c:
                found.append(torch.where(drawn_BK[:, i], failed_B * covered_BV.sum(-1), 0))
            else:
                weight_B = stands_B
            failed_B = failed_B * (1 - stands_B)
            rest_BV = node_B[:, None] * target_BV - covered_BV
            rest_B = rest_BV.sum(-1)
            whole_B, is_left_B = rest_B + 1 - node_B, drawn_BK[:, i] & (rest_B > 0)
            node_B = torch.where(is_left_B, rest_B / whole_B, node_B)
            target_BV = torch.where(is_left_B[:, None], rest_BV / rest_B[:, None], target_BV)
    return torch.stack(found, -1).view(len(weight_B), block.k, -1)


def siblings_that_stand(block: DraftBlock, result: RoundResult) -> list[tuple[int, int] | None]:
    """Which sibling of which draft each row commits."""
    found: list[tuple[int, int] | None] = []
    tokens = block.branches.token_BKS.tolist() if block.branches else []
    for row, accepted in enumerate(result.accepted):
        siblings = tokens[row][accepted] if tokens and accepted < block.k else []
        token = result.aside(row)
        found.append((accepted, siblings.index(token)) if token in siblings else None)
    return found
