"""One batch on a clock that runs only while the engine works."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.follower import AnyEngine
from llama_ssp.speculative.generate import Limits, Step, generate
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts, ratio


class TimedRun:
    """Reads the prompts, then gives rounds. What the caller does between rounds is on no clock.

    The clock is read after `engine.wait()`, so that a GPU has done what it is said to have done.
    """

    def __init__(self, engine: AnyEngine, prompts: list[Prompt], max_new_tokens: int) -> None:
        self._engine = engine
        self.counts = Counts()
        self.decode_s = 0.0
        self.first_token_s: float | None = None
        forwards = engine.target_forwards
        engine.wait()
        began = time.perf_counter()
        self.state = engine.prefill(prompts, max_new_tokens)
        engine.wait()
        self.prefill_s = time.perf_counter() - began
        self.prefill_forwards = engine.target_forwards - forwards

    @property
    def seconds(self) -> float:
        """What has been spent so far, prefill included."""
        return self.prefill_s + self.decode_s

    def rounds(self, limits: Limits, lookahead: DraftLength) -> Iterator[tuple[Step, float]]:
        """Every round until the last row has ended, and how long it took."""
        began = time.perf_counter()
        for step in generate(self._engine, self.state, limits, lookahead):
            self._engine.wait()
            spent = time.perf_counter() - began
            self.decode_s += spent
            if self.first_token_s is None:
                self.first_token_s = self.seconds
            for row in step.rows:
                self.counts.add(row)
            yield step, spent
            began = time.perf_counter()

    def figures(self) -> dict[str, Any]:
        """Times under the names of the JSON interface, and the counters."""
        counted = self.counts.summary()
        return {
            "prefill_ms": 1000 * self.prefill_s,
            "time_to_first_token_ms": None if self.first_token_s is None else 1000 * self.first_token_s,
            "decode_ms": 1000 * self.decode_s,
            "ms_per_token": ratio(1000 * self.decode_s, counted["tokens_committed"]),
            "tokens_per_s": ratio(counted["tokens_committed"], self.decode_s),
            **counted,
        }
