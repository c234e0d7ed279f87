"""Drafting ahead: what the draft does while the target verifies.

It goes on as if its tokens were accepted. It guesses the token that follows them, and drafts behind that.
Should the texts come to be what it took them for, the next proposal is ready, or begun.

Why this is exact. A proposal is a pure function of a row's text and of its draws, whose keys are that text's
(draws.py): seed, prompt, length. What is drafted ahead for a text is therefore the very proposal that would
be drawn for it later, only sooner: a `Memo` of that function. It is looked at for its own text and no other
(`Memo.stands`), which is to say that whether it is used depends on committed tokens alone; and each token
comes with the law it was drawn from. So every round is the round it would have been without. In fp32 a seed
gives the same text with and without, whatever the timing; how the next token is guessed, how often the guess
is right, and how far drafting got are matters of speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from llama_ssp.config import Overlap
from llama_ssp.coupled import CoupledDraws
from llama_ssp.draws import Draws, Purpose
from llama_ssp.engine.drafters import DraftModel, Drawn, ModelDrafter, nothing
from llama_ssp.engine.runner import Runner
from llama_ssp.engine.state import Proposal, State
from llama_ssp.ranks import Ranks
from llama_ssp.sampling import Laws
from llama_ssp.sending import sent


@dataclass
class Memo:
    """Proposals for texts that may come. `drawn[i]` is every row's draft number i, where it has one."""

    state: State  # the batch as it will be if all was guessed right
    count: tuple[int, ...]  # how many drafts are worth drawing, row by row
    drawn: list[Drawn] = field(default_factory=list)

    def stands(self, state: State, row: int) -> bool:
        """Whether the row's text is the one that was guessed. Nothing else may decide this."""
        return state.keys[row] == self.state.keys[row] and state.texts[row] == self.state.texts[row]

    def held(self, row: int) -> int:
        """How many of the row's drafts are drawn."""
        return min(len(self.drawn), self.count[row])


@dataclass
class Tally:
    """What came of drafting ahead, in drafts and rows."""

    rows: int = 0  # that were asked to draft, round by round
    rows_ready: int = 0  # of which all drafts were there
    drafted: int = 0
    used: int = 0


USUAL, MEMORY, TRY_EVERY = 1.0, 0.95, 16


class Pays:
    """Whether drafting ahead has paid lately, in passes of the draft model, a round.

    A draft that is used saves one. A round whose ask comes in the middle of a pass waits for its end, half of
    one. Where it does not pay it is tried now and then.
    """

    def __init__(self) -> None:
        self._gain, self._rests = USUAL, 0

    def __bool__(self) -> bool:
        self._rests = 0 if self._gain > 0 or self._rests == TRY_EVERY else self._rests + 1
        return self._rests == 0

    def learn(self, used: int, was_called: bool) -> None:
        """From a round before which it went ahead."""
        self._gain = MEMORY * self._gain + (1 - MEMORY) * (used - 0.5 * was_called)


class Span(NamedTuple):
    """A pass of the draft model, for pictures: whether it was ahead of being asked, and from when to when."""

    is_ahead: bool
    began_us: int
    ended_us: int


class AheadDrafter(ModelDrafter):
    """A draft model that drafts when it is asked, and in between for texts that may come.

    Split over several ranks, it is the first of them: the others (`AheadAssistant`) compute with it.
    """

    def __init__(self, runner: Runner, laws: Laws, draws: Draws, group: Ranks, overlap: Overlap) -> None:
        super().__init__(runner, laws, draws)
        self._group, self._overlap, self._pays = group, overlap, Pays()
        self._called: bool | None = None  # whether the last round's drafting ahead was broken off; None: none
        self.tally = Tally()
        self.spans: list[Span] = []
        self._is_ahead = False
        self._memo: Memo | None = None
        self._ready: list[int] = []  # drafts of each row that the memo has for its text

    def start(self, rows: int, capacity: int) -> None:
        super().start(rows, capacity)
        self._memo, self._ready = None, [0] * rows

    def forget(self, row: int) -> None:
        super().forget(row)
        self._ready[row] = 0

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        if not max(count):
            return nothing(state)
        self.tally.rows += sum(n > 0 for n in count)
        self.tally.rows_ready += sum(0 < n <= ready for n, ready in zip(count, self._ready, strict=True))
        used = sum(min(n, ready) for n, ready in zip(count, self._ready, strict=True))
        self.tally.used += used
        if self._called is not None:
            self._pays.learn(used, self._called)
        self._runner.roll_back([length + n for length, n in zip(state.lengths, count, strict=True)])
        proposal = super().propose(state, count)
        self._end_of_passes()
        self._memo, self._ready = None, [0] * state.rows
        return proposal

    def ahead(self, state: State, proposal: Proposal, called: Callable[[], bool]) -> None:
        """Drafts for the round to come, until called or done. Between two passes it looks who calls."""
        self._called = None
        if self._overlap is Overlap.off:
            return
        if self._overlap is Overlap.ahead or self._pays:
            passes, self._is_ahead, is_called = self._ahead(state, proposal), True, called()
            while not is_called and next(passes, None) is not None:
                is_called = called()
            self._is_ahead, self._called = False, is_called
        self._end_of_passes()

    def roll_back(self, lengths: list[int]) -> None:
        """Forgets what was not committed, but for drafts behind the very texts that were."""
        memo = self._memo
        if memo is not None:
            self._ready = [
                memo.held(row) if memo.stands(self._state, row) else 0 for row in range(len(lengths))
            ]
        kept = [length + ready for length, ready in zip(lengths, self._ready, strict=True)]
        super().roll_back(kept)

    def _step(self, state: State, offset: int, count: tuple[int, ...]) -> Drawn:
        """Draft number `offset`: remembered where it is, drawn where it is not."""
        if self._memo is None or offset >= max(self._ready):
            return super()._step(state, offset, count)
        held = tuple(min(n, ready) for n, ready in zip(count, self._ready, strict=True))
        remembered = self._memo.drawn[offset]
        state.place(remembered.token_B, offset, held)
        missing = tuple(0 if offset < h else n for n, h in zip(count, held, strict=True))
        if offset >= max(missing):
            return remembered
        held_B = sent([offset < h for h in held], state.device)
        return merged(held_B, remembered, super()._step(state, offset, missing))

    def _ahead(self, state: State, proposal: Proposal) -> Iterator[Drawn]:
        """One pass of the draft model a step; nothing is left to do when it ends."""
        drafted = [row[:n] for row, n in zip(proposal.drafted_BK.tolist(), proposal.count, strict=True)]
        accepted = state.beyond(drafted)
        count = tuple(self._worth(accepted, row, drafted[row]) for row in range(state.rows))
        if not max(count):
            return
        guess = self._guess(state, accepted, count)
        yield guess
        later = accepted.beyond([[token] for token in guess.token_B.tolist()])
        ends = set(self._laws.end_ids)
        count = tuple(0 if text[-1] in ends else n for text, n in zip(later.texts, count, strict=True))
        self._state, self._memo = state, Memo(later, count)
        for offset in range(max(count)):
            drawn = super()._step(later, offset, count)
            self._memo.drawn.append(drawn)
            self.tally.drafted += sum(offset < n for n in count)
            yield drawn

    def _guess(self, state: State, accepted: State, count: tuple[int, ...]) -> Drawn:
        """What may follow the drafts: drawn as the leader will draw it, but from the draft's law.

        The same random numbers go through both laws, so that they agree the more often, the more alike they
        are. The leader knows nothing of it, and its own draw stays the one that counts.
        """
        seen = accepted if isinstance(self._draws, CoupledDraws) else state
        return self._drawn(accepted, 0, count, seen.slot(Purpose.CORRECT))

    def _worth(self, accepted: State, row: int, drafted: list[int]) -> int:
        """As many as in this round, where there is room; none where the row is about to end."""
        if not drafted or set(drafted) & set(self._laws.end_ids):
            return 0
        length = accepted.lengths[row] + 1
        return max(0, min(len(drafted), self.limit(length), accepted.capacity - length - 1))

    def _pass(self, state: State, offset: int, count: tuple[int, ...]) -> torch.Tensor:
        if self._group.world > 1:
            ends = self._ends(state, offset, count)
            self._group.broadcast_ints([*self._runner.cached, *ends])
        began_us = now_us()
        logits = super()._pass(state, offset, count)
        self.spans.append(Span(self._is_ahead, began_us, now_us()))
        return logits

    def _end_of_passes(self) -> None:
        if self._group.world > 1:
            self._group.broadcast_ints([])


class AheadAssistant(DraftModel):
    """Computes its share of a split draft's passes, as the rank that draws tells it.

    Which tokens are drawn it need not know: that rank holds the whole embedding, and the sum over ranks
    that follows every look-up brings the rows here (load.tensor).
    """

    def __init__(self, runner: Runner, group: Ranks, overlap: Overlap) -> None:
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


def merged(first_B: torch.Tensor, first: Drawn, second: Drawn) -> Drawn:
    """Rows of the one where so marked, and of the other elsewhere."""
    return Drawn(
        torch.where(first_B, first.token_B, second.token_B),
        torch.where(first_B[:, None], first.law_BV, second.law_BV),
    )
