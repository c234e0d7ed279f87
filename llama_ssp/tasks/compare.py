"""task=compare: the same prompt by regular and by speculative sampling, side by side.

Both run on the same models, one after the other. What is drawn is drawn between rounds, off the clocks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from rich.console import Console as RichConsole

from llama_ssp.config import CompareConf, Drafting, Output, RunConf, home_expanded
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import DataError
from llama_ssp.pair.assembly import RankModels, engine_for, open_pair
from llama_ssp.pair.batches import begun, damaged, prompt_of, usable_prompts
from llama_ssp.pair.placements import model_placements, tokens_of
from llama_ssp.planner.run_plan import RunMeasurement
from llama_ssp.report.live_view import Scene, Screen, figures, save, verdict
from llama_ssp.report.run_folder import Console, RunFolder
from llama_ssp.speculative.follower import AnyEngine
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import ratio
from llama_ssp.tasks.contestant import Contestant
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.tasks.interactive import Terminal, while_others_wait
from llama_ssp.tasks.run_measurement import way
from llama_ssp.text.detokenizer import visible
from llama_ssp.text.prompts import TextPrompt, problem_of
from llama_ssp.text.tokenizer import Tokens

log = logging.getLogger(__name__)

TYPED_TOKENS = 1024  # what a typed prompt is taken to have at most, when memory is checked
WARM_UP_TOKENS = 24
RECORDED = 100  # columns of a picture where there is no terminal to have them from


class CompareTask:
    """One run of the task. `figures` is right at any moment, also after an interrupt."""

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        assert isinstance(inputs.run.task, CompareConf)
        self._inputs, self._task, self._ranks = inputs, inputs.run.task, ranks
        self._console = console
        self._terminal = Terminal() if ranks.is_leader and not inputs.reading.prompts else None
        self._screen = self._on_terminal()
        self._scenes: list[Scene] = []
        self._skipped = list(inputs.reading.skipped)
        self._comparisons: list[dict[str, Any]] = []
        self._pair: RankModels | None = None
        self._sides: tuple[Contestant, Contestant] | None = None
        self._vocabulary: dict[str, Any] | None = None
        self._recorded: str | None = None

    def run(self) -> str:
        """Loads the pair, then compares prompt after prompt; the status."""
        run, task = self._inputs.run, self._task
        found = model_placements(self._inputs.pairs[0])
        tokens = tokens_of(found)
        self._vocabulary = tokens.paired.record() if tokens.paired else None
        made = partial(self._prompt, tokens=tokens)
        given = usable_prompts(self._inputs.reading.prompts, made, task.on_bad_row, self._skipped)
        longest = max((len(prompt.token_ids) for _, prompt in given), default=TYPED_TOKENS)
        slots = min(longest + task.max_new_tokens, run.model.context)
        # Two engines hold a cache of the target's, and one of them the draft's.
        self._pair = open_pair(found, run, 1, slots, self._ranks, caches=(2, 1))
        self._sides = regular, speculative = self._two_sides(self._pair, tokens)
        self._warm_up(regular, speculative, tokens)
        try:
            for text, prompt in given or self._asked(tokens):
                self._compare(text, prompt, regular, speculative)
        finally:
            self._record()
        return "done"

    def has_output(self) -> bool:
        return bool(self._comparisons)

    def figures(self) -> dict[str, Any]:
        """The task's part of the summary."""
        return {
            "comparisons": self._comparisons,
            "speedup": self._speedup(),
            "rows_skipped": len(self._skipped),
            "devices": self._pair.devices if self._pair else {},
            "vocabulary": self._vocabulary,
            "record": self._recorded,
        }

    def ways(self) -> list[RunMeasurement]:
        """Each side over all prompts."""
        if self._pair is None or self._sides is None:
            return []
        return [
            way(name, self._pair, side.run, 1, side.pace())
            for name, side in zip(("regular", "speculative"), self._sides, strict=True)
        ]

    def _speedup(self) -> float | None:
        """Over all prompts: milliseconds a token, regular over speculative, prefill left out."""
        spent = [
            ratio(
                sum(one[side]["decode_ms"] for one in self._comparisons),
                sum(one[side]["tokens_committed"] for one in self._comparisons),
            )
            for side in ("regular", "speculative")
        ]
        return ratio(spent[0], spent[1]) if spent[0] is not None and spent[1] is not None else None

    def _two_sides(self, pair: RankModels, tokens: Tokens) -> tuple[Contestant, Contestant]:
        run, task = self._inputs.run, self._task
        plain = replace(run, speculation=replace(run.speculation, k=0, drafter=Drafting.none, adaptive=False))
        ends = frozenset[int]() if task.ignore_eos else tokens.end_ids

        def engine(by: RunConf) -> AnyEngine:
            return engine_for(pair, by, tokens, ends, self._inputs.seed, task.prefill_chunk)

        spec, drafter = run.speculation, self._inputs.pairs[0].drafter
        title = f"speculative, {drafter}, K {'adaptive' if spec.adaptive else f'= {spec.k}'}"
        return (
            Contestant("regular", engine(plain), plain, tokens.decode, ends),
            Contestant(title, engine(run), run, tokens.decode, ends),
        )

    def _warm_up(self, regular: Contestant, speculative: Contestant, tokens: Tokens) -> None:
        """The first passes of a process are slow; they are nobody's."""
        ids = begun(tokens.encode("warm up"), tokens) or [0]
        for side in (regular, speculative):
            side.begin(Prompt("warm-up", tuple(ids)), min(WARM_UP_TOKENS, self._task.max_new_tokens), [])
            while side.advance():
                pass
            side.forget()

    def _prompt(self, text: TextPrompt, tokens: Tokens) -> Prompt:
        wrong = problem_of(text, {})  # of what was typed; what was read has been checked
        if wrong is not None:
            raise wrong
        task, model = self._task, self._inputs.run.model
        return prompt_of(text, tokens, model, task.chat, task.system, task.special_tokens)

    def _asked(self, tokens: Tokens) -> Iterator[tuple[TextPrompt, Prompt]]:
        """Prompts as they are typed, on every rank, until the input ends."""
        log.info("type a prompt; Ctrl-D ends")
        for number in count(1):
            told = while_others_wait(self._ranks, self._typed)
            if not told:
                return
            text = TextPrompt(str(number), bytes(told).decode("utf-8", "surrogatepass"), f"prompt {number}")
            try:
                yield text, self._prompt(text, tokens)
            except DataError as problem:  # a slip of the typist's is no reason to load the models again
                log.warning("%s", problem)

    def _typed(self) -> list[int]:
        assert self._terminal is not None
        line = self._terminal.ask()
        return [] if line is None else list(line.encode("utf-8", "surrogatepass"))

    def _compare(
        self, text: TextPrompt, prompt: Prompt, regular: Contestant, speculative: Contestant
    ) -> None:
        sides = (regular, speculative)
        for side in sides:
            side.expect()
        scene = Scene(text.text, regular.track, speculative.track)
        with self._moving():
            self._in_turn(prompt, sides, scene)
        for side in sides:
            if side.track.finish == "error":
                raise damaged(text.id, side.position, 1, 1)
        self._comparisons.append(
            {
                "id": text.id,
                "prompt": text.text,
                "regular": regular.figures(),
                "speculative": speculative.figures(),
            }
        )
        self._show(scene)

    def _in_turn(self, prompt: Prompt, sides: tuple[Contestant, Contestant], scene: Scene) -> None:
        """One after the other; each is alone on the machine."""
        for side, note in zip(sides, ("regular sampling", "speculative sampling"), strict=True):
            self._draw(scene, f"{note}: reading the prompt")
            side.begin(prompt, self._task.max_new_tokens, self._task.stop)
            while side.advance():
                self._draw(scene, f"{note}: running")

    def _moving(self) -> AbstractContextManager[None]:
        return self._screen.moving() if self._screen is not None else nullcontext()

    def _draw(self, scene: Scene, note: str) -> None:
        if self._screen is not None:
            self._screen.draw(scene, note)

    def _show(self, scene: Scene) -> None:
        if self._task.record is not None:
            self._scenes.append(scene)
        if self._screen is not None:
            self._screen.keep(scene)
        elif self._inputs.run.output is Output.text:
            for line in in_words(scene):
                self._console.line(line)

    def _on_terminal(self) -> Screen | None:
        """The screen, where there is a terminal that can move its cursor."""
        if not (self._ranks.is_leader and self._console.is_terminal):
            return None
        console = RichConsole(file=sys.stdout, highlight=False)
        usable = console.is_terminal and not console.is_dumb_terminal
        return Screen(console) if usable and self._inputs.run.output is Output.text else None

    def _record(self) -> None:
        """Saves the picture of what was compared, where one was asked for."""
        if self._task.record is None or not self._scenes or not self._ranks.is_leader:
            return
        path = home_expanded(self._task.record)
        width = RichConsole(file=sys.stdout).width if self._screen is not None else RECORDED
        entry = self._inputs.pairs[0]
        save(self._scenes, path, width, f"llama-ssp task=compare: {entry.target} with {entry.drafter}")
        self._recorded = str(path)


def in_words(scene: Scene) -> list[str]:
    """A comparison as plain lines."""
    last = scene.end(whole=True)
    lines = [f"prompt: {visible(scene.prompt)}"]
    for view in (last.regular, last.speculative):
        lines += [f"--- {view.title}", visible(view.text), *(f"({line})" for line in figures(view) if line)]
    return [*lines, f"--- {verdict(last)}", ""]
