"""Texts through rows that are kept full: one that ends makes room for the next at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from llama_ssp.config import SamplingConfig
from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.follower import AnyEngine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.rng import CounterDraws, prompt_key
from llama_ssp.speculative.sampling import RowTransforms
from llama_ssp.speculative.state import WAITING, Prompt, State
from llama_ssp.speculative.stats import Counts, counted
from llama_ssp.text.detokenizer import Decode, Writing


@dataclass(frozen=True)
class Work:
    """A text to be written, and how. `seed` stands in the place of the run's."""

    index: int
    prompt: Prompt
    sampling: SamplingConfig
    max_new_tokens: int
    stop: tuple[str, ...]
    seed: int | None = None

    @property
    def longest(self) -> int:
        return len(self.prompt.token_ids) + self.max_new_tokens

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(plain: dict[str, Any]) -> Work:
        """What `plain` said, after a journey as JSON."""
        biases = {int(token): bias for token, bias in plain["sampling"]["logit_bias"].items()}
        return Work(
            plain["index"],
            Prompt(plain["prompt"]["id"], tuple(plain["prompt"]["token_ids"])),
            SamplingConfig(**{**plain["sampling"], "logit_bias": biases}),
            plain["max_new_tokens"],
            tuple(plain["stop"]),
            plain["seed"],
        )


@dataclass(frozen=True)
class Written:
    """A text that has ended."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int


@dataclass
class Rows:
    """Writes texts on one engine. `figures` is right at any moment, also after a failure."""

    engine: AnyEngine
    laws: RowTransforms
    draws: CounterDraws
    decode: Decode
    lookahead: Callable[[int], DraftLength]
    ends: frozenset[int]
    chunk: int
    _counts: Counts = field(default_factory=Counts)
    _spent_s: float = 0.0

    def write(self, works: list[Work], rows: int, begun: Callable[[list[int]], None]) -> Iterator[Written]:
        """Each text as it ends; `begun` is told which ones are about to be begun."""
        began = time.perf_counter()
        for written in self._written(works, rows, begun):
            self._spent_s += time.perf_counter() - began
            yield written
            began = time.perf_counter()
        self._spent_s += time.perf_counter() - began

    def _written(self, works: list[Work], rows: int, begun: Callable[[list[int]], None]) -> Iterator[Written]:
        first, engine = works[:rows], self.engine
        prompts = [work.prompt for work in first]
        writing = Writing(self.decode, [prompt.token_ids for prompt in prompts], [])
        limits = Limits(0, self.ends, writing)
        queue = _Queue(self, deque(works[rows:]), begun, writing, limits, self.chunk)
        begun([work.index for work in first])
        for row, work in enumerate(first):
            queue.seat(row, work)
        new = max(work.max_new_tokens for work in first)
        state = engine.prefill(prompts, new, max(work.longest for work in works))
        for step in generate(engine, state, limits, self.lookahead(state.rows), queue):
            for took in step.rows:
                self._counts.add(took)
            for took in step.rows:
                if took.finish is not None:
                    yield queue.written(state, took.row, took.finish)

    def figures(self) -> dict[str, Any]:
        """The counters and clocks under the names of the JSON interface."""
        spent = self._spent_s
        figures = {
            "target_forwards": self.engine.target_forwards,
            "draft_forwards": self.engine.draft_forwards,
            "overlap": self.engine.overlap,
            **counted(self._counts, 0.0, spent),
        }
        committed = figures["tokens_committed"]
        return {**figures, "tokens_per_s": committed / spent if spent else None}


@dataclass
class _Queue:
    """Who sits in which row, and who waits for one."""

    rows: Rows
    waiting: deque[Work]
    begun: Callable[[list[int]], None]
    writing: Writing
    limits: Limits
    chunk: int
    _seated: dict[int, Work] = field(default_factory=dict)

    def admit(self, engine: AnyEngine, state: State) -> list[int]:
        """Seats those who wait in rows that have ended."""
        free = [row for row, reason in enumerate(state.finished) if reason not in (None, WAITING)]
        seated = [(row, self.waiting.popleft()) for row in free[: len(self.waiting)]]
        if seated:
            self.begun([work.index for _, work in seated])
        for row, work in seated:
            engine.admit(state, row, work.prompt)
            self.seat(row, work)
        return [row for row, _ in seated]

    def seat(self, row: int, work: Work) -> None:
        """Everything that a row has of its own text."""
        self._seated[row] = work
        self.limits.by_row[row] = work.max_new_tokens
        self.writing.begin(row, work.prompt.token_ids, list(work.stop))
        self.rows.laws.assign(row, work.sampling)
        if work.seed is not None:
            self.rows.draws.own[prompt_key(work.prompt.id)] = work.seed

    def written(self, state: State, row: int, finish: str) -> Written:
        """The text that has ended in this row."""
        text, ids = self.writing.text(row), state.generated(row)
        return Written(self._seated[row].index, text, ids, finish, state.prompt_lengths[row])
