"""Drafting ahead: the draft model drafts while the target verifies.

It assumes that its tokens are accepted, guesses the token after them, and drafts after that. If the text
turns out to be the guessed one, the next proposal is complete or begun.

Why this is exact. A proposal is a pure function of a row's text and of its draws, which are keyed by that
text (rng.py): seed, prompt, length. What is drafted ahead for a text is the very proposal that would be drawn
for it later: a `Memo` of that function. It is used for its own text and no other (`Memo.stands`), so its use
depends on committed tokens alone, and each token comes with the distribution it was drawn from. So every
round is the one that it would have been without drafting ahead. In fp32 a seed gives the same text with and
without, whatever the timing; in 16 bit and less, forwards over other rows round differently. How the token is
guessed only affects speed. So does when a proposal is sent: one that is complete goes before its request, and
is the reply to it if both sides find that it is for that text (remote.py).
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from llama_ssp.config import Overlap
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.draft_messages import DraftServer
from llama_ssp.models.passes import fetched, sent
from llama_ssp.speculative.drafters.local import (
    DraftModel,
    Drawn,
    ModelDrafter,
    Sampler,
    nothing,
    proposal_of,
)
from llama_ssp.speculative.drafters.remote import AheadCounts, tags, written
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import Purpose, Slot
from llama_ssp.speculative.state import Proposal, State

HALF = 0.5  # of a forward: the expected wait of a request that arrives during one
HOPED = 1.0  # what drafting ahead is assumed to gain before it was tried
MEMORY = 0.95  # the weight of earlier rounds shrinks by this factor with each round
TRY_EVERY = 16  # rounds
# A reply before its request saves a message and the packing of the reply, and costs the packing if it is not
# used: the draft has nothing else to do meanwhile.
EARLY_COST = 0.1
MOST_EARLY = 2**16  # bytes of probabilities that a link takes without a reader


@dataclass
class Memo:
    """Holds proposals for texts that may come. `drawn[i]` is every row's draft number i, where it has one."""

    state: State  # the batch if every guess is right
    count: tuple[int, ...]  # how many drafts to draw, row by row
    drawn: list[Drawn] = field(default_factory=list)

    def stands(self, state: State, row: int) -> bool:
        """Returns whether the row's text is the guessed one. Nothing else may decide this."""
        return state.keys[row] == self.state.keys[row] and state.texts[row] == self.state.texts[row]

    def held(self, row: int) -> int:
        """Returns how many of the row's drafts are drawn."""
        return min(len(self.drawn), self.count[row])


class Pays:
    """Tells whether drafting ahead pays, by a moving average over rounds.

    It is of the draft forwards that drafting ahead saves, less those that a request waited for. Where it is
    not positive, drafting ahead is tried once every TRY_EVERY rounds.
    """

    def __init__(self) -> None:
        self._gain = HOPED
        self._rests = 0

    def __bool__(self) -> bool:
        if self._gain > 0 or self._rests == TRY_EVERY:
            self._rests = 0
        else:
            self._rests += 1
        return self._rests == 0

    def learn(self, used: int, lost: float) -> None:
        self._gain = MEMORY * self._gain + (1 - MEMORY) * (used - lost)


class AheadDrafter(ModelDrafter):
    """Runs a draft model on ranks of its own: it drafts on request, and for the guessed text in between.

    If the model is split over ranks, this is the first of them; the others have an `AheadDraftShard`.
    """

    def __init__(
        self, runner: ModelRunner, sampler: Sampler, group: Ranks, link: DraftServer, overlap: Overlap
    ) -> None:
        super().__init__(runner, sampler)
        self._group = group
        self._link = link
        self._overlap = overlap
        self._waited_s = link.waited_s  # for requests, before this engine
        self._pays = Pays()
        self._early_pays = Pays()
        self._was_sent_early = False
        # Whether a request ended drafting ahead; None without a forward.
        self._interrupted: bool | None = None
        self.counts = AheadCounts()
        self._memo: Memo | None = None  # what was drafted for the guessed text
        self._ready: list[int] = []  # how many of its drafts continue the row's text
        self._state: State

    def start(self, rows: int, capacity: int) -> None:
        super().start(rows, capacity)
        self._drop_memo(rows)

    def refill(self, state: State, kept: dict[int, int]) -> None:
        super().refill(state, kept)
        for row in kept:
            self._ready[row] = 0

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        if not max(count):
            return nothing(state)

        self._account(count)
        # Of keys after the text only those of drafts that are used stay.
        self._runner.roll_back([length + n for length, n in zip(state.lengths, count, strict=True)])
        proposal = super().propose(state, count)
        self._end_of_forwards()
        self._drop_memo(state.rows)
        self._reply(state, proposal)
        return proposal

    def _reply(self, state: State, proposal: Proposal) -> None:
        """Sends the leader the drafts, unless these very ones were sent before they were requested."""
        wanted = tags(state, proposal.count)
        is_early = self._link.has_replied(wanted)
        if self._was_sent_early:
            self._early_pays.learn(int(is_early), EARLY_COST)
            self._was_sent_early = False
        if not is_early:
            values, payload = self._message(proposal, self.counts)
            self._link.send_reply([*wanted, *values], payload)

    def _message(self, proposal: Proposal, counts: AheadCounts) -> tuple[list[int], Tensor]:
        """Returns what follows the tags of a reply: figures, drafts, and what each was drawn from."""
        assert proposal.draft_BKV is not None
        form, load = written(proposal.draft_BKV, self._sampler.top)
        payload, drafted_N = fetched(load, proposal.drafted_BK.flatten())
        waited_us = int(1e6 * (self._link.waited_s - self._waited_s))
        return [form, self.forwards, *astuple(counts), waited_us, *drafted_N.tolist()], payload

    def _send_early(self) -> None:
        """Sends what is drafted for the guessed text, if it is complete and small: its request may follow.

        The link takes that much at once, so this waits for nobody. The counts are those that hold if it is
        used.
        """
        memo = self._memo
        if memo is None or not max(memo.count) or len(memo.drawn) < max(memo.count) or not self._early_pays:
            return

        drafts = sum(memo.count)
        rows = sum(n > 0 for n in memo.count)
        counts = AheadCounts(
            rows=self.counts.rows + rows,
            rows_ready=self.counts.rows_ready + rows,
            drafted=self.counts.drafted,
            used=self.counts.used + drafts,
        )
        values, payload = self._message(proposal_of(memo.drawn, memo.count), counts)
        if payload.nbytes > MOST_EARLY:
            self._early_pays.learn(0, HOPED)
            return
        self._link.send_early(tags(memo.state, memo.count), values, payload)
        self._was_sent_early = True

    def meanwhile(self, state: State, proposal: Proposal) -> None:
        """Drafts for the next round until its request comes, which is checked between forwards.

        A forward on a GPU is over when its token is on the host, as `_ahead` yields it. Without that wait
        all forwards would be launched within the time of one: none could be interrupted, and `Pays` would
        never learn what a request has waited for.
        """
        self._interrupted = None
        self._drop_memo(state.rows)
        if self._overlap is Overlap.off:
            return
        if self._overlap is Overlap.ahead or self._pays:
            forwards = self._ahead(state, proposal)
            is_called = self._link.has_request()
            while not is_called and next(forwards, None) is not None:
                self._interrupted = is_called = self._link.has_request()
            if not is_called:
                self._send_early()
        self._end_of_forwards()

    def roll_back(self, lengths: list[int]) -> None:
        """Drops what was not committed, but keeps drafts after the very texts that were.

        A text without its last token is the old text and accepted drafts: the cache holds the right keys.
        """
        memo = self._memo
        if memo is not None:
            rows = range(len(lengths))
            self._ready = [memo.held(row) if memo.stands(self._state, row) else 0 for row in rows]
        super().roll_back([length + ready for length, ready in zip(lengths, self._ready, strict=True)])

    def _account(self, count: tuple[int, ...]) -> None:
        """Counts what was ready and what of it is used, and learns whether it was worth the wait."""
        pairs = list(zip(count, self._ready, strict=True))
        used = sum(min(n, ready) for n, ready in pairs)
        self.counts.rows += sum(n > 0 for n in count)
        self.counts.rows_ready += sum(0 < n <= ready for n, ready in pairs)
        self.counts.used += used
        if self._interrupted is not None:
            self._pays.learn(used, HALF if self._interrupted else 0.0)

    def _drop_memo(self, rows: int) -> None:
        self._memo = None
        self._ready = [0] * rows

    def _step(self, state: State, offset: int, count: tuple[int, ...], slot: Slot | None = None) -> Drawn:
        """Returns draft number `offset`: from the memo where it is there, drawn where it is not."""
        held = tuple(min(n, ready) for n, ready in zip(count, self._ready, strict=True))
        drawn: Drawn | None = None
        if self._memo is not None and offset < max(held):
            drawn = self._memo.drawn[offset]
            state.write_draft(drawn.token_B, offset, held)

        missing = tuple(0 if offset < h else n for n, h in zip(count, held, strict=True))
        if offset < max(missing) or drawn is None:
            fresh = super()._step(state, offset, missing, slot)
            drawn = fresh if drawn is None else merged([offset < h for h in held], drawn, fresh)
        return drawn

    def _ahead(self, state: State, proposal: Proposal) -> Iterator[list[int]]:
        """Runs one draft forward a step, until there is nothing left to draft.

        Yields each row's drawn token, for which the host has waited: the forward is over.
        """
        pairs = zip(proposal.drafted_BK.tolist(), proposal.count, strict=True)
        drafted = [row[:n] for row, n in pairs]
        self._state = state
        accepted = state.extended(drafted)
        count = tuple(self._worth(state, accepted, row, len(drafted[row])) for row in range(state.rows))
        if max(count):
            # The token after the drafts, drawn as the leader will draw it, but from the draft's distribution.
            # The less the distributions differ, the more often both draws agree. The leader's is committed.
            guess = super()._step(accepted, 0, count, state.slot(Purpose.CORRECT))
            guessed = guess.token_B.tolist()
            yield guessed
            later = accepted.extended([[token] for token in guessed])
            yield from self._draft_for(state, later, count)

    def _draft_for(self, state: State, later: State, count: tuple[int, ...]) -> Iterator[list[int]]:
        """Draws the drafts for the guessed batch; yields each row's token when its forward is over."""
        ends = set(self._sampler.transform.end_ids)
        count = tuple(0 if text[-1] in ends else n for text, n in zip(later.texts, count, strict=True))
        self._memo = memo = Memo(later, count)
        later.write_texts({row: len(state.texts[row]) for row in range(later.rows) if count[row]})
        for offset in range(max(count)):
            drawn = super()._step(later, offset, count)
            memo.drawn.append(drawn)
            self.counts.drafted += sum(offset < n for n in count)
            yield drawn.token_B.tolist()

    def _worth(self, state: State, accepted: State, row: int, wanted: int) -> int:
        """Returns how many drafts to draw ahead: as many as in this round, if there is room.

        A row that ends with these drafts needs none.
        """
        length = accepted.lengths[row] + 1
        drafted = accepted.texts[row][len(state.texts[row]) :]
        if set(drafted) & set(self._sampler.transform.end_ids):
            return 0
        return max(0, min(wanted, self.limit(length), accepted.capacity - length - 1))

    def _next_ends(self, state: State, offset: int, count: tuple[int, ...]) -> list[int]:
        """Also tells the other ranks that hold the draft, which take part in the pass."""
        ends = super()._next_ends(state, offset, count)
        if self._group.world > 1:
            self._group.broadcast_ints([*self._runner.cached, *ends])
        return ends

    def _end_of_forwards(self) -> None:
        if self._group.world > 1:
            self._group.broadcast_ints([])


class AheadDraftShard(DraftModel):
    """Computes its share of a split draft model's forwards, as the rank that draws broadcasts them.

    It does not need the drawn tokens, like `DraftShard`.
    """

    def __init__(self, runner: ModelRunner, group: Ranks, overlap: Overlap) -> None:
        super().__init__(runner)
        self._group = group
        self._overlap = overlap

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        if max(count):
            self._assist(state)
        return Proposal(nothing(state).drafted_BK, None, count)

    def meanwhile(self, state: State, proposal: Proposal) -> None:
        """Assists until the rank that draws is done."""
        if self._overlap is not Overlap.off:
            self._assist(state)

    def _assist(self, state: State) -> None:
        while places := self._group.broadcast_ints([]):
            self._runner.cached = places[: state.rows]
            self._runner.logits(state.token_BS, places[state.rows :], [1] * state.rows)


def merged(held: list[bool], memo: Drawn, fresh: Drawn) -> Drawn:
    """Returns rows of `memo` where `held` is set, of `fresh` elsewhere."""
    held_B = sent(held, memo.token_B.device)
    return Drawn(
        token_B=torch.where(held_B, memo.token_B, fresh.token_B),
        probs_BV=torch.where(held_B[:, None], memo.probs_BV, fresh.probs_BV),
    )
