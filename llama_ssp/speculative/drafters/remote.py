"""A draft on ranks of its own: its first rank draws, and sends the leader what it drew and from which
distribution.

A proposal is tagged, row by row, with the length and a checksum of the text it continues. The leader takes
none that is not about its own texts.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import astuple, dataclass, fields
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from llama_ssp.config import Overlap
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.draft_messages import DraftClient, DraftServer
from llama_ssp.models.transfer import sent
from llama_ssp.speculative.drafters.ahead import AheadDrafter, Span, now_us
from llama_ssp.speculative.drafters.local import CachelessDrafter, nothing, reach
from llama_ssp.speculative.drafters.memos import Tally
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import Draws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Proposal, State

WHOLE, SPARSE = 0, 1  # how distributions are written
SPARE = 4  # a distribution is written whole, unless fewer than one entry in so many is not 0
TOLD = 2 + len(fields(Tally)) + 2  # integers about drafting, beside the drafts
ROUNDS_KEPT = 64  # of which a picture can be made


@dataclass(frozen=True)
class Exchange:
    """One question and its answer, on the leader's clock, and what the draft has done since the last one.

    The draft's times are its own machine's, which is the leader's where they sit on one machine.
    """

    asked_us: int
    replied_us: int
    spans: tuple[Span, ...]


class SendingDrafter(AheadDrafter):
    """The draft's side: proposes, and sends it; drafts ahead until the leader's next message has come."""

    def __init__(
        self,
        runner: ModelRunner,
        transform: SamplingTransform,
        draws: Draws,
        group: Ranks,
        line: DraftServer,
        overlap: Overlap,
    ) -> None:
        super().__init__(runner, transform, draws, group, overlap)
        self._line, self._waited_s = line, line.waited_s

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        proposal = super().propose(state, count)
        if proposal.draft_BKV is not None and proposal.damaged is not None:
            how, load = written(proposal.draft_BKV)
            drafts = [*proposal.damaged.long().tolist(), *proposal.drafted_BK.flatten().tolist()]
            spans, self.spans = [time for span in self.spans for time in span], []
            told = [self.forwards, *astuple(self.tally), int(1e6 * (self._line.waited_s - self._waited_s))]
            self._line.send_reply([*tags(state, count), how, *told, len(spans), *spans, *drafts], load)
        return proposal

    def meanwhile(self, state: State, proposal: Proposal) -> None:
        """The leader's next message is what ends it."""
        self.ahead(state, proposal, self._line.has_request)


class RemoteDrafter(CachelessDrafter):
    """The leader's side: says how far drafting may reach, and takes what comes.

    A draft that is lost proposes nothing any more: the target goes on alone.
    """

    def __init__(self, line: DraftClient, context: int, vocab: int, dtype: torch.dtype) -> None:
        """`dtype` and `vocab` are those of the distributions, `context` is the draft model's."""
        self._line = line
        self._context, self._vocab, self._dtype = context, vocab, dtype
        self._tally, self._waited_us, self._drafts_waited_us = Tally(), 0, 0
        self.history: deque[Exchange] = deque(maxlen=ROUNDS_KEPT)

    def figures(self) -> dict[str, Any]:
        """What came of drafting apart, under the names of the JSON interface."""
        tally = self._tally
        return {
            "rows_asked": tally.rows,
            "rows_ready": tally.rows_ready,
            "ready_share": tally.rows_ready / tally.rows if tally.rows else None,
            "tokens_drafted_ahead": tally.drafted,
            "tokens_drafted_ahead_wasted": tally.drafted - tally.used,
            "leader_waited_ms": self._waited_us / 1000,
            "draft_waited_ms": self._drafts_waited_us / 1000,
            "replies_discarded": self._line.discarded,
            "draft_lost": self._line.lost,
        }

    def limit(self, length: int) -> int:
        return 0 if self._line.lost else reach(self._context, length)

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        rows, k, own = state.rows, max(count), tags(state, count)
        if not k:
            return nothing(state)
        asked_us = now_us()
        reply = self._line.reply()
        if reply is not None and reply.values[: len(own)] != own:
            self._line.give_up("what it drafted is about other texts")
            reply = None
        if reply is None:
            return nothing(state)
        how, self.forwards, *told = reply.values[len(own) : len(own) + TOLD]
        *tally, self._drafts_waited_us, times = told
        self._tally = Tally(*tally)
        rest = reply.values[len(own) + TOLD :]
        self._keep(asked_us, rest[:times])
        drafts = sent(rest[times:], state.device)
        drafted_BK = drafts[rows:].view(rows, k)
        draft_BKV = sent(read(how, reply.payload, (rows, k, self._vocab), self._dtype), state.device)
        for offset in range(k):
            state.place(drafted_BK[:, offset], offset, count)
        return Proposal(drafted_BK, draft_BKV, count, drafts[:rows].bool())

    def _keep(self, asked_us: int, times: list[int]) -> None:
        replied_us = now_us()
        self._waited_us += replied_us - asked_us
        spans = tuple(Span(bool(a), b, c) for a, b, c in zip(*[iter(times)] * 3, strict=True))
        self.history.append(Exchange(asked_us, replied_us, spans))


def tags(state: State, count: tuple[int, ...]) -> list[int]:
    """What a proposal is about: each row's length, a checksum of its text, and how many drafts."""
    found = []
    for text, n in zip(state.texts, count, strict=True):
        found += [len(text), crc32(array("q", text).tobytes()) if n else 0, n]
    return found


def written(probs_BKV: Tensor) -> tuple[int, bytes]:
    """Laws as bytes: whole, or only what is not 0 where that is much less (after top-k, top-p, argmax)."""
    flat = probs_BKV.detach().cpu().flatten()
    place = flat.nonzero()[:, 0]
    if len(place) * SPARE > len(flat):
        return WHOLE, flat.numpy().tobytes()
    return SPARSE, flat[place].numpy().tobytes() + place.numpy().tobytes()


def read(how: int, load: bytes, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """The distributions that `written` wrote, to the last bit."""
    if how == WHOLE:
        return torch.frombuffer(bytearray(load), dtype=dtype).view(shape)
    count = len(load) // (dtype.itemsize + torch.int64.itemsize)
    flat = torch.zeros(shape, dtype=dtype).flatten()
    if count:
        values = torch.frombuffer(bytearray(load), dtype=dtype, count=count)
        place = bytearray(load[count * dtype.itemsize :])
        flat[torch.frombuffer(place, dtype=torch.int64)] = values
    return flat.view(shape)
