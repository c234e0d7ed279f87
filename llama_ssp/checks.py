"""What a value may be: ranges and types of the configuration, checked once at the door. No torch."""

from __future__ import annotations

import math
import re
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from llama_ssp.config import (
    SIZES,
    TASKS,
    AgreeConf,
    CalibrateConf,
    CertifyConf,
    ClusterConf,
    CompareConf,
    Drafting,
    EvalConf,
    GenerateConf,
    MeasureConf,
    ModelConf,
    PlacementConf,
    PlanConf,
    PromptedConf,
    RunConf,
    SamplingConf,
    SpeculationConf,
    Splitting,
    Weights,
)
from llama_ssp.errors import UsageError

MAX_K = 64

MAX_SEED = 2**63 - 1

MEMORY = re.compile(r"\d+(\.\d+)? ?(KiB|MiB|GiB|KB|MB|GB)")

DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")

NEVER_EMPTY = (
    "name", "repo", "revision", "path", "prompt_file", "out", "plot", "record", "image", "offload_folder",
    "gpu", "folder",
)  # fmt: skip

PAIR = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)?")

PLOTS = (".png", ".svg", ".pdf")

RECORDS = (".svg", ".html", ".cast")


def to_run(cfg: DictConfig) -> RunConf:
    """The one conversion from Hydra's merged config to dataclasses, checked."""
    run = OmegaConf.to_object(cfg)
    if not isinstance(run, RunConf):
        raise UsageError("the configuration does not start from the schema", where="conf/run.yaml")
    check(run)
    return run


def check(run: RunConf) -> None:
    """Refuses values outside their range, naming key, value, range and remedy."""
    _check_types(run, "")
    if TASKS.get(run.task.name) is not type(run.task):  # the name becomes part of a folder's name
        raise UsageError(
            "task.name is no task", found=repr(run.task.name), allowed=", ".join(TASKS),
            fix="choose a task with task=NAME, and leave task.name",
        )  # fmt: skip
    _check_sampling(run.sampling)
    _check_speculation(run)
    for role, model in (("model", run.model), ("draft", run.draft)):
        if model is not None:
            _check_model(role, model)
    if isinstance(run.task, PromptedConf):
        _check_prompted(run.task)
    if isinstance(run.task, GenerateConf):
        _check_generate(run.task)
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
        _check_certify(run.task)
    if isinstance(run.task, AgreeConf):
        _check_agree(run.task)
    if run.sampling.min_new_tokens > getattr(run.task, "max_new_tokens", math.inf):
        raise UsageError(
            "sampling.min_new_tokens exceeds task.max_new_tokens",
            found=run.sampling.min_new_tokens,
            allowed=f"0..{getattr(run.task, 'max_new_tokens', '')}",
            fix="lower the one or raise the other",
        )
    if run.seed is not None:
        _between("seed", run.seed, 0, MAX_SEED, "choose another seed, or leave it out to draw one")
    _between("plan.acceptance", run.plan.acceptance, 0.0, 1.0)
    _check_cluster(run.cluster)
    _check_placement(run.placement)


def check_context(run: RunConf) -> None:
    """What depends on the model's context and vocabulary, once its files have been read."""
    vocab = run.model.vocab
    for key, tokens in (("logit_bias", run.sampling.logit_bias), ("bad_tokens", run.sampling.bad_tokens)):
        for token in tokens:
            fix = f"model {run.model.name} has {vocab} tokens"
            _between(f"sampling.{key} token", token, 0, vocab - 1, fix)
    if len(set(run.sampling.bad_tokens)) >= vocab:
        raise UsageError(
            "sampling.bad_tokens forbids every token", found=f"all {vocab}", fix="leave at least one"
        )
    of = f"model {run.model.name} has a context of {run.model.context} tokens"
    prompt = run.task.prompt_tokens if isinstance(run.task, PlanConf) else 1
    _between("task.prompt_tokens", prompt, 1, run.model.context - 1, of)
    if isinstance(run.task, PromptedConf | EvalConf | PlanConf):
        most = run.model.context - prompt
        _between("task.max_new_tokens", run.task.max_new_tokens, 1, most, f"{of}, prompt included")


def _check_types(node: Any, prefix: str) -> None:
    """Refuses what OmegaConf lets through: values of nested lists and of interpolations, empty names."""
    hints = get_type_hints(type(node))
    for entry in fields(node):
        key, value = prefix + entry.name, getattr(node, entry.name)
        if is_dataclass(value):
            _check_types(value, key + ".")
        elif not _fits(value, hints[entry.name]):
            raise UsageError(
                f"{key} is of the wrong type", found=repr(value), allowed=_in_words(hints[entry.name]),
                fix="write it as --help shows",
            )  # fmt: skip
        elif entry.name in NEVER_EMPTY and value is not None and (not value or "\0" in value):
            raise UsageError(f"{key} is empty", found=repr(value), fix="give it a value, or leave it out")


def _fits(value: object, hint: Any) -> bool:
    kind, inside = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(_fits(value, option) for option in inside)
    if kind is list:
        return isinstance(value, list) and all(_fits(item, inside[0]) for item in value)
    if kind is dict:
        return isinstance(value, dict) and all(
            _fits(k, inside[0]) and _fits(v, inside[1]) for k, v in value.items()
        )
    if hint in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole or (hint is float and isinstance(value, float))
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    inside = [_in_words(option) for option in get_args(hint)]
    if get_origin(hint) is UnionType:
        return " or ".join(inside)
    if get_origin(hint) is list:
        return f"a list of {inside[0]}"
    if get_origin(hint) is dict:
        return f"a map from {inside[0]} to {inside[1]}"
    return {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


def _check_sampling(sampling: SamplingConf) -> None:
    if sampling.temperature != 0:  # a smaller divisor would turn logits into infinities
        _between("sampling.temperature", sampling.temperature, 1e-5, 100.0, "0 means argmax")
    _between("sampling.top_p", sampling.top_p, 0.0, 1.0, "1 turns it off", above=True)
    _between("sampling.min_p", sampling.min_p, 0.0, 1.0, "0 turns it off")
    _between("sampling.top_k", sampling.top_k, 0, 2**31 - 1, "0 turns it off")
    _between("sampling.repetition_penalty", sampling.repetition_penalty, 0.01, 100.0, "1 turns it off")
    _between("sampling.frequency_penalty", sampling.frequency_penalty, -100.0, 100.0)
    _between("sampling.presence_penalty", sampling.presence_penalty, -100.0, 100.0)
    _between("sampling.min_new_tokens", sampling.min_new_tokens, 0, 2**31 - 1)
    for token, bias in sampling.logit_bias.items():
        _between("sampling.logit_bias key", token, 0, 2**31 - 1)
        fix = "to forbid a token use sampling.bad_tokens"
        _between(f"sampling.logit_bias.{token}", bias, -1e4, 1e4, fix)
    for token in sampling.bad_tokens:
        _between("sampling.bad_tokens entry", token, 0, 2**31 - 1)


def _check_speculation(run: RunConf) -> None:
    spec = run.speculation
    _between("speculation.k", spec.k, 0, MAX_K, "0 is plain decoding")
    _between("speculation.k_max", spec.k_max, 1, MAX_K)
    _between("speculation.cost_ratio", spec.cost_ratio, 0.0, 10.0)
    _between("speculation.ngram_min", spec.ngram_min, 1, 32)
    _between("speculation.ngram_max", spec.ngram_max, spec.ngram_min, 32)


def _check_placement(placement: PlacementConf) -> None:
    for role in ("target", "draft"):
        asked = getattr(placement, f"{role}_device")
        if not DEVICE.fullmatch(asked):
            raise UsageError(
                f"placement.{role}_device names no device", found=repr(asked),
                allowed="auto, cpu, cuda, cuda:N", fix="correct it",
            )  # fmt: skip
    if placement.draft_degree is not None:
        _between("placement.draft_degree", placement.draft_degree, 1, 4096)
    _between("placement.timeout_s", placement.timeout_s, 1.0, 86400.0, "seconds; raise it for slow machines")
    if placement.splitting is not Splitting.layers and (placement.max_memory or placement.offload_folder):
        raise UsageError(
            "placement.max_memory and offload_folder are for splitting by layers",
            found=f"placement.splitting={placement.splitting.value}", fix="use placement=layers",
        )  # fmt: skip
    for device, size in placement.max_memory.items():
        if not re.fullmatch(r"cpu|disk|\d{1,4}", device) or not MEMORY.fullmatch(size):
            raise UsageError(
                "a placement.max_memory entry cannot be read", found=f"{device}: {size}",
                allowed='a device index or cpu, and a size such as "20GiB"', fix="correct it",
            )  # fmt: skip


def _check_cluster(cluster: ClusterConf) -> None:
    _between("cluster.reserve", cluster.reserve, 0.0, 0.9)
    _between("cluster.nodes", cluster.nodes, 1, 1024)
    if cluster.gpus is not None:
        _between("cluster.gpus", cluster.gpus, 1, 1024, "null is what there is")
    for name in ("gib", "gb_s", "tflops", "link_gb_s"):
        if (value := getattr(cluster, name)) is not None:
            _between(f"cluster.{name}", value, 0.0, 2.0**20, "null looks it up", above=True)
    for name in ("context_mib", "cublas_mib", "nccl_mib", "graph_mib"):
        if (value := getattr(cluster, name)) is not None:
            _between(f"cluster.{name}", value, 0.0, 2.0**20)
    times = cluster.times
    for name in ("bandwidth_share", "flops_share"):
        if (value := getattr(times, name)) is not None:
            _between(f"cluster.times.{name}", value, 0.0, 2.0, above=True)
    for name in ("layer_us", "step_us", "round_us", "check_us", "law_ns", "accept_ns", "message_us"):
        if (value := getattr(times, name)) is not None:
            _between(f"cluster.times.{name}", value, 0.0, 1e9)
    for name in ("all_reduce_us", "rows_cost"):
        for count, value in getattr(times, name).items():
            _between(f"cluster.times.{name} count", count, 1, 2**20)
            _between(f"cluster.times.{name}", value, 0.0, 1e9)


def _check_model(role: str, model: ModelConf) -> None:
    least = 1 if model.weights is Weights.synthetic else 0
    for name in SIZES:
        _between(f"{role}.{name}", getattr(model, name), least, 2**31 - 1)
    if model.n_kv_heads and model.n_heads % model.n_kv_heads:
        raise UsageError(
            f"{role}.n_heads is not a multiple of {role}.n_kv_heads",
            found=f"{model.n_heads} and {model.n_kv_heads}",
            allowed="whole groups of query heads per KV head",
            fix="take the numbers from the model's config.json",
        )
    _between(f"{role}.agreement", model.agreement, 0.0, 1.0)
    _between(f"{role}.seed", model.seed, 0, MAX_SEED)


def _check_generate(task: GenerateConf) -> None:
    _between("task.batch_size", task.batch_size, 1, 4096)
    _check_stops(task.stop)


def _check_compare(task: CompareConf, run: RunConf) -> None:
    _check_stops(task.stop)
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
    _between("task.batch_size", task.batch_size, 1, 4096)
    _between("task.repeats", task.repeats, 1, 1000)
    _check_picture("task.plot", task.plot)
    for key, values, most in (("task.ks", task.ks, MAX_K), ("task.lengths", task.lengths, 2**20)):
        for value in values:
            _between(f"{key} entry", value, 1, most)
        if len(set(values)) < len(values):
            raise UsageError(f"{key} holds a number twice", found=values, fix="give each once")
    if task.lengths and (task.prompts is not None or task.prompt_file is not None):
        raise UsageError(
            "both task.lengths and prompts are given", allowed="one source of prompts",
            fix="drop one of them",
        )  # fmt: skip


def _check_stops(stops: list[str]) -> None:
    if any(not text for text in stops):
        raise UsageError(
            "task.stop holds an empty string",
            found="''",
            allowed="non-empty strings",
            fix="an empty stop string would end every text at once; drop it",
        )


def _check_prompted(task: PromptedConf) -> None:
    """What tasks share that continue prompts."""
    _between("task.max_new_tokens", task.max_new_tokens, 1, 2**31 - 1)
    _between("task.prefill_chunk", task.prefill_chunk, 1, 2**20)
    if task.prompts is not None and task.prompt_file is not None:
        raise UsageError(
            "both task.prompts and task.prompt_file are given",
            allowed="one source of prompts",
            fix="drop one of them",
        )
    if task.prompts is not None and not task.prompts:
        raise UsageError("task.prompts is an empty list", fix='write task.prompts=["your prompt"]')


def _check_plan(task: PlanConf) -> None:
    _between("task.prompt_tokens", task.prompt_tokens, 1, 2**31 - 1)
    _between("task.max_new_tokens", task.max_new_tokens, 1, 2**31 - 1)
    _between("task.batch_size", task.batch_size, 1, 4096)
    _between("task.prefill_chunk", task.prefill_chunk, 1, 2**20)
    _between("task.acceptance", task.acceptance, 0.0, 1.0)
    _check_picture("task.image", task.image)


def _check_calibrate(task: CalibrateConf) -> None:
    _between("task.repeats", task.repeats, 1, 1000)
    if not re.fullmatch(r"\w[\w.-]*", task.cluster_name):
        raise UsageError(
            "task.cluster_name is no name of a file", found=repr(task.cluster_name),
            allowed="letters, digits, _ . -", fix="choose another",
        )  # fmt: skip


def _check_eval(task: EvalConf) -> None:
    for key, values, least, most in (
        ("task.seeds", task.seeds, 0, MAX_SEED),
        ("task.sizes", task.sizes, 1, 10**6),
    ):
        if not values:
            raise UsageError(f"{key} is an empty list", fix=f"leave it out, or write {key}=[{least}]")
        for value in values:
            _between(f"{key} entry", value, least, most)
        if len(set(values)) < len(values):
            raise UsageError(f"{key} holds a number twice", found=values, fix="give each once")
    _between("task.shots", task.shots, 0, 100)
    _between("task.max_new_tokens", task.max_new_tokens, 1, 2**31 - 1)
    _between("task.batch_size", task.batch_size, 1, 4096)
    for entry in task.pairs:
        if not PAIR.fullmatch(entry):
            raise UsageError(
                "a task.pairs entry names no pair", found=repr(entry), allowed="TARGET or TARGET/DRAFT",
                fix="use the names under conf/model, such as 13B/7B",
            )  # fmt: skip
    if len(set(task.pairs)) < len(task.pairs):
        raise UsageError("task.pairs holds a pair twice", found=task.pairs, fix="give each once")
    _check_picture("task.plot", task.plot)


def _check_picture(key: str, name: str | None) -> None:
    if name is not None and not name.endswith(PLOTS):
        raise UsageError(
            f"{key} is no picture's name", found=repr(name), allowed=", ".join(PLOTS),
            fix="let its ending say which kind of picture it is",
        )  # fmt: skip


def _check_certify(task: CertifyConf) -> None:
    _between("task.samples", task.samples, 8, 10**6, "fewer texts tell nothing")
    for key in ("law_tokens", "greedy_tokens"):
        _between(f"task.{key}", getattr(task, key), 1, 2**31 - 1)
    _between("task.law_rounds", task.law_rounds, 1, 10**6)
    _between("task.false_alarm", task.false_alarm, 1e-3, 0.5, "the shuffles resolve no smaller rate")
    _between("task.batch_size", task.batch_size, 1, 4096)


def _check_agree(task: AgreeConf) -> None:
    _between("task.chunk", task.chunk, 1, MAX_K)
    _between("task.batch_size", task.batch_size, 1, 4096)
    _check_picture("task.plot", task.plot)


def _check_drafts(task: EvalConf, spec: SpeculationConf) -> None:
    """A draft that is named must have something to do."""
    named = next((entry for entry in task.pairs if "/" in entry and not entry.endswith("/none")), None)
    if named and (spec.drafter is not Drafting.model or not (spec.k or spec.adaptive)):
        raise UsageError(
            "task.pairs names a draft model, but none drafts", where="speculation",
            found=f"{named}, drafter {spec.drafter.value}, k {spec.k}",
            fix="name the target alone, or choose speculation=default",
        )  # fmt: skip


def _between(key: str, value: float, low: float, high: float, fix: str = "", above: bool = False) -> None:
    inside = low < value <= high if above else low <= value <= high  # NaN is never inside
    if not inside:
        raise UsageError(
            f"{key} is out of range",
            found=value,
            allowed=f"{'(' if above else '['}{low}, {high}]",
            fix=fix or "choose a value inside",
        )
