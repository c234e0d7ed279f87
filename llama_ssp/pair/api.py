"""The Python API: a target and a draft, loaded once, that continue prompts.

    from llama_ssp import load_pair

    with load_pair("/models/70b", draft="/models/1b") as pair:
        for completion in pair.generate(["def hello"], temperature=0.7):
            print(completion.text)

Under torchrun every rank calls the same functions with the same arguments; the leader (rank 0) gets the
texts, the others get empty lists. Errors are `RunError`s. Nothing here configures logging or signals.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, Unpack
from weakref import WeakSet

from llama_ssp.config import Bridging, ChatConf, GenerateConf, RunConf, SamplingConfig
from llama_ssp.config import validation as checks
from llama_ssp.config.compose import composed, pair_words
from llama_ssp.config.environment import rank_environment
from llama_ssp.config.schema import MAX_SEED
from llama_ssp.config.settings import NAMES, Settings, SettingsByName, unknown_name
from llama_ssp.errors import MemoryFull, RunError, UsageError
from llama_ssp.models.devices import device_of
from llama_ssp.pair.call_threads import CallThreads
from llama_ssp.pair.calls import Calls
from llama_ssp.pair.details import RoundRecorder
from llama_ssp.pair.given import OWN, Given, taken_apart
from llama_ssp.pair.hosts import say_nodes
from llama_ssp.pair.requests import Reply, require_numbers
from llama_ssp.pair.results import Completion, ScoredText, StreamedRow
from llama_ssp.pair.run import Run, TimedStep
from llama_ssp.pair.script_prompts import (
    GivenPrompt,
    Prompts,
    given_prompts,
    is_conversation,
    ordered,
    read,
    text_of,
)
from llama_ssp.pair.session import PairSession, first_cause, ranks_of, require_same_code
from llama_ssp.placing.pairs import pair_specs, require_own_ranks
from llama_ssp.planner.workload import DRAFT, TARGET
from llama_ssp.report.console import Progress, showing_progress
from llama_ssp.speculative.drafters.own import MakeDrafter
from llama_ssp.speculative.logprobs import LogprobReader
from llama_ssp.speculative.own_rule import GuardedRule
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import Rule
from llama_ssp.text.logprobs import ScoredToken, TokenLogprob, are_damaged, spelled
from llama_ssp.text.tokenizer import Tokens

USUAL_TOKENS = 2048  # of a prompt and its continuation, in the memory check
# Keys of the command that overrides of a pair may have; the others of `task` are arguments of a call.
OF_PAIRS = {"task.batch_size", "task.prefill_chunk", "task.ignore_eos", "task.special_tokens"}
# Keys of the command that nothing here reads.
OF_COMMANDS = ("hydra", "output", "out", "cluster.scheduler", "cluster.groups", "cluster.slurm")

GivenRule = Rule | type[Rule]
_PAIRS = WeakSet["Pair"]()  # all of this process


def load_pair(
    model: Any, draft: Any = None, *, tokenizer: Any = OWN, drafter: MakeDrafter | None = None,
    batch_size: int = 1, max_tokens: int = USUAL_TOKENS, overrides: Sequence[str] | Mapping[str, Any] = (),
    progress: bool = False,
) -> Pair:  # fmt: skip
    """Loads a target and a draft, after checking that they fit.

    `model` and `draft` are names of presets, folders, GGUF files, or ids on the Hugging Face hub; or models
    that the script has loaded with transformers, which are not changed and stay where they are. Without a
    draft the target is sampled regularly, or with n-grams. `drafter` is a class of the script's own, or
    another function, that is called with a `Sampler` and returns a `Drafter`: it drafts in place of a model.

    `tokenizer` is that of the model's files; or one of transformers, or a folder. Of a loaded model it has to
    be given. With None, prompts are token ids, and texts are empty.

    The memory check is for `batch_size` texts of `max_tokens` tokens each. `overrides` are those of the
    command line: "placement=own", "model.dtype=int8", "download=true", or a mapping of them. `progress` shows
    a bar while weights are read and steps compiled, on a terminal and in a notebook.

    Raises UsageError, ModelError or DistributedError.
    """
    world = rank_environment().world
    loaded, names = taken_apart(model, draft, world)
    given = Given(models=loaded, tokenizer=tokenizer, make_drafter=drafter)
    words = [*pair_words(names[TARGET], names[DRAFT], overrides), *_drafter_words(drafter, draft)]
    _require_read({word.partition("=")[0].lstrip("+") for word in words})
    run = composed([f"task.batch_size={batch_size}", f"task.max_new_tokens={max(1, max_tokens)}", *words])
    new = max(1, min(max_tokens, USUAL_TOKENS) // 16, run.sampling.controls.min_new_tokens)  # of a usual call
    task = replace(run.task_as(GenerateConf), max_new_tokens=new)
    # By what is compiled a pair counts as a chat: a script goes on for longer than one call.
    plan = replace(run.plan, tokens=run.plan.tokens or ChatConf.usual_tokens)
    run = given.over(replace(run, task=task, plan=plan))

    device = device_of(run.placement.target_device, "placement.target_device")
    calls = Calls(device, CallThreads(device.type == "cpu" and world == 1))
    with calls.computing(), showing_progress(progress):
        spec = pair_specs(run, [], world)[0]
        ranks = ranks_of(run)
        with first_cause(ranks):
            require_same_code(ranks)
            ranks.require_same("arguments of load_pair", "\n".join(words))
            say_nodes(ranks, device, spec.run, spec.placement)
            with _naming_open_pairs():
                session = PairSession(spec, ranks, given).load(task.batch_size, max_tokens)
            return Pair(session, calls)


@contextmanager
def _naming_open_pairs() -> Iterator[None]:
    """Adds to an error of full memory which pairs this script still holds."""
    try:
        yield
    except MemoryFull as error:
        held = [repr(pair) for pair in _PAIRS if pair.session.is_loaded]
        if not held:
            raise
        fix = f"or close what this script still holds, by its close(): {', '.join(held)}"
        raise MemoryFull(str(error), fix=fix) from error


def _drafter_words(drafter: MakeDrafter | None, draft: Any) -> list[str]:
    """Returns the override of a pair with a drafter of the script's own. Raises UsageError for no drafter."""
    if drafter is None:
        return []
    if draft is not None:
        raise UsageError("both a draft and a drafter are given", fix="give one: either drafts")
    if not callable(drafter):
        raise UsageError(
            "drafter makes no drafter",
            found=f"an object of {type(drafter).__name__}",
            allowed="a class that inherits from llama_ssp.Drafter, or a function that returns one",
            fix="give the class: each call has a drafter of its own",
        )
    return ["speculation.drafter=own"]


def _require_read(keys: set[str]) -> None:
    """Raises UsageError for an override of a pair that nothing would read."""
    if "ranks" in keys:
        raise UsageError(
            "a script does not start ranks: ranks= is the command's",
            fix="start the script with torchrun --nproc-per-node N",
        )
    for key in sorted(keys):
        of_call = key == "task" or (key.startswith("task.") and key not in OF_PAIRS)
        if not of_call and not any(key == name or key.startswith(f"{name}.") for name in OF_COMMANDS):
            continue
        is_setting = key.removeprefix("task.") in (*NAMES, "prompts")
        raise UsageError(
            f"{key} is among the overrides of a pair, where nothing reads it",
            fix="give it to generate or stream, as an argument" if is_setting else "leave it out",
        )


class Pair:
    """A target and a draft in memory. Made by `load_pair`."""

    def __init__(self, session: PairSession, calls: Calls) -> None:
        self._session = session
        self._ranks = session.ranks
        self._calls = calls
        # A rule for each class or object that was given: graphs are kept by it.
        self._rules: list[tuple[GivenRule, Rule]] = []
        _PAIRS.add(self)

    def __repr__(self) -> str:
        """Says what is loaded where, in one line."""
        session = self._session
        if not session.is_loaded:
            return f"<Pair {session.spec.name}: closed>"
        placed = session.models.devices.items()
        models = [f"{role} {where}, {session.engines.get(role, 'eager')}" for role, where in placed]
        drafter = session.spec.drafter
        if drafter is not None and not session.run.has_draft_model:
            models.append(f"drafts by {drafter}")
        rows = "1 text" if session.rows == 1 else f"{session.rows} texts"
        return f"<Pair {session.spec.name}: {'; '.join(models)}; {rows} of {session.slots} tokens at a time>"

    @property
    def session(self) -> PairSession:
        """What the program's own tasks use: tokenizer, configuration, ranks."""
        return self._session

    @property
    def tokenizer(self) -> Tokens:
        """The target's tokenizer: `encode`, `decode`, and `chat` for messages."""
        return self._session.tokens

    @property
    def devices(self) -> dict[str, str]:
        """Where target and draft are."""
        return self._session.models.devices

    def generate(
        self,
        prompts: Prompts = (),
        settings: Settings | None = None,
        *,
        messages: Iterable[Any] | None = None,
        rule: GivenRule | None = None,
        on_done: Callable[[Completion], object] | None = None,
        progress: bool = False,
        **changes: Unpack[SettingsByName],
    ) -> list[Completion]:
        """Continues every prompt, `batch_size` at a time; returns a completion of each, in their order.

        A prompt is a text, a list of token ids, or a conversation: a list of messages, as `messages` is one.
        `settings`, with these `changes`, says how; see `Settings`. Without a seed it is that of the
        overrides, or drawn. `chat` puts each text into the model's chat template, after `system`;
        `enable_thinking` and `template`, by name, are arguments of that template.
        `logprobs` adds each token's log-probability and those of this many likeliest tokens: of the target,
        unfiltered and at temperature 1, or with `logprobs_of="sampled"` of the distribution that tokens are
        sampled from. `rule` decides in place of the pair's own.

        `on_done` is called with each completion as soon as its text ends. An error or an interrupt has those
        that had ended as `completions`. Raises UsageError for settings, DataError for prompts, ModelError for
        logits that are not numbers.
        """
        given = given_prompts(prompts, messages)
        text_run, seeds, run = self._begun(given, settings, changes, rule)
        done = dict[int, Completion]()
        shown = Progress("generate", len(given), "texts") if progress else None
        rounds = self._rounds(text_run)
        try:
            with self._calls.held(), showing_progress(progress), shown or nullcontext():
                for step in rounds:
                    for row in step.rows:
                        reply = text_run.replies[row.row]
                        if row.finish is None or row.finish == "error":
                            continue
                        number = row.row
                        completion = self._completion(given[number], reply, seeds[number], run)
                        done[number] = completion
                        if shown is not None:
                            shown.advance(1)
                        if on_done is not None and self._ranks.is_leader:
                            on_done(completion)
            require_numbers(*(text_run.replies[number].outcome for number in range(len(given))))
        except BaseException as error:
            with suppress(AttributeError):  # an error of a class that takes no attributes
                error.completions = [done[number] for number in sorted(done)]  # type: ignore[attr-defined]
            raise
        finally:
            rounds.close()
            text_run.free()  # a traceback would keep the caches
        return [done[number] for number in range(len(given))] if self._ranks.is_leader else []

    def stream(
        self,
        prompts: Prompts = (),
        settings: Settings | None = None,
        *,
        messages: Iterable[Any] | None = None,
        rule: GivenRule | None = None,
        details: bool | Literal["logits"] = False,
        **changes: Unpack[SettingsByName],
    ) -> Iterator[list[StreamedRow]]:
        """Continues prompts as `generate`; yields what each got in each round.

        With `details` each row has what the round did, and with "logits" also the target's logits. The
        stream may be left at any time. Over ranks it ends on all of them when the leader leaves it.
        """
        given = given_prompts(prompts, messages)
        text_run, _, run = self._begun(given, settings, changes, rule)
        recorder = RoundRecorder(details == "logits") if details else None
        if recorder is not None:
            text_run.engine.observer = recorder
        return self._streamed(text_run, run, recorder)

    def _streamed(
        self, text_run: Run, run: RunConf, recorder: RoundRecorder | None
    ) -> Generator[list[StreamedRow]]:
        """Yields the rows of each round of the run; see `stream`."""
        rounds = self._rounds(text_run)
        try:
            for step in rounds:
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
                        details=recorder.by_prompt.get(reply.request.prompt.id) if recorder else None,
                    )
                    rows.append(streamed)
                yield rows if self._ranks.is_leader else []
            require_numbers(*(reply.outcome for reply in text_run.replies.values()))
        except GeneratorExit:
            if self._ranks.world > 1 and not self._ranks.ended:
                with self.computing(goes_on=True):
                    text_run.engine.leave()
            raise
        finally:
            rounds.close()
            text_run.free()

    def score(
        self,
        texts: Prompts,
        *,
        top: int = 0,
        sampling: SamplingConfig | Mapping[str, Any] | None = None,
    ) -> list[ScoredText]:
        """Returns the log-probability of every token of these texts, each given those before it.

        `top` adds those of this many likeliest tokens. They are the target's, unfiltered at temperature 1, or
        with `sampling` those of the distribution that these settings give, after the text's first token. The
        draft takes no part. Raises what `generate` raises.
        """
        pair = self._session
        result = list[ScoredText]()
        given = [texts] if isinstance(texts, str) else ordered("texts", texts)
        of = "target" if sampling is None else "sampled"
        settings = Settings(sampling=sampling, logprobs=top, logprobs_of=of)
        least = max(1, settings.over(pair.run).sampling.controls.min_new_tokens)  # nothing is generated
        settings = settings.but(max_new_tokens=least)
        run, prompts = self._settled(lambda: self._read_all(given, settings, shorter=False))
        with self.computing():
            rows = pair.rows
            reader = LogprobReader(top, sampling is not None)
            engine = pair.engine(0, run)
            for first in range(0, len(prompts), rows):
                batch = prompts[first : first + rows]
                scored = engine.score(batch, reader)
                reasons = ["error" if are_damaged(scores) else None for scores in scored]
                lengths = [len(prompt.token_ids) for prompt in batch]
                require_numbers(*zip((prompt.id for prompt in batch), lengths, reasons, strict=True))
                for number, scores in enumerate(scored, start=first):
                    result.append(ScoredText(text_of(given[number], pair.tokens), self._spelled(scores)))
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
        contexts = ordered("contexts", contexts)
        continuations = ordered("continuations", continuations)
        wanted = [*contexts, *continuations, *chain(*continuations)]
        if len(contexts) != len(continuations) or not all(map(len, wanted)):
            raise UsageError(
                "contexts and continuations do not match",
                found=f"{len(contexts)} contexts, {len(continuations)} lists of continuations",
                allowed="a list of continuations for each context, and nothing empty",
                fix="correct them",
            )
        settings = Settings(logprobs=top)
        least = max(1, settings.over(pair.run).sampling.controls.min_new_tokens)  # nothing is generated
        settings = settings.but(max_new_tokens=least)
        pairs = zip(contexts, continuations, strict=True)
        whole: list[GivenPrompt] = [[*context, *ids] for context, group in pairs for ids in group]
        run, _ = self._settled(lambda: self._read_all(whole, settings, shorter=False))
        with self.computing():
            reader = LogprobReader(top)
            engine = pair.engine(0, run)
            for first in range(0, len(contexts), pair.rows):
                batch = slice(first, first + pair.rows)
                groups = [list(map(tuple, of_context)) for of_context in continuations[batch]]
                prompts = [Prompt(str(n), tuple(ids)) for n, ids in enumerate(contexts[batch], start=first)]
                scored = engine.score_continuations(prompts, groups, reader)
                for context, group, by_ids in zip(prompts, groups, scored, strict=True):
                    length = len(context.token_ids)
                    reasons = ["error" if are_damaged(by_ids.get(ids, ())) else None for ids in group]
                    require_numbers(*((context.id, length, reason) for reason in reasons))
                    texts = [
                        ScoredText(text_of(ids, pair.tokens), self._spelled(by_ids.get(ids, ())))
                        for ids in group
                    ]
                    result.append(texts)
                self._ranks.broadcast_ints([0])  # a rank without a part in the target waits here
        return result if self._ranks.is_leader else []

    def close(self) -> None:
        """Frees the models and parts from the other ranks, if any. The pair cannot be used afterwards."""
        self._session.close()
        self._ranks.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._session.close()  # the other ranks may not be there to part from

    @contextmanager
    def computing(self, goes_on: bool = False) -> Iterator[None]:
        """Surrounds what a call computes: all ranks raise its first failure; see `Calls`."""
        with self._calls.computing(goes_on), first_cause(self._ranks, self._session):
            yield

    def _rounds(self, text_run: Run) -> Generator[TimedStep]:
        """Yields the rounds of a run; what their reader does is not surrounded."""
        rounds = text_run.rounds()
        while True:
            with self.computing(goes_on=True):
                step = next(rounds, None)
            if step is None:
                return
            yield step

    def _settled(self, read: Callable[[], Any]) -> Any:
        """Returns what `read` makes of a call's arguments.

        What is wrong with them, every rank raises for itself, and the pair stays usable.
        """
        refused: RunError | TypeError | None = None
        result = None
        try:
            result = read()
        except (RunError, TypeError) as error:
            refused = error
        if self._ranks.world > 1:
            with self.computing():
                count = sum(flag for [flag] in self._ranks.gather_ints([int(refused is not None)]))
                if 0 < count < self._ranks.world:  # the ranks were not called with the same
                    raise refused or UsageError("another rank was given arguments that it refuses")
        if refused is not None:
            raise refused
        return result

    def _begun(
        self,
        given: list[GivenPrompt],
        settings: Settings | None,
        changes: SettingsByName,
        rule: GivenRule | None,
    ) -> tuple[Run, list[int], RunConf]:
        """Returns the run that writes the texts of these prompts, their seeds, and its settings."""
        for name in changes:
            if name not in NAMES:
                raise TypeError(unknown_name(name, ("messages", "rule", "on_done", "progress", "details")))
        pair = self._session
        _ = pair.models  # raises RuntimeError after `close`
        decides = self.rule_of(rule)
        if not isinstance(settings, Settings | None):
            raise TypeError(
                f"settings is a Settings object, not a {type(settings).__name__}; names go by keyword"
            )
        asked = (settings or Settings()).but(**changes)
        run, prompts = self._settled(lambda: self._read_all(given, asked))
        if asked.seeds is not None and len(asked.seeds) != len(prompts):
            raise UsageError(
                "there is a seed for each prompt, or one for all",
                found=f"{len(asked.seeds)} seeds, {len(prompts)} prompts",
                fix="give as many seeds as prompts",
            )

        task = run.task_as(GenerateConf)
        with self.computing():
            seed = run.seed
            if seed is None and prompts and asked.seeds is None:
                drawn = [secrets.randbelow(2**31)] if self._ranks.is_leader else []
                seed = self._ranks.broadcast_ints(drawn)[0]
            seeds = asked.seeds or [seed or 0] * len(prompts)
            engine = pair.engine(seed or 0, run, rule=decides)
            requests = pair.requests(prompts, run, task.stop)
            if asked.seeds is not None:
                requests = [replace(one, seed=own) for one, own in zip(requests, seeds, strict=True)]
            return Run(engine, requests, pair.run_settings(task.batch_size, run)), seeds, run

    def rule_of(self, given: GivenRule | None) -> Rule | None:
        """Returns the rule that a script gives, as a class or an object. Raises UsageError for no rule."""
        if given is None:
            return None
        for known, rule in self._rules:
            if known is given:
                return rule
        own: object = given
        if isinstance(given, type) and issubclass(given, Rule):
            own = given()
        if isinstance(own, Rule):
            guarded = GuardedRule(own)
            self._rules.append((given, guarded))
            return guarded
        raise UsageError(
            "rule is no Rule",
            found=type(given).__name__,
            allowed="a class that inherits from llama_ssp.Rule, or an object of one",
            fix="docs/own.md shows one",
        )

    def _read_all(
        self, given: list[GivenPrompt], settings: Settings, shorter: bool = True
    ) -> tuple[RunConf, list[Prompt]]:
        """Returns the run with these settings, and the prompts as token ids. Raises RunError."""
        if any(map(is_conversation, given)):
            settings = settings.but(chat=True)
        run = self._run(settings)
        tokens = self._session.tokens
        return run, [read(number, prompt, tokens, run, shorter) for number, prompt in enumerate(given)]

    def _run(self, settings: Settings) -> RunConf:
        """Returns the run with these settings. Raises UsageError for those that it cannot have."""
        run = self._session.run
        usual = replace(run.task_as(GenerateConf), max_new_tokens=GenerateConf.max_new_tokens)
        run = settings.over(replace(run, task=usual))
        odd = (seed for seed in settings.seeds or () if type(seed) is not int or not 0 <= seed <= MAX_SEED)
        for seed in odd:
            checks.check_values(replace(run, seed=seed))
        checks.check(run)
        checks.check_context(run)
        if run.has_draft_model and not self._session.spec.placement.draft:
            raise UsageError(
                "the pair was loaded without its draft model",
                where="speculation",
                found=run.speculation.k_in_words,
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

    def _completion(self, prompt: GivenPrompt, reply: Reply, seed: int, run: RunConf) -> Completion:
        """Returns the completion of a text that has ended."""
        counts = reply.counts.summary()
        return Completion(
            prompt=text_of(prompt, self._session.tokens),
            text=reply.text,
            token_ids=reply.token_ids,
            finish_reason=str(reply.finish_reason),
            prompt_tokens=reply.prompt_tokens,
            drafted=counts["tokens_drafted"],
            accepted=counts["tokens_accepted"],
            message=self._session.tokens.thoughts.message(reply.text.strip()),
            seed=seed,
            rounds=counts["row_rounds"],
            seconds=reply.counts.decode_s,
            drafted_by_position=counts["drafted_by_position"],
            accepted_by_position=counts["accepted_by_position"],
            logprobs=None if run.task.logprobs is None else self._spelled(reply.logprobs),
        )

    def _spelled(self, tokens: Sequence[ScoredToken]) -> list[TokenLogprob]:
        return spelled(tokens, self._session.tokens.spell)
