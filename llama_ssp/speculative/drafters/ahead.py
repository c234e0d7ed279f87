"""Drafting ahead: what the draft does while the target verifies.

It goes on as if its tokens were accepted. It guesses the token that follows them, and drafts behind that. If
the text comes to be what it was taken for, the next proposal is ready, or begun.

Why this is exact. A proposal is a pure function of a row's text and of its draws, whose keys are that text's
(rng.py): seed, prompt, length. What is drafted ahead for a text is therefore the very proposal that would
be drawn for it later, only sooner: a `Memo` of that function. It is looked at for its own text and no other
(`Memo.stands`), which is to say that whether it is used depends on committed tokens alone; and each token
comes with the distribution it was drawn from. So every round is the round it would have been without. In fp32
a seed gives the same text with and without, whatever the timing; in 16 bit and less, passes over other rows
round differently. How the token is guessed, how often the guess is right, and how far it gets are matters of
speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from llama_ssp.config import Overlap
from llama_ssp.distributed.comm import Ranks
from llama_ssp.speculative.coupled import CoupledDraws
from llama_ssp.speculative.drafters.local import DraftModel, Drawn, ModelDrafter, nothing
from llama_ssp.speculative.drafters.memos import Memo, Pays, Tally, merged
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import Draws, Purpose
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Proposal, State

HALF = 0.5  # of a pass: how long an ask waits that comes in the middle of one


class Span(NamedTuple):
    """A pass of the draft model, for pictures: whether it was ahead of being asked, and from when to when."""

    is_ahead: bool
    began_us: int
    ended_us: int


class AheadDrafter(ModelDrafter):
    """A draft model that drafts when it is asked, and in between for the text that it guesses.

    Split over several ranks, it is the first of them: the others (`AheadAssistant`) compute with it.
    """

    def __init__(
        self, runner: ModelRunner, transform: SamplingTransform, draws: Draws, group: Ranks, overlap: Overlap
    ) -> None:
        super().__init__(runner, transform, draws)
        self._group, self._overlap = group, overlap
        self._pays = Pays()
        self._broken_off: bool | None = (
            None  # whether the ask ended drafting ahead; None where it made no pass
        )
        self.tally = Tally()
        self.spans: list[Span] = []
        self._is_ahead = False
        self._memo: Memo | None = None  # what was drafted for the guessed text
        self._ready: list[int] = []  # how many of its drafts continue the row's text
        self._bases: list[int] = []  # how long the texts were when the round began
        self._drafted: list[list[int]] = []

    def start(self, rows: int, capacity: int) -> None:
        super().start(rows, capacity)
        self._forget_memo(rows)

    def forget(self, row: int) -> None:
        super().forget(row)
        self._ready[row] = 0

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        if not max(count):
            return nothing(state)
        self._account(count)
        self._runner.roll_back([length + n for length, n in zip(state.lengths, count, strict=True)])
        proposal = super().propose(state, count)
        self._end_of_passes()
        self._forget_memo(state.rows)
        return proposal

    def ahead(self, state: State, proposal: Proposal, called: Callable[[], bool]) -> None:
        """Drafts for the round to come, until called or done. Between two passes it looks who calls."""
        self._broken_off = None
        self._forget_memo(state.rows)
        if self._overlap is Overlap.off:
            return
        if self._overlap is Overlap.ahead or self._pays:
            passes, self._is_ahead, is_called = self._ahead(state, proposal), True, called()
            while not is_called and next(passes, None) is not None:
                self._broken_off = is_called = called()
            self._is_ahead = False
        self._end_of_passes()

    def roll_back(self, lengths: list[int]) -> None:
        """Forgets what was not committed, but for drafts behind the very texts that were.

        A text without its last token is the old text and drafts that stand: the cache holds it rightly.
        """
        memo = self._memo
        if memo is not None:
            self._ready = [
                memo.held(row) if memo.stands(self._state, row) else 0 for row in range(len(lengths))
            ]
        super().roll_back([length + ready for length, ready in zip(lengths, self._ready, strict=True)])

    def _account(self, count: tuple[int, ...]) -> None:
        """What was ready, what of it is used, and whether it was worth the passes that were waited for."""
        used = sum(min(n, ready) for n, ready in zip(count, self._ready, strict=True))
        self.tally.rows += sum(n > 0 for n in count)
        self.tally.rows_ready += sum(0 < n <= ready for n, ready in zip(count, self._ready, strict=True))
        self.tally.used += used
        if self._broken_off is not None:
            self._pays.learn(used, HALF * self._broken_off)

    def _forget_memo(self, rows: int) -> None:
        self._memo, self._ready = None, [0] * rows

    def _step(self, state: State, offset: int, count: tuple[int, ...]) -> Drawn:
        """Draft number `offset`: remembered where it is, drawn where it is not."""
        held = tuple(min(n, ready) for n, ready in zip(count, self._ready, strict=True))
        drawn: Drawn | None = None
        if self._memo is not None and offset < max(held):
            drawn = self._memo.drawn[offset]
            state.place(drawn.token_B, offset, held)
        missing = tuple(0 if offset < h else n for n, h in zip(count, held, strict=True))
        if offset < max(missing) or drawn is None:
            made = super()._step(state, offset, missing)
            drawn = made if drawn is None else merged([offset < h for h in held], drawn, made)
        return drawn

    def _ahead(self, state: State, proposal: Proposal) -> Iterator[Drawn]:
        """One pass of the draft model a step; nothing is left to do when it ends."""
        pairs = zip(proposal.drafted_BK.tolist(), proposal.count, strict=True)
        self._drafted = [row[:n] for row, n in pairs]
        self._state, self._bases = state, state.lengths
        accepted = state.beyond(self._drafted)
        count = tuple(self._worth(accepted, row) for row in range(state.rows))
        if max(count):
            guess = self._guess(state, accepted, count)
            yield guess
            yield from self._remembered(accepted.beyond([[t] for t in guess.token_B.tolist()]), count)

    def _guess(self, state: State, accepted: State, count: tuple[int, ...]) -> Drawn:
        """What may follow the drafts: drawn as the leader will draw it, but from the draft's distribution.

        The same random numbers go through both distributions, so that they agree the more often, the more
        alike they are. The leader knows nothing of it, and its own draw stays the one that counts.
        """
        before = accepted if isinstance(self._draws, CoupledDraws) else state
        return self._drawn(accepted, 0, count, before.slot(Purpose.CORRECT))

    def _remembered(self, later: State, count: tuple[int, ...]) -> Iterator[Drawn]:
        """The drafts for the batch that was guessed."""
        ends = set(self._transform.end_ids)
        count = tuple(0 if text[-1] in ends else n for text, n in zip(later.texts, count, strict=True))
        self._memo = memo = Memo(later, count)
        for row in range(later.rows):
            if count[row]:
                later.lay(row, self._bases[row])
        for offset in range(max(count)):
            drawn = super()._step(later, offset, count)
            memo.drawn.append(drawn)
            self.tally.drafted += sum(offset < n for n in count)
            yield drawn

    def _worth(self, before: State, row: int) -> int:
        """As many drafts as in this round, where there is room; none where the row has ended."""
        wanted, length = len(self._drafted[row]), before.lengths[row] + 1
        if set(before.texts[row][self._bases[row] :]) & set(self._transform.end_ids):
            return 0
        return max(0, min(wanted, self.limit(length), before.capacity - length - 1))

    def _pass(self, state: State, offset: int, count: tuple[int, ...]) -> Tensor:
        if self._group.world > 1:
            ends = self._ends(state, offset, count)
            self._group.broadcast_ints([*self._runner.cached, *ends])
        began_us = now_us()
        logit_B1V = super()._pass(state, offset, count)
        self.spans.append(Span(self._is_ahead, began_us, now_us()))
        return logit_B1V

    def _end_of_passes(self) -> None:
        if self._group.world > 1:
            self._group.broadcast_ints([])


class AheadDraftShard(DraftModel):
    """Computes its share of a split draft's passes, as the rank that draws tells it.

    Which tokens are drawn it need not know: that rank holds the whole embedding, and the sum over ranks
    that follows every look-up brings the rows here (tensor_parallel.py).
    """

    def __init__(self, runner: ModelRunner, group: Ranks, overlap: Overlap) -> None:
        super().__init__(runner)
        self._group, self._overlap = group, overlap

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        if max(count):
            self._assist(state)
        return Proposal(nothing(state).drafted_BK, None, count)

    def meanwhile(self, state: State, _proposal: Proposal) -> None:
        """Until the rank that draws is done."""
        if self._overlap is not Overlap.off:
            self._assist(state)

    def _assist(self, state: State) -> None:
        while places := self._group.broadcast_ints([]):
            self._runner.cached = places[: state.rows]
            self._runner.logits(state.token_BS, places[state.rows :], [1] * state.rows)


def now_us() -> int:
    """The same for all processes of a machine."""
    return time.monotonic_ns() // 1000
