"""Runs the loop, as in the papers: draft, verify, commit, until every row has ended; of token ids only.

Text, timing and printing live outside; what may end a row by its text comes in as `TextEnd`. Regular sampling
is this loop with K = 0: nothing is drafted, the target is fed one token a row, and the token that follows is
drawn from its distribution.

    generate.py      the loop, what ends a row, and where a round's tokens are cut
    engine.py        one round: the drafts, the target's forward, the decision, what caches keep
    decision.py      what was decided; the same on a device, on the host and in a message
    verification.py  the rules: which drafts are kept, what replaces the first that is not
    sampling.py      logits to the distribution that a token is drawn from
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from llama_ssp.speculative.decision import Decision
from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.state import State
from llama_ssp.speculative.stats import RowStep


class TextEnd(Protocol):
    """Tells whether new tokens complete a stop string. It remembers the row's earlier tokens."""

    def kept(self, row: int, tokens: list[int], last: bool) -> int | None:
        """Returns how many tokens to keep if they complete a stop string, that token included; else None.

        `last`: the row ends with them. Characters are cut later, where the text is shown.
        """


@dataclass(frozen=True)
class Limits:
    """Says what ends a row."""

    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    text_end: TextEnd | None = None
    by_row: dict[int, int] = field(default_factory=dict)  # other `max_new_tokens` of some rows

    def longest(self, state: State, row: int) -> int:
        """Returns the length at which the row is full."""
        return state.prompt_lengths[row] + self.by_row.get(row, self.max_new_tokens)

    def room(self, state: State, row: int, context: int) -> int:
        """Returns how many tokens the row may still get; 0 once it has ended."""
        if state.finished[row]:
            return 0
        return min(self.longest(state, row), context) - len(state.texts[row])

    def reached(self, state: State) -> bool:
        """Returns whether every row has ended."""
        return all(state.finished)

    def trim(self, state: State, row: int, tokens: list[int], context: int) -> tuple[int, str | None]:
        """Returns how many of a round's tokens the row keeps, and why it ends there; None if it does not.

        A block may hold an end token in its midst. It is kept, and what follows it is dropped although the
        target has verified it: a text that ends there has no token after it.
        """
        kept = len(tokens)
        reason = None

        ends = [i for i, token in enumerate(tokens) if token in self.end_ids]
        if ends:
            kept = ends[0] + 1
            reason = "eos"
        elif kept >= self.room(state, row, context):
            # Drafts were limited to the room, so that a block fills it but never exceeds it.
            is_full = len(state.texts[row]) + kept == self.longest(state, row)
            reason = "length" if is_full else "context"

        if self.text_end:
            # The end token is not shown, so no stop string is sought in it.
            visible = tokens[: kept - 1] if ends else tokens
            stopped = self.text_end.kept(row, visible, reason is not None)
            if stopped is not None:  # a stop string is complete before the end token or the limit
                kept = stopped
                reason = "stop"

        return kept, reason


class Refill(Protocol):
    """Puts new prompts into rows that have ended."""

    def admit(self, engine: RankEngine, state: State) -> list[int]:
        """Fills the rows it can by `engine.admit`, the same on every rank; returns which."""


@dataclass(frozen=True)
class Step:
    """Holds what each row got in one round."""

    round: int
    rows: list[RowStep] = field(default_factory=list)


def generate(
    engine: RankEngine,
    state: State,
    limits: Limits,
    lookahead: DraftLength,
    refill: Refill | None = None,
) -> Iterator[Step]:
    """Runs rounds until every row has ended and no prompt is left to refill it. `state` comes from prefill.

    `lookahead` chooses K, the number of tokens to draft, for each row.
    To stop earlier, every rank must stop after the same round and call `engine.flush`.

    Every rank runs this loop, and all take the same way through it: only the leader's engine decides, and
    `verify` returns the leader's decision on every rank. Every rank's `lookahead` chooses K, but only the
    leader's choice is read.
    """
    number = 0
    while True:
        if refill:
            # A refilled row begins like any other: its prompt is in the caches except the last token.
            for row in refill.admit(engine, state):
                lookahead.restart(row)  # earlier rounds say nothing of this text
        if limits.reached(state):
            break

        # K is chosen before anything is drawn, so that it cannot depend on what is drawn: a choice that had
        # seen the drafts would favour some of them, and texts would have another distribution.
        #
        # A row that may get r more tokens drafts r - 1 at most: a round adds one token to the accepted ones.
        room = [limits.room(state, row, engine.context) for row in range(state.rows)]
        wanted = [max(0, min(k, r - 1)) for k, r in zip(lookahead.choose(), room, strict=True)]

        proposal = engine.draft(state, wanted)
        result = engine.verify(state, proposal)
        del proposal  # frees its probabilities before the next ones are made

        step = commit(state, result, limits, engine.context, number)
        # Caches now hold keys of drafts that were rejected, or trimmed: whatever is after the text is
        # dropped, for both reasons in one way.
        engine.roll_back(state)
        lookahead.observe(step.rows)
        yield step
        number += 1
    engine.flush()


def commit(state: State, result: Decision, limits: Limits, context: int, number: int) -> Step:
    """Cuts each row's block where the row ends, then appends it; returns what each row got.

    It is trimmed before anything is counted: statistics know of no token that is not in the text.
    """
    step = Step(number)
    blocks: dict[int, list[int]] = {}

    for row in range(state.rows):
        if state.finished[row]:
            continue
        drafted = result.drafted[row]

        if result.damaged[row]:
            # Logits were not numbers: no token of this round has a distribution. Other rows go on.
            state.finished[row] = "error"
            step.rows.append(
                RowStep(
                    row=row,
                    tokens=[],
                    drafted=[],
                    accepted=0,
                    overlap=[],
                    discarded=len(drafted),
                    finish="error",
                )
            )
            continue

        block = result.tokens(row)  # the accepted drafts, then the correction or the token after them all
        kept, finish = limits.trim(state, row, block, context)
        blocks[row] = block[:kept]
        state.finished[row] = finish
        if result.logprobs:
            state.logprobs[row] += result.logprobs[row][:kept]

        # Of a block that is cut only the drafts up to the cut count; of any other all, rejected ones too.
        counted = drafted if kept == len(block) else drafted[:kept]
        step.rows.append(
            RowStep(
                row=row,
                tokens=block[:kept],
                drafted=counted,
                accepted=min(result.accepted[row], kept),
                overlap=result.overlap[row][: len(counted)],
                discarded=len(drafted) - len(counted),
                finish=finish,
                cut=len(block) - kept,
                standing=result.standing[row][: len(counted)],
            )
        )

    state.append(blocks)
    return step
