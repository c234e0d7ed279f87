"""One of the two samplings that are compared: its engine, its clock, and the track it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llama_ssp.config import RunConf
from llama_ssp.pair.assembly import lookahead_for
from llama_ssp.report.timeline import Arrival, Track
from llama_ssp.speculative.follower import AnyEngine
from llama_ssp.speculative.generate import Limits, RowStep, Step
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts
from llama_ssp.tasks.run_measurement import pace_of_counts
from llama_ssp.tasks.timed_generation import TimedRun
from llama_ssp.text.detokenizer import Decode, Detokenizer, Writing


class Contestant:
    """`begin` reads a prompt, `advance` does a round."""

    def __init__(
        self, title: str, engine: AnyEngine, run: RunConf, decode: Decode, ends: frozenset[int]
    ) -> None:
        self._title, self._engine, self.run, self._decode, self._ends = title, engine, run, decode, ends
        self._earlier, self._earlier_s = Counts(), 0.0
        self.track = Track(title)
        self._timed: TimedRun | None = None

    def expect(self) -> None:
        """An empty track, for a prompt that is still to begin."""
        if self._timed is not None:
            self._earlier.merge(self._timed.counts)
            self._earlier_s += self._timed.decode_s
        self.track, self._timed = Track(self._title), None

    def begin(self, prompt: Prompt, max_new_tokens: int, stops: list[str]) -> None:
        self._timed = TimedRun(self._engine, [prompt], max_new_tokens)
        self.track.prefill_s = self._timed.prefill_s
        self._writing = Writing(self._decode, [prompt.token_ids], stops)
        self._detokenizer = Detokenizer(self._decode, list(prompt.token_ids))
        limits = Limits(max_new_tokens, self._ends, self._writing)
        self._rounds: Iterator[tuple[Step, float]] = self._timed.rounds(limits, lookahead_for(self.run, 1))

    @property
    def seconds(self) -> float:
        return self._timed.seconds if self._timed else 0.0

    @property
    def position(self) -> int:
        """How long the text is, prompt included, in tokens."""
        return self._timed.state.lengths[0] if self._timed else 0

    def advance(self) -> bool:
        """One round; whether there was one."""
        found = next(self._rounds, None)
        if found is None:
            return False
        row = found[0].rows[0]
        self.track.arrivals.append(self._arrival(row))
        if row.finish is not None:
            self.track.finish, self.track.length = row.finish, len(self._writing.text(0))
        return True

    def forget(self) -> None:
        """The last prompt counts for nothing."""
        self._timed = None

    def pace(self) -> dict[str, Any]:
        """How fast, over all prompts, and what stood."""
        counts, spent = Counts(), self._earlier_s
        counts.merge(self._earlier)
        if self._timed is not None:
            counts.merge(self._timed.counts)
            spent += self._timed.decode_s
        return pace_of_counts(spent, counts)

    def figures(self) -> dict[str, Any]:
        """The text, its times and its counters, under the names of the JSON interface."""
        assert self._timed is not None, "begin() comes first"
        state, ids = self._timed.state, self._timed.state.generated(0)
        return {
            "text": self._writing.text(0),
            "token_ids": ids,
            "finish_reason": state.finished[0],
            "prompt_tokens": state.prompt_lengths[0],
            "output_tokens": len(ids),
            **self._timed.figures(),
        }

    def _arrival(self, row: RowStep) -> Arrival:
        pieces = tuple(
            (text, row.origin(position))
            for position, token in enumerate(row.tokens)
            if (text := self._detokenizer.push(token))
        )
        return Arrival(self.seconds, pieces, len(row.tokens), len(row.drafted), row.accepted)
