"""A draft on ranks of its own: its first rank draws, and sends the leader what it drew and from which law."""

from __future__ import annotations

import torch
from torch import Tensor

from llama_ssp.draws import Draws
from llama_ssp.engine.drafters import ModelDrafter, nothing, reach
from llama_ssp.engine.runner import Runner
from llama_ssp.engine.state import Proposal, State
from llama_ssp.placement import LEADER
from llama_ssp.ranks import Ranks
from llama_ssp.sampling import Laws


class SendingDrafter(ModelDrafter):
    """The draft's side: proposes, and sends it."""

    def __init__(self, runner: Runner, laws: Laws, draws: Draws, ranks: Ranks) -> None:
        super().__init__(runner, laws, draws)
        self._ranks = ranks

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        proposal = super().propose(state, count)
        if proposal.draft_BKV is not None and proposal.damaged is not None:
            self._ranks.send(_packed(self.forwards, proposal.damaged, proposal.drafted_BK), LEADER)
            self._ranks.send(proposal.draft_BKV.contiguous(), LEADER)
        return proposal


class RemoteDrafter:
    """The leader's side: says how far drafting may reach, and takes what comes."""

    def __init__(self, ranks: Ranks, source: int, context: int, vocab: int, dtype: torch.dtype) -> None:
        """`dtype` and `vocab` are those of the laws, `context` is the draft model's."""
        self._ranks, self._source = ranks, source
        self._context, self._vocab, self._dtype = context, vocab, dtype
        self.forwards = 0

    def start(self, rows: int, capacity: int) -> None:
        pass

    def warm(self, state: State) -> None:
        pass

    def forget(self, row: int) -> None:
        pass

    def read(self, state: State, row: int, end: int) -> None:
        pass

    def limit(self, length: int) -> int:
        return reach(self._context, length)

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        rows, k = state.rows, max(count)
        if not k:
            return nothing(state)
        packed = torch.empty(1 + rows + rows * k, dtype=torch.int64, device=state.device)
        packed = self._ranks.receive(packed, self._source)
        draft_BKV = torch.empty(rows, k, self._vocab, dtype=self._dtype, device=state.device)
        draft_BKV = self._ranks.receive(draft_BKV, self._source)
        self.forwards = int(packed[0])
        drafted_BK = packed[1 + rows :].view(rows, k)
        for offset in range(k):
            state.place(drafted_BK[:, offset], offset, count)
        return Proposal(drafted_BK, draft_BKV, count, packed[1 : 1 + rows].bool())

    def roll_back(self, lengths: list[int]) -> None:
        pass


def _packed(forwards: int, damaged_B: Tensor, drafted_BK: Tensor) -> Tensor:
    """All integers of a proposal in one tensor."""
    made = torch.tensor([forwards], device=drafted_BK.device)
    return torch.cat([made, damaged_B.to(torch.int64), drafted_BK.flatten()])
