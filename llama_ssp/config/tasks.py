"""The settings of each task: keys, ranges, and combinations that are refused. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING

from llama_ssp.config.schema import (
    MAX_INT,
    MAX_K,
    MAX_SEED,
    Drafting,
    LogprobsOf,
    OnBadRow,
    SpeculationConfig,
    number,
    share,
)
from llama_ssp.errors import UsageError

PAIR = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)?")
PLOTS = (".png", ".svg", ".pdf")
SCREENS = (".svg", ".html")
MOST_ROWS = 4096
MAX_LOGPROBS = 20  # alternatives a token, as in OpenAI's API
MOST_CERTIFIED = 16  # drafts a round, which may be decided in 2^16 ways


def picture(*endings: str) -> Any:
    """A field for the name of a picture, with one of these endings; null by default."""
    return field(default=None, metadata={"endings": endings})


@dataclass
class TaskConf:
    """A task."""

    name: str = MISSING

    @property
    def pictures(self) -> dict[str, str]:
        """The names of pictures, by key."""
        keys = [entry.name for entry in fields(self) if "endings" in entry.metadata]
        return {key: value for key in keys if (value := getattr(self, key)) is not None}

    @property
    def writes_past_end(self) -> bool:
        """Whether an end-of-text token ends no text."""
        return getattr(self, "ignore_eos", False)

    @property
    def named_pairs(self) -> list[str]:
        """The pairs of presets that the task names in the place of the run's own."""
        return getattr(self, "pairs", [])

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        """Raises UsageError for values that rule each other out. Types and ranges have been checked."""
        for entry in fields(self):
            value, key = getattr(self, entry.name), f"task.{entry.name}"
            distinct = "range" in entry.metadata or entry.name == "pairs"
            if distinct and isinstance(value, list) and len(set(value)) < len(value):
                raise UsageError(f"{key} holds an entry twice", found=value, fix="give each once")
            endings = entry.metadata.get("endings")
            if endings and value is not None and not value.endswith(endings):
                fix = "let its ending say which kind of picture it is"
                raise UsageError(f"{key} is no picture's name", "", repr(value), ", ".join(endings), fix)
            if entry.name == "stop" and "" in value:
                fix = "an empty stop string would end every text at once; drop it"
                raise UsageError("task.stop holds an empty string", "", "''", "non-empty strings", fix)


@dataclass
class PromptedConf(TaskConf):
    """A task that continues prompts: from the config, a file, or its own source (text/prompts.py).

    `chat` puts each prompt into the target's chat template, after `system` if given.
    """

    prompts: list[str] | None = None
    prompt_file: str | None = None
    on_bad_row: OnBadRow = OnBadRow.fail
    chat: bool = False
    system: str | None = None
    max_new_tokens: int = number(128, 1, MAX_INT)
    prefill_chunk: int = number(512, 1, 2**20)

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        if self.system is not None and not self.chat:
            what, fix = "task.system is a part of a chat", "write task.chat=true, or put it into the prompt"
            raise UsageError(what, found="task.chat=false", fix=fix)
        sources = [key for key in ("prompts", "prompt_file", "lengths", "suite") if getattr(self, key, None)]
        if len(sources) > 1:
            what = f"both task.{sources[0]} and task.{sources[1]} are given"
            raise UsageError(what, allowed="one source of prompts", fix="drop one of them")
        if self.prompts is not None and not self.prompts:
            raise UsageError("task.prompts is an empty list", fix='write task.prompts=["your prompt"]')


@dataclass
class TextConf(PromptedConf):
    """A task that shows what it writes.

    Names of special tokens in a prompt are text, or with `special_tokens` (without `chat`) those tokens.
    """

    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    special_tokens: bool = False

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        if self.special_tokens and self.chat:
            what, found = "in a chat special tokens are the template's", "task.special_tokens=true"
            raise UsageError(what, found=f"{found}, task.chat=true", fix="choose one of the two")


@dataclass
class GenerateConf(TextConf):
    """task=generate: continue prompts from the config, a file, or standard input.

    `logprobs` adds each token's log-probability, and those of the N likeliest tokens at its place (0: none).
    With `echo` the output has the prompt's tokens, too; with `max_new_tokens` 0 nothing else.
    """

    max_new_tokens: int = number(128, 0, MAX_INT, "0 scores the prompt, with task.echo=true")
    batch_size: int = number(8, 1, MOST_ROWS)
    trace: bool = False
    logprobs: int | None = number(None, 0, MAX_LOGPROBS, "null turns them off")
    logprobs_of: LogprobsOf = LogprobsOf.target
    echo: bool = False

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        check_echo(self.echo, self.logprobs, self.max_new_tokens)


def check_pairs(pairs: list[str], spec: SpeculationConfig) -> None:
    """Raises UsageError for entries of `task.pairs` that name no pair, or a draft where none drafts."""
    for name in pairs:
        if not PAIR.fullmatch(name):
            allowed, fix = "TARGET or TARGET/DRAFT", "use the names under conf/model, such as 13B/7B"
            raise UsageError("a task.pairs entry names no pair", "", repr(name), allowed, fix)
    drafted = [name for name in pairs if "/" in name and not name.endswith("/none")]
    if drafted and (spec.drafter is not Drafting.model or not spec.may_draft):
        what, found = "task.pairs names a draft model, but none drafts", f"drafter {spec.drafter.value}"
        fix = "name the target alone, or choose speculation=default"
        raise UsageError(what, "speculation", f"{drafted[0]}, {found}, k {spec.k}", fix=fix)


@dataclass
class EvalConf(TaskConf):
    """task=eval: few-shot multiplications, answered by regular and by speculative sampling.

    The score is highest with sampling=greedy; the ancestor had sampling.temperature=0.5. An entry of `pairs`
    is TARGET or TARGET/DRAFT, presets under conf/model; without any, the run's own pair is scored.
    The first n questions of each seed are scored for every n of `sizes`; `quick` asks 10 of one seed. `plot`
    null puts plot.svg into the run folder.
    """

    pairs: list[str] = field(default_factory=list)
    seeds: list[int] = number(lambda: [0, 1, 2, 3], 0, MAX_SEED)
    sizes: list[int] = number(lambda: [1000], 1, 10**6)
    quick: bool = False
    shots: int = number(4, 0, 100)
    max_new_tokens: int = number(6, 1, MAX_INT)
    batch_size: int = number(64, 1, MOST_ROWS)
    plot: str | None = picture(*PLOTS)

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        for key, values in (("seeds", self.seeds), ("sizes", self.sizes)):
            if not values:
                raise UsageError(f"task.{key} is an empty list", fix=f"leave it out, or write task.{key}=[1]")
        check_pairs(self.pairs, spec)


@dataclass
class CompareConf(TextConf):
    """task=compare: each prompt by regular and by speculative sampling, side by side.

    Prompts come from the config, a file or a pipe, else from the terminal. One sampling runs after the other.
    `plot` saves the final picture, as .svg or .html.
    """

    plot: str | None = picture(*SCREENS)

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        idle = spec.drafter is Drafting.none or not spec.may_draft
        if idle or (spec.drafter is Drafting.model and not has_draft):
            what, model = "task=compare has nothing to compare: nobody drafts", "a" if has_draft else "no"
            found = f"drafter {spec.drafter.value}, k {spec.k}, {model} draft model"
            fix = "name a draft model (draft=NAME), or choose speculation=ngram"
            raise UsageError(what, "draft, speculation", found, fix=fix)


@dataclass
class MeasureConf(PromptedConf):
    """task=measure: the speed of the target alone, the draft alone and the pair at each K of `ks`.

    Prompts come from the config or a file, else they are fifteen sentences; with `lengths` they are random
    tokens, one prompt of each length; with `suite` they are the questions of a published file, of several
    turns each (text/suites.py). An entry of `pairs` is TARGET or TARGET/DRAFT, presets under conf/model;
    without any, the run's own pair is measured. Contenders take turns `repeats` times, after a warm-up that
    does not count. `ignore_eos` null is true, but false with a suite. `plot` null puts plot.svg into the run
    folder.
    """

    suite: str | None = None
    pairs: list[str] = field(default_factory=list)
    lengths: list[int] = number(list, 1, 2**20)
    ks: list[int] = number(lambda: [1, 2, 4, 8], 1, MAX_K)
    repeats: int = number(6, 1, 1000)
    max_new_tokens: int = number(64, 1, MAX_INT)
    ignore_eos: bool | None = None
    batch_size: int = number(1, 1, MOST_ROWS)
    plot: str | None = picture(*PLOTS)

    @property
    def writes_past_end(self) -> bool:
        return self.suite is None if self.ignore_eos is None else self.ignore_eos

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        check_pairs(self.pairs, spec)
        if self.suite is not None and self.batch_size > 1:
            what, fix = "a suite's questions are answered one by one", "leave task.batch_size=1"
            raise UsageError(what, "task.suite", f"task.batch_size={self.batch_size}", "1", fix)


@dataclass
class CertifyConf(PromptedConf):
    """task=certify: does speculation sample the target's distribution?

    Of each prompt `samples` texts of `max_new_tokens` are sampled regularly, speculatively, and by a rule
    that is wrong on purpose; up to `law_rounds` rounds of texts of `law_tokens` are computed exactly; greedy
    texts have `greedy_tokens`. A correct sampler fails in at most `false_alarm` of runs.
    """

    samples: int = number(128, 8, 10**6, "fewer texts tell nothing")
    max_new_tokens: int = number(8, 1, MAX_INT)
    law_tokens: int = number(24, 1, MAX_INT)
    law_rounds: int = number(64, 1, 10**6)
    greedy_tokens: int = number(24, 1, MAX_INT)
    false_alarm: float = number(0.001, 1e-3, 0.5, "the shuffles resolve no smaller rate")
    batch_size: int = number(64, 1, MOST_ROWS)

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        key, most = ("k_max", spec.k_max) if spec.adaptive else ("k", spec.k)
        if most > MOST_CERTIFIED:
            what, found = "task=certify looks at every way to decide a round", f"up to {most} drafts a round"
            fix = f"certify with speculation.{key}={MOST_CERTIFIED}: the rule is the same for any number"
            raise UsageError(what, "speculation", found, f"up to {MOST_CERTIFIED}", fix)


@dataclass
class AgreeConf(PromptedConf):
    """task=agree: how far draft and target agree greedily on each prompt, and where they differ.

    The draft writes `chunk` tokens at a time, which the target reads in one pass, until they differ or have
    agreed on `max_new_tokens`. `plot` null puts plot.svg into the run folder.
    """

    max_new_tokens: int = number(64, 1, MAX_INT)
    chunk: int = number(8, 1, MAX_K)
    ignore_eos: bool = False
    batch_size: int = number(8, 1, MOST_ROWS)
    plot: str | None = picture(*PLOTS)


@dataclass
class PlanConf(TaskConf):
    """task=plan: does the pair fit, which ranks get the draft, how fast is it.

    `acceptance` is the probability that a drafted token is accepted if those before it are. With
    `require_fit` the exit code is 1 unless the verdict is `fits`.
    """

    prompt_tokens: int = number(512, 1, MAX_INT)
    max_new_tokens: int = number(128, 1, MAX_INT)
    batch_size: int = number(1, 1, MOST_ROWS)
    prefill_chunk: int = number(512, 1, 2**20)
    acceptance: float = share(0.8)
    require_fit: bool = False


@dataclass
class CalibrateConf(TaskConf):
    """task=calibrate: measures this machine, and writes cluster/calibrated.yaml in `folder`.

    To use it: --config-dir FOLDER cluster=calibrated.
    """

    folder: str = "calibrated"
    repeats: int = number(5, 1, 1000)


@dataclass
class BatchConf(TaskConf):
    """task=batch: every record of a file is answered exactly once, also when processes are killed.

    `input` is JSONL, plain or in OpenAI's batch format, or text of one prompt a line; `output` has an answer
    a line, in the same order. `work` holds the job until then (null: OUTPUT.work). Records are committed one
    by one and published by shards of `shard_size`, which several processes may share. A record that ended
    `retries` attempts, alone, is set aside. `status` only reports the job's progress; `submit` gives the job
    to the cluster's scheduler. `logprobs` is as in task=generate, for lines that do not say it themselves.
    """

    input: str | None = None
    output: str | None = None
    work: str | None = None
    chat: bool = False
    system: str | None = None
    max_new_tokens: int = number(128, 1, MAX_INT)
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    on_bad_row: OnBadRow = OnBadRow.fail
    batch_size: int = number(8, 1, MOST_ROWS)
    prefill_chunk: int = number(512, 1, 2**20)
    shard_size: int = number(256, 1, 10**6)
    retries: int = number(3, 1, 100)
    logprobs: int | None = number(None, 0, MAX_LOGPROBS, "null turns them off")
    logprobs_of: LogprobsOf = LogprobsOf.target
    status: bool = False
    submit: bool = False


def check_echo(echo: bool, logprobs: int | None, max_new_tokens: int) -> None:
    """Raises UsageError for an echo without log-probabilities, and for a run without new tokens or echo."""
    if echo and logprobs is None:
        what, fix = "an echo gives the prompt's log-probabilities", "write task.logprobs=0, or a number of"
        raise UsageError(f"{what}, and none are asked for", "task.echo=true", fix=f"{fix} alternatives")
    if not (max_new_tokens or echo):
        what, fix = "task.max_new_tokens is 0: no text is asked for", "write at least 1; or task.echo=true"
        raise UsageError(what, allowed="1 or more", fix=f"{fix} task.logprobs=0, which scores the prompt")


# task=NAME is NameConf.
TASKS: dict[str, type[TaskConf]] = {
    conf.__name__.removesuffix("Conf").lower(): conf
    for conf in (
        GenerateConf, BatchConf, EvalConf, CompareConf, MeasureConf, CertifyConf, AgreeConf, PlanConf,
        CalibrateConf,
    )
}  # fmt: skip
