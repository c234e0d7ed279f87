"""A draft on ranks of its own: its first rank draws, and sends the leader what it drew and from which law.

A proposal is tagged, row by row, with the length and a checksum of the text it continues. The leader takes
none that is not about its own texts.
"""

from __future__ import annotations

import logging
from array import array
from zlib import crc32

import torch
from torch import Tensor

from llama_ssp.draws import Draws
from llama_ssp.engine.ahead import AheadDrafter, Tally
from llama_ssp.engine.drafters import nothing, reach
from llama_ssp.engine.runner import Runner
from llama_ssp.engine.state import Proposal, State
from llama_ssp.ranks import Answerer, Asker, LostPeer, Ranks
from llama_ssp.sampling import Laws

log = logging.getLogger(__name__)

WHOLE, SPARSE = 0, 1  # how laws are written
SPARE = 4  # a law is written whole, unless fewer than one entry in so many is not 0
TOLD = 5  # integers about drafting, beside the drafts


class SendingDrafter(AheadDrafter):
    """The draft's side: proposes, and sends it; drafts ahead until the leader's next message has come."""

    def __init__(
        self, runner: Runner, laws: Laws, draws: Draws, group: Ranks, line: Answerer, goes_ahead: bool
    ) -> None:
        super().__init__(runner, laws, draws, group, goes_ahead)
        self._line = line

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        proposal = super().propose(state, count)
        if proposal.draft_BKV is not None and proposal.damaged is not None:
            how, load = written(proposal.draft_BKV)
            drafts = [*proposal.damaged.long().tolist(), *proposal.drafted_BK.flatten().tolist()]
            tally = self.tally
            told = [self.forwards, tally.rows, tally.rows_ready, tally.drafted, tally.used]
            self._line.answer([*tags(state, count), how, *told, *drafts], load)
        return proposal

    def meanwhile(self, state: State, proposal: Proposal) -> None:
        """The leader's next message is what ends it."""
        self.ahead(state, proposal, self._line.come)


class RemoteDrafter:
    """The leader's side: says how far drafting may reach, and takes what comes.

    A draft that is lost proposes nothing any more: the target goes on alone.
    """

    def __init__(self, line: Asker, context: int, vocab: int, dtype: torch.dtype, may_lose: bool) -> None:
        """`dtype` and `vocab` are those of the laws, `context` is the draft model's."""
        self._line, self._may_lose = line, may_lose
        self._context, self._vocab, self._dtype = context, vocab, dtype
        self.forwards = 0
        self.tally = Tally()

    def start(self, rows: int, capacity: int) -> None:
        pass

    def warm(self, state: State) -> None:
        pass

    def forget(self, row: int) -> None:
        pass

    def read(self, state: State, row: int, end: int) -> None:
        pass

    def limit(self, length: int) -> int:
        return 0 if self._line.lost else reach(self._context, length)

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        rows, k, own = state.rows, max(count), tags(state, count)
        if not k:
            return nothing(state)
        while (reply := self._line.reply()) is not None:
            if reply.values[: len(own)] == own:
                break
            self._line.refuse()
        if reply is None:
            self._lose()
            return nothing(state)
        how, self.forwards, *told = reply.values[len(own) : len(own) + 1 + TOLD]
        self.tally = Tally(*told)
        drafts = torch.tensor(reply.values[len(own) + 1 + TOLD :], device=state.device)
        drafted_BK = drafts[rows:].view(rows, k)
        draft_BKV = read(how, reply.load, (rows, k, self._vocab), self._dtype).to(state.device)
        for offset in range(k):
            state.place(drafted_BK[:, offset], offset, count)
        return Proposal(drafted_BK, draft_BKV, count, drafts[:rows].bool())

    def roll_back(self, lengths: list[int]) -> None:
        pass

    def _lose(self) -> None:
        if not self._may_lose:
            raise LostPeer(
                "the draft has gone or does not answer", where="its first rank", found=self._line.lost,
                fix="look there for the first error; placement.on_draft_loss=continue lets the target go on",
            )  # fmt: skip
        log.warning("the draft is lost (%s): the target goes on alone", self._line.lost)


def tags(state: State, count: tuple[int, ...]) -> list[int]:
    """What a proposal is about: each row's length, a checksum of its text, and how many drafts."""
    found = []
    for text, n in zip(state.texts, count, strict=True):
        found += [len(text), crc32(array("q", text).tobytes()) if n else 0, n]
    return found


def written(law_BKV: Tensor) -> tuple[int, bytes]:
    """Laws as bytes: whole, or only what is not 0 where that is much less (after top-k, top-p, argmax)."""
    flat = law_BKV.detach().cpu().flatten()
    place = flat.nonzero()[:, 0]
    if len(place) * SPARE > len(flat):
        return WHOLE, flat.numpy().tobytes()
    return SPARSE, flat[place].numpy().tobytes() + place.numpy().tobytes()


def read(how: int, load: bytes, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """The laws that `written` wrote, to the last bit."""
    if how == WHOLE:
        return torch.frombuffer(bytearray(load), dtype=dtype).view(shape)
    count = len(load) // (dtype.itemsize + torch.int64.itemsize)
    flat = torch.zeros(shape, dtype=dtype).flatten()
    if count:
        values = torch.frombuffer(bytearray(load), dtype=dtype, count=count)
        place = bytearray(load[count * dtype.itemsize :])
        flat[torch.frombuffer(place, dtype=torch.int64)] = values
    return flat.view(shape)
