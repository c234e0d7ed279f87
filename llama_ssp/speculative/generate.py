"""The loop, as in the papers: draft, verify, commit, until every row has ended. It knows token ids only.

Text, timing and printing live outside; what may end a row by its text comes in as `TextEnd`. Regular sampling
is this loop with K = 0.
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
    """What ends a row."""

    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    text_end: TextEnd | None = None
    by_row: dict[int, int] = field(default_factory=dict)  # other `max_new_tokens` of some rows

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
        elif kept >= self.room(state, row, context):
            full = len(state.texts[row]) + kept
            reason = "length" if full == self.longest(state, row) else "context"
        if self.text_end:
            visible = tokens[: kept - 1] if ends else tokens
            stopped = self.text_end.kept(row, visible, reason is not None)
            if stopped is not None:
                kept, reason = stopped, "stop"
        return kept, reason


class Refill(Protocol):
    """Puts new prompts into rows that have ended."""

    def admit(self, engine: RankEngine, state: State) -> list[int]:
        """Fills the rows it can by `engine.admit`, the same on every rank; returns which."""


@dataclass(frozen=True)
class Step:
    """One round over the batch."""

    round: int
    rows: list[RowStep] = field(default_factory=list)


def generate(
    engine: RankEngine, state: State, limits: Limits, lookahead: DraftLength, refill: Refill | None = None
) -> Iterator[Step]:
    """Runs rounds until every row has ended and no prompt is left to refill it. `state` comes from prefill.

    `lookahead` chooses K, the number of tokens to draft, for each row.
    To stop earlier, every rank must stop after the same round and call `engine.flush`.
    """
    number = 0
    while True:
        for row in refill.admit(engine, state) if refill else ():
            lookahead.restart(row)  # earlier rounds say nothing of this text
        if limits.reached(state):
            break
        room = [limits.room(state, row, engine.context) for row in range(state.rows)]
        wanted = [max(0, min(k, r - 1)) for k, r in zip(lookahead.choose(), room, strict=True)]
        proposal = engine.draft(state, wanted)
        result = engine.verify(state, proposal)
        del proposal  # frees its probabilities before the next ones are made
        step = commit(state, result, limits, engine.context, number)
        engine.roll_back(state)
        lookahead.observe(step.rows)
        yield step
        number += 1
    engine.flush()


def commit(state: State, result: Decision, limits: Limits, context: int, number: int) -> Step:
    """Cuts each row's block where the row ends, then appends it: trim before counting."""
    step, blocks = Step(number), dict[int, list[int]]()
    for row in range(state.rows):
        if state.finished[row]:
            continue
        drafted = result.drafted[row]
        if result.damaged[row]:
            state.finished[row] = "error"
            step.rows.append(RowStep(row, [], [], 0, [], len(drafted), "error"))
            continue
        block = result.tokens(row)
        kept, finish = limits.trim(state, row, block, context)
        counted = drafted if kept == len(block) else drafted[:kept]
        blocks[row] = block[:kept]
        if result.logprobs:
            state.logprobs[row] += result.logprobs[row][:kept]
        state.finished[row] = finish
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
