"""task=generate: prompts in, continuations out, streamed, in batches."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from llama_ssp.config import GenerateConf, Output
from llama_ssp.pair.batches import Batch, Batches, nothing_run, require_numbers
from llama_ssp.planner.run_plan import RunMeasurement
from llama_ssp.report.console import Console, rich_console
from llama_ssp.report.live_view import TRACE_LEGEND, trace_line
from llama_ssp.speculative.generate import Step
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import RowStep
from llama_ssp.tasks.common import Task, longest, output_of, pace_in_words
from llama_ssp.text.detokenizer import Writing
from llama_ssp.text.logprobs import ScoredToken, are_damaged, plain, spelled
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.tokenizer import Tokens

log = logging.getLogger(__name__)


class GenerateTask(Task[GenerateConf]):
    """Continues every prompt, `task.batch_size` at a time."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._batches: Batches | None = None
        self._explained = False  # the marks of a trace

    def run(self) -> str:
        task, pair = self._task, self._open()
        prompts = self._prompts(pair)
        most = longest(prompt for _, prompt in prompts) + task.max_new_tokens
        pair.load(min(task.batch_size, len(prompts)), most)
        self._batches = pair.batches(self._inputs.seed, stops=task.stop, costs=pair.costs)
        starts = range(0, len(prompts), task.batch_size)
        for number, first in enumerate(starts, start=1):
            self._write(self._batches, prompts[first : first + task.batch_size], pair.tokens)
            if len(starts) > 1:
                log.info("batch %d of %d done", number, len(starts))
        require_numbers(
            *((o["id"], o["prompt_tokens"] + o["output_tokens"], o["finish_reason"]) for o in self._found)
        )
        log.info("%s", pace_in_words(self.figures()))
        return "done"

    def figures(self) -> dict[str, Any]:
        counted = self._batches.figures() if self._batches else nothing_run()
        return {"outputs": self._found, **self._pair_figures(), **counted}

    def measurements(self) -> list[RunMeasurement]:
        return self._measurement(self._batches.figures()) if self._batches else []

    def _write(self, batches: Batches, rows: list[tuple[TextPrompt, Prompt]], tokens: Tokens) -> None:
        """Continues one batch; what it has written is kept also if it is interrupted."""
        prompts = [prompt for _, prompt in rows]
        echoed: list[Any] = batches.score(prompts) if self._task.echo else [None] * len(rows)
        if not self._task.max_new_tokens:
            unwritten = {"text": "", "token_ids": [], "finish_reason": "length"}
            for (text, prompt), scored in zip(rows, echoed, strict=True):
                counts = {"prompt_tokens": len(prompt.token_ids), "output_tokens": 0}
                self._found.append(self._output(text, unwritten | counts, [], scored))
                self._print([f"{text.id}: {scores_in_words(self._found[-1]['prompt_logprobs'])}"])
                self._lines(self._found[-1:])
            return
        batch = batches.begin(prompts)
        stream = _Stream(self._console, [text for text, _ in rows], batch.writing, self._task.chat)

        def output(row: int) -> dict[str, Any]:
            written = output_of(batch.state, row, batch.writing.text(row))
            return self._output(rows[row][0], written, batch.state.logprobs[row], echoed[row])

        try:
            for step in batch.steps:
                self._lines(output(row.row) for row in step.rows if row.finish)
                if self._task.trace:
                    self._trace(step, batch, tokens, self._run.output is not Output.text)
                elif self._run.output is Output.text:
                    stream.show(step)
        finally:
            stream.end()
            self._found += [output(row) for row in range(len(rows))]

    def _lines(self, outputs: Iterable[dict[str, Any]]) -> None:
        """With output=jsonl, prints a line of JSON for each text that has ended."""
        if self._run.output is Output.jsonl:
            for output in outputs:
                self._console.line(json.dumps(output))

    def _output(
        self, text: TextPrompt, written: dict[str, Any], logprobs: list[ScoredToken],
        echoed: list[ScoredToken] | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Returns a prompt's part of the summary, with the log-probabilities that are asked for."""
        output: dict[str, Any] = {"id": text.id, "prompt": text.text, **written}
        if self._task.logprobs is not None and self._pair is not None:
            spell = self._pair.tokens.spell
            output["logprobs"] = plain(spelled(logprobs, spell))
            if echoed is not None:
                output["prompt_logprobs"] = plain(spelled(echoed, spell))
                output["finish_reason"] = "error" if are_damaged(echoed) else output["finish_reason"]
        return output

    def _trace(self, step: Step, batch: Batch, tokens: Tokens, silent: bool) -> None:
        """Records a round, and prints it."""
        for row in step.rows:
            name, text = batch.state.prompts[row.row].id, batch.writing.text(row.row)
            position = len(batch.state.generated(row.row)) - len(row.tokens)
            record = traced(step.round, name, position, row, tokens, text)
            self._folder.round(record)
            if not silent:
                self._console.show([TRACE_LEGEND] * (not self._explained))
                self._console.show([trace_line(record, rich_console().no_color)])
                self._explained = True


class _Stream:
    """Prints texts in the order of the prompts: the first unfinished one live, the others when it ends.

    On a terminal each follows its prompt; several prompts have a line with their id between them.
    """

    def __init__(self, console: Console, prompts: list[TextPrompt], writing: Writing, chat: bool) -> None:
        self._console, self._prompts, self._writing, self._chat = console, prompts, writing, chat
        self._ended = [False] * len(prompts)
        self._row = 0
        self._begun = False

    def show(self, step: Step) -> None:
        for row in step.rows:
            self._ended[row.row] = row.finish is not None
        while self._row < len(self._prompts):
            ended = self._ended[self._row]
            piece = self._writing.printable(self._row, ended)
            if not self._begun and self._console.is_terminal:
                self._console.write(self._heading(self._prompts[self._row]))
            self._begun = True
            self._console.write(piece)
            if not ended:
                return
            self.end()
            self._row += 1

    def _heading(self, prompt: TextPrompt) -> str:
        """The prompt, dim: of a chat as a paragraph, else as the beginning of the text."""
        name = f"--- {prompt.id}\n" if len(self._prompts) > 1 else ""
        text = f"{name}{prompt.text}{chr(10) * self._chat}"
        return f"\x1b[2m{text}\x1b[0m" if rich_console().color_system else text  # not on a dumb terminal

    def end(self) -> None:
        """Ends the line that is being written, if any."""
        if self._begun:
            self._console.write("\n")
        self._begun = False


def scores_in_words(scores: list[dict[str, Any]]) -> str:
    """Returns the log-probability of tokens, given as in the output, as words."""
    known = [score["logprob"] for score in scores if score["logprob"] is not None]
    if not known:
        return "no token to score"
    total, nats = sum(known), -sum(known) / len(known)
    return f"{len(known)} tokens, log-probability {total:.4f}, {nats:.4f} nats a token"


def traced(number: int, name: str, position: int, row: RowStep, tokens: Tokens, text: str) -> dict[str, Any]:
    """One row's round, for people and for rounds.jsonl."""
    origins = [row.origin(i) for i in range(len(row.tokens))]
    return {
        "round": number, "id": name, "position": position,
        **{key: value for key, value in asdict(row).items() if key != "row"},
        "drafted_text": [tokens.decode([token]) for token in row.drafted],
        "origins": origins,
        "last_origin": origins[-1] if origins else None,
        "last_text": tokens.decode(row.tokens[-1:]),
        "text": text,
    }  # fmt: skip
