"""How ranks agree: the leader drafts and decides, and the others do what they are told.

A round has two messages: what was drafted, and what was decided. From them every rank derives all
that it does, so nothing hangs on equal seeds or equal rounding. Each message carries a checksum of
what the leader holds the texts' lengths to be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llama_ssp.engine.drafters import Drafter
from llama_ssp.engine.state import Proposal, State
from llama_ssp.errors import DistributedError
from llama_ssp.ranks import Ranks, checksum


@dataclass(frozen=True)
class Verdict:
    """What was decided, on the host. Row b commits its first `accepted[b]` drafts and `token[b]`."""

    drafted: list[list[int]]
    accepted: list[int]
    token: list[int]
    overlap: list[list[float]]
    damaged: list[bool]

    def tokens(self, row: int) -> list[int]:
        return [*self.drafted[row][: self.accepted[row]], self.token[row]]


class LeadingDrafter:
    """The leader's: what it proposes, the other ranks are told."""

    def __init__(self, drafter: Drafter, ranks: Ranks) -> None:
        self._drafter, self._ranks = drafter, ranks

    @property
    def forwards(self) -> int:
        return self._drafter.forwards

    def start(self, rows: int, capacity: int) -> None:
        self._drafter.start(rows, capacity)

    def warm(self, state: State) -> None:
        self._drafter.warm(state)

    def limit(self, length: int) -> int:
        return self._drafter.limit(length)

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        proposal = self._drafter.propose(state, count)
        drafted = [token for row in proposal.drafted_BK.tolist() for token in row]
        _tell(self._ranks, state, [*proposal.count, *drafted])
        return proposal

    def roll_back(self, lengths: list[int]) -> None:
        self._drafter.roll_back(lengths)


class FollowingDrafter:
    """Every other rank's: proposes what the leader does, and knows no law of it."""

    forwards: int = 0

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def start(self, rows: int, capacity: int) -> None:
        pass

    def warm(self, state: State) -> None:
        pass

    def limit(self, length: int) -> int:
        return 0  # how far drafting reaches is the leader's to say

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        told = _hear(self._ranks, state)
        count, drafted = tuple(told[: state.rows]), told[state.rows :]
        drafted_BK = torch.tensor(drafted, dtype=torch.int64, device=state.device).view(
            state.rows, max(count)
        )
        for offset in range(max(count)):
            state.place(drafted_BK[:, offset], offset, count)
        return Proposal(drafted_BK, None, count)

    def roll_back(self, lengths: list[int]) -> None:
        pass


def agreed(ranks: Ranks, state: State, proposal: Proposal, verdict: Verdict | None) -> Verdict:
    """The leader's verdict, on every rank. Overlaps, which steer only the leader's drafting, stay there."""
    if ranks.world == 1:
        assert verdict is not None, "one rank leads itself"
        return verdict
    if verdict is not None:
        _tell(ranks, state, [*verdict.accepted, *verdict.token, *map(int, verdict.damaged)])
        return verdict
    told, rows = _hear(ranks, state), state.rows
    drafted = [row[:n] for row, n in zip(proposal.drafted_BK.tolist(), proposal.count, strict=True)]
    return Verdict(
        drafted=drafted,
        accepted=told[:rows],
        token=told[rows : 2 * rows],
        overlap=[[0.0] * n for n in proposal.count],
        damaged=[bool(d) for d in told[2 * rows :]],
    )


def _tell(ranks: Ranks, state: State, values: list[int]) -> None:
    ranks.broadcast_ints([checksum(state.lengths), *values])


def _hear(ranks: Ranks, state: State) -> list[int]:
    lengths, *values = ranks.broadcast_ints([])
    if lengths != checksum(state.lengths):
        raise DistributedError(
            "the ranks are out of step: their texts differ in length", where=f"rank {ranks.rank}",
            found=str(state.lengths), fix="report it: ranks derive all they do from the leader's messages",
        )  # fmt: skip
    return values
