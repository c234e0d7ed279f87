"""task=eval: how many multiplications are right, by regular and by speculative sampling.

Both get the same prompts, the same number of tokens and the same distribution, so their scores may differ by
chance alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from llama_ssp.config import EvalConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.pair.assembly import ModelCache
from llama_ssp.pair.requests import require_numbers
from llama_ssp.pair.run import Run, run_figures
from llama_ssp.pair.session import PairSession, regular
from llama_ssp.placing.pairs import PairSpec
from llama_ssp.report.console import Console, Progress
from llama_ssp.report.run_folder import RunFolder
from llama_ssp.report.statistics import paired_difference, wilson
from llama_ssp.report.task_tables import REGULAR, SPECULATIVE, scores
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts
from llama_ssp.tasks.arithmetic import STOP, Question, questions
from llama_ssp.tasks.common import Task, longest
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.text.prompts import TextPrompt

QUICK = 10  # prompts of a quick run


@dataclass
class Answers:
    """What one mode of a pair has answered. `figures` holds the counters at the latest batch of each size."""

    right: dict[str, bool] = field(default_factory=dict)
    figures: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass
class ScoredPair:
    """A checked pair, its prompts size by size, and its answers by mode."""

    pair: PairSession
    blocks: list[list[tuple[Question, Prompt]]]
    answers: dict[str, Answers] = field(default_factory=dict)


class EvalTask(Task[EvalConf]):
    """Checks every pair, then answers all prompts with each."""

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        super().__init__(inputs, console, folder, ranks)
        task = self._task
        self._seeds = task.seeds[:1] if task.quick else task.seeds
        self._sizes = [QUICK] if task.quick else sorted(task.sizes)
        self._scored: list[ScoredPair] = []  # those that have been begun
        self._devices: dict[str, dict[str, str]] = {}

    def run(self) -> str:
        # A block for each size: the questions that the size before it lacks. Within a block the seeds take
        # turns, so that a run that was stopped has answered each equally far.
        by_seed = [questions(seed, self._sizes[-1], self._task.shots) for seed in self._seeds]
        blocks = list[list[Question]]()
        for first, last in pairwise([0, *self._sizes]):
            blocks.append([of_seed[number] for number in range(first, last) for of_seed in by_seed])

        checked = [self._checked(spec, blocks) for spec in self._inputs.pairs]
        cache = ModelCache(self._ranks, self._run.placement)
        try:
            for scored in checked:
                self._answer_all(scored, cache)
        finally:
            if self.has_output():
                self._print(scores(self.figures()))
        return "done"

    def has_output(self) -> bool:
        return any(answers.right for scored in self._scored for answers in scored.answers.values())

    def figures(self) -> dict[str, Any]:
        rows = list[dict[str, Any]]()
        differences = list[dict[str, Any]]()
        for scored in self._scored:
            for mode, answers in scored.answers.items():
                rows += self._rows(scored, mode, answers)
            differences += self._differences(scored)
        return {"rows": rows, "differences": differences, "devices": self._devices}

    def _checked(self, spec: PairSpec, question_blocks: list[list[Question]]) -> ScoredPair:
        """Returns the pair with the questions as token ids. Raises DistributedError if it does not fit."""
        pair = PairSession(spec, self._ranks)
        blocks = list[list[tuple[Question, Prompt]]]()
        for question_block in question_blocks:
            block = list[tuple[Question, Prompt]]()
            for question in question_block:
                text = TextPrompt(question.id, question.text, f"task.shots, seed {question.seed}")
                block.append((question, pair.prompt(text)))
            blocks.append(block)

        length = longest(prompt for block in blocks for _, prompt in block)
        rows = min(self._task.batch_size, max(map(len, blocks)))
        pair.check(rows, length + self._task.max_new_tokens)
        return ScoredPair(pair, blocks)

    def _answer_all(self, scored: ScoredPair, cache: ModelCache) -> None:
        """Answers the prompts in every mode of the pair; takes regular answers of an earlier same target."""
        pair = scored.pair
        target = pair.placements.target
        earlier = next((item for item in self._scored if item.pair.placements.target == target), None)
        self._scored.append(scored)
        if earlier is not None:
            scored.answers[REGULAR] = earlier.answers[REGULAR]

        modes = [REGULAR] if pair.spec.drafter is None else [REGULAR, SPECULATIVE]
        missing = [mode for mode in modes if mode not in scored.answers]
        if missing:
            self._devices[pair.spec.name] = pair.open(cache).models.devices
        for mode in missing:
            scored.answers[mode] = Answers()
            self._answer(scored, mode, scored.answers[mode])
        pair.close()

    def _answer(self, scored: ScoredPair, mode: str, answers: Answers) -> None:
        """Answers all prompts in one mode; an answer counts as soon as it is there."""
        pair = scored.pair
        run = regular(pair.run) if mode == REGULAR else pair.run
        engine = pair.engine(self._inputs.seed, run)
        settings = pair.run_settings(self._task.batch_size, run)
        counts = Counts()
        name = f"{pair.spec.name}, {mode}"

        with Progress(name, sum(map(len, scored.blocks)), "prompts") as progress:
            for size, block in zip(self._sizes, scored.blocks, strict=True):
                # The two modes draw from random streams of their own: with shared ones their texts would
                # agree more often than the distributions do, and the interval would claim too much.
                prompts = [Prompt(f"{prompt.id} {mode}", prompt.token_ids) for _, prompt in block]
                requests = pair.requests(prompts, run, [STOP])
                outcomes = []
                for reply in Run(engine, requests, settings, counts).ended():
                    outcomes.append(reply.outcome)
                    if reply.finish_reason == "error":
                        continue
                    question, _ = block[reply.index]
                    answers.right[question.id] = question.is_answered_by(reply.text)
                    answers.figures[size] = run_figures(engine, counts)
                    progress.advance(1)
                require_numbers(*outcomes)
        self._measured.append(pair.measurement(name, run_figures(engine, counts), run))

    def _reached(self, *modes: Answers) -> Iterator[tuple[int, list[str]]]:
        """Yields each size that all these have worked on, and the prompts that all have answered."""
        smaller = 0
        for size in self._sizes:
            prompts = [f"{seed}-{number}" for seed in self._seeds for number in range(size)]
            answered = set(prompts).intersection(*(answers.right for answers in modes))
            if len(answered) > smaller:
                yield size, [name for name in prompts if name in answered]
            smaller = len(prompts)

    def _rows(self, scored: ScoredPair, mode: str, answers: Answers) -> Iterator[dict[str, Any]]:
        """Yields a mode's scores at each size."""
        for size, names in self._reached(answers):
            correct = sum(answers.right[name] for name in names)
            yield {
                "pair": scored.pair.spec.name,
                "target": scored.pair.spec.target,
                "draft": scored.pair.spec.drafter if mode == SPECULATIVE else None,
                "mode": mode,
                "prompts_per_seed": size,
                "prompts": len(names),
                "correct": correct,
                **wilson(correct, len(names)).figures("score"),
                **answers.figures.get(size, {}),
            }

    def _differences(self, scored: ScoredPair) -> Iterator[dict[str, Any]]:
        """Yields speculative less regular at each size, over the prompts that both have answered."""
        if len(scored.answers) < 2:
            return
        plain = scored.answers[REGULAR]
        drafted = scored.answers[SPECULATIVE]
        for size, names in self._reached(plain, drafted):
            gained = sum(drafted.right[name] and not plain.right[name] for name in names)
            lost = sum(plain.right[name] and not drafted.right[name] for name in names)
            estimate = paired_difference(gained, lost, len(names))
            yield {
                "pair": scored.pair.spec.name,
                "prompts_per_seed": size,
                "prompts": len(names),
                "correct_speculative_only": gained,
                "correct_regular_only": lost,
                **estimate.figures("difference"),
                "includes_zero": estimate.includes(0.0),
            }
