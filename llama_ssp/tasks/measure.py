"""task=measure: how fast the target, the draft and the pair are, at each K, and where the time goes.

It measures the run's own pair or several presets, on sentences, random tokens or the questions of a suite.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from llama_ssp.config import MeasureConf
from llama_ssp.pair.assembly import ModelCache
from llama_ssp.pair.batches import usable
from llama_ssp.pair.session import PairSession
from llama_ssp.planner.resolve import PairSpec
from llama_ssp.report.speed_tables import speeds
from llama_ssp.tasks.common import Task
from llama_ssp.tasks.measured_pair import MeasuredPair, PromptBatch
from llama_ssp.tasks.profiling import Stopwatch, timed_ranks
from llama_ssp.text.prompts import TextPrompt


class MeasureTask(Task[MeasureConf]):
    """Checks every pair, then measures one after the other."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._watch = Stopwatch()
        self._ranks = timed_ranks(self._ranks, self._watch)
        self._measured_pairs: list[MeasuredPair] = []

    def run(self) -> str:
        self._measured_pairs = [self._checked(spec) for spec in self._inputs.pairs]
        cache = ModelCache(self._ranks, self._run.placement)
        try:
            for one in self._measured_pairs:
                self._pair = one.pair
                try:
                    one.measure(cache)
                finally:
                    self._measured += one.measurements(f"{one.name}, " if self._task.pairs else "")
                one.close()
        finally:
            if self.has_output() and self._ranks.is_leader:
                self._print(speeds(self.figures()))
                if not self._task.pairs:
                    self._draw(self._task.plot)
        return "done"

    def has_output(self) -> bool:
        pairs = self._measured_pairs
        return any(contender.record.samples for one in pairs for contender in one.contenders)

    def figures(self) -> dict[str, Any]:
        pairs = self._measured_pairs
        found = {"pairs": [{"name": one.name, **one.figures()} for one in pairs if one.contenders]}
        return {
            **(found if self._task.pairs else pairs[0].figures() if pairs else {}),
            "suite": self._task.suite,
            "plot": self._plot,
            "rows_skipped": len(self._skipped),
        }

    def _checked(self, spec: PairSpec) -> MeasuredPair:
        speculation = spec.run.speculation
        most_k = replace(speculation, k=max([speculation.k or 0, *self._task.ks]))
        pair = PairSession(replace(spec, run=replace(spec.run, speculation=most_k)), self._ranks)
        return MeasuredPair(pair, self._asked(pair), self._inputs.seed, self._ranks, self._watch)

    def _asked(self, pair: PairSession) -> PromptBatch:
        """The prompts that are given, or of `task.lengths` random tokens."""
        if not self._task.lengths:
            return self._prompts(pair)
        found = []
        for length in self._task.lengths:
            draw = random.Random(f"{self._inputs.seed} {length}")
            ids = draw.choices(range(min(pair.run.model.vocab, pair.tokens.size)), k=length)
            text = TextPrompt(f"length-{length}", "", f"task.lengths, {length}")
            found.append((text, usable(text, ids, pair.tokens, pair.run)))
        return found
