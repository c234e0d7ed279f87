"""task=eval: how many multiplications are right, by regular and by speculative sampling.

Both get the same prompts, the same number of tokens and the same distribution, so their scores may differ by
chance alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llama_ssp.config import EvalConf
from llama_ssp.pair.assembly import ModelCache
from llama_ssp.pair.batches import require_numbers, usable
from llama_ssp.pair.session import PairSession, regular
from llama_ssp.planner.resolve import PairSpec
from llama_ssp.report.console import Progress
from llama_ssp.report.statistics import paired_difference, wilson
from llama_ssp.report.task_tables import REGULAR, SPECULATIVE, scores
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.arithmetic import STOP, Question, questions
from llama_ssp.tasks.common import Task, longest
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

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        task = self._task
        self._seeds = task.seeds[:1] if task.quick else task.seeds
        self._sizes = [QUICK] if task.quick else sorted(task.sizes)
        self._scored: list[ScoredPair] = []  # those that have been begun
        self._devices: dict[str, dict[str, str]] = {}

    def run(self) -> str:
        # A block for each size: the questions that the size before it lacks. Within a block the seeds take
        # turns, so that a run that was stopped has answered each equally far.
        by_seed = [questions(seed, self._sizes[-1], self._task.shots) for seed in self._seeds]
        bounds = zip([0, *self._sizes], self._sizes, strict=False)
        blocks = [[seed[n] for n in range(first, last) for seed in by_seed] for first, last in bounds]
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
        scored = self._scored
        modes = [(item, mode, answers) for item in scored for mode, answers in item.answers.items()]
        return {
            "rows": [row for item in modes for row in self._rows(*item)],
            "differences": [row for item in scored for row in self._differences(item)],
            "devices": self._devices,
        }

    def _checked(self, spec: PairSpec, questions: list[list[Question]]) -> ScoredPair:
        pair = PairSession(spec, self._ranks)
        blocks = []
        for block in questions:
            texts = [TextPrompt(q.id, q.text, f"task.shots, seed {q.seed}") for q in block]
            ids = [pair.tokens.encode(text.text) for text in texts]
            prompts = [usable(*given, pair.tokens, pair.run) for given in zip(texts, ids, strict=True)]
            blocks.append(list(zip(block, prompts, strict=True)))
        length = max(longest(prompt for _, prompt in block) for block in blocks)
        rows = min(self._task.batch_size, max(map(len, blocks)))
        pair.check(rows, length + self._task.max_new_tokens)
        return ScoredPair(pair, blocks)

    def _answer_all(self, scored: ScoredPair, cache: ModelCache) -> None:
        """Answers the prompts in every mode of the pair; takes regular answers of an earlier same target."""
        pair = scored.pair
        earlier = [other for other in self._scored if other.pair.placements.target == pair.placements.target]
        self._scored.append(scored)
        if earlier:
            scored.answers[REGULAR] = earlier[0].answers[REGULAR]
        modes = [REGULAR] if pair.spec.drafter is None else [REGULAR, SPECULATIVE]
        missing = [mode for mode in modes if mode not in scored.answers]
        if missing:
            self._devices[scored.pair.spec.name] = pair.open(cache).models.devices
        for mode in missing:
            scored.answers[mode] = Answers()
            self._answer(scored, mode, scored.answers[mode])
        pair.close()

    def _answer(self, scored: ScoredPair, mode: str, answers: Answers) -> None:
        task, pair = self._task, scored.pair
        run = regular(pair.run) if mode == REGULAR else pair.run
        writer = pair.writer(self._inputs.seed, run)
        name = f"{scored.pair.spec.name}, {mode}"
        with Progress(name, sum(map(len, scored.blocks)), "prompts") as progress:
            for size, block in zip(self._sizes, scored.blocks, strict=True):
                # The two modes draw from random streams of their own: with shared ones their texts would
                # agree more often than the distributions do, and the interval would claim too much.
                prompts = [Prompt(f"{prompt.id} {mode}", prompt.token_ids) for _, prompt in block]
                ends = []
                for reply in writer.write(pair.requests(prompts, run, [STOP]), task.batch_size):
                    ends.append(reply.end)
                    if reply.finish_reason == "error":
                        continue
                    question = block[reply.index][0]
                    answers.right[question.id] = question.is_answered_by(reply.text)
                    answers.figures[size] = writer.figures()
                    progress.advance(1)
                require_numbers(*ends)
        self._measured.append(pair.measurement(name, writer.figures(), run))

    def _reached(self, *modes: Answers) -> Iterator[tuple[int, list[str]]]:
        """Yields each size that all these have worked on, and the prompts that all have answered."""
        smaller = 0
        for size in self._sizes:
            every = [f"{seed}-{number}" for seed in self._seeds for number in range(size)]
            names = [name for name in every if all(name in answers.right for answers in modes)]
            if len(names) > smaller:
                yield size, names
            smaller = len(every)

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
        before, after = scored.answers[REGULAR], scored.answers[SPECULATIVE]
        for size, names in self._reached(before, after):
            gained = sum(after.right[name] and not before.right[name] for name in names)
            lost = sum(before.right[name] and not after.right[name] for name in names)
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
