"""The Python API: a target and a draft, loaded once, that continue prompts.

    from llama_ssp import SamplingConfig, load_pair

    with load_pair("/models/70b", draft="/models/1b") as pair:
        for completion in pair.generate(["def hello"], sampling=SamplingConfig(temperature=0.7)):
            print(completion.text)

Under torchrun every rank calls the same functions with the same arguments; the leader (rank 0) gets the
texts, the others get empty lists. Errors are `RunError`s. Nothing here configures logging or signals.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

from llama_ssp.config import GenerateConf, RunConf, SamplingConfig, SpeculationConfig
from llama_ssp.config import validation as checks
from llama_ssp.config.compose import composed, model_words
from llama_ssp.config.environment import rank_environment
from llama_ssp.config.overrides import check_arguments
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.process_group import open_ranks
from llama_ssp.models.devices import device_of
from llama_ssp.pair.assembly import RankModels, engine_for, lookahead_for, open_pair
from llama_ssp.pair.batches import Batch, Batches, damaged, prompt_of
from llama_ssp.pair.placements import model_placements, tokens_of
from llama_ssp.planner.resolve import PairSpec, pair_specs
from llama_ssp.speculative.generate import Step
from llama_ssp.speculative.state import Prompt
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.tokenizer import Tokens

USUAL_TOKENS = 2048  # of a prompt and its continuation, for which the memory check reckons


@dataclass(frozen=True)
class Completion:
    """One prompt's continuation.

    `finish_reason` is eos, stop, length or context. `drafted` and `accepted` count draft tokens up to the
    end of the text.
    """

    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class StreamedRow:
    """What one prompt got in one round. `text` is all that it has so far."""

    index: int
    text: str
    token_ids: list[int]
    drafted: int
    accepted: int
    finish_reason: str | None


def load_pair(
    model: str | Path, draft: str | Path | None = None, *, batch_size: int = 1,
    max_tokens: int = USUAL_TOKENS, overrides: Sequence[str] = (),
) -> Pair:  # fmt: skip
    """Loads a target and its draft, after checking that they fit.

    `model` and `draft` are names of presets, folders, or ids on the Hugging Face hub; without a draft the
    target is sampled regularly, or with n-grams. `batch_size` texts of `max_tokens` tokens each are what the
    memory check reckons with. `overrides` are those of the command line: "placement=own",
    "model.dtype=int8", "model.download=true".

    Raises UsageError, ModelError or DistributedError.
    """
    words = [
        *model_words("model", model),
        *(model_words("draft", draft) if draft is not None else ["draft=none"]),
    ]
    check_arguments([*words, *overrides])
    sizes = [f"task.batch_size={batch_size}", f"task.max_new_tokens={max(1, max_tokens // 16)}"]
    run = composed([*words, *sizes, *overrides])
    spec = pair_specs(run, [], rank_environment().world)[0]
    placement = run.placement
    ranks = open_ranks(device_of(placement.target_device, "placement.target_device"), placement.timeout_s)
    with _cause_of(ranks):
        ranks.require_same("arguments of load_pair", "\n".join([*words, *overrides]))
        return Pair(spec, min(max_tokens, spec.run.model.context), ranks)


class Pair:
    """A target and a draft in memory. Made by `load_pair`."""

    def __init__(self, spec: PairSpec, max_tokens: int, ranks: Ranks) -> None:
        self._run, self._ranks = spec.run, ranks
        placements = model_placements(spec)
        self._tokens: Tokens = tokens_of(placements)
        assert isinstance(spec.run.task, GenerateConf)
        rows = spec.run.task.batch_size
        self._models: RankModels = open_pair(placements, spec.run, rows, max_tokens, ranks)

    @property
    def devices(self) -> dict[str, str]:
        """Where target and draft are, in words."""
        return self._models.devices

    def generate(
        self, prompts: Sequence[str], *, max_new_tokens: int = 128, sampling: SamplingConfig | None = None,
        speculation: SpeculationConfig | None = None, stop: Sequence[str] = (), seed: int | None = None,
        chat: bool = False, system: str | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Continues every prompt, `batch_size` at a time; the completions in the order of the prompts.

        Without `seed` one is drawn. `chat` puts each prompt into the model's chat template, after `system`.
        Raises UsageError for settings, DataError for prompts, ModelError for logits that are not numbers.
        """
        texts = [TextPrompt(str(n), text, f"prompt {n}") for n, text in enumerate(prompts)]
        done: list[Completion] = []
        with _cause_of(self._ranks):
            run = self._with(max_new_tokens, sampling, speculation, stop, chat, system)
            for batch, first, counts in self._batches(run, texts, seed):
                for step in batch.steps:
                    for row in step.rows:
                        counts[row.row][0] += len(row.drafted)
                        counts[row.row][1] += row.accepted
                done += _completions(batch.begun, texts[first:], counts)
        return done if self._ranks.is_leader else []

    def stream(
        self, prompts: Sequence[str], *, max_new_tokens: int = 128, sampling: SamplingConfig | None = None,
        speculation: SpeculationConfig | None = None, stop: Sequence[str] = (), seed: int | None = None,
        chat: bool = False, system: str | None = None,
    ) -> Iterator[list[StreamedRow]]:  # fmt: skip
        """The same, round by round: what each prompt of the batch got. All rounds must be taken.

        On ranks other than the leader every list is empty.
        """
        texts = [TextPrompt(str(n), text, f"prompt {n}") for n, text in enumerate(prompts)]
        with _cause_of(self._ranks):
            run = self._with(max_new_tokens, sampling, speculation, stop, chat, system)
            for batch, first, _ in self._batches(run, texts, seed):
                for step in batch.steps:
                    shown = _streamed(step, batch.begun, first)
                    yield shown if self._ranks.is_leader else []
                _require_whole(batch.begun, texts[first:])

    def close(self) -> None:
        """Parts from the other ranks, if there are any. The pair cannot be used afterwards."""
        self._ranks.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _with(
        self, max_new_tokens: int, sampling: SamplingConfig | None, speculation: SpeculationConfig | None,
        stop: Sequence[str], chat: bool, system: str | None,
    ) -> RunConf:  # fmt: skip
        """The run with these settings, checked."""
        assert isinstance(self._run.task, GenerateConf)
        task = replace(
            self._run.task, max_new_tokens=max_new_tokens, stop=list(stop), chat=chat, system=system
        )
        run = replace(
            self._run, task=task, sampling=sampling or self._run.sampling,
            speculation=speculation or self._run.speculation,
        )  # fmt: skip
        checks.check(run)
        checks.check_context(run)
        return run

    def _batches(
        self, run: RunConf, texts: list[TextPrompt], seed: int | None
    ) -> Iterator[tuple[_Running, int, list[list[int]]]]:
        """Each batch, the number of its first prompt, and two counters for each of its rows."""
        task, tokens = run.task, self._tokens
        assert isinstance(task, GenerateConf)
        if not texts:
            return
        if seed is None:
            seed = self._ranks.broadcast_ints([secrets.randbelow(2**31)] if self._ranks.is_leader else [])[0]
        made = partial(prompt_of, tokens=tokens, model=run.model, chat=task.chat, system=task.system)
        prompts = [made(text) for text in texts]
        engine = engine_for(self._models, run, tokens, tokens.end_ids, seed, task.prefill_chunk)
        lookahead = partial(lookahead_for, run, costs=self._models.costs)
        runs = Batches(engine, tokens.decode, lookahead, task.max_new_tokens, tokens.end_ids, task.stop)
        for first in range(0, len(prompts), task.batch_size):
            batch = _Running(runs, prompts[first : first + task.batch_size])
            yield batch, first, [[0, 0] for _ in range(batch.begun.state.rows)]


class _Running:
    """A batch whose prompts have been read, and its rounds."""

    def __init__(self, runs: Batches, prompts: list[Prompt]) -> None:
        self.begun: Batch = runs.begin(prompts)
        self.steps: Iterator[Step] = runs.steps(self.begun)


def _completions(batch: Batch, texts: list[TextPrompt], counts: list[list[int]]) -> list[Completion]:
    _require_whole(batch, texts)
    state = batch.state
    return [
        Completion(
            prompt=texts[row].text, text=written, token_ids=state.generated(row),
            finish_reason=str(state.finished[row]), prompt_tokens=state.prompt_lengths[row],
            drafted=counts[row][0], accepted=counts[row][1],
        )
        for row, written in enumerate(batch.texts())
    ]  # fmt: skip


def _require_whole(batch: Batch, texts: list[TextPrompt]) -> None:
    """Raises ModelError where a row stopped on logits that are not numbers."""
    stopped = [row for row, reason in enumerate(batch.state.finished) if reason == "error"]
    if stopped:
        name, length = texts[stopped[0]].where, len(batch.state.texts[stopped[0]])
        raise damaged(name, length, len(stopped), batch.state.rows)


def _streamed(step: Step, batch: Batch, first: int) -> list[StreamedRow]:
    return [
        StreamedRow(
            first + row.row, batch.writing.text(row.row), row.tokens, len(row.drafted), row.accepted,
            row.finish,
        )
        for row in step.rows
    ]  # fmt: skip


@contextmanager
def _cause_of(ranks: Ranks) -> Iterator[None]:
    """Where several ranks fail, all raise what failed first."""
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        cause = ranks.cause_of(error)
        if cause is error:
            raise
        raise cause from error
