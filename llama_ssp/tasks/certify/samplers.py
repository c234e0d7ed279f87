"""What certify judges: a sampler continues prompts, and its rounds may be watched.

A black box, such as another library's `generate`, needs `texts` alone; then only its texts are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llama_ssp.pair.batches import TimedRun, require_numbers, texts_of
from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Limits
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts
from llama_ssp.tasks.certify.recorder import Witness


class Sampler(Protocol):
    """Continues prompts by drawing, each prompt with its own random stream."""

    name: str

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        """The new tokens of each prompt, an end token among them."""


@dataclass
class EngineSampler:
    """An engine, batch by batch, counted and timed. `witness` watches its rounds, if there is one.

    `rows` are those of its largest batch.
    """

    name: str
    engine: RankEngine
    lookahead: Callable[[int], DraftLength]
    ends: frozenset[int]
    batch_size: int
    advance: Callable[[int], None] = lambda _: None
    witness: Witness | None = None
    counts: Counts = field(default_factory=Counts)
    rows: int = 0

    def __post_init__(self) -> None:
        self.engine.watch = self.witness.see if self.witness else None

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        found: list[list[int]] = []
        for first in range(0, len(prompts), self.batch_size):
            batch = list(prompts[first : first + self.batch_size])
            run = TimedRun(self.engine, batch, max_new_tokens, self.counts)
            state = run.state
            for _ in run.rounds(Limits(max_new_tokens, self.ends), self.lookahead(state.rows)):
                pass
            self.rows = max(self.rows, state.rows)
            require_numbers(*texts_of(state))
            found += [state.generated(row) for row in range(state.rows)]
            self.advance(state.rows)
        return found
