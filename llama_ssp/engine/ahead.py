"""Drafting ahead: what the draft does while the target verifies.

It goes on as if its tokens were accepted. It guesses the token that follows them, and drafts behind that.
With time to spare it drafts for other texts that may come, the likeliest first (branches.py). Should a text
come to be one of those it was taken for, the next proposal is ready, or begun.

Why this is exact. A proposal is a pure function of a row's text and of its draws, whose keys are that text's
(draws.py): seed, prompt, length. What is drafted ahead for a text is therefore the very proposal that would
be drawn for it later, only sooner: a `Memo` of that function. It is looked at for its own text and no other
(`Memo.stands`), which is to say that whether it is used depends on committed tokens alone; and each token
comes with the law it was drawn from. So every round is the round it would have been without. In fp32 a seed
gives the same text with and without, whatever the timing; how other tokens are guessed, how often a guess is
right, for which texts it drafts, and how far it gets are matters of speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.config import Overlap, SpeculationConf
from llama_ssp.coupled import CoupledDraws
from llama_ssp.draws import Draws, Purpose, Slot
from llama_ssp.engine.branches import Hopes, Rivals, likeliest, parting
from llama_ssp.engine.drafters import DraftModel, Drawn, ModelDrafter, nothing, resting
from llama_ssp.engine.memos import SELDOM, USUAL, Memo, Pays, Tally, merged
from llama_ssp.engine.runner import LAG, Runner
from llama_ssp.engine.state import Proposal, State
from llama_ssp.ranks import Ranks
from llama_ssp.sampling import Laws

HALF = 0.5  # of a pass: how long an ask waits that comes in the middle of one


class Span(NamedTuple):
    """A pass of the draft model, for pictures: whether it was ahead of being asked, and from when to when."""

    is_ahead: bool
    began_us: int
    ended_us: int


class AheadDrafter(ModelDrafter):
    """A draft model that drafts when it is asked, and in between for texts that may come.

    Split over several ranks, it is the first of them: the others (`AheadAssistant`) compute with it.
    """

    def __init__(self, runner: Runner, laws: Laws, draws: Draws, group: Ranks, how: SpeculationConf) -> None:
        super().__init__(runner, laws, draws)
        self._group, self._how, self._hopes = group, how, Hopes()
        self._pays, self._branches_pay = Pays(USUAL), Pays(SELDOM)
        self._went: dict[Pays, bool] = {}  # what it did before this round, and whether the ask broke it off
        self.tally = Tally()
        self.spans: list[Span] = []
        self._is_ahead = False
        branching = how.overlap in (Overlap.auto, Overlap.branches) and how.branches > 0
        greedy = laws.controls.temperature == 0  # such laws leave nothing but what they chose
        self._uncut = laws.uncut() if branching and greedy else None
        self._wide: list[Tensor] = []  # the laws of the last proposal before they were cut, where they are
        self._memos: list[Memo] = []  # the guess first, then branches
        self._found: list[Memo | None] = []  # which of them is about the row's text
        self._ready: list[int] = []  # how many drafts it has
        self._bases: list[int] = []  # how long the texts were when the round began
        self._drafted: list[list[int]] = []
        self._fed: list[list[int]] = []  # the text that each row's cache is filled with; empty between rounds

    def start(self, rows: int, capacity: int) -> None:
        super().start(rows, capacity)
        self._fed = []
        self._forget_memos(rows)

    def forget(self, row: int) -> None:
        super().forget(row)
        self._found[row], self._ready[row] = None, 0

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        if not max(count):
            return nothing(state)
        self._account(state, count)
        self._runner.roll_back([length + n for length, n in zip(state.lengths, count, strict=True)])
        self._wide.clear()
        proposal = super().propose(state, count)
        self._end_of_passes()
        self._forget_memos(state.rows)
        return proposal

    def ahead(self, state: State, proposal: Proposal, called: Callable[[], bool]) -> None:
        """Drafts for the round to come, until called or done. Between two passes it looks who calls."""
        self._went.clear()
        self._forget_memos(state.rows)
        if self._how.overlap is Overlap.off:
            return
        if self._how.overlap is not Overlap.auto or self._pays:
            passes, self._is_ahead, is_called = self._ahead(state, proposal), True, called()
            while not is_called and next(passes, None) is not None:
                is_called = called()
            self._is_ahead = False
            self._went |= {latest: is_called for latest in [*self._went][-1:]}
        self._end_of_passes()

    def roll_back(self, lengths: list[int]) -> None:
        """Forgets what was not committed, but for drafts behind the very texts that were."""
        kept = list(lengths)
        for row, fed in enumerate(self._fed):
            text, base = self._state.texts[row], self._bases[row]
            memo = next((memo for memo in self._memos if memo.stands(self._state, row)), None)
            self._found[row], self._ready[row] = memo, memo.held(row) if memo else 0
            if memo is not None and fed is memo.state.texts[row]:
                kept[row] += self._ready[row]
            else:
                kept[row] = min(kept[row], parting(fed, text, base) + 1)
            if self._drafted[row] and len(text) > base:
                self._hopes.learn(parting(self._drafted[row], text[base:]), len(self._drafted[row]))
        self._fed = []
        super().roll_back(kept)

    def _account(self, state: State, count: tuple[int, ...]) -> None:
        """What was ready, what of it is used, and whether it was worth the passes that were waited for."""
        used = [min(n, ready) for n, ready in zip(count, self._ready, strict=True)]
        by_branches = sum(n for n, memo in zip(used, self._found, strict=True) if memo and memo.is_branch)
        self.tally.rows += sum(n > 0 for n in count)
        self.tally.rows_ready += sum(0 < n <= ready for n, ready in zip(count, self._ready, strict=True))
        self.tally.used += sum(used)
        self.tally.branches_used += by_branches
        cached = self._runner.cached
        lags = any(
            length - c > LAG and not n for length, c, n in zip(state.lengths, cached, used, strict=True)
        )
        for pays, was_called in self._went.items():
            if pays is self._pays:
                pays.learn(sum(used) - by_branches, HALF * was_called)
            else:  # a cache that a branch was fed to takes a pass to catch up
                pays.learn(by_branches, HALF * was_called + lags)

    def _forget_memos(self, rows: int) -> None:
        self._memos, self._found, self._ready = [], [None] * rows, [0] * rows

    def _step(self, state: State, offset: int, count: tuple[int, ...]) -> Drawn:
        """Draft number `offset`: remembered where it is, drawn where it is not."""
        held = tuple(min(n, ready) for n, ready in zip(count, self._ready, strict=True))
        drawn: Drawn | None = None
        for memo in self._memos:
            own = [found is memo and offset < n for found, n in zip(self._found, held, strict=True)]
            if any(own):
                drawn = memo.drawn[offset] if drawn is None else merged(own, memo.drawn[offset], drawn)
        if drawn is not None:
            state.place(drawn.token_B, offset, held)
        missing = tuple(0 if offset < h else n for n, h in zip(count, held, strict=True))
        if offset < max(missing) or drawn is None:
            made = super()._step(state, offset, missing)
            drawn = made if drawn is None else merged([offset < h for h in held], drawn, made)
        self._wide += [] if drawn.wide_BV is None else [drawn.wide_BV]
        return drawn

    def _drawn(self, state: State, offset: int, count: tuple[int, ...], slot: Slot) -> Drawn:
        drawn = super()._drawn(state, offset, count, slot)
        if self._uncut is None:
            return drawn
        return replace(drawn, wide_BV=self._uncut(self._logit_B1V, state.prefix(offset, 1))[:, 0])

    def _ahead(self, state: State, proposal: Proposal) -> Iterator[Drawn]:
        """One pass of the draft model a step; nothing is left to do when it ends."""
        pairs = zip(proposal.drafted_BK.tolist(), proposal.count, strict=True)
        self._drafted = [row[:n] for row, n in pairs]
        self._state, self._bases = state, state.lengths
        accepted = state.beyond(self._drafted)
        self._fed = list(accepted.texts)
        self._went[self._pays] = False
        guess: Drawn | None = None
        count = tuple(self._worth(accepted, row) for row in range(state.rows))
        if max(count):
            guess = self._guess(state, accepted, count)
            yield guess
            yield from self._remembered(accepted.beyond([[t] for t in guess.token_B.tolist()]), count)
        if self._how.overlap is Overlap.branches or (
            self._how.overlap is Overlap.auto and self._branches_pay
        ):
            self._went[self._branches_pay] = False
            yield from self._branches(state, proposal, guess, count)

    def _guess(self, state: State, accepted: State, count: tuple[int, ...]) -> Drawn:
        """What may follow the drafts: drawn as the leader will draw it, but from the draft's law.

        The same random numbers go through both laws, so that they agree the more often, the more alike they
        are. The leader knows nothing of it, and its own draw stays the one that counts.
        """
        return self._drawn(accepted, 0, count, self._correction(state, accepted))

    def _correction(self, state: State, before: State) -> Slot:
        """The leader's draw of the token that follows `before`."""
        return (before if isinstance(self._draws, CoupledDraws) else state).slot(Purpose.CORRECT)

    def _branches(
        self, state: State, proposal: Proposal, guess: Drawn | None, counted: tuple[int, ...]
    ) -> Iterator[Drawn]:
        """The same for texts in which a draft falls, or another token than the guess follows."""
        if proposal.draft_BKV is None:
            return
        law_BKV = torch.stack(self._wide, 1) if self._wide else proposal.draft_BKV
        guessed: list[int | None] = [None] * state.rows
        behind_BV = None
        if guess is not None:
            behind_BV = guess.law_BV if guess.wide_BV is None else guess.wide_BV
            guessed = [t if n else None for t, n in zip(guess.token_B.tolist(), counted, strict=True)]
        rivals = Rivals(law_BKV, self._drafted, behind_BV, guessed)
        places = [likeliest(len(tokens), self._hopes.rate, self._how.branches) for tokens in self._drafted]
        for number in range(self._how.branches):
            falls = [of_row[number].draft for of_row in places]
            law_BV, some = rivals.laws(falls)
            before = state.beyond([row[:draft] for row, draft in zip(self._drafted, falls, strict=True)])
            count = tuple(self._worth(before, row) if some[row] else 0 for row in range(state.rows))
            if max(count):
                idle, slot = [not n for n in count], self._correction(state, before)
                tokens = self._draws.categorical(resting(law_BV, idle), slot).tolist()
                for row, draft in enumerate(falls):
                    rivals.strike(row, draft, tokens[row])
                yield from self._remembered(before.beyond([[t] for t in tokens]), count, is_branch=True)

    def _remembered(self, later: State, count: tuple[int, ...], is_branch: bool = False) -> Iterator[Drawn]:
        """The drafts for a batch that may come."""
        ends = set(self._laws.end_ids)
        count = tuple(0 if text[-1] in ends else n for text, n in zip(later.texts, count, strict=True))
        memo = Memo(later, count, is_branch)
        self._memos.append(memo)
        kept = [cached + 1 for cached in self._runner.cached]
        for row, text in enumerate(later.texts):
            if count[row]:
                later.lay(row, self._bases[row])
                kept[row] = parting(self._fed[row], text, self._bases[row]) + 1
                self._fed[row] = text
        self._runner.roll_back(kept)
        for offset in range(max(count)):
            drawn = super()._step(later, offset, count)
            memo.drawn.append(drawn)
            made = sum(offset < n for n in count)
            self.tally.drafted += made
            self.tally.branched += made * is_branch
            yield drawn

    def _worth(self, before: State, row: int) -> int:
        """As many drafts as in this round, where there is room; none where the row has ended."""
        wanted, length = len(self._drafted[row]), before.lengths[row] + 1
        if set(before.texts[row][self._bases[row] :]) & set(self._laws.end_ids):
            return 0
        return max(0, min(wanted, self.limit(length), before.capacity - length - 1))

    def _pass(self, state: State, offset: int, count: tuple[int, ...]) -> Tensor:
        if self._group.world > 1:
            ends = self._ends(state, offset, count)
            self._group.broadcast_ints([*self._runner.cached, *ends])
        began_us = now_us()
        logit_B1V = super()._pass(state, offset, count)
        self.spans.append(Span(self._is_ahead, began_us, now_us()))
        if self._uncut is not None:
            self._logit_B1V = logit_B1V.to(state.device)
        return logit_B1V

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
