"""Draws siblings of drafts, from the distributions of any drafter's proposal: no further pass is needed."""

from __future__ import annotations

from dataclasses import replace

import torch

from llama_ssp.config import MAX_SIBLINGS
from llama_ssp.models.transfer import sent
from llama_ssp.speculative.drafters.local import certain_where
from llama_ssp.speculative.rng import Draws, Purpose
from llama_ssp.speculative.siblings import Siblings
from llama_ssp.speculative.state import Proposal, State


def with_siblings(proposal: Proposal, state: State, draws: Draws, wanted: list[int]) -> Proposal:
    """The proposal with `wanted` siblings at each draft of a row.

    Where the draft's distribution has no further token, the rule takes none for drawn.
    """
    each = tuple(n if k else 0 for n, k in zip(wanted, proposal.count, strict=True))
    if proposal.draft_BKV is None or not max(each):
        return proposal
    left_BKV, before_BK, drawn = proposal.draft_BKV.clone(), proposal.drafted_BK, []
    for j in range(max(each)):
        left_BKV.scatter_(2, before_BK[..., None], 0)
        tokens = []
        for i in range(proposal.k):
            idle = [j >= n or i >= k for n, k in zip(each, proposal.count, strict=True)]
            probs_BV = left_BKV[:, i]
            none_B = sent(idle, probs_BV.device) | ~(probs_BV.sum(-1) > 0)
            probs_BV = certain_where(none_B, probs_BV)
            tokens.append(draws.categorical(probs_BV, state.slot(Purpose.SIBLING, MAX_SIBLINGS * i + j)))
        before_BK = torch.stack(tokens, 1)
        drawn.append(before_BK)
    return replace(proposal, siblings=Siblings(torch.stack(drawn, 2), proposal.count, each))
