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
    """A task. The first line of its description is its line in --help.

    Attributes:
        name: The task's name.
    """

    groups = "model draft sampling speculation placement cluster"  # of the run, that the task uses
    measures_costs = False  # whether an adaptive K goes by measured costs of rounds

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
                raise UsageError(
                    f"{key} is not the name of a picture", "", repr(value), ", ".join(endings), fix
                )
            if entry.name == "stop" and "" in value:
                fix = "an empty stop string would end every text at once; drop it"
                raise UsageError("task.stop holds an empty string", "", "''", "non-empty strings", fix)


@dataclass
class PromptedConf(TaskConf):
    """A task that continues prompts. Without prompts of the user it has its own (text/prompts.py).

    Attributes:
        prompts: The prompts, as a list of quoted texts; each prompt=TEXT adds one.
        prompt_file: A text file with a prompt a line, or .jsonl with an object a line (prompt, id); - is
            standard input.
        on_bad_row: What a prompt that cannot be read does to the run: fail ends it, skip leaves the prompt
            out.
        chat: Put each prompt into the target's chat template.
        system: The system message of the chat.
        max_new_tokens: The longest continuation, in tokens.
        prefill_chunk: Tokens of a prompt that one forward pass reads.
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
    """A task that shows what it writes. Without `chat`, names of special tokens in a prompt are text.

    Attributes:
        stop: Texts, or names of special tokens, that end a continuation; they are left out of it. Each
            stop=TEXT adds one.
        ignore_eos: Continue after the model's end token.
        special_tokens: Read names of special tokens in a prompt as those tokens.
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
    """Continue prompts: from the command line, a file, standard input.

    Attributes:
        batch_size: Prompts at a time.
        trace: Show every round: drafted, accepted and corrected tokens.
        logprobs: Print each token's log-probability, and those of the N likeliest tokens in its place; 0
            gives its own alone.
        logprobs_of: The distribution of the log-probabilities: the target's own at temperature 1, or the one
            sampled from.
        echo: Also give the prompt's tokens; with max_new_tokens=0 nothing else.
    """

    measures_costs = True

    max_new_tokens: int = number(128, 0, MAX_INT, "0 scores the prompt, with task.echo=true")
    batch_size: int = number(8, 1, MOST_ROWS)
    trace: bool = False
    logprobs: int | None = number(None, 0, MAX_LOGPROBS, "null turns them off")
    logprobs_of: LogprobsOf = LogprobsOf.target
    echo: bool = False

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        if self.echo and self.logprobs is None:
            what = "an echo gives the prompt's log-probabilities, and none are asked for"
            raise UsageError(what, "task.echo=true", fix="write task.logprobs=0, or a number of alternatives")
        if not (self.max_new_tokens or self.echo):
            fix = "write at least 1; or task.echo=true task.logprobs=0, which scores the prompt"
            raise UsageError("task.max_new_tokens asks for no text", "", "0", "1 or more", fix)


def check_pairs(pairs: list[str], spec: SpeculationConfig) -> None:
    """Raises UsageError for entries of `task.pairs` that name no pair, or a draft where none drafts."""
    for name in pairs:
        if not PAIR.fullmatch(name):
            allowed, fix = "TARGET or TARGET/DRAFT", "use the names under conf/model, such as 13B/7B"
            raise UsageError("a task.pairs entry is not a pair", "", repr(name), allowed, fix)
    drafted = [name for name in pairs if "/" in name and not name.endswith("/none")]
    if drafted and (spec.drafter is not Drafting.model or not spec.may_draft):
        what, found = "task.pairs names a draft model, but none drafts", f"drafter {spec.drafter.value}"
        fix = "name the target alone, or choose speculation=default"
        raise UsageError(what, "speculation", f"{drafted[0]}, {found}, k {spec.k}", fix=fix)


def check_drafts(task: str, key: str, spec: SpeculationConfig, has_draft: bool) -> None:
    """Raises UsageError for K = 0, which leaves out the draft model; `key` is the task's own K."""
    if has_draft and spec.drafter is Drafting.model and not spec.may_draft:
        what = f"task={task} needs drafts, and nothing drafts"
        fix = f"leave speculation.k out: {key} is its K"
        raise UsageError(what, "speculation", f"drafter model, k {spec.k}", "1 or more", fix)


@dataclass
class ChatConf(TaskConf):
    """Talk with the model on a terminal; a pipe has a message a line.

    Attributes:
        system: The system message.
        stop: A reply ends at any of these strings, or special tokens of these names.
        context: The most tokens of the whole conversation; never more than the model's own.
        max_new_tokens: The most tokens of a reply.
        prefill_chunk: Tokens of a prompt in one forward pass.
    """

    measures_costs = True

    system: str | None = None
    stop: list[str] = field(default_factory=list)
    context: int = number(4096, 16, MAX_INT)
    max_new_tokens: int = number(512, 1, MAX_INT)
    prefill_chunk: int = number(512, 1, 2**20)


@dataclass
class EvalConf(TaskConf):
    """Score few-shot multiplications, regular and speculative.

    The score is highest with sampling=greedy. The first n questions of each seed are scored for every n of
    `sizes`.

    Attributes:
        pairs: Pairs of presets to score: TARGET or TARGET/DRAFT each; [] scores the run's own pair.
        seeds: Seeds of sets of questions.
        sizes: Numbers of questions of each set.
        quick: Ask 10 questions of one seed.
        shots: Solved examples before each question.
        max_new_tokens: The longest answer, in tokens.
        batch_size: Questions at a time.
        plot: The picture of the scores, as .png, .svg or .pdf; null is plot.svg in the run folder.
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
    """Regular and speculative sampling of a prompt, side by side.

    Without a prompt it asks on the terminal. One sampling runs after the other.

    Attributes:
        plot: The picture of each comparison's end, as .svg or .html; null saves none.
    """

    measures_costs = True

    plot: str | None = picture(*SCREENS)

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        idle = spec.drafter is Drafting.none or not spec.may_draft
        if idle or (spec.drafter is Drafting.model and not has_draft):
            what, model = "task=compare has nothing to compare: nothing drafts", "a" if has_draft else "no"
            found = f"drafter {spec.drafter.value}, k {spec.k}, {model} draft model"
            fix = "name a draft model (draft=NAME), or choose speculation=ngram"
            raise UsageError(what, "draft, speculation", found, fix=fix)


@dataclass
class MeasureConf(PromptedConf):
    """The speed of target, draft and pair at each K; where time goes.

    Without prompts it continues fifteen sentences. Contenders take turns, after a warm-up that does not
    count.

    Attributes:
        suite: A published file of questions, of several turns each (text/suites.py).
        pairs: Pairs of presets to measure: TARGET or TARGET/DRAFT each; [] measures the run's own pair.
        lengths: Lengths of prompts of random tokens, one prompt each, instead of texts.
        ks: Drafted tokens a round (K) to measure the pair with.
        repeats: Measurements of each contender.
        max_new_tokens: Tokens of each continuation.
        ignore_eos: Continue after the model's end token, so that all texts are of one length; null is true,
            but false with a suite.
        batch_size: Prompts at a time.
        plot: The picture of the speeds, as .png, .svg or .pdf; null is plot.svg in the run folder.
    """

    measures_costs = True

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

    def measured_ks(self, spec: SpeculationConfig) -> list[int]:
        """`ks`; of the default, only the K that a step has room for, with the siblings of each draft."""
        fit = [k for k in self.ks if k * (spec.siblings + 1) <= MAX_K]
        return fit if self.ks == MeasureConf(self.name).ks else self.ks

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        check_pairs(self.pairs, spec)
        if (most := max(self.measured_ks(spec), default=0) * (spec.siblings + 1)) > MAX_K:
            what, found = f"drafts and siblings are {MAX_K} at most", f"{most} with {spec.siblings} siblings"
            raise UsageError(what, "task.ks", found, fix="lower task.ks or speculation.siblings")
        check_drafts(self.name, "task.ks", spec, has_draft and bool(self.ks) and not self.pairs)
        if self.suite is not None and self.batch_size > 1:
            what, fix = "a suite's questions are answered one by one", "leave task.batch_size=1"
            raise UsageError(what, "task.suite", f"task.batch_size={self.batch_size}", "1", fix)


@dataclass
class CertifyConf(PromptedConf):
    """Does speculation sample the target's distribution? A verdict.

    Texts of each prompt are sampled regularly, speculatively, and by a rule that is wrong on purpose, and
    their distributions are compared. Distributions of rounds are computed exactly.

    Attributes:
        samples: Sampled texts of each prompt, for each way of sampling.
        max_new_tokens: Tokens of each sampled text.
        law_tokens: Tokens of the long texts, `batch_size` of them, whose rounds are examined one by one.
        law_rounds: Rounds of the long texts whose distributions are computed exactly, at most.
        greedy_tokens: Tokens of each greedy text.
        false_alarm: The share of runs, at most, in which a correct sampler fails.
        batch_size: Texts at a time.
    """

    samples: int = number(128, 8, 10**6, "fewer texts tell nothing")
    max_new_tokens: int = number(8, 1, MAX_INT)
    law_tokens: int = number(192, 1, MAX_INT)
    law_rounds: int = number(64, 1, 10**6)
    greedy_tokens: int = number(96, 1, MAX_INT)
    false_alarm: float = number(0.001, 1e-3, 0.5, "the shuffles resolve no smaller rate")
    batch_size: int = number(32, 1, MOST_ROWS)

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        key, most = ("k_max", spec.k_max) if spec.adaptive else ("k", spec.k)
        if most > MOST_CERTIFIED:
            what, found = "task=certify looks at every way to decide a round", f"up to {most} drafts a round"
            fix = f"certify with speculation.{key}={MOST_CERTIFIED}: the rule is the same for any number"
            raise UsageError(what, "speculation", found, f"up to {MOST_CERTIFIED}", fix)


@dataclass
class AgreeConf(PromptedConf):
    """How many greedy tokens draft and target agree on, and where not.

    The draft writes a chunk at a time, which the target reads in one pass, until they differ.

    Attributes:
        max_new_tokens: Tokens to agree on, at most.
        chunk: Tokens that the draft writes before the target reads them.
        ignore_eos: Continue after the model's end token.
        batch_size: Prompts at a time.
        plot: The picture of the lengths, as .png, .svg or .pdf; null is plot.svg in the run folder.
    """

    max_new_tokens: int = number(64, 1, MAX_INT)
    chunk: int = number(8, 1, MAX_K)
    ignore_eos: bool = False
    batch_size: int = number(8, 1, MOST_ROWS)
    plot: str | None = picture(*PLOTS)

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        check_drafts(self.name, "task.chunk", spec, has_draft)


@dataclass
class PlanConf(TaskConf):
    """Does the pair fit, where, and how fast? No GPU, no weights.

    Attributes:
        prompt_tokens: Tokens of a prompt.
        max_new_tokens: Tokens of a continuation.
        batch_size: Rows at a time.
        prefill_chunk: Tokens of a prompt that one forward pass reads.
        acceptance: The probability that a drafted token is accepted if those before it are.
        require_fit: End with exit code 1 unless the verdict is `fits`.
        nodes: Also plan a batch job on each of these numbers of nodes, such as [1,2,4,8,16,32,64].
        records: Records of that job.
        shard_size: Records of a shard of that job.
        plot: The picture of that job, as .png, .svg or .pdf; null is plot.svg in the run folder.
    """

    groups = "model draft speculation placement cluster"

    prompt_tokens: int = number(512, 1, MAX_INT)
    max_new_tokens: int = number(128, 1, MAX_INT)
    batch_size: int = number(1, 1, MOST_ROWS)
    prefill_chunk: int = number(512, 1, 2**20)
    acceptance: float = share(0.8)
    require_fit: bool = False
    nodes: list[int] = number(list, 1, 1024)
    records: int = number(100_000, 1, MAX_INT)
    shard_size: int = number(256, 1, 10**6)
    plot: str | None = picture(*PLOTS)

    def check(self, spec: SpeculationConfig, has_draft: bool) -> None:
        super().check(spec, has_draft)
        own, usual = vars(self), vars(PlanConf(self.name))
        of_a_job = [key for key in ("plot", "records", "shard_size") if own[key] != usual[key]]
        if of_a_job and not self.nodes:
            key = f"task.{of_a_job[0]}"
            fix = f"write task.nodes=[1,2,4], or leave out {key}"
            raise UsageError(f"{key} is of a job over nodes", found="task.nodes=[]", fix=fix)


@dataclass
class CalibrateConf(TaskConf):
    """Measure this machine's constants, for plans and for drafts.

    They are written as a cluster. To use it: --config-dir FOLDER cluster=calibrated.

    Attributes:
        folder: The folder that gets cluster/calibrated.yaml.
        repeats: Measurements of each constant.
    """

    groups = "placement"

    folder: str = "calibrated"
    repeats: int = number(5, 1, 1000)


@dataclass
class BatchConf(TaskConf):
    """Answer each record of a file exactly once, whatever is killed.

    Records are committed one by one, and published by shards, which several processes may share: on this
    machine or on Slurm.

    Attributes:
        input: The prompts: JSONL, plain or in OpenAI's batch format, or text with a prompt a line.
        output: The answers: JSONL, a line each, in the order of the prompts.
        work: The folder of the job while it runs; null is OUTPUT.work. It stays when the job is done.
        chat: Put each prompt into the target's chat template.
        system: The system message of the chat.
        max_new_tokens: The longest answer, in tokens, of a record that does not say its own.
        stop: Texts, or names of special tokens, that end an answer; they are left out of it.
        ignore_eos: Continue after the model's end token.
        on_bad_row: What a record that cannot be read does to the job: fail ends it, skip answers with an
            error.
        batch_size: Rows at a time.
        prefill_chunk: Tokens of a prompt that one forward pass reads.
        shard_size: Records of a shard.
        retries: Attempts with a record alone; a record that ends all of them is answered with an error.
        logprobs: Give each token's log-probability, and those of the N likeliest tokens in its place; 0
            gives its own alone.
        logprobs_of: The distribution of the log-probabilities: the target's own at temperature 1, or the one
            sampled from.
        status: Only report the job's progress.
        submit: Give the job to the cluster's scheduler.
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


# task=NAME is NameConf.
TASKS: dict[str, type[TaskConf]] = {
    conf.__name__.removesuffix("Conf").lower(): conf
    for conf in (
        GenerateConf, ChatConf, BatchConf, EvalConf, CompareConf, MeasureConf, CertifyConf, AgreeConf,
        PlanConf, CalibrateConf,
    )
}  # fmt: skip
