"""Decides a round by the rule: the definitions below, run call by call, or replayed as a CUDA graph.

After a forward the launches of a decision cost more than what they compute. So on a GPU with CUDA graphs
`decided` is a graph, too, one for each set of shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from llama_ssp.models.cuda_graphs import GraphedModel
from llama_ssp.models.feed import sent
from llama_ssp.models.heads.model import HeadModel
from llama_ssp.models.interface import Model
from llama_ssp.speculative.array_ops import order
from llama_ssp.speculative.drafters.local import certain_where, resting
from llama_ssp.speculative.rng import CounterDraws, Draws, Purpose, heat, inverse_cdf, race
from llama_ssp.speculative.sampling import has_nan
from llama_ssp.speculative.state import Proposal, State
from llama_ssp.speculative.verification import DraftBlock, RoundDraws, Rule, acceptance_prob

Decide = Callable[[Rule, Draws, State, Proposal, Tensor], Tensor]


def draws_for(model: Model | HeadModel, seed: int) -> CounterDraws:
    """Returns the draws of a rank that has this model; where it has graphs, a draw is one."""
    return GraphedDraws(seed, model) if isinstance(model, GraphedModel) else CounterDraws(seed)


def decide_for(draws: Draws) -> Decide:
    """Returns how rounds with these draws are decided."""
    return decide_by_graph if isinstance(draws, GraphedDraws) else decide


def decide(rule: Rule, draws: Draws, state: State, proposal: Proposal, probs_BWV: Tensor) -> Tensor:
    """A round's decision by the rule, as `RoundResult.of` reads it. `probs_BWV` is the target's."""
    count_B = sent(proposal.count, probs_BWV.device)
    given = probs_BWV, proposal.draft_BKV, proposal.drafted_BK, count_B
    return decided(rule, StateDraws(draws, state), *given)


def decided(
    rule: Rule, draws: RoundDraws, probs_BWV: Tensor, draft_BKV: Tensor | None, drafted_BK: Tensor,
    count_B: Tensor,
) -> Tensor:  # fmt: skip
    """The same of tensors alone. Rows are damaged where probabilities that count are NaN."""
    damaged_BW = has_nan(probs_BWV)
    if drafted_BK.shape[1]:
        assert draft_BKV is not None
        damaged_BW[:, 1:] |= has_nan(draft_BKV)
        block = DraftBlock(_normalised(probs_BWV), _normalised(draft_BKV), drafted_BK, count_B)
        accepted_B, token_B = rule.decide(block, draws)
        prob_BK = acceptance_prob(block)
        seen_BN = torch.cat([prob_BK, *rule.standing(block, prob_BK)], 1)
    else:
        accepted_B, token_B = torch.zeros_like(count_B), draws.token(probs_BWV[:, 0])
        seen_BN = probs_BWV[:, 0, :0]
    damaged_B1 = (damaged_BW & (order(damaged_BW) <= count_B[:, None])).any(1, keepdim=True)
    return torch.cat([accepted_B[:, None], token_B[:, None], damaged_B1, drafted_BK, seen_BN.double()], 1)


def block_of(proposal: Proposal, probs_BWV: Tensor) -> DraftBlock:
    """What a rule decides on, in fp64, normalised."""
    assert proposal.draft_BKV is not None
    count_B = sent(proposal.count, probs_BWV.device)
    return DraftBlock(_normalised(probs_BWV), _normalised(proposal.draft_BKV), proposal.drafted_BK, count_B)


def _normalised(probs: Tensor) -> Tensor:
    wide = probs.to(torch.float64, copy=True)
    return wide.div_(wide.sum(-1, keepdim=True))


@dataclass(frozen=True)
class StateDraws:
    """A round's draws for a batch. Nothing random happens in rows that have ended."""

    draws: Draws
    state: State

    def coins(self, chance_BK: Tensor) -> Tensor:
        return self.draws.bernoulli(chance_BK, self.state.slot(Purpose.ACCEPT))

    def token(self, probs_BV: Tensor) -> Tensor:
        probs_BV = resting(probs_BV, self.state.ended)
        return self.draws.categorical(probs_BV, self.state.slot(Purpose.CORRECT))


class GraphedDraws(CounterDraws):
    """The draws of `CounterDraws` on a GPU, by graphs that the model keeps."""

    def __init__(self, seed: int, model: GraphedModel) -> None:
        super().__init__(seed)
        self.model = model

    def _by_cdf(self, probs_BV: Tensor, uniform_B1: Tensor) -> Tensor:
        return self.model.replayed(inverse_cdf, probs_BV, uniform_B1).clone()


@dataclass(frozen=True)
class TableDraws:
    """A round's draws by numbers that are there: coins, a race's clocks; and which rows have ended."""

    coin_BK: Tensor
    clock_BN: Tensor
    ended_B: Tensor

    def coins(self, chance_BK: Tensor) -> Tensor:
        return self.coin_BK < chance_BK

    def token(self, probs_BV: Tensor) -> Tensor:
        return race(certain_where(self.ended_B, probs_BV), self.clock_BN)


def decide_by_graph(rule: Rule, draws: Draws, state: State, proposal: Proposal, probs_BWV: Tensor) -> Tensor:
    """The same as `decide`; the next round overwrites it."""
    assert isinstance(draws, GraphedDraws)
    device, vocab = probs_BWV.device, probs_BWV.shape[-1]
    draft_BKV = probs_BWV[:, :0] if proposal.draft_BKV is None else proposal.draft_BKV
    row_2B = sent([proposal.count, state.ended], device)
    coin_BK = draws._uniforms(state.slot(Purpose.ACCEPT), proposal.k, device)
    clock_BN = draws._clocks(state.slot(Purpose.CORRECT), 2 * heat(vocab), device)
    given = probs_BWV, draft_BKV, proposal.drafted_BK, row_2B, coin_BK, clock_BN
    return draws.model.replayed(_of_tensors(rule), *given)


@cache
def _of_tensors(rule: Rule) -> Callable[..., Tensor]:
    """The rule's decision as one function: graphs are kept by function."""

    def of_tensors(
        probs_BWV: Tensor, draft_BKV: Tensor, drafted_BK: Tensor, row_2B: Tensor, coin_BK: Tensor,
        clock_BN: Tensor,
    ) -> Tensor:  # fmt: skip
        count_B, ended_B = row_2B
        draws = TableDraws(coin_BK, clock_BN, ended_B.bool())
        return decided(rule, draws, probs_BWV, draft_BKV, drafted_BK, count_B)

    return of_tensors
