"""What certify judges: a sampler continues prompts, and may let its rounds be watched.

A black box, such as another library's `generate`, needs `texts` alone; then nothing but its texts is judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llama_ssp.pair.batches import require_numbers, texts_of
from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.follower import AnyEngine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.rng import Draws
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts
from llama_ssp.speculative.verification import Rule
from llama_ssp.tasks.certify.recorder import WatchedEngine, WatchedFollower, Witness


class Sampler(Protocol):
    """Continues prompts by drawing, each prompt by its own random stream."""

    name: str

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        """The new tokens of each prompt, an end token among them."""


class WatchedSampler(Sampler, Protocol):
    """A sampler whose rounds can be watched."""

    @property
    def rule(self) -> Rule: ...

    @property
    def draws(self) -> Draws: ...

    @property
    def witness(self) -> Witness: ...


@dataclass
class Clock:
    """What a sampler's rounds took and brought, and the rows of its largest batch."""

    seconds: float = 0.0
    rows: int = 0
    counts: Counts = field(default_factory=Counts)


@dataclass
class EngineSampler:
    """An engine, batch by batch, counted and timed. Its rounds are watched where there is a witness."""

    name: str
    engine: AnyEngine
    lookahead: Callable[[int], DraftLength]
    ends: frozenset[int]
    batch_size: int
    advance: Callable[[int], None] = lambda _: None
    clock: Clock = field(default_factory=Clock)

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        found: list[list[int]] = []
        for first in range(0, len(prompts), self.batch_size):
            batch = list(prompts[first : first + self.batch_size])
            state = self.engine.prefill(batch, max_new_tokens)
            limits = Limits(max_new_tokens, self.ends)
            self.engine.wait()
            began = time.perf_counter()
            for step in generate(self.engine, state, limits, self.lookahead(state.rows)):
                for one in step.rows:
                    self.clock.counts.add(one)
            self.clock.seconds += time.perf_counter() - began
            self.clock.rows = max(self.clock.rows, state.rows)
            require_numbers(*texts_of(state))
            found += [state.generated(row) for row in range(state.rows)]
            self.advance(len(batch))
        return found


@dataclass
class WatchedEngineSampler(EngineSampler):
    """The same, its rounds seen by a witness."""

    engine: WatchedEngine | WatchedFollower

    @property
    def rule(self) -> Rule:
        return self.engine.rule

    @property
    def draws(self) -> Draws:
        return self.engine.draws

    @property
    def witness(self) -> Witness:
        return self.engine.witness
