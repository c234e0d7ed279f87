"""task=measure: how fast the target, the draft and the pair are, at each K, and where the time goes.

Contenders take turns on the same prompts. Every rank takes the same turns in the same order; no decision
depends on a clock.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from llama_ssp.config import MeasureConf, RunConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.pair.assembly import RankModels, draft_alone, engine_for, lookahead_for
from llama_ssp.pair.batches import TimedRun, require_numbers, texts_of, usable
from llama_ssp.pair.session import PairSession, regular
from llama_ssp.planner.run_plan import TENSORS, RunMeasurement
from llama_ssp.report.console import Progress
from llama_ssp.report.plots import plot_speeds
from llama_ssp.report.speed_stats import Record, Sample, Speeds
from llama_ssp.report.task_tables import repeats_csv, speeds
from llama_ssp.speculative.engine import Engine, RankEngine
from llama_ssp.speculative.generate import Limits, Step
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.common import Task, longest
from llama_ssp.tasks.profiling import MEANING, PARTS, Stopwatch, timed_ranks
from llama_ssp.tasks.rank_memory import memory_here, process_bytes
from llama_ssp.text.prompts import TextPrompt


@dataclass(frozen=True)
class Contender:
    """Takes turns. `models` is None on ranks that have no part in it and wait."""

    record: Record
    run: RunConf
    models: RankModels | None
    is_pairs: bool = True


class MeasureTask(Task[MeasureConf]):
    """A warm-up, the repeats, then a turn of each contender with the stopwatch on."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._watch = Stopwatch()
        self._ranks = timed_ranks(self._ranks, self._watch)
        self._batches: list[list[Prompt]] = []
        self._contenders: list[Contender] = []
        self._memory: list[dict[str, int]] = []

    def run(self) -> str:
        task, spec = self._task, self._inputs.pairs[0]
        most_k = replace(spec.run.speculation, k=max([spec.run.speculation.k, *task.ks]))
        pair = self._open(replace(spec, run=replace(spec.run, speculation=most_k)))
        prompts = self._measured_prompts(pair)
        rows, most = min(task.batch_size, len(prompts)), longest(prompts) + task.max_new_tokens
        self._batches = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
        models = pair.load(rows, most).models
        alone = len(pair.placements) > 1 and most <= models.draft_context
        self._contenders = contenders_of(models, self._run, task.ks if spec.drafter else [], alone)
        turns = (1 + (task.repeats + 1) * len(self._batches)) * len(self._contenders)
        try:
            with Progress("measure", turns, "turns") as progress:
                self._repeat(pair, self._batches[:1], 0, progress)  # a warm-up
                for repeat in range(task.repeats):
                    samples = self._repeat(pair, self._batches, repeat, progress)
                    for contender, sample in zip(self._contenders, samples, strict=True):
                        contender.record.samples += [sample] if contender.models else []
                for contender in self._contenders:
                    self._split(pair, contender)
                    progress.advance(len(self._batches))
            self._memory = peak_memory(pair.placements[0].device, self._ranks)
        finally:
            self._show()
        return "done"

    def has_output(self) -> bool:
        return any(contender.record.samples for contender in self._contenders)

    def figures(self) -> dict[str, Any]:
        prompts = [prompt for batch in self._batches for prompt in batch]
        return {
            **(speeds_of(self._contenders).figures() if self._contenders else {}),
            "time_split_parts": MEANING,
            "peak_memory": self._memory,
            "prompts": len(prompts),
            "prompt_tokens": [len(prompt.token_ids) for prompt in prompts],
            "plot": self._plot,
            **self._pair_figures(),
        }

    def measurements(self) -> list[RunMeasurement]:
        """Every contender with the target; the draft alone does not write the target's texts."""
        return [
            self._pair.measurement(one.record.name, one.record.figures(), one.run)
            for one in self._contenders
            if self._pair is not None and one.models and one.is_pairs and one.record.samples
        ]

    def _measured_prompts(self, pair: PairSession) -> list[Prompt]:
        """The prompts that are given, or of `task.lengths` random tokens."""
        if not self._task.lengths:
            return [prompt for _, prompt in self._prompts(pair)]
        found = []
        for length in self._task.lengths:
            draw = random.Random(f"{self._inputs.seed} {length}")
            ids = draw.choices(range(min(self._run.model.vocab, pair.tokens.size)), k=length)
            text = TextPrompt(f"length-{length}", "", f"task.lengths, {length}")
            found.append(usable(text, ids, pair.tokens, self._run))
        return found

    def _repeat(
        self, pair: PairSession, batches: list[list[Prompt]], repeat: int, progress: Progress
    ) -> list[Sample]:
        """Every contender writes all texts; they change turns after each batch, so machine noise is shared.

        Every repeat draws other texts, the same in every run of this seed.
        """
        samples = [Sample() for _ in self._contenders]
        for batch in batches:
            for contender, sample in zip(self._contenders, samples, strict=True):
                self._turn(pair, contender, batch, repeat, sample)
                progress.advance(1)
        return samples

    def _turn(
        self, pair: PairSession, contender: Contender, batch: list[Prompt], repeat: int, sample: Sample
    ) -> None:
        """One batch by one contender."""
        if contender.models is not None:
            engine = self._engine(pair, contender.models, contender.run, repeat)
            timed = TimedRun(engine, batch, self._task.max_new_tokens)
            for step, spent in self._rounds(pair, contender, timed):
                if step.round:
                    sample.delivery_ms.append(1000 * spent)
                    for row in step.rows:
                        sample.inter_token_ms += [1000 * spent / len(row.tokens)] * len(row.tokens)
            require_numbers(*texts_of(timed.state))
            first_s, counts = timed.first_token_s or 0.0, timed.counts
            sample.take(longest(batch), counts.prefill_s, counts.decode_s, first_s, counts)
            if engine.overlap is not None and contender.record.k != 0:
                sample.overlaps.append(engine.overlap)
        self._ranks.barrier()  # ranks without a part in it wait here: a barrier waits longer than a message

    def _engine(self, pair: PairSession, models: RankModels, run: RunConf, repeat: int) -> RankEngine:
        seed, chunk = self._inputs.seed + repeat, self._task.prefill_chunk
        return engine_for(models, run, pair.tokens, pair.end_ids, seed, chunk)

    def _rounds(
        self, pair: PairSession, contender: Contender, timed: TimedRun
    ) -> Iterator[tuple[Step, float]]:
        limits = Limits(self._task.max_new_tokens, pair.end_ids)
        return timed.rounds(limits, lookahead_for(contender.run, timed.state.rows, pair.costs))

    def _split(self, pair: PairSession, contender: Contender) -> None:
        """The same turn with the stopwatch on, which is not part of the other figures."""
        if contender.models is not None:
            engine, made = self._engine(pair, contender.models, contender.run, 0), 0
            if isinstance(engine, Engine):  # the leader's clocks are those that are shown
                engine.part = self._watch.part
            self._watch.spent.clear()
            for batch in self._batches:
                timed = TimedRun(engine, batch, self._task.max_new_tokens)
                with self._watch.running(engine.synchronize):
                    for _ in self._rounds(pair, contender, timed):
                        pass
                made += timed.counts.committed.total()
            contender.record.split = {part: 1000 * self._watch.spent[part] / made for part in PARTS}
        self._ranks.barrier()

    def _show(self) -> None:
        """Prints the table and writes the files and the plot, of what has been measured."""
        if self.has_output() and self._ranks.is_leader:
            self._print(speeds(self.figures()))
            self._folder.write("repeats.csv", repeats_csv([one.record for one in self._contenders]))
            self._draw(self._task.plot, lambda path: plot_speeds(self.figures(), path))


def contenders_of(models: RankModels, run: RunConf, ks: list[int], drafts_alone: bool) -> list[Contender]:
    """The contenders in their order: the target alone, the draft alone, the pair at each K."""
    plain = regular(run)
    found = [Contender(Record("target alone", 0), plain, models)]
    if ks and drafts_alone and not models.roles.drafts_apart:  # apart, the leader has no part in it
        found.append(Contender(Record("draft alone", 0), plain, draft_alone(models), is_pairs=False))
    for k in ks:
        spec = replace(run.speculation, k=k, adaptive=False)
        found.append(Contender(Record(f"pair, K = {k}", k), replace(run, speculation=spec), models))
    if ks and run.speculation.adaptive:
        found.append(Contender(Record("pair, adaptive", None), run, models))
    return found


def speeds_of(contenders: list[Contender]) -> Speeds:
    """The contenders' records, by their names."""
    records = [contender.record for contender in contenders]
    draft = next((record for record in records if record.name == "draft alone"), None)
    return Speeds(records[0], draft, [record for record in records[1:] if record is not draft])


def peak_memory(device: torch.device, ranks: Ranks) -> list[dict[str, int]]:
    """The most that each rank's process and its device have held."""
    held = memory_here(0, device)[TENSORS] or 0
    every = ranks.gather_ints([process_bytes(), held])
    return [{"rank": n, "process_bytes": own, "device_bytes": its} for n, (own, its) in enumerate(every)]
