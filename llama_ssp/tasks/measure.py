"""task=measure: how fast the target, the draft and the pair are, at each K, and where the time goes.

It measures the run's own pair or several presets, on sentences, random tokens or the questions of a suite.
Contenders take turns on the same prompts. Every rank takes the same turns in the same order; no decision
depends on a clock.
"""

import logging
import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from llama_ssp.config import MeasureConf, RunConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import DataError
from llama_ssp.pair.assembly import ModelCache, RankModels, draft_alone, engine_for
from llama_ssp.pair.requests import require_numbers
from llama_ssp.pair.run import Run, RunSettings
from llama_ssp.pair.session import PairSession, regular
from llama_ssp.pair.token_prompts import prompt_of, usable
from llama_ssp.placing.pairs import PairSpec
from llama_ssp.placing.prediction import RunMeasurement
from llama_ssp.report.console import Console, Progress
from llama_ssp.report.run_folder import RunFolder
from llama_ssp.report.speed_stats import Record, Sample, Speeds, by_category
from llama_ssp.report.task_tables import speeds as speeds_shown
from llama_ssp.speculative.draft_length import lookahead_for
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts
from llama_ssp.tasks.common import Task
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.tasks.profiling import PARTS, Stopwatch, timed_ranks
from llama_ssp.text.messages import Message
from llama_ssp.text.prompts import TextPrompt

log = logging.getLogger(__name__)
PromptBatch = list[tuple[TextPrompt, Prompt]]


@dataclass(frozen=True)
class Contender:
    """Takes turns. `models` is None on ranks that have no part in it and wait."""

    record: Record
    run: RunConf
    models: RankModels | None
    has_target: bool = True
    answers: dict[str, list[Counts]] = field(default_factory=dict)  # to a suite's questions, a repeat each


class MeasuredPair:
    """A warm-up, the repeats, then, but for suites, a turn of each contender with the stopwatch on."""

    def __init__(
        self, pair: PairSession, prompts: PromptBatch, seed: int, ranks: Ranks, watch: Stopwatch
    ) -> None:
        """Checks that the pair fits. Raises DistributedError otherwise."""
        self.pair = pair
        self._task = pair.run.task_as(MeasureConf)
        self._seed = seed
        self._ranks = ranks
        self._watch = watch
        self.contenders: list[Contender] = []
        self._pair_figures = pair.figures()
        rows = min(self._task.batch_size, len(prompts))
        self.batches = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
        self._longest = max(self._whole_length(text, prompt) for text, prompt in prompts)
        pair.check(rows, self._longest)

    @property
    def name(self) -> str:
        return self.pair.spec.name

    def measure(self, cache: ModelCache) -> None:
        """Loads the models and takes all turns; the models are the cache's afterwards."""
        task = self._task
        pair = self.pair
        models = pair.open(cache).models
        pair.measure_costs()
        self._pair_figures = pair.figures()
        drafts_alone = pair.placements.drafter is not None and self._longest <= models.draft_context
        ks = task.ks if pair.spec.drafter else []
        self.contenders = contenders_of(models, pair.run, ks, drafts_alone)

        # A warm-up on one batch, then all batches: the repeats and, but for suites, once with the stopwatch.
        passes = task.repeats if task.suite is not None else task.repeats + 1
        turns = (1 + passes * len(self.batches)) * len(self.contenders)
        with Progress(f"measure {self.name}", turns, "turns") as progress:
            self._repeat(self.batches[:1], [Sample() for _ in self.contenders], 0, progress)
            for contender in self.contenders:
                contender.answers.clear()

            for repeat in range(task.repeats):
                samples = [Sample() for _ in self.contenders]
                try:
                    self._repeat(self.batches, samples, repeat, progress)
                except BaseException:  # a suite takes hours: what has been answered counts
                    if task.suite is not None:
                        self._keep(samples)
                    raise
                self._keep(samples)

            if task.suite is None:
                for contender in self.contenders:
                    self._split(contender)
                    progress.advance(len(self.batches))

    def close(self) -> None:
        """Frees the models, except those in a cache; figures remain."""
        self.contenders = [replace(contender, models=None) for contender in self.contenders]
        self.pair.close()

    def figures(self) -> dict[str, Any]:
        """Returns the figures so far."""
        lengths = [len(prompt.token_ids) for batch in self.batches for _, prompt in batch]
        about = {"prompts": len(lengths), "prompt_tokens": lengths, **self._pair_figures}
        if not self.contenders:
            return about

        target, *rest = self.contenders
        draft = next((contender.record for contender in rest if not contender.has_target), None)
        pairs = [contender for contender in rest if contender.has_target]
        speeds = Speeds(target.record, draft, [contender.record for contender in pairs]).figures()
        if self._task.suite is not None:
            questions = [text for batch in self.batches for text, _ in batch]
            for row, contender in zip(speeds["pair"], pairs, strict=True):
                row["by_category"] = by_category(questions, target.answers, contender.answers)
        return {**speeds, **about}

    def measurements(self, prefix: str) -> list[RunMeasurement]:
        """Returns what every contender with the target took: the draft alone writes other texts."""
        return [
            self.pair.measurement(prefix + contender.record.name, contender.record.figures(), contender.run)
            for contender in self.contenders
            if contender.models and contender.has_target and contender.record.samples
        ]

    def _whole_length(self, text: TextPrompt, prompt: Prompt) -> int:
        """Returns the most tokens of prompt and answers; a turn's frame is at most as long as the first."""
        new = self._task.max_new_tokens
        first = len(prompt.token_ids)
        turns = [len(self.pair.tokens.encode(turn)) + first + new for turn in text.later]
        return first + new + sum(turns)

    def _repeat(
        self, batches: list[PromptBatch], samples: list[Sample], repeat: int, progress: Progress
    ) -> None:
        """Has all contenders write each batch in turn, so that they share noise; each repeat draws anew."""
        for batch in batches:
            for contender, sample in zip(self.contenders, samples, strict=True):
                self._turn(contender, batch, repeat, sample)
                progress.advance(1)

    def _turn(self, contender: Contender, batch: PromptBatch, repeat: int, sample: Sample) -> None:
        """Has the contender write a batch, or answer a question of a suite."""
        if contender.models is not None and self._task.suite is None:
            self._write(contender, [prompt for _, prompt in batch], repeat, sample)
        elif contender.models is not None:
            question, prompt = batch[0]  # a suite's batches have one
            counts = self._answer(contender, question, prompt, repeat, sample)
            contender.answers.setdefault(question.id, []).append(counts)
        self._ranks.barrier()  # ranks without a part in it wait here: a barrier waits longer than a message

    def _keep(self, samples: list[Sample]) -> None:
        """Counts a repeat if every contender has had a turn."""
        turns = [
            (contender, sample)
            for contender, sample in zip(self.contenders, samples, strict=True)
            if contender.models
        ]
        if all(sample.tokens for _, sample in turns):
            for contender, sample in turns:
                contender.record.samples.append(sample)

    def _answer(
        self, contender: Contender, question: TextPrompt, prompt: Prompt, repeat: int, sample: Sample
    ) -> Counts:
        """Answers all turns of a question; each follows what this contender has answered before."""
        counts = Counts()
        answers = list[str]()
        for number, text in enumerate([question.text, *question.later]):
            if number:
                try:
                    prompt = self._follow_up(question, text, number, answers)
                except DataError as problem:
                    log.warning("skipped: %s", problem)
                    continue

            text_run = self._write(contender, [prompt], repeat, sample)
            counts.merge(text_run.counts)
            reply = text_run.replies[0]
            token_ids = reply.token_ids[:-1] if reply.finish_reason == "eos" else reply.token_ids
            answers.append(self.pair.tokens.decode(token_ids))
            del text_run  # with its KV caches: the next turn has its own, and the plan counts those of one
        return counts

    def _follow_up(self, question: TextPrompt, text: str, number: int, answers: list[str]) -> Prompt:
        """Returns the prompt of a later turn. Raises DataError where it does not fit the model's context."""
        earlier_turns = [question.text, *question.later[: number - 1]]
        messages = list[Message]()
        for turn, answer in zip(earlier_turns, answers, strict=False):
            messages.append({"role": "user", "content": turn})
            if self._task.chat:
                messages.append(self.pair.tokens.thoughts.message(answer))
            else:
                messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": text})

        whole = "\n\n".join(message["content"] for message in messages)
        following = replace(question, id=f"{question.id} turn {number + 1}", text=whole)
        return prompt_of(following, self.pair.tokens, self.pair.run, messages if self._task.chat else ())

    def _write(self, contender: Contender, prompts: list[Prompt], repeat: int, sample: Sample) -> Run:
        """Writes the batch's texts on the clock."""
        engine = self._engine(contender, repeat)
        text_run = self._text_run(contender, engine, prompts)
        for step in text_run.rounds():
            if step.round:  # before the first one's tokens there is the prefill
                for row in step.rows:
                    count = len(row.tokens)
                    if count:  # a row of damaged logits gets none
                        sample.inter_token_ms += [1000 * step.seconds / count] * count

        require_numbers(*(reply.outcome for reply in text_run.replies.values()))
        sample.take(text_run.first_token_s or 0.0, text_run.counts)
        if engine.overlap is not None and contender.record.k != 0:
            sample.overlaps.append(engine.overlap)
        return text_run

    def _engine(self, contender: Contender, repeat: int) -> RankEngine:
        """Returns an engine for one turn; each repeat has draws of its own."""
        assert contender.models is not None
        pair = self.pair
        return engine_for(contender.models, contender.run, pair.tokens, pair.end_ids, self._seed + repeat)

    def _text_run(self, contender: Contender, engine: RankEngine, prompts: list[Prompt]) -> Run:
        """Returns what writes one batch, as token ids alone: to decode them would take time."""
        pair = self.pair
        settings = RunSettings(
            rows=len(prompts),
            lookahead=partial(lookahead_for, contender.run, costs=pair.costs),
            ends=pair.end_ids,
        )
        return Run(engine, pair.requests(prompts, contender.run), settings)

    def _split(self, contender: Contender) -> None:
        """Has a turn with the stopwatch on, which counts for no other figure."""
        if contender.models is not None:
            engine = self._engine(contender, 0)
            if self._ranks.is_leader:  # whose clocks are shown
                engine.observer = self._watch
            self._watch.spent.clear()
            tokens = 0
            for batch in self.batches:
                text_run = self._text_run(contender, engine, [prompt for _, prompt in batch])
                text_run.begin()  # the parts are those of rounds
                with self._watch.running(engine.synchronize):
                    for _ in text_run.rounds():
                        pass
                tokens += text_run.counts.committed
            contender.record.split = {part: 1000 * self._watch.spent[part] / tokens for part in PARTS}
        self._ranks.barrier()


def contenders_of(models: RankModels, run: RunConf, ks: list[int], drafts_alone: bool) -> list[Contender]:
    """Returns the contenders in their order: the target alone, the draft alone, the pair at each K."""
    plain = regular(run)
    result = [Contender(Record("target alone", 0), plain, models)]
    if ks and drafts_alone and not models.roles.drafts_apart:  # apart, the leader has no part in it
        result.append(Contender(Record("draft alone", 0), plain, draft_alone(models), has_target=False))
    for k in ks:
        spec = replace(run.speculation, k=k, adaptive=False)
        result.append(Contender(Record(f"pair, K = {k}", k), replace(run, speculation=spec), models))
    if ks and run.speculation.fixed_k is None:
        result.append(Contender(Record("pair, adaptive", None), run, models))
    return result


class MeasureTask(Task[MeasureConf]):
    """Checks every pair, then measures one after the other."""

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        self._watch = Stopwatch()
        super().__init__(inputs, console, folder, timed_ranks(ranks, self._watch))
        self._measured_pairs: list[MeasuredPair] = []

    def run(self) -> str:
        self._measured_pairs = [self._checked(spec) for spec in self._inputs.pairs]
        cache = ModelCache(self._ranks, self._run.placement)
        try:
            for measured in self._measured_pairs:
                self._pair = measured.pair
                prefix = f"{measured.name}, " if self._task.pairs else ""
                try:
                    measured.measure(cache)
                finally:
                    self._measured += measured.measurements(prefix)
                measured.close()
        finally:
            if self.has_output() and self._ranks.is_leader:
                self._print(speeds_shown(self.figures()))
                if not self._task.pairs:
                    self._draw(self._task.plot)
        return "done"

    def has_output(self) -> bool:
        pairs = self._measured_pairs
        return any(contender.record.samples for measured in pairs for contender in measured.contenders)

    def figures(self) -> dict[str, Any]:
        pairs = self._measured_pairs
        speeds: dict[str, Any] = {}
        if self._task.pairs:
            begun = [measured for measured in pairs if measured.contenders]
            speeds["pairs"] = [{"name": measured.name, **measured.figures()} for measured in begun]
        elif pairs:
            speeds = pairs[0].figures()
        return {
            **speeds,
            "suite": self._task.suite,
            "plot": self._plot,
            "rows_skipped": len(self._skipped),
        }

    def _checked(self, spec: PairSpec) -> MeasuredPair:
        """Returns the pair, which is checked with the largest K of all."""
        speculation = spec.run.speculation
        largest_k = replace(speculation, k=max([speculation.longest, *self._task.ks]))
        pair = PairSession(replace(spec, run=replace(spec.run, speculation=largest_k)), self._ranks)
        return MeasuredPair(pair, self._prompts_of(pair), self._inputs.seed, self._ranks, self._watch)

    def _prompts_of(self, pair: PairSession) -> PromptBatch:
        """Returns the prompts that are given, or those of `task.lengths` random tokens."""
        if not self._task.lengths:
            return self._prompts(pair)

        prompts = []
        vocab = min(pair.run.model.vocab, pair.tokens.size)
        for length in self._task.lengths:
            draw = random.Random(f"{self._inputs.seed} {length}")
            token_ids = draw.choices(range(vocab), k=length)
            text = TextPrompt(f"length-{length}", "", f"task.lengths, {length}")
            prompts.append((text, usable(text, token_ids, pair.tokens, pair.run)))
        return prompts
