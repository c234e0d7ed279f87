"""task=generate: prompts in, continuations out, streamed, in batches."""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from llama_ssp.config import GenerateConf, Output
from llama_ssp.distributed.comm import Ranks
from llama_ssp.pair.requests import Reply, require_numbers
from llama_ssp.pair.run import Run, run_figures, runs
from llama_ssp.placing.prediction import RunMeasurement
from llama_ssp.report.accepted import of_run
from llama_ssp.report.console import Console
from llama_ssp.report.live_view import TRACE_LEGEND, trace_line
from llama_ssp.report.run_folder import RunFolder
from llama_ssp.report.terminal import rich_console
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Step
from llama_ssp.speculative.stats import Counts, RowStep
from llama_ssp.tasks.common import ReplyScreen, Task, longest, output_of, pace_in_words
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.text.logprobs import plain, spelled
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.tokenizer import Tokens

log = logging.getLogger(__name__)


class GenerateTask(Task[GenerateConf]):
    """Continues every prompt, `task.batch_size` at a time."""

    _engine: RankEngine | None = None
    _explained = False  # the marks of a trace

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        super().__init__(inputs, console, folder, ranks)
        self._counts = Counts()

    def run(self) -> str:
        task = self._task
        pair = self._open()
        prompts = self._prompts(pair)
        max_tokens = longest(prompt for _, prompt in prompts) + task.max_new_tokens
        pair.load(min(task.batch_size, len(prompts)), max_tokens)
        self._engine = pair.engine(self._inputs.seed)

        texts = [text for text, _ in prompts]
        requests = pair.requests([prompt for _, prompt in prompts], stops=task.stop)
        for text_run in runs(self._engine, requests, pair.run_settings(task.batch_size), self._counts):
            self._write(text_run, texts, pair.tokens)

        ends = []
        for output in self._results:
            length = output["prompt_tokens"] + output["output_tokens"]
            ends.append((output["id"], length, output["finish_reason"]))
        require_numbers(*ends)
        log.info("%s", pace_in_words(self.figures()))
        return "done"

    def figures(self) -> dict[str, Any]:
        counted = run_figures(self._engine, self._counts)
        accepted = of_run(self._run, self._counts)
        return {"outputs": self._results, **self._pair_figures(), **counted, "acceptance": accepted}

    def measurements(self) -> list[RunMeasurement]:
        return self._measurement(run_figures(self._engine, self._counts)) if self._engine else []

    def _write(self, text_run: Run, texts: list[TextPrompt], tokens: Tokens) -> None:
        """Continues prompts; what it has written is kept also if it is interrupted."""
        replies = text_run.replies
        if not self._task.max_new_tokens:  # prompts are scored, and nothing is written
            for reply in text_run.ended():
                text = texts[reply.index]
                scored = self._output(text, reply)
                self._results.append(scored)
                self._print([f"{text.id}: {scores_in_words(scored['prompt_logprobs'])}"])
                self._lines([scored])
            return

        first = len(self._results)
        stream = _Stream(self._console, texts, replies, first, self._task, tokens)
        try:
            for step in text_run.rounds():
                ended = [row.row for row in step.rows if row.finish]
                self._lines(self._output(texts[index], replies[index]) for index in ended)
                if self._task.trace:
                    self._trace(step, replies, tokens, self._run.output is not Output.text)
                elif self._run.output is Output.text:
                    stream.show()
        finally:
            stream.end()
            self._results += [self._output(texts[index], reply) for index, reply in replies.items()]

    def _lines(self, outputs: Iterable[dict[str, Any]]) -> None:
        """With output=jsonl, prints a line of JSON for each text that has ended."""
        if self._run.output is Output.jsonl:
            for output in outputs:
                self._console.line(json.dumps(output))

    def _output(self, text: TextPrompt, reply: Reply) -> dict[str, Any]:
        """Returns a prompt's part of the summary, with the log-probabilities that are asked for."""
        written = output_of(reply.text, reply.token_ids, reply.finish_reason, reply.prompt_tokens)
        output: dict[str, Any] = {"id": text.id, "prompt": text.text, **written}
        if self._task.logprobs is not None and self._pair is not None:
            spell = self._pair.tokens.spell
            output["logprobs"] = plain(spelled(reply.logprobs, spell))
            if self._task.echo:
                output["prompt_logprobs"] = plain(spelled(reply.echoed, spell))
        return output

    def _trace(self, step: Step, replies: dict[int, Reply], tokens: Tokens, silent: bool) -> None:
        """Records a round, and prints it."""
        for row in step.rows:
            reply = replies[row.row]
            position = len(reply.token_ids) - len(row.tokens)
            record = traced(step.round, reply.request.prompt.id, position, row, tokens, reply.text)
            self._folder.round(record)
            if silent:
                continue
            if not self._explained:
                self._console.show([TRACE_LEGEND])
                self._explained = True
            self._console.show([trace_line(record, rich_console().no_color)])


class _Stream:
    """Prints texts in the order of the prompts: the first unfinished one live, the others when it ends.

    On a terminal each follows its prompt; several prompts have a line with their id between them.
    """

    def __init__(
        self,
        console: Console,
        prompts: list[TextPrompt],
        replies: dict[int, Reply],
        first: int,
        task: GenerateConf,
        tokens: Tokens,
    ) -> None:
        self._console = console
        self._prompts = prompts
        self._replies = replies
        self._task = task
        self._tokens = tokens
        self._next = first
        self._screen: ReplyScreen | None = None  # of the text that is being written

    def show(self) -> None:
        """Prints what is new of the first unfinished text, and of those after it as it ends."""
        while reply := self._replies.get(self._next):
            ended = reply.finish_reason is not None
            piece = reply.printable(ended)
            if self._screen is None:
                if self._console.is_terminal:
                    self._console.write(self._heading(self._prompts[self._next]), is_dim=True)
                thoughts = self._tokens.thought_stream(reply.request.prompt.token_ids)
                self._screen = ReplyScreen(self._console, thoughts, self._task.show_thinking)
            self._screen.write(piece)
            if not ended:
                return
            self.end()
            self._next += 1

    def _heading(self, prompt: TextPrompt) -> str:
        """The prompt: of a chat as a paragraph, else as the beginning of the text."""
        name = f"--- {prompt.id}\n" if len(self._prompts) > 1 else ""
        end = "\n" if self._task.chat else ""
        return f"{name}{prompt.text}{end}"

    def end(self) -> None:
        """Ends the line that is being written, if any."""
        if self._screen is not None:
            self._screen.end()
        self._screen = None


def scores_in_words(scores: list[dict[str, Any]]) -> str:
    """Returns the log-probability of tokens, given as in the output, as words."""
    known = [score["logprob"] for score in scores if score["logprob"] is not None]
    if not known:
        return "no token to score"
    total = sum(known)
    nats = -total / len(known)
    return f"{len(known)} tokens, log-probability {total:.4f}, {nats:.4f} nats a token"


def traced(number: int, name: str, position: int, row: RowStep, tokens: Tokens, text: str) -> dict[str, Any]:
    """Returns one row's round, for people and for rounds.jsonl."""
    origins = [row.origin(i) for i in range(len(row.tokens))]
    return {
        "round": number,
        "id": name,
        "position": position,
        **{key: value for key, value in asdict(row).items() if key != "row"},
        "drafted_text": [tokens.decode([token]) for token in row.drafted],
        "origins": origins,
        "last_origin": origins[-1] if origins else None,
        "last_text": tokens.decode(row.tokens[-1:]),
        "text": text,
    }
