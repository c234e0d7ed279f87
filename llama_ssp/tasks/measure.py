"""task=measure: how fast the target, the draft and the pair are, at each K, and where the time goes.

Contenders take turns on the same prompts. Every rank does the same turns in the same order; nothing that
a clock says decides anything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from llama_ssp.config import Drafting, MeasureConf, Output, RunConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.pair.assembly import RankModels, draft_alone, engine_for, lookahead_for, open_pair
from llama_ssp.pair.batches import damaged, prompt_of, unusable, usable_prompts
from llama_ssp.pair.placements import model_placements, tokens_of
from llama_ssp.planner.run_plan import TENSORS, RunMeasurement
from llama_ssp.report.plots import plot_place
from llama_ssp.report.run_folder import Console, Progress, RunFolder
from llama_ssp.report.speed_plots import plot_speeds
from llama_ssp.report.speed_stats import Record, Sample, Speeds
from llama_ssp.report.speed_table import csv_text, table
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.follower import AnyEngine
from llama_ssp.speculative.generate import Limits
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.tasks.profiling import MEANING, PARTS, Stopwatch, TimedRanks
from llama_ssp.tasks.run_measurement import memory_here, process_bytes, way
from llama_ssp.tasks.timed_generation import TimedRun
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.tokenizer import Tokens


@dataclass(frozen=True)
class Contender:
    """Who takes a turn. `pair` is None on ranks that have no part in it: they wait."""

    record: Record
    run: RunConf
    pair: RankModels | None
    is_pairs: bool = True


class MeasureTask:
    """One run of the task. `figures` is right at any moment, also after an interrupt."""

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        assert isinstance(inputs.run.task, MeasureConf)
        self._inputs, self._task = inputs, inputs.run.task
        self._console, self._folder = console, folder
        self._watch = Stopwatch()
        self._ranks: Ranks = TimedRanks(ranks, self._watch)
        self._skipped = list(inputs.reading.skipped)
        self._prompts: list[Prompt] = []
        self._pair: RankModels | None = None
        self._vocabulary: dict[str, Any] | None = None
        self._speeds: Speeds | None = None
        self._contenders: list[Contender] = []
        self._rows = 0
        self._memory: list[dict[str, int]] = []
        self._plot: str | None = None

    def run(self) -> str:
        """A warm-up, the repeats, a pass with the stopwatch on; the status."""
        run, task = self._inputs.run, self._task
        found = model_placements(self._inputs.pairs[0])
        tokens = tokens_of(found)
        self._vocabulary = tokens.paired.record() if tokens.paired else None
        self._prompts = self._tokenised(tokens)
        longest = max(len(prompt.token_ids) for prompt in self._prompts)
        slots = min(longest + task.max_new_tokens, run.model.context)
        rows = min(task.batch_size, len(self._prompts))
        most = replace(run, speculation=replace(run.speculation, k=max([run.speculation.k, *task.ks])))
        self._pair = open_pair(found, most, rows, slots, self._ranks)
        drafts = self._inputs.pairs[0].drafter
        alone = len(found) > 1 and longest + task.max_new_tokens <= self._pair.draft_context
        contenders = contenders_of(self._pair, run, task.ks if drafts else [], alone)
        self._speeds, self._contenders, self._rows = speeds_of(contenders), contenders, rows
        batches = [self._prompts[i : i + rows] for i in range(0, len(self._prompts), rows)]
        turns = (task.repeats + 1) * len(batches) * len(contenders)
        try:
            with Progress("measure", turns, "turns") as progress:
                self._repeat(contenders, batches[:1], tokens, 0)
                for repeat in range(task.repeats):
                    samples = self._repeat(contenders, batches, tokens, repeat, progress)
                    for contender, sample in zip(contenders, samples, strict=True):
                        contender.record.samples += [sample] if contender.pair else []
                for contender in contenders:
                    self._split(contender, batches, tokens)
                    progress.advance(len(batches))
            self._memory = peak_memory(found[0].device, self._ranks)
        finally:
            self._show()
        return "done"

    def has_output(self) -> bool:
        return self._speeds is not None and bool(self._speeds.target.samples)

    def figures(self) -> dict[str, Any]:
        """The task's part of the summary."""
        return {
            **(self._speeds.figures() if self._speeds else {}),
            "time_split_parts": MEANING,
            "peak_memory": self._memory,
            "prompts": len(self._prompts),
            "prompt_tokens": [len(prompt.token_ids) for prompt in self._prompts],
            "rows_skipped": len(self._skipped),
            "devices": self._pair.devices if self._pair else {},
            "vocabulary": self._vocabulary,
            "plot": self._plot,
        }

    def ways(self) -> list[RunMeasurement]:
        """Every contender with the target; the draft alone is no way of writing the target's texts."""
        return [
            way(one.record.name, self._pair, one.run, self._rows, one.record.figures())
            for one in self._contenders
            if self._pair is not None and one.pair is not None and one.is_pairs and one.record.samples
        ]

    def _tokenised(self, tokens: Tokens) -> list[Prompt]:
        if self._task.lengths:
            return [self._random(length, tokens) for length in self._task.lengths]
        made = partial(prompt_of, tokens=tokens, model=self._inputs.run.model)
        texts, policy = self._inputs.reading.prompts, self._task.on_bad_row
        return [prompt for _, prompt in usable_prompts(texts, made, policy, self._skipped)]

    def _random(self, length: int, tokens: Tokens) -> Prompt:
        model, draw = self._inputs.run.model, random.Random(f"{self._inputs.seed} {length}")
        ids = draw.choices(range(min(model.vocab, tokens.size)), k=length)
        where = TextPrompt(f"length-{length}", "", f"task.lengths, {length}")
        problem = unusable(where, ids, model.context, model.vocab)
        if problem is not None:
            raise problem
        return Prompt(where.id, tuple(ids))

    def _repeat(
        self, contenders: list[Contender], batches: list[list[Prompt]], tokens: Tokens, repeat: int,
        progress: Progress | None = None,
    ) -> list[Sample]:  # fmt: skip
        """All prompts once by each contender, in turn at every batch: what slows the machine slows all.

        Every repeat draws other texts, the same in every run of this seed.
        """
        samples = [Sample() for _ in contenders]
        for batch in batches:
            for contender, sample in zip(contenders, samples, strict=True):
                self._turn(contender, batch, tokens, repeat, sample)
                if progress is not None:
                    progress.advance(1)
        return samples

    def _turn(
        self, contender: Contender, batch: list[Prompt], tokens: Tokens, repeat: int, sample: Sample
    ) -> None:
        """One batch by one contender."""
        if contender.pair is not None:
            engine = self._engine(contender, tokens, repeat)
            limits = Limits(self._task.max_new_tokens, self._ends(tokens))
            timed = TimedRun(engine, batch, self._task.max_new_tokens)
            for step, spent in timed.rounds(
                limits, lookahead_for(contender.run, len(batch), contender.pair.costs)
            ):
                if step.round:
                    sample.delivery_ms.append(1000 * spent)
                    for row in step.rows:
                        sample.inter_token_ms += [1000 * spent / len(row.tokens)] * len(row.tokens)
            self._require_sound(timed)
            longest = max(len(prompt.token_ids) for prompt in batch)
            first_s = timed.first_token_s or 0.0
            sample.take(longest, timed.prefill_s, timed.decode_s, first_s, timed.counts)
            if engine.overlap is not None and contender.record.k != 0:
                sample.overlaps.append(engine.overlap)
        self._ranks.barrier()  # who has no part in it waits here, not in a message that has less patience

    def _engine(self, contender: Contender, tokens: Tokens, repeat: int) -> AnyEngine:
        assert contender.pair is not None
        ends, seed = self._ends(tokens), self._inputs.seed + repeat
        return engine_for(contender.pair, contender.run, tokens, ends, seed, self._task.prefill_chunk)

    def _ends(self, tokens: Tokens) -> frozenset[int]:
        return frozenset() if self._task.ignore_eos else tokens.end_ids

    def _split(self, contender: Contender, batches: list[list[Prompt]], tokens: Tokens) -> None:
        """The same turn once more with the stopwatch on, which is no part of the figures above."""
        if contender.pair is not None:
            engine = self._engine(contender, tokens, 0)
            if isinstance(engine, Engine):  # the leader's clocks are those that are shown
                engine.part = self._watch.part
            limits, made = Limits(self._task.max_new_tokens, self._ends(tokens)), 0
            self._watch.spent.clear()
            for batch in batches:
                timed = TimedRun(engine, batch, self._task.max_new_tokens)
                with self._watch.running(engine.wait):
                    for _ in timed.rounds(
                        limits, lookahead_for(contender.run, len(batch), contender.pair.costs)
                    ):
                        pass
                made += timed.counts.committed.total()
            contender.record.split = {part: 1000 * self._watch.spent[part] / made for part in PARTS}
        self._ranks.barrier()

    @staticmethod
    def _require_sound(timed: TimedRun) -> None:
        state = timed.state
        stopped = [row for row in range(state.rows) if state.finished[row] == "error"]
        if stopped:
            first = stopped[0]
            raise damaged(state.prompts[first].id, state.lengths[first], len(stopped), state.rows)

    def _show(self) -> None:
        """The table, the files of the run folder, the picture: of what has been measured."""
        if not self.has_output() or self._speeds is None or not self._ranks.is_leader:
            return
        if self._inputs.run.output is Output.text:
            for line in table(self.figures()):
                self._console.line(line)
        self._folder.write("repeats.csv", csv_text(self._speeds.records))
        place = plot_place(self._task.plot, self._folder.path)
        if place is not None:
            plot_speeds(self.figures(), place)
            self._plot = str(place)


def contenders_of(pair: RankModels, run: RunConf, ks: list[int], drafts_alone: bool) -> list[Contender]:
    """Who takes turns, in their order: the target alone, the draft alone, the pair at each K."""
    plain = replace(run, speculation=replace(run.speculation, k=0, drafter=Drafting.none, adaptive=False))
    found = [Contender(Record("target alone", 0), plain, pair)]
    if ks and drafts_alone and not pair.crew.drafts_apart:  # apart, the leader has no part in it
        found.append(Contender(Record("draft alone", 0), plain, draft_alone(pair), is_pairs=False))
    for k in ks:
        spec = replace(run.speculation, k=k, adaptive=False)
        found.append(Contender(Record(f"pair, K = {k}", k), replace(run, speculation=spec), pair))
    if ks and run.speculation.adaptive:
        found.append(Contender(Record("pair, adaptive", None), run, pair))
    return found


def speeds_of(contenders: list[Contender]) -> Speeds:
    """The records, told apart by their names."""
    records = [contender.record for contender in contenders]
    draft = next((record for record in records if record.name == "draft alone"), None)
    return Speeds(records[0], draft, [record for record in records[1:] if record is not draft])


def peak_memory(device: torch.device, ranks: Ranks) -> list[dict[str, int]]:
    """The most that each rank's process and its device have held."""
    held = memory_here(0, device, ranks.rank).bytes[TENSORS] or 0
    names = ("process_bytes", "device_bytes")
    return [
        {"rank": rank, **dict(zip(names, part, strict=True))}
        for rank, part in enumerate(ranks.gather_ints([process_bytes(), held]))
    ]
