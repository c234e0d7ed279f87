"""Drafts by ranks of their own: the leader requests drafts, and receives their probabilities.

ahead.py is the draft's side. A proposal is tagged, row by row, with the length and a hash of the text it
continues. The leader rejects a proposal that is not for its own texts. One that was finished before its
request is sent at once: it is the reply if it turns out to be for the leader's texts, and is forgotten if
not. Both sides see by its tags which it is.
"""

import time
from array import array
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from llama_ssp.distributed.draft_messages import DraftClient
from llama_ssp.models.passes import sent
from llama_ssp.speculative.drafters.local import Drafter, nothing, reach
from llama_ssp.speculative.state import Proposal, State

# How probabilities are written.
WHOLE = 0
SPARSE = 1
SPARE = 2  # sparsely where at most one in SPARE is not 0: with its id one takes as much as two in fp32


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
            "replies_before_requests": self._link.early,
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
        reply = self._link.reply(expected, pinned=state.device.type == "cuda")
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
    """Returns what a proposal is for, three numbers a row: its length, a hash of its text and of its prompt's
    key, and how many drafts. They are 0 of a row without drafts, of which nothing is proposed.

    Two texts of one length have the same hash by a chance of 2**-64: a proposal that was sent ahead is used
    by it alone.
    """
    result = []
    for text, key, n in zip(state.texts, state.keys, count, strict=True):
        result += [len(text), _hashed(text, key), n] if n else [0, 0, 0]
    return result


def _hashed(text: list[int], key: int) -> int:
    """Returns a signed integer of 64 bits."""
    digest = blake2b(array("q", text).tobytes(), digest_size=8, key=key.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little", signed=True)


def written(probs_BKV: Tensor, top: int | None = None) -> tuple[int, Tensor]:
    """Returns probabilities as bytes, on their device: all, or those that are not 0, if they are few.

    There are at most `top` in each distribution if it is given, and few after top-k, top-p and argmax, too.
    Then the bytes are | values | ids |, as many of each distribution. Else they are those of the tensor, and
    nothing is copied.
    """
    probs_BKV = probs_BKV.detach()
    vocab = probs_BKV.shape[-1]

    if top is None:
        # Counted on the device. To look for places where most are not 0 would take most of a reply's time.
        if int(probs_BKV.count_nonzero()) * SPARE > probs_BKV.numel():  # waits for the device
            return WHOLE, probs_BKV.flatten().view(torch.uint8)
        top = max(1, int(probs_BKV.count_nonzero(-1).amax()))
    if top * SPARE > vocab:
        return WHOLE, probs_BKV.flatten().view(torch.uint8)

    # The largest are all that are not 0. Zeros among them stand for themselves.
    value_BKN, token_BKN = probs_BKV.topk(top, sorted=False)
    token_BKN = token_BKN.to(torch.int32)
    return SPARSE, torch.cat([value_BKN.flatten().view(torch.uint8), token_BKN.flatten().view(torch.uint8)])


def read(
    form: int, payload: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns the probabilities that `written` wrote, to the last bit, on the device."""
    load = sent(payload, device)
    if form == WHOLE:
        return load.view(dtype).view(shape)

    rows, k, _ = shape
    pairs = len(load) // (dtype.itemsize + torch.int32.itemsize)
    value_BKN = load[: pairs * dtype.itemsize].view(dtype).view(rows, k, -1)
    token_BKN = load[pairs * dtype.itemsize :].view(torch.int32).view(rows, k, -1)

    # A damaged distribution has NaN everywhere: whoever looks at any of its tokens has to see it.
    is_damaged_BK1 = value_BKN.isnan().any(-1, keepdim=True)
    rest_BK1 = torch.zeros(rows, k, 1, dtype=dtype, device=device).masked_fill_(is_damaged_BK1, torch.nan)
    return rest_BK1.expand(shape).contiguous().scatter_(2, token_BKN.long(), value_BKN)
