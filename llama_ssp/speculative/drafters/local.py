"""Who proposes tokens: a draft model, the text so far, or nobody. One interface.

A drafter declares, for each token, the distribution it was drawn from: a model's distribution, or a one-hot
distribution for a token that was looked up. Whatever it drew it submits; how many it draws is decided before
it draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llama_ssp.models.transfer import sent
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import Draws, Purpose, Slot
from llama_ssp.speculative.sampling import SamplingTransform, has_nan, one_hot
from llama_ssp.speculative.state import Proposal, State


@dataclass(frozen=True)
class Drawn:
    """One draft of each row, and the distribution it was drawn from."""

    token_B: Tensor
    probs_BV: Tensor


class Drafter(Protocol):
    """Proposes up to `count` tokens a row."""

    @property
    def forwards(self) -> int: ...

    def start(self, rows: int, capacity: int) -> None: ...

    def warm(self, state: State) -> None: ...

    def forget(self, row: int) -> None:
        """Another text comes into the row."""

    def read(self, state: State, row: int, end: int) -> None:
        """Reads the row's prompt up to `end`, while the others rest."""

    def limit(self, length: int) -> int:
        """How many tokens it can draft for a text of this length."""

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal: ...

    def roll_back(self, lengths: list[int]) -> None: ...


class CachelessDrafter:
    """A drafter that runs no model on this rank, so it has no cache to fill, to clear or to roll back."""

    forwards: int = 0

    def start(self, rows: int, capacity: int) -> None:
        pass

    def warm(self, state: State) -> None:
        pass

    def forget(self, row: int) -> None:
        pass

    def read(self, state: State, row: int, end: int) -> None:
        pass

    def roll_back(self, lengths: list[int]) -> None:
        pass


class NoDrafter(CachelessDrafter):
    """Regular sampling: proposes nothing."""

    def limit(self, length: int) -> int:
        return 0

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        return nothing(state)


class DraftModel:
    """A draft model's passes; who draws from its distributions is said by what is made of it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        runner.limit = None

    @property
    def forwards(self) -> int:
        return self._runner.forwards

    @property
    def device(self) -> torch.device:
        return self._runner.model.device

    def start(self, rows: int, capacity: int) -> None:
        self._runner.start(rows, min(capacity, self._runner.model.context))

    def warm(self, state: State) -> None:
        ends = [length - 1 if self.limit(length) else 0 for length in state.lengths]
        self._runner.warm(state.token_BS, ends)

    def forget(self, row: int) -> None:
        self._runner.forget(row)

    def read(self, state: State, row: int, end: int) -> None:
        if self.limit(state.lengths[row]):
            self._runner.expect(row, state.lengths[row])
            self._runner.read(state.token_BS, row, end)

    def limit(self, length: int) -> int:
        return reach(self._runner.model.context, length)

    def roll_back(self, lengths: list[int]) -> None:
        self._runner.roll_back(lengths)

    def _pass(self, state: State, offset: int, count: tuple[int, ...]) -> Tensor:
        """Logits for draft number `offset` of each row that wants one; other rows are fed nothing."""
        return self._runner.logits(state.token_BS, self._ends(state, offset, count), [1] * state.rows)

    def _ends(self, state: State, offset: int, count: tuple[int, ...]) -> list[int]:
        """Up to where that pass feeds each row."""
        return [
            length + offset if offset < wanted else cached
            for length, wanted, cached in zip(state.lengths, count, self._runner.cached, strict=True)
        ]


class ModelDrafter(DraftModel):
    """A small model that samples from its own distribution, under the same controls as the target."""

    def __init__(self, runner: ModelRunner, transform: SamplingTransform, draws: Draws) -> None:
        super().__init__(runner)
        self._transform = transform
        self._draws = draws

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        if not max(count):
            return nothing(state)
        drawn = [self._step(state, offset, count) for offset in range(max(count))]
        probs_BKV = torch.stack([step.probs_BV for step in drawn], 1)
        damaged_B = within(count, has_nan(probs_BKV)).any(1)
        return Proposal(torch.stack([step.token_B for step in drawn], 1), probs_BKV, count, damaged_B)

    def _step(self, state: State, offset: int, count: tuple[int, ...]) -> Drawn:
        """Draft number `offset` of each row that wants one, put behind its text."""
        return self._drawn(state, offset, count, state.slot(Purpose.DRAFT, offset))

    def _drawn(self, state: State, offset: int, count: tuple[int, ...], slot: Slot) -> Drawn:
        logit_B1V = self._pass(state, offset, count).to(state.device)
        probs_BV = self._transform(logit_B1V, state.prefix(offset, 1))[:, 0]
        token_B = self._draws.categorical(resting(probs_BV, [offset >= n for n in count]), slot)
        state.place(token_B, offset, count)
        return Drawn(token_B, probs_BV)


class DraftShard(DraftModel):
    """Computes its share of a split draft's passes, in step with the rank that draws.

    Which tokens are drawn it need not know: that rank holds the whole embedding, and the sum over ranks
    that follows every look-up brings the rows here (tensor_parallel.py).
    """

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        for offset in range(max(count)):
            self._pass(state, offset, count)
        return Proposal(nothing(state).drafted_BK, None, count)


class NgramDrafter(CachelessDrafter):
    """Looks up what followed the last few tokens when they last occurred (prompt lookup)."""

    def __init__(self, shortest: int, longest: int, vocab: int, dtype: torch.dtype) -> None:
        self._shortest = shortest
        self._longest = longest
        self._vocab = vocab
        self._dtype = dtype

    def limit(self, length: int) -> int:
        return length

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        found = [
            continuation(text, wanted, self._shortest, self._longest)
            for text, wanted in zip(state.texts, count, strict=True)
        ]
        drafted = tuple(len(tokens) for tokens in found)
        if not max(drafted):
            return nothing(state)
        padded = [tokens + [0] * (max(drafted) - len(tokens)) for tokens in found]
        drafted_BK = sent(padded, state.device)
        for offset in range(max(drafted)):
            state.place(drafted_BK[:, offset], offset, drafted)
        like = torch.empty(*drafted_BK.shape, self._vocab, dtype=self._dtype, device=state.device)
        return Proposal(drafted_BK, one_hot(drafted_BK, like), drafted)


def reach(context: int, length: int) -> int:
    """How many tokens a model of this context can draft for a text of this length."""
    return max(0, context - length + 1)


def continuation(text: list[int], wanted: int, shortest: int, longest: int) -> list[int]:
    """What followed the most recent earlier occurrence of the longest matching tail."""
    if wanted <= 0:
        return []
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        tail = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == tail:
                return text[start + size : start + size + wanted]
    return []


def nothing(state: State) -> Proposal:
    """The empty proposal."""
    empty_B0 = torch.empty(state.rows, 0, dtype=torch.int64, device=state.device)
    return Proposal(empty_B0, None, (0,) * state.rows)


def within(count: tuple[int, ...], flag_BW: Tensor) -> Tensor:
    """The flags of each row's first `count` columns; the others are down."""
    if min(count) >= flag_BW.shape[1]:
        return flag_BW
    column_W = torch.arange(flag_BW.shape[1], device=flag_BW.device)
    return flag_BW & (column_W < sent(count, flag_BW.device)[:, None])


def resting(probs_BV: Tensor, idle: list[bool]) -> Tensor:
    """The distributions to draw from: in rows that are idle nothing random happens."""
    return certain_where(sent(idle, probs_BV.device), probs_BV) if any(idle) else probs_BV


def certain_where(condition: Tensor, probs: Tensor) -> Tensor:
    """The distribution, but certain of token 0 where the condition holds."""
    probs = probs.masked_fill(condition[..., None], 0)
    probs[..., 0] += condition
    return probs
