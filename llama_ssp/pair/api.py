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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from operator import index
from pathlib import Path
from typing import Any, TypedDict, Unpack

from llama_ssp.config import Bridging, GenerateConf, LogprobsOf, RunConf, SamplingConfig, SpeculationConfig
from llama_ssp.config import validation as checks
from llama_ssp.config.compose import composed, pair_words
from llama_ssp.config.environment import rank_environment
from llama_ssp.config.validation import chosen, listed
from llama_ssp.errors import DataError, UsageError
from llama_ssp.models.devices import device_of
from llama_ssp.pair.call_threads import CallThreads
from llama_ssp.pair.requests import require_numbers
from llama_ssp.pair.run import Run
from llama_ssp.pair.session import PairSession, first_cause, ranks_of
from llama_ssp.pair.token_prompts import usable
from llama_ssp.placing.draft_length import with_k_of
from llama_ssp.placing.pairs import pair_specs, require_own_ranks
from llama_ssp.speculative.logprobs import LogprobReader
from llama_ssp.speculative.state import Prompt
from llama_ssp.text.logprobs import ScoredToken, TokenLogprob, are_damaged, spelled
from llama_ssp.text.prompts import TextPrompt, require_usable

USUAL_TOKENS = 2048  # of a prompt and its continuation, in the memory check
ARGUMENTS = (
    "prompts",
    "prompt_file",
    "max_new_tokens",
    "stop",
    "chat",
    "system",
    "enable_thinking",
    "template",
    "logprobs",
    "logprobs_of",
)
OF_CALLS = {"task", *(f"task.{name}" for name in ARGUMENTS)}


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One prompt's continuation.

    `finish_reason` is eos, stop, length or context. `drafted` and `accepted` count draft tokens up to the
    end of the text. `logprobs` has an entry for each of `token_ids`; None unless asked for.
    """

    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    drafted: int
    accepted: int
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class ScoredText:
    """A given text's log-probabilities, one entry a token; the first token has None."""

    text: str
    logprobs: list[TokenLogprob]

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.logprobs]

    @property
    def total(self) -> float:
        """The log-probability of the text, given its first token."""
        return sum(token.logprob for token in self.logprobs if token.logprob is not None)


@dataclass(frozen=True, kw_only=True)
class StreamedRow:
    """What one prompt got in one round. `text` is all that it has so far."""

    index: int
    text: str
    token_ids: list[int]
    drafted: int
    accepted: int
    finish_reason: str | None
    logprobs: list[TokenLogprob] | None = None


TextOrIds = str | Sequence[int]  # a text, or its token ids


class CallSettings(TypedDict, total=False):
    """Names the settings of a call. Those left out are the pair's, and `max_new_tokens` is 128."""

    max_new_tokens: int
    sampling: SamplingConfig | None
    speculation: SpeculationConfig | None
    stop: Sequence[str]
    seed: int | None
    chat: bool
    system: str | None
    enable_thinking: bool | None
    template: Mapping[str, Any]
    logprobs: int | None
    logprobs_of: str


def load_pair(
    model: str | Path, draft: str | Path | None = None, *, batch_size: int = 1,
    max_tokens: int = USUAL_TOKENS, overrides: Sequence[str] = (),
) -> Pair:  # fmt: skip
    """Loads a target and a draft, after checking that they fit.

    `model` and `draft` are names of presets, folders, GGUF files, or ids on the Hugging Face hub; without a
    draft the target is sampled regularly, or with n-grams. The memory check is for `batch_size` texts of
    `max_tokens` tokens each. `overrides` are those of the command line: "placement=own",
    "model.dtype=int8", "download=true".

    Raises UsageError, ModelError or DistributedError.
    """
    words = pair_words(model, draft, overrides)
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    if unread := {key for key in keys if key in OF_CALLS or key.startswith("hydra")}:
        raise UsageError(
            f"{min(unread)} is among the overrides of a pair, where nothing reads it",
            fix="give it to generate or stream, as an argument",
        )
    if "ranks" in keys:
        raise UsageError(
            "a script does not start ranks: ranks= is the command's",
            fix="start the script with torchrun --nproc-per-node N",
        )
    run = composed([f"task.batch_size={batch_size}", f"task.max_new_tokens={max(1, max_tokens)}", *words])
    new = max(1, min(max_tokens, USUAL_TOKENS) // 16, run.sampling.controls.min_new_tokens)  # of a usual call
    task = replace(run.task_as(GenerateConf), max_new_tokens=new)
    run = replace(run, task=task)
    spec = pair_specs(run, [], rank_environment().world)[0]
    ranks = ranks_of(run)
    on_cpu = device_of(run.placement.target_device, "placement.target_device").type == "cpu"
    threads = CallThreads(on_cpu and ranks.world == 1)
    with first_cause(ranks), threads.chosen():
        ranks.require_same("arguments of load_pair", "\n".join(words))
        return Pair(PairSession(spec, ranks).load(task.batch_size, max_tokens), threads)


class Pair:
    """A target and a draft in memory. Made by `load_pair`."""

    def __init__(self, session: PairSession, threads: CallThreads) -> None:
        self._session = session
        self._ranks = session.ranks
        self._threads = threads

    @property
    def session(self) -> PairSession:
        """What the program's own tasks use: tokenizer, configuration, ranks."""
        return self._session

    @property
    def devices(self) -> dict[str, str]:
        """Where target and draft are."""
        return self._session.models.devices

    def generate(self, prompts: Sequence[TextOrIds], **settings: Unpack[CallSettings]) -> list[Completion]:
        """Continues every prompt, `batch_size` at a time; returns a completion of each, in their order.

        Without `seed` it is that of `overrides`, or drawn. `chat` puts each prompt into the model's chat
        template, after `system`; `enable_thinking` and `template`, by name, are arguments of that template.
        `logprobs` adds each token's log-probability and those of this many
        likeliest tokens: of the target, unfiltered and at temperature 1, or with `logprobs_of="sampled"` of
        the distribution that tokens are sampled from. Raises UsageError for settings, DataError for prompts,
        ModelError for logits that are not numbers.
        """
        done: list[Completion] = []
        with self._call():
            prompts = listed("prompts", prompts)
            run = self._run(settings)
            text_run = self._run_of(prompts, run)
            for _ in text_run.rounds():
                pass
            replies = [text_run.replies[n] for n in range(len(prompts))]
            require_numbers(*(reply.outcome for reply in replies))
            for prompt, reply in zip(prompts, replies, strict=True):
                completion = Completion(
                    prompt=self._text(prompt),
                    text=reply.text,
                    token_ids=reply.token_ids,
                    finish_reason=str(reply.finish_reason),
                    prompt_tokens=reply.prompt_tokens,
                    drafted=reply.drafted,
                    accepted=reply.accepted,
                    logprobs=None if run.task.logprobs is None else self._spelled(reply.logprobs),
                )
                done.append(completion)
        return done if self._ranks.is_leader else []

    def stream(
        self, prompts: Sequence[TextOrIds], **settings: Unpack[CallSettings]
    ) -> Iterator[list[StreamedRow]]:
        """Continues prompts as `generate`; yields what each got in each round. All rounds must be taken."""
        with self._call():
            run = self._run(settings)
            text_run = self._run_of(listed("prompts", prompts), run)
            for step in text_run.rounds():
                rows = []
                for row in step.rows:
                    reply = text_run.replies[row.row]
                    new = reply.logprobs[len(reply.logprobs) - len(row.tokens) :]
                    streamed = StreamedRow(
                        index=row.row,
                        text=reply.text,
                        token_ids=row.tokens,
                        drafted=len(row.drafted),
                        accepted=row.accepted,
                        finish_reason=row.finish,
                        logprobs=None if run.task.logprobs is None else self._spelled(new),
                    )
                    rows.append(streamed)
                yield rows if self._ranks.is_leader else []
            require_numbers(*(reply.outcome for reply in text_run.replies.values()))

    def score(
        self, texts: Sequence[TextOrIds], *, top: int = 0, sampling: SamplingConfig | None = None
    ) -> list[ScoredText]:
        """Returns the log-probability of every token of these texts, each given those before it.

        `top` adds those of this many likeliest tokens. They are the target's, unfiltered at temperature 1, or
        with `sampling` those of the distribution that these settings give, after the text's first token. The
        draft takes no part. Raises what `generate` raises.
        """
        pair = self._session
        result = list[ScoredText]()
        with self._call():
            texts = listed("texts", texts)
            of = "target" if sampling is None else "sampled"
            controls = (sampling or self._session.run.sampling).controls
            least = max(1, controls.min_new_tokens)  # nothing is generated
            settings: CallSettings = {"sampling": sampling, "logprobs": top, "logprobs_of": of}
            run = self._run({**settings, "max_new_tokens": least})
            read = self._read(texts, run, shorter=False)
            rows = pair.rows
            reader = LogprobReader(top, sampling is not None)
            engine = pair.engine(0, run)
            for first in range(0, len(read), rows):
                batch = read[first : first + rows]
                scored = engine.score(batch, reader)
                reasons = ["error" if are_damaged(scores) else None for scores in scored]
                lengths = [len(prompt.token_ids) for prompt in batch]
                require_numbers(*zip((prompt.id for prompt in batch), lengths, reasons, strict=True))
                for number, scores in enumerate(scored, start=first):
                    result.append(ScoredText(self._text(texts[number]), self._spelled(scores)))
                self._ranks.broadcast_ints([0])  # a rank without a part in the target waits here
        return result if self._ranks.is_leader else []

    def score_continuations(
        self,
        contexts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[Sequence[int]]],
        *,
        top: int = 0,
    ) -> list[list[ScoredText]]:
        """Returns the log-probability of every token of several continuations of each context.

        All are token ids, and none is empty. A context is read once for all its continuations. `top` and what
        is raised are those of `score`; the log-probabilities are the target's, unfiltered at temperature 1.
        """
        pair = self._session
        result = list[list[ScoredText]]()
        with self._call():
            contexts = listed("contexts", contexts)
            continuations = listed("continuations", continuations)
            wanted = [*contexts, *continuations, *chain(*continuations)]
            if len(contexts) != len(continuations) or not all(map(len, wanted)):
                raise UsageError(
                    "contexts and continuations do not match",
                    found=f"{len(contexts)} contexts, {len(continuations)} lists of continuations",
                    allowed="a list of continuations for each context, and nothing empty",
                    fix="correct them",
                )
            least = max(1, pair.run.sampling.controls.min_new_tokens)  # nothing is generated
            run = self._run({"logprobs": top, "max_new_tokens": least})
            reader = LogprobReader(top)
            engine = pair.engine(0, run)
            for first in range(0, len(contexts), pair.rows):
                batch = slice(first, first + pair.rows)
                groups = [list(map(tuple, of_context)) for of_context in continuations[batch]]
                read = [Prompt(str(n), tuple(ids)) for n, ids in enumerate(contexts[batch], start=first)]
                for context, group in zip(read, groups, strict=True):
                    self._read([[*context.token_ids, *ids] for ids in group], run, shorter=False)
                scored = engine.score_continuations(read, groups, reader)
                for context, group, by_ids in zip(read, groups, scored, strict=True):
                    length = len(context.token_ids)
                    reasons = ["error" if are_damaged(by_ids.get(ids, ())) else None for ids in group]
                    require_numbers(*((context.id, length, reason) for reason in reasons))
                    texts = [ScoredText(self._text(ids), self._spelled(by_ids.get(ids, ()))) for ids in group]
                    result.append(texts)
                self._ranks.broadcast_ints([0])  # a rank without a part in the target waits here
        return result if self._ranks.is_leader else []

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Wraps what a call computes: all ranks raise its first failure, and threads are those for it."""
        with first_cause(self._ranks, self._session), self._threads.chosen():
            yield

    def close(self) -> None:
        """Frees the models and parts from the other ranks, if any. The pair cannot be used afterwards."""
        self._session.close()
        self._ranks.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def _run(self, settings: CallSettings) -> RunConf:
        """Returns the run with these settings. Raises UsageError for those that it cannot have."""
        if unknown := settings.keys() - CallSettings.__annotations__.keys():
            raise TypeError(f"no such argument: {min(unknown)}")
        given: dict[str, Any] = {"max_new_tokens": GenerateConf.max_new_tokens, "stop": (), **settings}
        run = self._session.run
        sampling = (given.pop("sampling", None) or SamplingConfig()).over(run.sampling)
        seed = given.pop("seed", None)
        speculation = chosen(given.pop("speculation", None) or run.speculation)
        if (logprobs_of := given.get("logprobs_of", "target")) not in tuple(LogprobsOf):
            raise UsageError(
                "logprobs_of is unknown",
                found=repr(logprobs_of),
                allowed=", ".join(LogprobsOf),
                fix="choose one",
            )
        given |= {"stop": listed("stop", given["stop"]), "logprobs_of": LogprobsOf(logprobs_of)}
        if isinstance(given.get("template"), Mapping):  # another value is refused by its type
            given["template"] = dict(given["template"])
        task = replace(run.task_as(GenerateConf), **given)
        speculation = with_k_of(run.speculation, speculation)
        seed = run.seed if seed is None else seed
        run = replace(run, task=task, sampling=sampling, speculation=speculation, seed=seed)
        checks.check(run)
        checks.check_context(run)
        if run.has_draft_model and not self._session.spec.placement.draft:
            raise UsageError(
                "the pair was loaded without its draft model",
                where="speculation",
                found=speculation.k_in_words,
                allowed="settings without one",
                fix="load it with settings that draft",
            )
        loaded = self._session.run.speculation.bridge
        bridge = run.speculation.bridge
        if run.has_draft_model and bridge not in (Bridging.auto, loaded):
            raise UsageError(
                "a bridge is built when a pair is loaded",
                where="speculation.bridge",
                found=bridge.value,
                allowed=f"auto, {loaded.value}",
                fix="give it to load_pair in overrides",
            )
        require_own_ranks(run, self._session.spec.placement)
        return run

    def _run_of(self, prompts: list[TextOrIds], run: RunConf) -> Run:
        """Returns the run that writes the texts of these prompts, with these settings."""
        pair = self._session
        task = run.task_as(GenerateConf)
        seed = run.seed
        if seed is None and prompts:
            seed = self._ranks.broadcast_ints([secrets.randbelow(2**31)] if self._ranks.is_leader else [])[0]
        engine = pair.engine(seed or 0, run)
        requests = pair.requests(self._read(prompts, run), run, task.stop)
        return Run(engine, requests, pair.run_settings(task.batch_size, run))

    def _read(self, texts: Sequence[TextOrIds], run: RunConf, shorter: bool = True) -> list[Prompt]:
        """Returns the texts as token ids, `shorter` than the context or not. Raises DataError."""
        tokens = self._session.tokens
        result = list[Prompt]()
        for n, text in enumerate(texts):
            given = TextPrompt(str(n), text if isinstance(text, str) else "", f"prompt {n}")
            require_usable(given)
            if isinstance(text, str) and shorter:
                result.append(self._session.prompt(given, run))
                continue
            try:  # integers of NumPy and torch are token ids, too
                if isinstance(text, str):
                    ids = tokens.encode(text, run.task.special_tokens)
                else:
                    ids = [index(item) for item in listed(given.where, text)]
            except (TypeError, UsageError):
                raise DataError(
                    "a prompt is neither a text nor token ids",
                    where=given.where,
                    found=repr(text),
                    allowed="a text, or whole numbers",
                ) from None
            if run.task.chat:
                raise DataError(
                    "token ids are not put into a chat template",
                    where=given.where,
                    fix="give the text, or leave out chat",
                )
            result.append(usable(given, ids, tokens, run, 0 if shorter else 2))
        return result

    def _text(self, text: TextOrIds) -> str:
        return text if isinstance(text, str) else self._session.tokens.decode(list(text))

    def _spelled(self, tokens: Sequence[ScoredToken]) -> list[TokenLogprob]:
        return spelled(tokens, self._session.tokens.spell)
