"""One of the two samplings that task=compare compares: its engine, its clock, and what arrived when."""

from __future__ import annotations

from typing import Any

from llama_ssp.config import RunConf
from llama_ssp.pair.assembly import lookahead_for
from llama_ssp.pair.batches import TimedRun
from llama_ssp.pair.session import PairSession
from llama_ssp.report.timeline import Track
from llama_ssp.speculative.generate import Limits
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import Counts
from llama_ssp.tasks.common import output_of
from llama_ssp.text.detokenizer import Detokenizer, Writing


class Contestant:
    """`begin` prefills a prompt, `advance` runs a round."""

    def __init__(self, title: str, pair: PairSession, run: RunConf, seed: int) -> None:
        self.title, self._pair, self.run = title, pair, run
        self._engine = pair.engine(seed, run)
        self._runs: list[TimedRun] = []

    def begin(self, prompt: Prompt, track: Track, max_new_tokens: int, stops: list[str]) -> None:
        """What arrives is noted on the `track`."""
        self.track, tokens = track, self._pair.tokens
        self._runs.append(timed := TimedRun(self._engine, [prompt], max_new_tokens, track.counts))
        self._writing = Writing(tokens.decode, [prompt.token_ids], tokens.stops(stops))
        self._detokenizer = Detokenizer(tokens.decode, list(prompt.token_ids))
        limits = Limits(max_new_tokens, self._pair.end_ids, self._writing)
        self._rounds = timed.rounds(limits, lookahead_for(self.run, 1, self._pair.costs))

    @property
    def state(self) -> State:
        return self._runs[-1].state

    def advance(self) -> bool:
        """Runs a round; False if the text had ended."""
        found = next(self._rounds, None)
        if found is None:
            return False
        row = found[0].rows[0]
        for position, token in enumerate(row.tokens):
            last = row.finish is not None and position == len(row.tokens) - 1
            if text := self._detokenizer.push(token) + (self._detokenizer.end() if last else ""):
                self.track.arrived.append((text, row.origin(position)))
        if row.finish is not None:
            self.track.finish, self.track.length = row.finish, len(self._writing.text(0))
        return True

    def warm_up(self, prompt: Prompt, new_tokens: int) -> None:
        """Writes a text that counts for nothing: the first passes of a process are slow."""
        self.begin(prompt, Track(self.title), new_tokens, [])
        while self.advance():
            pass
        self._runs.clear()

    def pace(self) -> dict[str, Any]:
        """Times and counters of all prompts so far."""
        counts = Counts()
        for timed in self._runs:
            counts.merge(timed.counts)
        return counts.figures()

    def figures(self) -> dict[str, Any]:
        """The text, its times and its counters, under the names of the JSON interface."""
        return {**output_of(self.state, 0, self._writing.text(0)), **self._runs[-1].figures()}
