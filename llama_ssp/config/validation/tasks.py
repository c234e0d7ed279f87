"""What each task may be asked."""

from __future__ import annotations

import re

from llama_ssp.config import (
    AgreeConf,
    BatchConf,
    CalibrateConf,
    CertifyConf,
    CompareConf,
    Drafting,
    EvalConf,
    GenerateConf,
    MeasureConf,
    PlanConf,
    PromptedConf,
    RunConf,
    SpeculationConfig,
)
from llama_ssp.config.schema import MAX_K, MAX_SEED
from llama_ssp.config.validation.values import between
from llama_ssp.errors import UsageError

PAIR = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)?")

PLOTS = (".png", ".svg", ".pdf")

RECORDS = (".svg", ".html")
MOST_CERTIFIED = 16  # drafts a round: what becomes of so many has 2^16 ways


def check_task(run: RunConf) -> None:
    """Refuses what the run's task cannot be asked."""
    if isinstance(run.task, PromptedConf):
        _check_prompted(run.task)
    if isinstance(run.task, GenerateConf):
        _check_generate(run.task)
    if isinstance(run.task, BatchConf):
        _check_batch(run.task)
    if isinstance(run.task, CompareConf):
        _check_compare(run.task, run)
    if isinstance(run.task, MeasureConf):
        _check_measure(run.task)
    if isinstance(run.task, PlanConf):
        _check_plan(run.task)
    if isinstance(run.task, CalibrateConf):
        _check_calibrate(run.task)
    if isinstance(run.task, EvalConf):
        _check_eval(run.task)
        _check_drafts(run.task, run.speculation)
    if isinstance(run.task, CertifyConf):
        _check_certify(run.task, run.speculation)
    if isinstance(run.task, AgreeConf):
        _check_agree(run.task)


def _check_prompted(task: PromptedConf) -> None:
    """What tasks share that continue prompts."""
    between("task.max_new_tokens", task.max_new_tokens, 1, 2**31 - 1)
    between("task.prefill_chunk", task.prefill_chunk, 1, 2**20)
    if task.prompts is not None and task.prompt_file is not None:
        raise UsageError(
            "both task.prompts and task.prompt_file are given",
            allowed="one source of prompts",
            fix="drop one of them",
        )
    if task.prompts is not None and not task.prompts:
        raise UsageError("task.prompts is an empty list", fix='write task.prompts=["your prompt"]')


def _check_generate(task: GenerateConf) -> None:
    between("task.batch_size", task.batch_size, 1, 4096)
    _check_stops(task.stop)
    _check_chat(task)


def _check_batch(task: BatchConf) -> None:
    between("task.max_new_tokens", task.max_new_tokens, 1, 2**31 - 1)
    between("task.prefill_chunk", task.prefill_chunk, 1, 2**20)
    between("task.batch_size", task.batch_size, 1, 4096)
    between("task.shard_size", task.shard_size, 1, 10**6)
    between("task.retries", task.retries, 1, 100)
    _check_stops(task.stop)


def _check_compare(task: CompareConf, run: RunConf) -> None:
    _check_stops(task.stop)
    _check_chat(task)
    spec = run.speculation
    idle = spec.drafter is Drafting.none or not (spec.k or spec.adaptive)
    if idle or (spec.drafter is Drafting.model and run.draft is None):
        raise UsageError(
            "task=compare has nothing to compare: nobody drafts", where="draft, speculation",
            found=f"drafter {spec.drafter.value}, k {spec.k}, {'a' if run.draft else 'no'} draft model",
            fix="name a draft model (draft=NAME), or choose speculation=ngram",
        )  # fmt: skip
    if task.record is not None and not task.record.endswith(RECORDS):
        raise UsageError(
            "task.record is no picture's name", found=repr(task.record), allowed=", ".join(RECORDS),
            fix="let its ending say which kind of picture it is",
        )  # fmt: skip


def _check_measure(task: MeasureConf) -> None:
    between("task.batch_size", task.batch_size, 1, 4096)
    between("task.repeats", task.repeats, 1, 1000)
    _check_picture(task.plot)
    for key, values, most in (("task.ks", task.ks, MAX_K), ("task.lengths", task.lengths, 2**20)):
        for value in values:
            between(f"{key} entry", value, 1, most)
        if len(set(values)) < len(values):
            raise UsageError(f"{key} holds a number twice", found=values, fix="give each once")
    if task.lengths and (task.prompts is not None or task.prompt_file is not None):
        raise UsageError(
            "both task.lengths and prompts are given", allowed="one source of prompts",
            fix="drop one of them",
        )  # fmt: skip


def _check_plan(task: PlanConf) -> None:
    between("task.prompt_tokens", task.prompt_tokens, 1, 2**31 - 1)
    between("task.max_new_tokens", task.max_new_tokens, 1, 2**31 - 1)
    between("task.batch_size", task.batch_size, 1, 4096)
    between("task.prefill_chunk", task.prefill_chunk, 1, 2**20)
    between("task.acceptance", task.acceptance, 0.0, 1.0)


def _check_calibrate(task: CalibrateConf) -> None:
    between("task.repeats", task.repeats, 1, 1000)


def _check_eval(task: EvalConf) -> None:
    for key, values, least, most in (
        ("task.seeds", task.seeds, 0, MAX_SEED),
        ("task.sizes", task.sizes, 1, 10**6),
    ):
        if not values:
            raise UsageError(f"{key} is an empty list", fix=f"leave it out, or write {key}=[{least}]")
        for value in values:
            between(f"{key} entry", value, least, most)
        if len(set(values)) < len(values):
            raise UsageError(f"{key} holds a number twice", found=values, fix="give each once")
    between("task.shots", task.shots, 0, 100)
    between("task.max_new_tokens", task.max_new_tokens, 1, 2**31 - 1)
    between("task.batch_size", task.batch_size, 1, 4096)
    for entry in task.pairs:
        if not PAIR.fullmatch(entry):
            raise UsageError(
                "a task.pairs entry names no pair", found=repr(entry), allowed="TARGET or TARGET/DRAFT",
                fix="use the names under conf/model, such as 13B/7B",
            )  # fmt: skip
    if len(set(task.pairs)) < len(task.pairs):
        raise UsageError("task.pairs holds a pair twice", found=task.pairs, fix="give each once")
    _check_picture(task.plot)


def _check_certify(task: CertifyConf, spec: SpeculationConfig) -> None:
    most = spec.k_max if spec.adaptive else spec.k
    if most > MOST_CERTIFIED:
        raise UsageError(
            "task=certify looks at every way in which a round may be decided", where="speculation",
            found=f"up to {most} drafts a round", allowed=f"up to {MOST_CERTIFIED}",
            fix=f"certify with speculation.{'k_max' if spec.adaptive else 'k'}={MOST_CERTIFIED}: "
            "the rule is the same for any number",
        )  # fmt: skip
    between("task.samples", task.samples, 8, 10**6, "fewer texts tell nothing")
    for key in ("law_tokens", "greedy_tokens"):
        between(f"task.{key}", getattr(task, key), 1, 2**31 - 1)
    between("task.law_rounds", task.law_rounds, 1, 10**6)
    between("task.false_alarm", task.false_alarm, 1e-3, 0.5, "the shuffles resolve no smaller rate")
    between("task.batch_size", task.batch_size, 1, 4096)


def _check_agree(task: AgreeConf) -> None:
    between("task.chunk", task.chunk, 1, MAX_K)
    between("task.batch_size", task.batch_size, 1, 4096)
    _check_picture(task.plot)


def _check_drafts(task: EvalConf, spec: SpeculationConfig) -> None:
    """A draft that is named must have something to do."""
    named = next((entry for entry in task.pairs if "/" in entry and not entry.endswith("/none")), None)
    if named and (spec.drafter is not Drafting.model or not (spec.k or spec.adaptive)):
        raise UsageError(
            "task.pairs names a draft model, but none drafts", where="speculation",
            found=f"{named}, drafter {spec.drafter.value}, k {spec.k}",
            fix="name the target alone, or choose speculation=default",
        )  # fmt: skip


def _check_chat(task: GenerateConf | CompareConf) -> None:
    if task.system is not None and not task.chat:
        raise UsageError(
            "task.system is a part of a chat, but this is none", found="task.chat=false",
            fix="write task.chat=true, or put it into the prompt",
        )  # fmt: skip
    if task.special_tokens and task.chat:
        raise UsageError(
            "in a chat special tokens are the template's", found="task.special_tokens=true, task.chat=true",
            fix="choose one of the two",
        )  # fmt: skip


def _check_stops(stops: list[str]) -> None:
    if any(not text for text in stops):
        raise UsageError(
            "task.stop holds an empty string",
            found="''",
            allowed="non-empty strings",
            fix="an empty stop string would end every text at once; drop it",
        )


def _check_picture(name: str | None) -> None:
    if name is not None and not name.endswith(PLOTS):
        raise UsageError(
            "task.plot is no picture's name", found=repr(name), allowed=", ".join(PLOTS),
            fix="let its ending say which kind of picture it is",
        )  # fmt: skip
