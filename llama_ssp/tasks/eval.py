"""task=eval: how many multiplications are right, by regular and by speculative sampling.

Both get the same prompts, the same number of tokens and the same distribution, so their scores may differ by
chance alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from llama_ssp.config import Drafting, EvalConf, Output, RunConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.pair.assembly import ModelCache, RankModels, engine_for, lookahead_for
from llama_ssp.pair.batches import Batch, Batches, begun, damaged, unusable
from llama_ssp.pair.placements import ModelPlacement, model_placements, require_loadable, tokens_of
from llama_ssp.planner.resolve import PairSpec
from llama_ssp.planner.run_plan import Prediction, RunMeasurement
from llama_ssp.report.plots import plot_place, plot_scores
from llama_ssp.report.run_folder import Console, Progress, RunFolder
from llama_ssp.report.scores import table
from llama_ssp.report.statistics import paired_difference, wilson
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.arithmetic import STOP, Question, questions
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.tasks.run_measurement import way
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.tokenizer import Tokens

QUICK = 10  # prompts of a quick run
PREFILL_CHUNK = 512
REGULAR, SPECULATIVE = "regular", "speculative"
Block = list[tuple[Question, Prompt]]


@dataclass
class Answers:
    """What one mode of a pair has answered. `figures` holds the counters at each size's end."""

    right: dict[str, bool] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)
    running: Batches | None = None
    way: RunMeasurement | None = None

    def figures_at(self, size: int) -> dict[str, Any]:
        """The counters when the size of this index was done, or now if it is being worked on."""
        if size < len(self.figures):
            return self.figures[size]
        return self.running.figures() if self.running else {}


@dataclass(frozen=True)
class Prepared:
    """A pair whose files, tokens and memory have been checked, and its prompts, size by size."""

    entry: PairSpec
    placements: list[ModelPlacement]
    tokens: Tokens
    blocks: list[Block]
    rows: int
    prediction: Prediction | None

    @property
    def name(self) -> str:
        drafter = self.entry.drafter
        return self.entry.target if drafter is None else f"{self.entry.target}/{drafter}"

    @property
    def modes(self) -> list[str]:
        return [REGULAR] if self.entry.drafter is None else [REGULAR, SPECULATIVE]


@dataclass
class Result:
    """What is known of a pair, by mode."""

    pair: Prepared
    answers: dict[str, Answers] = field(default_factory=dict)


class EvalTask:
    """One run of the task. `figures` is right at any moment, also after an interrupt."""

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        assert isinstance(inputs.run.task, EvalConf)
        self._ranks = ranks
        self._inputs, self._task = inputs, inputs.run.task
        self._console, self._folder = console, folder
        seeds, sizes = self._task.seeds, sorted(self._task.sizes)
        self._seeds, self._sizes = (seeds[:1], [QUICK]) if self._task.quick else (seeds, sizes)
        self._results: list[Result] = []
        self._devices: dict[str, dict[str, str]] = {}
        self._plot: str | None = None

    def run(self) -> str:
        """Checks every pair, then answers all prompts with each; the status."""
        asked = self._questions()
        prepared = [self._prepared(entry, asked) for entry in self._inputs.pairs]
        shelf = ModelCache(self._ranks)
        try:
            for one in prepared:
                self._answer_all(one, shelf)
        finally:
            self._show()
        place = plot_place(self._task.plot, self._folder.path)
        if place is not None and self._ranks.is_leader:
            plot_scores(self._rows(), place)
            self._plot = str(place)
        return "done"

    def has_output(self) -> bool:
        return any(answers.right for result in self._results for answers in result.answers.values())

    def figures(self) -> dict[str, Any]:
        """The task's part of the summary."""
        return {
            "rows": self._rows(),
            "differences": self._differences(),
            "devices": self._devices,
            "plot": self._plot,
        }

    def ways(self) -> list[RunMeasurement]:
        """Every mode of every pair that has ended; regular answers are known to several pairs."""
        found = [answers.way for result in self._results for answers in result.answers.values()]
        return list({id(way): way for way in found if way is not None}.values())

    def _questions(self) -> list[list[Question]]:
        """The questions, in one block for each size: those that the size before it lacks.

        Within a block the seeds take turns, so that a run that was stopped has asked each the same.
        """
        by_seed = [questions(seed, self._sizes[-1], self._task.shots) for seed in self._seeds]
        bounds = zip([0, *self._sizes], self._sizes, strict=False)
        return [[own[n] for n in range(first, last) for own in by_seed] for first, last in bounds]

    def _prepared(self, entry: PairSpec, asked: list[list[Question]]) -> Prepared:
        task, run, found = self._task, entry.run, model_placements(entry)
        tokens = tokens_of(found)
        blocks = [[(question, _prompt(question, tokens, run)) for question in block] for block in asked]
        longest = max(len(prompt.token_ids) for block in blocks for _, prompt in block)
        slots = min(longest + task.max_new_tokens, run.model.context)
        rows = min(task.batch_size, max(len(block) for block in blocks))
        return Prepared(entry, found, tokens, blocks, rows, require_loadable(found, run, rows, slots))

    def _answer_all(self, one: Prepared, shelf: ModelCache) -> None:
        """Answers the prompts in every mode that the pair has."""
        result = Result(one)
        known = self._known_regular(one)
        self._results.append(result)
        if known is not None:
            result.answers[REGULAR] = known
        missing = [mode for mode in one.modes if mode not in result.answers]
        if missing:
            pair = replace(shelf.open(one.placements), prediction=one.prediction)
            self._devices[one.name] = pair.devices
        for mode in missing:
            result.answers[mode] = Answers()
            self._answer(one, mode, pair, result.answers[mode])

    def _known_regular(self, one: Prepared) -> Answers | None:
        """The same target's answers from an earlier pair: the same seed would give them again."""
        return next(
            (r.answers[REGULAR] for r in self._results if r.pair.placements[0] == one.placements[0]), None
        )

    def _answer(self, one: Prepared, mode: str, pair: RankModels, answers: Answers) -> None:
        run, tokens, task = one.entry.run, one.tokens, self._task
        if mode == REGULAR:
            run = replace(run, speculation=replace(run.speculation, drafter=Drafting.none))
        engine = engine_for(pair, run, tokens, tokens.end_ids, self._inputs.seed, PREFILL_CHUNK)
        answers.running = Batches(
            engine, tokens.decode, partial(lookahead_for, run), task.max_new_tokens, tokens.end_ids, [STOP]
        )
        total = sum(len(block) for block in one.blocks)
        with Progress(f"{one.name}, {mode}", total, "prompts") as progress:
            for block in one.blocks:
                for first in range(0, len(block), task.batch_size):
                    part = block[first : first + task.batch_size]
                    self._batch(answers, answers.running, part, mode)
                    progress.advance(len(part))
                answers.figures.append(answers.running.figures())
        answers.way = way(f"{one.name}, {mode}", pair, run, one.rows, answers.running.figures())
        answers.running = None  # it holds the models

    def _batch(self, answers: Answers, runs: Batches, part: Block, mode: str) -> None:
        # Streams of their own for the two modes: with shared ones their texts would agree more often
        # than the distributions do, and the difference would say less than its interval claims.
        prompts = [Prompt(f"{prompt.id} {mode}", prompt.token_ids) for _, prompt in part]
        batch = runs.begin(prompts)
        for _ in runs.steps(batch):
            pass
        _raise_if_damaged(batch)
        for (question, _), written in zip(part, batch.texts(), strict=True):
            answers.right[question.id] = question.is_answered_by(written)

    def _rows(self) -> list[dict[str, Any]]:
        return [
            self._row(result.pair, mode, index, answers, names)
            for result in self._results
            for mode, answers in result.answers.items()
            for index, names in self._reached(answers)
        ]

    def _reached(self, *modes: Answers) -> Iterator[tuple[int, list[str]]]:
        """Each size that all these have worked on, by its index, and the prompts that all have answered."""
        smaller = 0
        for index, size in enumerate(self._sizes):
            asked = [f"{seed}-{number}" for seed in self._seeds for number in range(size)]
            names = [name for name in asked if all(name in answers.right for answers in modes)]
            if len(names) > smaller:
                yield index, names
            smaller = len(asked)

    def _row(
        self, one: Prepared, mode: str, index: int, answers: Answers, names: list[str]
    ) -> dict[str, Any]:
        return {
            "pair": one.name,
            "target": one.entry.target,
            "draft": one.entry.drafter if mode == SPECULATIVE else None,
            "mode": mode,
            "prompts_per_seed": self._sizes[index],
            **_score([answers.right[name] for name in names]),
            "per_seed": self._per_seed(answers, self._sizes[index]),
            **answers.figures_at(index),
        }

    def _per_seed(self, answers: Answers, size: int) -> list[dict[str, Any]]:
        found = []
        for seed in self._seeds:
            names = [f"{seed}-{number}" for number in range(size)]
            right = [answers.right[name] for name in names if name in answers.right]
            if right:
                found.append({"seed": seed, **_score(right)})
        return found

    def _differences(self) -> list[dict[str, Any]]:
        """Speculative less regular, over the prompts that both have answered."""
        found = []
        for result in self._results:
            if len(result.answers) == 2:
                both = result.answers[REGULAR], result.answers[SPECULATIVE]
                for index, names in self._reached(*both):
                    found.append(
                        {
                            "pair": result.pair.name,
                            "prompts_per_seed": self._sizes[index],
                            **_difference(both[0].right, both[1].right, names),
                        }
                    )
        return found

    def _show(self) -> None:
        if self._inputs.run.output is Output.text and self.has_output():
            for line in table(self._rows(), self._differences()):
                self._console.line(line)


def _prompt(question: Question, tokens: Tokens, run: RunConf) -> Prompt:
    text = TextPrompt(question.id, question.text, f"task.shots, seed {question.seed}")
    ids = begun(tokens.encode(text.text), tokens)
    problem = unusable(text, ids, run.model.context, run.model.vocab)
    if problem is not None:
        raise problem
    return Prompt(text.id, tuple(ids))


def _raise_if_damaged(batch: Batch) -> None:
    state = batch.state
    stopped = [row for row in range(state.rows) if state.finished[row] == "error"]
    if stopped:
        first = stopped[0]
        raise damaged(state.prompts[first].id, state.lengths[first], len(stopped), state.rows)


def _score(right: list[bool]) -> dict[str, Any]:
    share = wilson(sum(right), len(right))
    return {
        "prompts": len(right),
        "correct": sum(right),
        "score": share.value,
        "score_low": share.low,
        "score_high": share.high,
    }


def _difference(before: dict[str, bool], after: dict[str, bool], names: list[str]) -> dict[str, Any]:
    gained = sum(after[name] and not before[name] for name in names)
    lost = sum(before[name] and not after[name] for name in names)
    estimate = paired_difference(gained, lost, len(names))
    return {
        "prompts": len(names),
        "correct_speculative_only": gained,
        "correct_regular_only": lost,
        "difference": estimate.value,
        "difference_low": estimate.low,
        "difference_high": estimate.high,
        "includes_zero": estimate.includes(0.0),
    }
