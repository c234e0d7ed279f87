"""Drafts with trained heads: they read the target's hidden states, which each target pass brings.

Drafts are drawn as a draft model's are, from a softmax of the head's logits under the run's controls, which
is what they declare. What differs is where the logits come from: a head reads what the target has made of the
text, a draft model the text.

At position t an EAGLE-3 head reads g, made of the target's hidden states at t, and token t+1. So of a text
of n committed tokens it reads the positions up to n-2, and the last of them gives the first draft. For
further drafts it reads its own z in the place of g. Those keys and values never count: as soon as the target
has fed a position, its own states take their place.

DFlash gives all drafts of a round in one pass. Of a text of n committed tokens it has read the states of all
but the last one, and what they give does not depend on the text. What was read at positions that were
rejected, and what the head's own pass wrote, is read anew before it counts.

A Gemma 4's assistant reads the target's own cache. Of a text it keeps the target's last hidden states alone.

Shapes: B rows, R of them drafting, T tokens of a pass, H the head's width, E the head's own vocabulary, V the
target's, X the tapped states of the target side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llama_ssp.models.graph_sizes import WIDEST
from llama_ssp.models.passes import Pass, RowSpan, sent
from llama_ssp.speculative.drafters.local import Drafter, Drawn, Sampler, nothing, proposal_of, reach
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.state import Proposal, State

if TYPE_CHECKING:
    from llama_ssp.models.heads.model import AssistantModel, DFlashModel, Eagle3Model, HeadModel
    from llama_ssp.models.kv_cache import KVCache


class RunsHead(Drafter):
    """Runs a head, or this rank's part of one, and counts its passes."""

    def __init__(self, head: HeadModel) -> None:
        self._of = head
        self._passes = 0

    @property
    def forwards(self) -> int:
        return self._passes

    @property
    def device(self) -> torch.device:
        return self._of.device

    @property
    def name(self) -> str:
        return f"the draft {self._of.name}"


class SamplesFromHead(RunsHead):
    """Samples from a head's distribution, under the same controls as the target."""

    def __init__(self, head: HeadModel, sampler: Sampler) -> None:
        super().__init__(head)
        self._sampler = sampler

    def _pass(self, fed: Iterable[RowSpan]) -> Pass:
        return Pass(spans=tuple(fed), device=self._of.device)

    def _in_target(self, logit_RE: Tensor, rows: list[int], count: int) -> Tensor:
        """Returns logits by the target's ids, (B, V): -inf of tokens that the head lacks, 0 in other rows."""
        vocab = max(self._sampler.transform.vocab, self._of.vocab)
        ids_E = self._of.ids_E  # the target's ids of the head's tokens; None if they are the same
        wide = torch.promote_types(logit_RE.dtype, torch.float32)
        if ids_E is None and len(rows) == count:
            return logit_RE.to(wide)

        logit_RV = logit_RE.new_full((len(rows), vocab), -torch.inf, dtype=wide)
        if ids_E is None:
            logit_RV[:, : logit_RE.shape[1]] = logit_RE.to(wide)
        else:
            logit_RV.index_copy_(1, ids_E.to(logit_RV.device), logit_RE.to(wide))

        if len(rows) == count:
            return logit_RV
        return logit_RV.new_zeros(count, vocab).index_copy_(0, sent(rows, logit_RV.device), logit_RV)


class HeadDrafter(SamplesFromHead):
    """Drafts one token after the other.

    Of each row the first `_cached` positions were read with the target's states. Those of later positions
    wait in `_state_NH`, position p at place p modulo `_window` of the row.
    """

    def __init__(self, head: Eagle3Model, target: ModelRunner, sampler: Sampler) -> None:
        """`target` is the runner whose passes the head reads; its model has the head's taps."""
        super().__init__(head, sampler)
        self._head = head
        self._window = max(target.prefill_chunk, WIDEST)
        target.observer = self.observe

    def start(self, rows: int, capacity: int) -> None:
        self._slots = min(capacity, self._head.context)
        self._cached = [0] * rows
        self._cache = self._head.new_cache(rows, self._slots)
        self._state_NH = self._head.new_states(rows, self._window)

    def prefill(self, state: State) -> None:
        """Reads what the target's prefill has brought, except the last position, which the draft needs."""
        self._read(state.token_BS, [length - 2 for length in state.lengths])

    def refill(self, state: State, kept: dict[int, int]) -> None:
        ends = list(self._cached)
        for row in kept:
            ends[row] = state.lengths[row] - 2
        self._read(state.token_BS, ends)

    def limit(self, length: int) -> int:
        """Returns 0 before there is a hidden state: a text of one token has none."""
        return reach(self._head.context, length) if length > 1 else 0

    @torch.inference_mode()
    def observe(self, token_BS: Tensor, fed: list[RowSpan], state_TX: Tensor) -> None:
        """Keeps the target's hidden states of a pass; what the head has read at these positions is stale."""
        for row, start, _ in fed:
            self._cached[row] = min(self._cached[row], start)

        # What waits is read before the new states would take its places.
        if any(start + count - self._cached[row] > self._window for row, start, count in fed):
            ends = list(self._cached)
            for row, start, _ in fed:
                ends[row] = start
            self._read(token_BS, ends)

        self._state_NH[self._places(fed)] = self._head.fused(state_TX)

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        if not max(count):
            return nothing(state)

        lengths = state.lengths
        drawn: list[Drawn] = []
        rows: list[int] = []
        z_RH = self._state_NH  # from the second draft on, what the head gave for the last one, of `rows`
        for offset in range(max(count)):
            wanted = [row for row, n in enumerate(count) if n > offset]
            if offset == 0:
                # What the head's cache lacks; the last position is read again if nothing is lacking.
                starts = [min(self._cached[row], lengths[row] - 2) for row in wanted]
                fed = [RowSpan(row, s, lengths[row] - 1 - s) for row, s in zip(wanted, starts, strict=True)]
                g_TH = self._state_NH[self._places(fed)]
            else:
                fed = [RowSpan(row, lengths[row] - 2 + offset, 1) for row in wanted]
                places = None if wanted == rows else sent([rows.index(row) for row in wanted], z_RH.device)
                g_TH = z_RH if places is None else z_RH[places]

            logit_RE, z_RH = self._forward(state.token_BS, fed, g_TH)
            rows = wanted
            logit_BV = self._in_target(logit_RE.to(state.device), rows, state.rows)
            drawn.append(self._sampler.draw(state, offset, count, logit_BV))

        for row, n in enumerate(count):
            if n:
                self._cached[row] = lengths[row] - 1
        return proposal_of(drawn, count)

    def _read(self, token_BS: Tensor, ends: list[int]) -> None:
        """Reads each row up to its end, as far as the cache goes."""
        fed = [
            RowSpan(row, cached, min(end, self._slots) - cached)
            for row, (cached, end) in enumerate(zip(self._cached, ends, strict=True))
            if cached < min(end, self._slots)
        ]
        if fed:
            self._passes += 1
            g_TH = self._state_NH[self._places(fed)]
            self._head.states(_after(token_BS, fed), g_TH, self._pass(fed), self._cache)
        self._cached = [max(pair) for pair in zip(self._cached, ends, strict=True)]

    def _forward(self, token_BS: Tensor, fed: list[RowSpan], g_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits (R, E) and z (R, H) of the last position of each row that is fed."""
        self._passes += 1
        return self._head.step(_after(token_BS, fed), g_TH, self._pass(fed), self._cache)

    def _places(self, fed: list[RowSpan]) -> Tensor | slice:
        """Returns where the states of these positions stand in `_state_NH`."""
        window = self._window
        if len(fed) == 1:  # a slice, which needs no copy to the device
            row, start, count = fed[0]
            first = row * window + start % window
            if start % window + count <= window:
                return slice(first, first + count)
        places = [row * window + (start + i) % window for row, start, count in fed for i in range(count)]
        return sent(places, self._head.device)


def _after(token_BS: Tensor, fed: list[RowSpan]) -> Tensor:
    """Returns the token after each of these positions, (T,)."""
    if len(fed) == 1:
        row, start, count = fed[0]
        return token_BS[row, start + 1 : start + 1 + count]
    row_T = [row for row, _, count in fed for _ in range(count)]
    next_T = [start + i + 1 for _, start, count in fed for i in range(count)]
    row_T, next_T = sent([row_T, next_T], token_BS.device)
    return token_BS[row_T, next_T]


class BlockHeadDrafter(SamplesFromHead):
    """Draws each draft from the distribution that the pass gave at its place.

    It does not depend on the drafts before it. The target's does, and the rules compare both at that place:
    q may be any distribution that the draft was drawn from.
    """

    def __init__(self, head: DFlashModel, target: ModelRunner, sampler: Sampler) -> None:
        """`target` is the runner whose passes the head reads; its model has the head's taps."""
        super().__init__(head, sampler)
        self._head = head
        target.observer = self.observe

    def start(self, rows: int, capacity: int) -> None:
        self._slots = min(capacity + self._head.width, self._head.context)
        self._cache: KVCache = self._head.new_cache(rows, self._slots)

    def limit(self, length: int) -> int:
        """Returns a block's drafts, or 0 where the block would not stand within the head's context."""
        return self._head.drafts if length - 1 + self._head.width <= self._head.context else 0

    def observe(self, token_BS: Tensor, fed: list[RowSpan], state_TX: Tensor) -> None:
        """Reads the target's hidden states of a pass, as far as the cache goes."""
        kept = [RowSpan(row, start, min(count, self._slots - start)) for row, start, count in fed]
        if any(inside_span.tokens < span.tokens for inside_span, span in zip(kept, fed, strict=True)):
            inside = [start + i < self._slots for _, start, count in fed for i in range(count)]
            state_TX = state_TX[sent(inside, state_TX.device)]
        kept = [span for span in kept if span.tokens > 0]
        if kept:
            self._head.remember(state_TX, self._pass(kept), self._cache)

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        if not max(count):
            return nothing(state)

        self._passes += 1
        rows = [row for row, n in enumerate(count) if n]
        last = [state.lengths[row] - 1 for row in rows]
        row_R, last_R = sent([rows, last], state.device)
        fed = [RowSpan(row, start, self._head.width) for row, start in zip(rows, last, strict=True)]
        logit_RKE = self._head.logits(state.token_BS[row_R, last_R], self._pass(fed), self._cache)

        drawn: list[Drawn] = []
        for offset in range(max(count)):
            wanted = [row for row, n in enumerate(count) if n > offset]
            places = sent([rows.index(row) for row in wanted], logit_RKE.device)
            logit_BV = self._in_target(logit_RKE[places, offset].to(state.device), wanted, state.rows)
            drawn.append(self._sampler.draw(state, offset, count, logit_BV))
        return proposal_of(drawn, count)


class AssistantDrafter(SamplesFromHead):
    """Drafts with a head that reads the keys and values in the target's cache, and has none of its own.

    Of a text of n committed tokens the target has read n - 1. The head is given the last token, and the
    target's state of the one before it: position p is at place p modulo `WIDEST` of the row. Each further
    draft is given the draft before it, and the state that the head made; where the query stands, and what it
    sees, stay the same within a round.
    """

    def __init__(self, head: AssistantModel, target: ModelRunner, sampler: Sampler) -> None:
        """`target` is the runner whose passes and cache the head reads."""
        super().__init__(head, sampler)
        self._head = head
        self._target = target
        target.observer = self.observe

    def start(self, rows: int, capacity: int) -> None:
        self._state_NX = self._head.new_states(rows, WIDEST)

    def limit(self, length: int) -> int:
        """Returns 0 before there is a hidden state: a text of one token has none."""
        return reach(self._head.context, length) if length > 1 else 0

    @torch.inference_mode()
    def observe(self, token_BS: Tensor, fed: list[RowSpan], state_TX: Tensor) -> None:
        """Keeps the last of the target's hidden states of a pass, by position."""
        places: list[int] = []
        kept: list[int] = []
        begin = 0
        for row, start, count in fed:
            last = range(max(0, count - WIDEST), count)
            places += [row * WIDEST + (start + i) % WIDEST for i in last]
            kept += [begin + i for i in last]
            begin += count
        place_N, kept_N = sent([places, kept], state_TX.device)
        state_NX = self._target.model.normed(state_TX[kept_N])
        self._state_NX[place_N] = state_NX.to(self._state_NX.dtype)

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        if not max(count):
            return nothing(state)

        lengths = state.lengths
        drawn: list[Drawn] = []
        rows = [row for row, n in enumerate(count) if n]
        places = [row * WIDEST + (lengths[row] - 2) % WIDEST for row in rows]
        state_RX = self._state_NX[sent(places, self._head.device)]
        for offset in range(max(count)):
            wanted = [row for row, n in enumerate(count) if n > offset]
            if wanted != rows:
                state_RX = state_RX[sent([rows.index(row) for row in wanted], state_RX.device)]
                rows = wanted

            # The last token of the text, or the draft before this one.
            row_R, last_R = sent([rows, [lengths[row] - 1 + offset for row in rows]], state.device)
            texts = [(row, lengths[row]) for row in rows]
            self._passes += 1
            token_R = state.token_BS[row_R, last_R]
            logit_RE, state_RX = self._head.step(token_R, state_RX, texts, self._target.cache)
            logit_BV = self._in_target(logit_RE.to(state.device), rows, state.rows)
            drawn.append(self._sampler.draw(state, offset, count, logit_BV))
        return proposal_of(drawn, count)


class AssistantShard(RunsHead):
    """Computes its share of a split assistant's passes, in step with the rank that draws.

    It needs neither tokens nor states: sums over ranks bring here what the blocks are given.
    """

    def __init__(self, head: AssistantModel, target: ModelRunner) -> None:
        """`target` is the runner of this rank's part of the target, whose cache the head reads."""
        super().__init__(head)
        self._head = head
        self._target = target

    def limit(self, length: int) -> int:
        return reach(self._head.context, length) if length > 1 else 0

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        for offset in range(max(count)):
            self._passes += 1
            texts = [(row, state.lengths[row]) for row, n in enumerate(count) if n > offset]
            self._head.follow(texts, self._target.cache)
        return Proposal(nothing(state).drafted_BK, None, count)


def head_drafter(head: Any, target: ModelRunner, sampler: Sampler) -> SamplesFromHead:
    """Returns the drafter of a head of this kind."""
    if head.shares_cache:
        return AssistantDrafter(head, target, sampler)
    return BlockHeadDrafter(head, target, sampler) if head.drafts else HeadDrafter(head, target, sampler)
