"""task=compare: runs each prompt with regular, then speculative sampling; draws both side by side."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

from llama_ssp.config import CompareConf, Output, RunConf, home_expanded
from llama_ssp.errors import DataError
from llama_ssp.pair.requests import Reply, require_numbers
from llama_ssp.pair.run import Run
from llama_ssp.pair.session import PairSession, regular
from llama_ssp.placing.prediction import RunMeasurement
from llama_ssp.report.live_view import ONE_PROMPT, SIDE_BY_SIDE, Scene, Screen, Track, save, verdict
from llama_ssp.report.live_view import figures as track_lines
from llama_ssp.report.machine import processor_name
from llama_ssp.report.task_tables import REGULAR, SPECULATIVE
from llama_ssp.report.terminal import rich_console
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts, ratio
from llama_ssp.tasks.common import Task, longest, output_of
from llama_ssp.tasks.interactive import Terminal, typed_lines
from llama_ssp.text.detokenizer import Detokenizer
from llama_ssp.text.prompts import TextPrompt, require_usable

log = logging.getLogger(__name__)

TYPED_TOKENS = 1024  # the limit of a typed prompt: memory is planned for it
WARM_UP_TOKENS = 24
RECORDED = 100  # columns of a picture where there is no terminal
SIDES = REGULAR, SPECULATIVE


class Contestant:
    """One of the two samplings: its engine, its clock, and what arrived when."""

    def __init__(self, title: str, pair: PairSession, run: RunConf, seed: int) -> None:
        self.title = title
        self.run = run
        self._pair = pair
        self._engine = pair.engine(seed, run)
        self._runs: list[Run] = []

    def begin(self, prompt: Prompt, track: Track, max_new_tokens: int, stops: list[str]) -> None:
        """Prefills a prompt; what arrives is noted on the `track`."""
        self.track = track
        pair = self._pair
        requests = pair.requests([prompt], self.run, stops, max_new_tokens)
        text_run = Run(self._engine, requests, pair.run_settings(1, self.run), track.counts)
        text_run.begin()
        self._runs.append(text_run)
        self._detokenizer = Detokenizer(pair.tokens.decode, list(prompt.token_ids))
        self._rounds = text_run.rounds()

    @property
    def reply(self) -> Reply:
        return self._runs[-1].replies[0]

    def advance(self) -> bool:
        """Runs a round; False if the text had ended."""
        step = next(self._rounds, None)
        if step is None:
            return False
        (row,) = step.rows
        for position, token in enumerate(row.tokens):
            text = self._detokenizer.push(token)
            if row.finish is not None and position == len(row.tokens) - 1:
                text += self._detokenizer.end()
            if text:
                self.track.arrived.append((text, row.origin(position)))
        if row.finish is not None:
            self.track.finish = row.finish
            self.track.length = len(self.reply.text)
        return True

    def warm_up(self, prompt: Prompt, new_tokens: int) -> None:
        """Writes a text that counts for nothing: the first passes of a process are slow."""
        self.begin(prompt, Track(self.title), new_tokens, [])
        while self.advance():
            pass
        self._runs.clear()

    def pace(self) -> dict[str, Any]:
        """Returns times and counters of all prompts so far."""
        return Counts.sum(text_run.counts for text_run in self._runs).figures()

    def figures(self) -> dict[str, Any]:
        """Returns the text, its times and its counters, under the names of the JSON interface."""
        reply = self.reply
        text_run = self._runs[-1]
        first_s = text_run.first_token_s
        return {
            **output_of(reply.text, reply.token_ids, reply.finish_reason, reply.prompt_tokens),
            **text_run.counts.figures(),
            "time_to_first_token_ms": None if first_s is None else 1000 * first_s,
            "tokens_per_s": text_run.counts.tokens_per_s,
        }


class CompareTask(Task[CompareConf]):
    """Compares prompt after prompt: those given, or those typed until the input ends."""

    _screen: Screen | None = None
    _sides: tuple[Contestant, ...] = ()
    _saved: str | None = None

    def run(self) -> str:
        task = self._task
        pair = self._open()
        self._scenes: list[Scene] = []
        if self._ranks.is_leader and self._console.is_terminal and self._run.output is Output.text:
            screen = rich_console()
            if screen.is_terminal and not screen.is_dumb_terminal and screen.width >= SIDE_BY_SIDE:
                self._screen = Screen(screen)
        prompts = self._prompts(pair)  # none: they are typed
        length = longest(prompt for _, prompt in prompts) if prompts else TYPED_TOKENS
        # Two engines hold a KV cache of the target, and one of them the draft's.
        pair.load(1, length + task.max_new_tokens, caches=(2, 1))

        spec = self._run.speculation
        seed = self._inputs.seed
        title = f"speculative, {pair.spec.drafter}, {spec.k_in_words}"
        plain_side = Contestant("regular", pair, regular(self._run), seed)
        speculative_side = Contestant(title, pair, self._run, seed)
        self._sides = (plain_side, speculative_side)
        warm_up = Prompt("warm-up", tuple(pair.tokens.encode("warm up") or [0]))
        for side in self._sides:
            side.warm_up(warm_up, min(WARM_UP_TOKENS, task.max_new_tokens))

        try:
            for text, prompt in prompts or self._typed_prompts(pair):
                self._compare(text, prompt)
        finally:
            if task.plot is not None and self._scenes and self._ranks.is_leader:
                self._save(home_expanded(task.plot), pair)
        return "done"

    def _save(self, path: Path, pair: PairSession) -> None:
        """Writes the comparisons so far as a picture."""
        width = rich_console().width if self._screen is not None else RECORDED
        title = f"{pair.spec.target} with {pair.spec.drafter}; {processor_name()}; {date.today()}"
        save(self._scenes, path, width, title)
        self._saved = str(path)

    def figures(self) -> dict[str, Any]:
        """Returns the comparisons, and the speed-up over all prompts, without prefill."""
        paces = [side.pace()["ms_per_token"] for side in self._sides]
        speedup = None
        if paces and None not in paces:
            regular_ms, speculative_ms = paces
            speedup = ratio(regular_ms, speculative_ms)
        return {
            "comparisons": self._results,
            "speedup": speedup,
            "plot": self._saved,
            **self._pair_figures(),
        }

    def measurements(self) -> list[RunMeasurement]:
        """Returns each side's speed over all prompts."""
        return [
            self._pair.measurement(name, side.pace(), side.run)
            for name, side in zip(SIDES, self._sides, strict=False)
            if self._pair is not None
        ]

    def _typed_prompts(self, pair: PairSession) -> Iterator[tuple[TextPrompt, Prompt]]:
        """Yields prompts as they are typed, on every rank, until the input ends."""
        log.info("type a prompt; Ctrl-D ends")
        terminal = Terminal() if self._ranks.is_leader else None

        for number, typed in enumerate(typed_lines(self._ranks, terminal), start=1):
            text = TextPrompt(str(number), typed, f"prompt {number}")
            try:
                require_usable(text)  # what is read from a file was checked before
                prompt = pair.prompt(text)
                count = len(prompt.token_ids)
                if count > TYPED_TOKENS:
                    raise DataError(
                        "a typed prompt is longer than memory was planned for",
                        where=text.where,
                        found=f"{count} tokens",
                        allowed=f"at most {TYPED_TOKENS}",
                        fix="use task.prompt_file",
                    )
                yield text, prompt
            except DataError as problem:  # a typing mistake does not end the run
                log.warning("%s", problem)

    def _compare(self, text: TextPrompt, prompt: Prompt) -> None:
        """Continues a prompt in both ways; draws while it is written, and keeps what came of it."""
        tracks = [Track(side.title) for side in self._sides]
        regular_track, speculative_track = tracks
        scene = Scene(text.text, regular_track, speculative_track)
        draw = self._screen.draw if self._screen else lambda *_: None
        with self._screen.moving() if self._screen else nullcontext():
            # One after the other: each is alone on the machine.
            for side, name, track in zip(self._sides, SIDES, tracks, strict=True):
                draw(scene, f"{name} sampling: reading the prompt")
                side.begin(prompt, track, self._task.max_new_tokens, self._task.stop)
                while side.advance():
                    draw(scene, f"{name} sampling: running")

        for side in self._sides:
            require_numbers(side.reply.outcome)
        figures = {name: side.figures() for name, side in zip(SIDES, self._sides, strict=True)}
        self._results.append({"id": text.id, "prompt": text.text, **figures})
        if self._task.plot is not None:
            self._scenes.append(scene)
        if self._screen is not None:
            self._screen.keep(scene)
        else:
            self._print(in_words(scene))


def in_words(scene: Scene) -> list[str]:
    """Returns a comparison as plain lines."""
    lines = [f"prompt: {scene.prompt}"]
    for track in (scene.regular, scene.speculative):
        lines += [f"--- {track.title}", track.text]
        lines += [f"({line})" for line in track_lines(track) if line]
    conclusion = verdict(scene)
    lines.append(f"--- {conclusion}")
    if conclusion:
        lines.append(ONE_PROMPT)
    return [*lines, ""]
