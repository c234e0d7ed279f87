"""Drafts by ranks of their own: the leader requests drafts, and receives their probabilities.

ahead.py is the draft's side. A proposal is tagged, row by row, with the length and a checksum of the text it
continues. The leader rejects a proposal that is not for its own texts.
"""

import math
import time
from array import array
from dataclasses import dataclass, fields
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from llama_ssp.distributed.draft_messages import DraftClient
from llama_ssp.models.passes import sent
from llama_ssp.speculative.drafters.local import Drafter, nothing, reach
from llama_ssp.speculative.state import Proposal, State

# How probabilities are written.
WHOLE = 0
SPARSE = 1
SPARE = 4  # written sparsely if fewer than one entry in SPARE is not 0


@dataclass
class AheadCounts:
    """Counts drafts and rows. A reply holds the counts in the order of the fields."""

    rows: int = 0  # that were to draft, summed over rounds
    rows_ready: int = 0  # of these, with all drafts ready
    drafted: int = 0  # ahead
    used: int = 0


HEAD = 2 + len(fields(AheadCounts)) + 1  # integers between a reply's tags and its drafts


class RemoteDrafter(Drafter):
    """Requests drafts for the leader and receives them.

    A draft that is lost proposes nothing any more: the target continues alone.
    """

    def __init__(self, link: DraftClient, context: int, vocab: int, dtype: torch.dtype) -> None:
        """`dtype` and `vocab` are those of the probabilities, `context` is the draft model's."""
        self._link = link
        self._context = context
        self._vocab = vocab
        self._dtype = dtype
        self._counts = AheadCounts()
        self._forwards = 0
        self._waited_s = 0.0
        self._drafts_waited_us = 0

    @property
    def forwards(self) -> int:
        return self._forwards

    def figures(self) -> dict[str, Any]:
        """Returns figures of the run so far, under the names of the JSON interface."""
        counts = self._counts
        return {
            "rows_asked": counts.rows,
            "rows_ready": counts.rows_ready,
            "ready_share": counts.rows_ready / counts.rows if counts.rows else None,
            "tokens_drafted_ahead": counts.drafted,
            "tokens_drafted_ahead_wasted": counts.drafted - counts.used,
            "leader_waited_ms": 1000 * self._waited_s,
            "draft_waited_ms": self._drafts_waited_us / 1000,
            "replies_discarded": self._link.discarded,
            "draft_lost": self._link.lost,
        }

    def limit(self, length: int) -> int:
        return 0 if self._link.lost else reach(self._context, length)

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        rows = state.rows
        k = max(count)
        expected = tags(state, count)
        if not k:
            return nothing(state)

        began = time.perf_counter()
        reply = self._link.reply(pinned=state.device.type == "cuda")
        if reply is not None and reply.values[: len(expected)] != expected:
            self._link.give_up("its drafts are for other texts")
            reply = None
        if reply is None:
            return nothing(state)
        self._waited_s += time.perf_counter() - began

        # | tags | form | forwards | rows | rows_ready | drafted | used | waited | drafts, B * K |
        start = len(expected) + HEAD
        form, forwards, rows_wanted, rows_ready, ahead, used, waited_us = reply.values[len(expected) : start]
        self._forwards = forwards
        self._counts = AheadCounts(rows=rows_wanted, rows_ready=rows_ready, drafted=ahead, used=used)
        self._drafts_waited_us = waited_us

        drafted_BK = sent(reply.values[start:], state.device).view(rows, k)
        draft_BKV = read(form, reply.payload, (rows, k, self._vocab), self._dtype, state.device)
        state.write_drafts(drafted_BK, count)
        return Proposal(drafted_BK, draft_BKV, count)


def tags(state: State, count: tuple[int, ...]) -> list[int]:
    """Returns what a proposal is for: each row's length, a checksum of its text, and its number of drafts."""
    result = []
    for text, n in zip(state.texts, count, strict=True):
        result += [len(text), crc32(array("q", text).tobytes()) if n else 0, n]
    return result


def written(probs_BKV: Tensor) -> tuple[int, Tensor]:
    """Returns probabilities as bytes, on their device: all, or those that are not 0, if they are few.

    There are few after top-k, top-p and argmax: then the frame has all places, then all values. Else its
    bytes are those of the tensor, and nothing is copied.
    """
    flat_N = probs_BKV.detach().flatten()
    # Most have no zeros, which their minimum tells in a small part of the time that a search takes.
    if bool(flat_N.amin() > 0):  # waits for the device
        return WHOLE, flat_N.view(torch.uint8)

    place_N = flat_N.nonzero()[:, 0]
    if len(place_N) * SPARE > len(flat_N):
        return WHOLE, flat_N.view(torch.uint8)
    value_N = flat_N[place_N]
    return SPARSE, torch.cat([place_N.view(torch.uint8), value_N.view(torch.uint8)])


def read(
    form: int, payload: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns the probabilities that `written` wrote, to the last bit, on the device."""
    load = sent(payload, device)
    if form == WHOLE:
        return load.view(dtype).view(shape)

    places = len(load) // (dtype.itemsize + torch.int64.itemsize) * torch.int64.itemsize
    place_N = load[:places].view(torch.int64)
    value_N = load[places:].view(dtype)
    flat_N = torch.zeros(math.prod(shape), dtype=dtype, device=device)
    return flat_N.index_copy_(0, place_N, value_N).view(shape)
