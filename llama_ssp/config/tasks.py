"""The settings of each task: keys, ranges, and combinations that are refused. No torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from omegaconf import MISSING

from llama_ssp.config.schema import (
    MAX_INT,
    MAX_K,
    MAX_SEED,
    USUAL_CHUNK,
    LogprobsOf,
    OnBadRow,
    key,
    not_empty,
    number,
    share,
)
from llama_ssp.errors import UsageError

MOST_ROWS = 4096
MAX_LOGPROBS = 20  # alternatives a token, as in OpenAI's API
ANSWER_FIELDS = "prompt|messages|text|token_ids|finish_reason|prompt_tokens|logprobs|prompt_logprobs"
# Descriptions of keys that several tasks have.
PREFILL_CHUNK = "Tokens of a prompt that one pass reads; null is 2048 on GPUs where it fits, else 512."
LOGPROBS = "Give each token's log-probability, and those of the N likeliest in its place; 0 is its own."
LOGPROBS_OF = "Whose log-probabilities: the target's at temperature 1, or those sampled from."
CHAT = "Put each prompt into the target's chat template."
SYSTEM = "The system message of the chat."
ENABLE_THINKING = "The argument enable_thinking of the chat template; null gives it none."
TEMPLATE = "Further arguments of the chat template, as '{reasoning_effort: low}' or as JSON."
SHOW_THINKING = "Show a model's thoughts, on a terminal dimmed; false shows the answer alone."
# Names that are no arguments of a chat template: the program sets them, or transformers takes them itself.
NOT_OF_TEMPLATES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)


def picture(what: str, endings: str = "png|svg|pdf", null: str = "null is plot.svg in the run folder") -> Any:
    """Returns a field for the name of a picture, with one of these endings; null by default."""
    about = f"The picture of {what}, as .{endings.replace('|', ', .')}; {null}."
    return key(None, about, shape=rf".*\.({endings})", allowed=f"a name with the ending {endings}")


def pair_names(verb: str) -> Any:
    about = f"Pairs of presets to {verb}: TARGET or TARGET/DRAFT each; [] is the run's own pair."
    return key(list, about, shape=r"\w[\w.+-]*(/\w[\w.+-]*)?", allowed="TARGET or TARGET/DRAFT")


@dataclass
class TaskConf:
    """A task. The first line of its description is its line in --help."""

    groups = "model draft sampling speculation placement cluster"  # of the run, that the task uses
    measures_costs = False  # whether an adaptive K goes by measured costs of rounds
    chooses_k = False  # whether K is adaptive where the user does not say it
    may_not_draft = False  # whether the plan may choose K = 0
    usual_tokens = 0  # that the task writes in all, at least, where nothing says how many
    usual_new_tokens = 0  # of a text, for plans, where `max_new_tokens` is 0
    distinct = cast("tuple[str, ...]", ())  # keys of lists that may not hold an entry twice
    filled = cast("tuple[str, ...]", ())  # keys of lists that may not be empty
    compares = False  # whether it is about drafts, and is refused where nothing drafts
    most_drafts = MAX_K  # a round
    own_k = ""  # the key that is the task's K in place of speculation.k; where it is set, there are drafts
    has_conversations = False  # whether there may be chats where `chat` is false

    # What a run takes of a task that does not have these keys.
    prompt_tokens = max_new_tokens = 0  # not known; none
    batch_size = cast("int | None", 1)
    repeats = 1
    prefill_chunk = cast("int | None", USUAL_CHUNK)
    chat = special_tokens = echo = status = submit = False
    ignore_eos = cast("bool | None", False)
    enable_thinking = cast("bool | None", None)
    template = cast("dict[str, Any]", MappingProxyType({}))
    system = plot = suite = cast("str | None", None)
    acceptance = cast("float | None", None)
    acceptance_from = replay = cast("str | None", None)
    logprobs = cast("int | None", None)
    logprobs_of = LogprobsOf.target
    on_bad_row = OnBadRow.fail
    pairs = cast("Sequence[str]", ())
    drafts = cast("Sequence[str]", ())
    lengths = cast("Sequence[int]", ())

    name: str = key(MISSING, "The task's name.")

    @property
    def writes_past_end(self) -> bool:
        """Returns whether an end-of-text token ends no text; by default it ends those of a suite."""
        return self.suite is None if self.ignore_eos is None else self.ignore_eos

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Returns all arguments of the chat template, but those that the program sets itself."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.template, **thinking}

    def check(self) -> None:
        """Raises UsageError for keys that rule each other out. Types and ranges have been checked."""
        for name in self.distinct:
            value = getattr(self, name)
            if len({*value}) < len(value):
                raise UsageError(f"task.{name} holds an entry twice", found=value, fix="give each once")
        for name in self.filled:
            if getattr(self, name) == []:
                raise UsageError(f"task.{name} is an empty list", fix="leave it out, or write an entry")
        for name in ("system", "enable_thinking", "template"):
            is_given = getattr(self, name) not in (None, {})
            if is_given and not (self.chat or self.has_conversations):
                raise UsageError(
                    f"task.{name} is a part of a chat",
                    found="task.chat=false",
                    fix="write task.chat=true, or leave it out; a system message may be put into the prompt",
                )
        require_arguments("task.template", self.template)
        if self.enable_thinking is not None and "enable_thinking" in self.template:
            raise UsageError(
                "enable_thinking is given twice",
                where="task.enable_thinking, task.template",
                found=f"{self.enable_thinking} and {self.template['enable_thinking']}",
                fix="leave out one of them",
            )


def require_arguments(where: str, arguments: Mapping[str, Any]) -> None:
    """Raises UsageError unless a chat template may get these arguments, which `where` names."""
    if taken := sorted(NOT_OF_TEMPLATES & arguments.keys()):
        raise UsageError(
            f"{taken[0]} is no argument of a chat template",
            where=where,
            fix="leave it out: it is set already",
        )
    for name, value in arguments.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the argument {name} of the chat template cannot be used",
                where=where,
                found=str(error),
                allowed="what JSON has: texts, numbers, true, false, null, lists and maps of them",
                fix="correct it",
            ) from None


@dataclass(kw_only=True)
class PromptedConf(TaskConf):
    """A task that continues prompts. Without prompts of the user it has its own (text/prompts.py)."""

    filled = ("prompts",)
    sources = cast("tuple[str, ...]", ("prompts", "prompt_file"))  # a run names one at most
    usual_prompts = cast("str | None", None)  # by name, in text/prompts.py; None: standard input
    asks_for_prompts = False  # on a terminal

    prompts: list[str] | None = key(None, "The prompts; each prompt=TEXT adds one.")
    prompt_file: str | None = not_empty("A prompt a line; of .jsonl prompt and id; - is standard input.")
    on_bad_row: OnBadRow = key(OnBadRow.fail, "An unreadable prompt: fail ends the run, skip leaves it out.")
    chat: bool = key(False, CHAT)
    system: str | None = key(None, SYSTEM)
    enable_thinking: bool | None = key(None, ENABLE_THINKING)
    template: dict[str, Any] = key(dict, TEMPLATE)
    max_new_tokens: int = number(128, 1, MAX_INT, "The longest continuation, in tokens.")
    prefill_chunk: int | None = number(None, 1, 2**20, PREFILL_CHUNK)

    def check(self) -> None:
        super().check()
        sources = [key for key in self.sources if getattr(self, key)]
        if len(sources) > 1:
            raise UsageError(
                f"both task.{sources[0]} and task.{sources[1]} are given",
                allowed="one source of prompts",
                fix="drop one of them",
            )


@dataclass(kw_only=True)
class TextConf(PromptedConf):
    """A task that shows what it writes. Without `chat`, names of special tokens in a prompt are text."""

    stop: list[str] = not_empty("Texts or special tokens that end a text; each stop=TEXT adds one.", list)
    ignore_eos: bool = key(False, "Continue after the model's end token.")
    special_tokens: bool = key(False, "Read names of special tokens in a prompt as those tokens.")

    def check(self) -> None:
        super().check()
        if self.special_tokens and self.chat:
            what = "in a chat special tokens are the template's"
            found = "task.special_tokens=true"
            raise UsageError(what, found=f"{found}, task.chat=true", fix="choose one of the two")


@dataclass(kw_only=True)
class GenerateConf(TextConf):
    """Continue prompts: from the command line, a file, standard input."""

    measures_costs = may_not_draft = True

    max_new_tokens: int = number(128, 0, MAX_INT, "Tokens of a continuation at most; 0 needs echo=true.")
    batch_size: int = number(8, 1, MOST_ROWS, "Prompts at a time.")
    trace: bool = key(False, "Show every round: drafted, accepted and corrected tokens.")
    show_thinking: bool = key(True, SHOW_THINKING)
    logprobs: int | None = number(None, 0, MAX_LOGPROBS, LOGPROBS)
    logprobs_of: LogprobsOf = key(LogprobsOf.target, LOGPROBS_OF)
    echo: bool = key(False, "Also give the prompt's tokens; with max_new_tokens=0 nothing else.")

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is None:
            raise UsageError(
                "an echo gives the prompt's log-probabilities, and none are asked for",
                where="task.echo=true",
                fix="write task.logprobs=0, or a number of alternatives",
            )
        if not (self.max_new_tokens or self.echo):
            raise UsageError(
                "task.max_new_tokens asks for no text",
                found="0",
                allowed="1 or more",
                fix="write at least 1; or task.echo=true task.logprobs=0, which scores the prompt",
            )


@dataclass(kw_only=True)
class ChatConf(TaskConf):
    """Talk with the model on a terminal; a pipe has a message a line."""

    measures_costs = may_not_draft = has_conversations = True
    usual_tokens = 4_000
    usual_new_tokens = 512

    system: str | None = key(None, "The system message.")
    resume: str | None = not_empty(
        "Go on with a conversation: its run folder, a file of it, or last, the newest below `out`.", None
    )
    enable_thinking: bool | None = key(None, ENABLE_THINKING)
    template: dict[str, Any] = key(dict, TEMPLATE)
    show_thinking: bool = key(True, SHOW_THINKING)
    stop: list[str] = not_empty("Texts, or names of special tokens, that end a reply.", list)
    context: int | None = number(
        None, 16, MAX_INT, "Tokens of the conversation, at most; null is the model's own, as far as it fits."
    )
    max_new_tokens: int = number(
        0, 0, MAX_INT, "The most tokens of a reply; 0 is the room that is left in the context."
    )
    prefill_chunk: int | None = number(None, 1, 2**20, PREFILL_CHUNK)


@dataclass(kw_only=True)
class EvalConf(TaskConf):
    """Score few-shot multiplications, regular and speculative.

    The score is highest with sampling=greedy. The first n questions of each seed are scored for every n of
    `sizes`.
    """

    distinct = "pairs", "seeds", "sizes"
    filled = "seeds", "sizes"

    pairs: list[str] = pair_names("score")
    seeds: list[int] = number(lambda: [0, 1, 2, 3], 0, MAX_SEED, "Seeds of sets of questions.")
    sizes: list[int] = number(lambda: [1000], 1, 10**6, "Numbers of questions of each set.")
    quick: bool = key(False, "Ask 10 questions of one seed.")
    shots: int = number(4, 0, 100, "Solved examples before each question.")
    chat: bool = key(False, "Put each question, with its examples, into the target's chat template.")
    system: str | None = key(None, SYSTEM)
    enable_thinking: bool | None = key(None, ENABLE_THINKING)
    template: dict[str, Any] = key(dict, TEMPLATE)
    max_new_tokens: int = number(6, 1, MAX_INT, "The longest answer, in tokens.")
    batch_size: int = number(64, 1, MOST_ROWS, "Questions at a time.")


@dataclass(kw_only=True)
class CompareConf(TextConf):
    """Regular and speculative sampling of a prompt, side by side.

    Without a prompt it asks on the terminal. One sampling runs after the other.
    """

    measures_costs = asks_for_prompts = compares = True

    plot: str | None = picture("each comparison's end", "svg|html", "null saves none")


@dataclass(kw_only=True)
class MeasureConf(PromptedConf):
    """The speed of target, draft and pair at each K; where time goes.

    Without prompts it continues fifteen sentences. Contenders take turns, after a warm-up that does not
    count.
    """

    measures_costs = True
    distinct = "pairs", "drafts", "lengths", "ks"
    sources = "prompts", "prompt_file", "lengths", "suite", "replay"
    usual_prompts = "sentences"
    own_k = "ks"

    suite: str | None = not_empty("A published file of questions, of several turns each (text/prompts.py).")
    replay: str | None = not_empty(
        "Texts of the target, by which drafts are measured without speculation: a run's folder, or JSONL."
    )
    drafts: list[str] = not_empty(
        "With replay: what drafts, a model by any of its names, a head, or ngram; [] is the run's own.", list
    )
    pairs: list[str] = pair_names("measure")
    lengths: list[int] = number(list, 1, 2**20, "Lengths of prompts of random tokens, instead of texts.")
    ks: list[int] = number(lambda: [1, 2, 4, 8], 1, MAX_K, "Drafted tokens a round (K) to measure with.")
    repeats: int = number(6, 1, 1000, "Measurements of each contender.")
    max_new_tokens: int = number(64, 1, MAX_INT, "Tokens of each continuation.")
    ignore_eos: bool | None = key(None, "Continue after the end token; null is true, but false with a suite.")
    batch_size: int = number(1, 1, MOST_ROWS, "Prompts at a time.")
    plot: str | None = picture("the speeds")

    def check(self) -> None:
        super().check()
        if self.suite is not None and self.batch_size > 1:
            raise UsageError(
                "a suite's questions are answered one by one",
                where="task.suite",
                found=f"task.batch_size={self.batch_size}",
                allowed="1",
                fix="leave task.batch_size=1",
            )
        if self.replay is not None and (self.plot is not None or not self.ks):
            raise UsageError(
                "a replay of texts has a table for task.ks, and no picture",
                where="task.replay",
                found=f"task.plot={self.plot}, task.ks={self.ks}",
                fix="leave task.plot out, and name a K",
            )
        for name in ("drafts", "pairs"):
            if getattr(self, name) and (self.replay is None) == (name == "drafts"):
                raise UsageError(
                    f"task.{name} is {'for' if name == 'drafts' else 'not for'} a replay of texts",
                    found=f"task.replay={'null' if self.replay is None else self.replay}",
                    fix="name the texts with replay=TEXTS and what drafts with drafts=[NAME,...]; "
                    "pairs are measured without replay",
                )


@dataclass(kw_only=True)
class CertifyConf(PromptedConf):
    """Does speculation sample the target's distribution? A verdict.

    Texts of each prompt are sampled regularly, speculatively, and by a rule that is wrong on purpose, and
    their distributions are compared. Distributions of rounds are computed exactly.
    """

    usual_prompts = "short"
    most_drafts = 16  # a round can be decided in 2^16 ways

    samples: int = number(128, 8, 10**6, "Sampled texts of each prompt, for each way of sampling.")
    max_new_tokens: int = number(8, 1, MAX_INT, "Tokens of each sampled text.")
    law_tokens: int = number(192, 1, MAX_INT, "Tokens of long texts, examined round by round.")
    law_rounds: int = number(64, 1, 10**6, "Rounds whose distributions are computed exactly, at most.")
    greedy_tokens: int = number(96, 1, MAX_INT, "Tokens of each greedy text.")
    false_alarm: float = number(0.001, 1e-3, 0.5, "The share of runs in which a correct sampler may fail.")
    batch_size: int = number(32, 1, MOST_ROWS, "Texts at a time.")


@dataclass(kw_only=True)
class AgreeConf(PromptedConf):
    """How many greedy tokens draft and target agree on, and where not.

    The draft writes a chunk at a time, which the target reads in one pass, until they differ.
    """

    usual_prompts = "short"
    own_k = "chunk"

    max_new_tokens: int = number(64, 1, MAX_INT, "Tokens to agree on, at most.")
    chunk: int = number(8, 1, MAX_K, "Tokens that the draft writes before the target reads them.")
    ignore_eos: bool = key(False, "Continue after the model's end token.")
    batch_size: int = number(8, 1, MOST_ROWS, "Prompts at a time.")
    plot: str | None = picture("the lengths")


@dataclass(kw_only=True)
class PlanConf(TaskConf):
    """Does the pair fit, where, and how fast? No GPU, no weights."""

    groups = "model draft speculation placement cluster"

    prompt_tokens: int = number(512, 1, MAX_INT, "Tokens of a prompt.")
    max_new_tokens: int = number(128, 1, MAX_INT, "Tokens of a continuation.")
    batch_size: int = number(1, 1, MOST_ROWS, "Rows at a time.")
    prefill_chunk: int | None = number(None, 1, 2**20, PREFILL_CHUNK)
    acceptance: float | None = share(
        None,
        "The probability that a drafted token is accepted if those before it are; null: plan.acceptance.",
    )
    acceptance_from: str | None = not_empty(
        "The folder of a run of this pair that says what was accepted: measure replay=TEXTS, generate, batch."
    )
    require_fit: bool = key(False, "End with exit code 1 unless the verdict is `fits`.")

    def check(self) -> None:
        super().check()
        if self.acceptance is not None and self.acceptance_from is not None:
            raise UsageError(
                "both task.acceptance and task.acceptance_from are given", fix="leave out one of them"
            )


@dataclass
class CalibrateConf(TaskConf):
    """Check this machine, and measure its constants for plans.

    The check says within a minute what is wrong, and what to do; where it finds a fault the exit code is 1.
    Plans of this machine go by the constants from then on. They are also written as a cluster, for others:
    --config-dir FOLDER cluster=calibrated.
    """

    groups = "placement"

    measure: bool = key(True, "Measure the constants, too; false only checks the machine.")
    folder: str = not_empty("The folder that gets cluster/calibrated.yaml.", "calibrated")
    repeats: int = number(5, 1, 1000, "Measurements of each constant.")


@dataclass(kw_only=True)
class BatchConf(TaskConf):
    """Answer each record of a file exactly once, whatever is killed.

    Records are committed one by one, and published by shards, which several processes may share: on this
    machine or on Slurm.
    """

    measures_costs = chooses_k = may_not_draft = has_conversations = True
    usual_tokens = 10_000

    input: str | None = not_empty("The prompts: JSONL, also of OpenAI's batches, or a prompt a line.")
    output: str | None = not_empty("The answers: JSONL, a line each, in the order of the prompts.")
    work: str | None = not_empty("The folder of the job, which stays when it is done; null is OUTPUT.work.")
    chat: bool = key(False, CHAT)
    system: str | None = key(None, SYSTEM)
    enable_thinking: bool | None = key(None, ENABLE_THINKING)
    template: dict[str, Any] = key(dict, TEMPLATE)
    max_new_tokens: int = number(128, 1, MAX_INT, "The longest answer of a record that does not say its own.")
    stop: list[str] = not_empty("Texts, or names of special tokens, that end an answer.", list)
    ignore_eos: bool = key(False, "Continue after the model's end token.")
    on_bad_row: OnBadRow = key(OnBadRow.fail, "A bad record: fail ends the job, skip gives an error.")
    batch_size: int | None = number(
        None, 1, MOST_ROWS, "Rows at a time; null, or auto: what the plan finds fastest of what fits, or 8."
    )
    prefill_chunk: int | None = number(None, 1, 2**20, PREFILL_CHUNK)
    shard_size: int = number(256, 1, 10**6, "Records of a shard.")
    retries: int = number(3, 1, 100, "Attempts with a record alone, before it is answered with an error.")
    logprobs: int | None = number(None, 0, MAX_LOGPROBS, LOGPROBS)
    logprobs_of: LogprobsOf = key(LogprobsOf.target, LOGPROBS_OF)
    fields: list[str] = key(
        list,
        "A field of plain answers besides id and output_tokens; each adds one, [] is all.",
        shape=ANSWER_FIELDS,
        allowed=ANSWER_FIELDS.replace("|", ", "),
    )
    retry_errors: bool = key(False, "Answer records again whose answer is an error.")
    status: bool = key(False, "Only report the job's progress.")
    submit: bool = key(False, "Give the job to the cluster's scheduler.")


WRITING: list[type[TaskConf]] = [GenerateConf, ChatConf, BatchConf, EvalConf]
TRYING: list[type[TaskConf]] = [CompareConf, MeasureConf, CertifyConf, AgreeConf, PlanConf, CalibrateConf]
# task=NAME is NameConf.
TASKS = {conf.__name__.removesuffix("Conf").lower(): conf for conf in WRITING + TRYING}
