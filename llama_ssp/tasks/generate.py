"""task=generate: prompts in, continuations out, streamed, in batches."""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import partial
from typing import Any

from llama_ssp.config import GenerateConf, Output
from llama_ssp.distributed.comm import Ranks
from llama_ssp.pair.assembly import RankModels, engine_for, lookahead_for, open_pair
from llama_ssp.pair.batches import Batches, damaged, nothing_run, prompt_of, usable_prompts
from llama_ssp.pair.placements import model_placements, tokens_of
from llama_ssp.planner.run_plan import RunMeasurement
from llama_ssp.report.run_folder import Console, RunFolder
from llama_ssp.speculative.generate import RowStep, Step
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.tasks.run_measurement import way
from llama_ssp.text.detokenizer import Writing
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.tokenizer import Tokens

log = logging.getLogger(__name__)


class GenerateTask:
    """One run of the task. `figures` is right at any moment, also after a failure."""

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        assert isinstance(inputs.run.task, GenerateConf)
        self._ranks = ranks
        self._inputs, self._task = inputs, inputs.run.task
        self._console, self._folder = console, folder
        self._outputs: list[dict[str, Any]] = []
        self._skipped = list(inputs.reading.skipped)
        self._pair: RankModels | None = None
        self._vocabulary: dict[str, Any] | None = None
        self._runs: Batches | None = None
        self._rows = 0

    def run(self) -> str:
        """Loads the pair, continues every prompt; the status."""
        run, task = self._inputs.run, self._task
        found = model_placements(self._inputs.pairs[0])
        tokens = tokens_of(found)
        self._vocabulary = tokens.paired.record() if tokens.paired else None
        prompts = self._tokenised(tokens)
        self._rows = rows = min(task.batch_size, len(prompts))
        longest = max(len(prompt.token_ids) for _, prompt in prompts)
        slots = min(longest + task.max_new_tokens, run.model.context)
        self._pair = open_pair(found, run, rows, slots, self._ranks)
        ends = frozenset() if task.ignore_eos else tokens.end_ids
        engine = engine_for(self._pair, run, tokens, ends, self._inputs.seed, task.prefill_chunk)
        lookahead = partial(lookahead_for, run, costs=self._pair.costs)
        self._runs = Batches(engine, tokens.decode, lookahead, task.max_new_tokens, ends, task.stop)
        batches = range(0, len(prompts), task.batch_size)
        for number, first in enumerate(batches, start=1):
            self._batch(self._runs, prompts[first : first + task.batch_size], tokens)
            if len(batches) > 1:
                log.info("batch %d of %d done", number, len(batches))
        self._raise_if_damaged()
        log.info("%s", in_words(self.figures()))
        return "done"

    def has_output(self) -> bool:
        return bool(self._outputs)

    def figures(self) -> dict[str, Any]:
        """The task's part of the summary."""
        figures = self._runs.figures() if self._runs else nothing_run()
        return {
            "outputs": self._outputs,
            "rows_skipped": len(self._skipped),
            "devices": self._pair.devices if self._pair else {},
            "vocabulary": self._vocabulary,
            **figures,
        }

    def ways(self) -> list[RunMeasurement]:
        """All texts are written in one."""
        if self._pair is None or self._runs is None:
            return []
        drafter = self._inputs.pairs[0].drafter
        name = "regular" if drafter is None else "speculative"
        return [way(name, self._pair, self._inputs.run, self._rows, self._runs.figures())]

    def _tokenised(self, tokens: Tokens) -> list[tuple[TextPrompt, Prompt]]:
        task, model = self._task, self._inputs.run.model
        made = partial(
            prompt_of, tokens=tokens, model=model, chat=task.chat, system=task.system,
            special=task.special_tokens,
        )  # fmt: skip
        return usable_prompts(self._inputs.reading.prompts, made, task.on_bad_row, self._skipped)

    def _batch(self, runs: Batches, rows: list[tuple[TextPrompt, Prompt]], tokens: Tokens) -> None:
        prompts = [prompt for _, prompt in rows]
        batch = runs.begin(prompts)
        stream = _Stream(self._console, rows, batch.writing, self._task.trace, self._inputs.run.output)
        try:
            for step in runs.steps(batch):
                if self._task.trace:
                    self._trace(step, prompts, tokens, batch.writing, stream)
                stream.show(step)
        finally:
            written = zip(rows, batch.texts(), strict=True)
            self._outputs += [
                _output(text, batch.state, row, said) for row, ((text, _), said) in enumerate(written)
            ]
            stream.end()

    def _trace(
        self, step: Step, prompts: list[Prompt], tokens: Tokens, writing: Writing, stream: _Stream
    ) -> None:
        for row in step.rows:
            record = traced(step.round, prompts[row.row].id, row, tokens, writing.text(row.row))
            self._folder.round(record)
            stream.trace(record)

    def _raise_if_damaged(self) -> None:
        stopped = [output for output in self._outputs if output["finish_reason"] == "error"]
        if stopped:
            first = stopped[0]
            position = first["prompt_tokens"] + first["output_tokens"]
            raise damaged(first["id"], position, len(stopped), len(self._outputs))


class _Stream:
    """Prints texts in the order of the prompts: the first unfinished one live, the others when it ends."""

    def __init__(
        self, console: Console, batch: list[tuple[TextPrompt, Prompt]], writing: Writing,
        trace: bool, output: Output,
    ) -> None:  # fmt: skip
        self._console, self._writing = console, writing
        self._prompts = [text.text for text, _ in batch]
        self._ended = [False] * len(batch)
        self._silent = output is Output.json
        self._trace = trace
        self._row = 0
        self._begun = False

    def show(self, step: Step) -> None:
        for row in step.rows:
            self._ended[row.row] = row.finish is not None
        if self._silent or self._trace:
            return
        while self._row < len(self._prompts):
            self._print(self._ended[self._row])
            if not self._ended[self._row]:
                return
            self._next()

    def trace(self, record: dict[str, Any]) -> None:
        if self._silent:
            return
        drafted = " ".join(
            repr(t) if i < record["accepted"] else f"~{t!r}~" for i, t in enumerate(record["drafted_text"])
        )
        self._console.line(
            f"{record['id']} round {record['round']}: drafted {drafted or 'nothing'}; "
            f"accepted {record['accepted']} of {len(record['drafted'])}; "
            f"{record['last_origin']} {record['last_text']!r}; text {record['text']!r}"
        )

    def end(self) -> None:
        """Breaks off the line that was being written, if any."""
        if self._begun and not self._silent and not self._trace:
            self._console.write("\n")

    def _print(self, ended: bool) -> None:
        piece = self._writing.printable(self._row, ended)
        if not self._begun and self._console.is_terminal:
            self._console.write(f"\x1b[2m{self._prompts[self._row]}\x1b[0m")
        self._begun = True
        self._console.write(piece)

    def _next(self) -> None:
        self._console.write("\n")
        self._begun = False
        self._row += 1


def in_words(figures: dict[str, Any]) -> str:
    """A run's figures as one line for people."""
    words = [f"{figures['tokens_committed']} tokens"]
    if figures["ms_per_token"] is not None:
        words.append(f"{figures['ms_per_token']:.2f} ms/token without prefill")
    if figures["acceptance_rate"] is not None:
        words.append(f"{figures['tokens_per_target_forward']:.2f} tokens a round")
        words.append(f"{figures['acceptance_rate']:.0%} of drafts accepted")
    return ", ".join(words)


def traced(number: int, name: str, row: RowStep, tokens: Tokens, text: str) -> dict[str, Any]:
    """One row's round, for people and for rounds.jsonl."""
    last = len(row.tokens) - 1
    return {
        "round": number, "id": name, **{k: v for k, v in asdict(row).items() if k != "row"},
        "drafted_text": [tokens.decode([t]) for t in row.drafted],
        "origins": [row.origin(i) for i in range(len(row.tokens))],
        "last_origin": row.origin(last) if row.tokens else None,
        "last_text": tokens.decode(row.tokens[-1:]),
        "text": text,
    }  # fmt: skip


def _output(text: TextPrompt, state: State, row: int, written: str) -> dict[str, Any]:
    ids = state.generated(row)
    return {
        "id": text.id,
        "prompt": text.text,
        "text": written,
        "token_ids": ids,
        "finish_reason": state.finished[row],
        "prompt_tokens": state.prompt_lengths[row],
        "output_tokens": len(ids),
    }
