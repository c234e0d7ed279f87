"""The loop, as the paper has it: draft, verify, commit, until every row has ended.

It knows token ids only. Text, timing and printing live outside; what may end a row by its text comes
in as `TextEnd`. Regular sampling is this loop with K = 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.follower import AnyEngine
from llama_ssp.speculative.round_protocol import RoundResult
from llama_ssp.speculative.state import State


class TextEnd(Protocol):
    """Tells whether new tokens complete a stop string."""

    def kept(self, row: int, tokens: list[int]) -> int | None:
        """How many of the tokens stand when a stop string ends inside them; None if none does."""


@dataclass(frozen=True)
class Limits:
    """What ends a row."""

    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    text_end: TextEnd | None = None
    by_row: dict[int, int] = field(default_factory=dict)  # rows with a length of their own

    def longest(self, state: State, row: int) -> int:
        """The length at which the row is full."""
        return state.prompt_lengths[row] + self.by_row.get(row, self.max_new_tokens)

    def room(self, state: State, row: int, context: int) -> int:
        """How many tokens the row may still get; 0 once it has ended."""
        if state.finished[row]:
            return 0
        return min(self.longest(state, row), context) - len(state.texts[row])

    def reached(self, state: State) -> bool:
        return all(state.finished)

    def trim(self, state: State, row: int, tokens: list[int], context: int) -> tuple[int, str | None]:
        """How many of a round's tokens the row keeps, and why it ends there, if it does."""
        kept, reason = len(tokens), None
        ends = [i for i, token in enumerate(tokens) if token in self.end_ids]
        if ends:
            kept, reason = ends[0] + 1, "eos"
        if self.text_end:
            visible = tokens[: kept - 1] if reason else tokens
            stopped = self.text_end.kept(row, visible)
            if stopped is not None:
                kept, reason = stopped, "stop"
        if reason is None and kept >= self.room(state, row, context):
            full = len(state.texts[row]) + kept
            reason = "length" if full == self.longest(state, row) else "context"
        return kept, reason


class Refill(Protocol):
    """Puts new prompts into rows that have ended."""

    chunk: int

    def admit(self, engine: AnyEngine, state: State) -> list[int]:
        """Fills what rows it can, alike on every rank; which ones."""


@dataclass(frozen=True)
class RowStep:
    """What one row got in one round, cut where the row ended.

    `drafted` are the tokens that were looked at, `discarded` how many more lay behind the row's end, and
    `cut` how many tokens of the verified block did. `withheld` drafts were not made, for want of room.
    """

    row: int
    tokens: list[int]
    drafted: list[int]
    accepted: int
    overlap: list[float]
    discarded: int
    finish: str | None
    cut: int = 0
    withheld: int = 0
    standing: list[tuple[float, float]] = field(default_factory=list)

    def origin(self, position: int) -> str:
        """Where the token at this position of the block came from."""
        if position < self.accepted:
            return "drafted"
        if not self.drafted:
            return "sampled"
        return "bonus" if self.accepted == len(self.drafted) else "corrected"


@dataclass(frozen=True)
class Step:
    """One round over the batch."""

    round: int
    rows: list[RowStep] = field(default_factory=list)


def generate(
    engine: AnyEngine, state: State, limits: Limits, lookahead: DraftLength, refill: Refill | None = None
) -> Iterator[Step]:
    """Rounds until every row has ended, and no prompt is left to refill it. `state` comes from prefill.

    Who stops before the end, alike on every rank, calls `engine.settle`.
    """
    number = 0
    while True:
        if refill is not None:
            _refilled(engine, state, lookahead, refill)
        if limits.reached(state):
            break
        room = [limits.room(state, row, engine.context) for row in range(state.rows)]
        chosen = lookahead.choose()
        wanted = [max(0, min(k, r - 1)) for k, r in zip(chosen, room, strict=True)]
        proposal = engine.draft(state, wanted)
        verdict = engine.verify(state, proposal)
        del proposal  # whose distributions take room that the next ones need
        withheld = [k - w for k, w in zip(chosen, wanted, strict=True)]
        step = commit(state, verdict, limits, engine.context, number, withheld)
        engine.roll_back(state)
        lookahead.observe(step.rows)
        yield step
        number += 1
    engine.settle()


def _refilled(engine: AnyEngine, state: State, lookahead: DraftLength, refill: Refill) -> None:
    """Rows that ended get new prompts, of which each reads a chunk a round, while any row still writes."""
    refill.admit(engine, state)
    while state.waiting:
        for row in state.waiting:
            engine.read(state, row, refill.chunk)
            if state.finished[row] is None:  # read: rounds that it waited for are none of its own
                lookahead.restart(row)
        if not all(state.finished):
            return


def commit(
    state: State, verdict: RoundResult, limits: Limits, context: int, number: int, withheld: list[int]
) -> Step:
    """Cuts each row's block where the row ends, then appends it: trim before counting."""
    step = Step(number)
    for row in range(state.rows):
        if state.finished[row]:
            continue
        if verdict.damaged[row]:
            state.finished[row] = "error"
            step.rows.append(RowStep(row, [], [], 0, [], len(verdict.drafted[row]), "error"))
            continue
        block, drafted = verdict.tokens(row), verdict.drafted[row]
        kept, finish = limits.trim(state, row, block, context)
        looked_at = drafted if kept == len(block) else drafted[:kept]
        state.append(row, block[:kept])
        state.finished[row] = finish
        step.rows.append(
            RowStep(
                row=row,
                tokens=block[:kept],
                drafted=looked_at,
                accepted=min(verdict.accepted[row], kept),
                overlap=verdict.overlap[row][: len(looked_at)],
                discarded=len(drafted) - len(looked_at),
                finish=finish,
                cut=len(block) - kept,
                withheld=withheld[row],
                standing=verdict.standing[row][: len(looked_at)],
            )
        )
    return step
