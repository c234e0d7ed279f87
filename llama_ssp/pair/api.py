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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llama_ssp.config import GenerateConf, SamplingConfig, SpeculationConfig
from llama_ssp.config import validation as checks
from llama_ssp.config.compose import composed, pair_words
from llama_ssp.config.environment import rank_environment
from llama_ssp.config.overrides import check_arguments
from llama_ssp.pair.batches import Batch, require_numbers, texts_of
from llama_ssp.pair.session import PairSession, first_cause, ranks_of
from llama_ssp.planner.resolve import pair_specs
from llama_ssp.text.prompts import TextPrompt

USUAL_TOKENS = 2048  # of a prompt and its continuation, in the memory check


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
    """Loads a target and a draft, after checking that they fit.

    `model` and `draft` are names of presets, folders, or ids on the Hugging Face hub; without a draft the
    target is sampled regularly, or with n-grams. The memory check is for `batch_size` texts of `max_tokens`
    tokens each. `overrides` are those of the command line: "placement=own", "model.dtype=int8",
    "model.download=true".

    Raises UsageError, ModelError or DistributedError.
    """
    names = pair_words(model, draft)
    check_arguments([*names, *overrides])
    sizes = [f"task.batch_size={batch_size}", f"task.max_new_tokens={max(1, max_tokens // 16)}"]
    run = composed([*names, *sizes, *overrides])
    spec = pair_specs(run, [], rank_environment().world)[0]
    ranks = ranks_of(run)
    with first_cause(ranks):
        ranks.require_same("arguments of load_pair", "\n".join([*names, *overrides]))
        assert isinstance(spec.run.task, GenerateConf)
        return Pair(PairSession(spec, ranks).load(spec.run.task.batch_size, max_tokens))


class Pair:
    """A target and a draft in memory. Made by `load_pair`."""

    def __init__(self, session: PairSession) -> None:
        self._session, self._ranks = session, session.ranks

    @property
    def devices(self) -> dict[str, str]:
        """Where target and draft are, in words."""
        return self._session.models.devices

    def generate(
        self, prompts: Sequence[str], *, max_new_tokens: int = 128, sampling: SamplingConfig | None = None,
        speculation: SpeculationConfig | None = None, stop: Sequence[str] = (), seed: int | None = None,
        chat: bool = False, system: str | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Continues every prompt, `batch_size` at a time; the completions in the order of the prompts.

        Without `seed` one is drawn. `chat` puts each prompt into the model's chat template, after `system`.
        Raises UsageError for settings, DataError for prompts, ModelError for logits that are not numbers.
        """
        done: list[Completion] = []
        with first_cause(self._ranks):
            settings = max_new_tokens, sampling, speculation, stop, chat, system
            for batch, first in self._batches(prompts, seed, *settings):
                drafted, accepted = Counter[int](), Counter[int]()
                for step in batch.steps:
                    for row in step.rows:
                        drafted[row.row] += len(row.drafted)
                        accepted[row.row] += row.accepted
                state = batch.state
                require_numbers(*texts_of(state))
                done += [
                    Completion(
                        prompts[first + n], text, state.generated(n), str(state.finished[n]),
                        state.prompt_lengths[n], drafted[n], accepted[n],
                    )
                    for n, text in enumerate(batch.texts())
                ]  # fmt: skip
        return done if self._ranks.is_leader else []

    def stream(
        self, prompts: Sequence[str], *, max_new_tokens: int = 128, sampling: SamplingConfig | None = None,
        speculation: SpeculationConfig | None = None, stop: Sequence[str] = (), seed: int | None = None,
        chat: bool = False, system: str | None = None,
    ) -> Iterator[list[StreamedRow]]:  # fmt: skip
        """The same, round by round: what each prompt of the batch got. All rounds must be taken.

        On ranks other than the leader every list is empty.
        """
        with first_cause(self._ranks):
            settings = max_new_tokens, sampling, speculation, stop, chat, system
            for batch, first in self._batches(prompts, seed, *settings):
                for step in batch.steps:
                    rows = [
                        StreamedRow(
                            first + row.row, batch.writing.text(row.row), row.tokens, len(row.drafted),
                            row.accepted, row.finish,
                        )
                        for row in step.rows
                    ]  # fmt: skip
                    yield rows if self._ranks.is_leader else []
                require_numbers(*texts_of(batch.state))

    def close(self) -> None:
        """Parts from the other ranks, if there are any. The pair cannot be used afterwards."""
        self._ranks.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def _batches(
        self, prompts: Sequence[str], seed: int | None, max_new_tokens: int, sampling: SamplingConfig | None,
        speculation: SpeculationConfig | None, stop: Sequence[str], chat: bool, system: str | None,
    ) -> Iterator[tuple[Batch, int]]:  # fmt: skip
        """Each batch of a run with these settings, its prompts read, and the number of its first prompt."""
        pair, run = self._session, self._session.run
        assert isinstance(run.task, GenerateConf)
        task = replace(run.task, max_new_tokens=max_new_tokens, stop=list(stop), chat=chat, system=system)
        sampling, speculation = sampling or run.sampling, speculation or run.speculation
        run = replace(run, task=task, sampling=sampling, speculation=speculation)
        checks.check(run)
        checks.check_context(run)
        if not prompts:
            return
        if seed is None:
            seed = self._ranks.broadcast_ints([secrets.randbelow(2**31)] if self._ranks.is_leader else [])[0]
        read = [pair.prompt(TextPrompt(str(n), text, f"prompt {n}"), run) for n, text in enumerate(prompts)]
        batches = pair.batches(seed, run, task.stop, pair.costs)
        for first in range(0, len(read), task.batch_size):
            yield batches.begin(read[first : first + task.batch_size]), first
