"""Checks of the whole configuration, before anything is loaded. No torch."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import EnumType
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from llama_ssp.config.arguments import unknown_key
from llama_ssp.config.gone import gone
from llama_ssp.config.run import SIZES, RunConf
from llama_ssp.config.schema import (
    MAX_INT,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Drafting,
    DraftSeat,
    ModelConf,
    Output,
    Scheduler,
    Splitting,
    Weights,
)
from llama_ssp.config.tasks import TASKS
from llama_ssp.errors import UsageError

T = TypeVar("T")


def check(run: RunConf) -> None:
    """Refuses values of the wrong type or out of range, and settings that contradict each other."""
    check_values(run)
    if TASKS.get(run.task.name) is not type(run.task):  # the name becomes part of a folder's name
        raise UsageError(
            "task.name is not a task",
            found=repr(run.task.name),
            allowed=", ".join(TASKS),
            fix="choose a task with task=NAME, and leave task.name",
        )
    spec = run.speculation
    sampling = run.sampling.controls
    new = run.task.max_new_tokens
    if sampling.temperature != 0:
        temperature = sampling.temperature
        between("sampling.temperature", temperature, MIN_TEMPERATURE, MAX_TEMPERATURE, "0 means argmax")
    between("speculation.ngram_max", spec.ngram_max, spec.ngram_min, 32)
    for role, model in (("model", run.model), ("draft", run.draft)):
        if model is not None:
            _check_model(role, model)
    run.task.check()
    _check_drafts(run)
    if run.output is Output.jsonl and run.task.name != "generate":
        raise UsageError(
            "output=jsonl is for task=generate",
            where="output",
            found=f"task={run.task.name}",
            fix="use output=json; task=batch writes JSONL to its file",
        )
    if new and sampling.min_new_tokens > new:  # without new tokens a prompt is scored
        raise UsageError(
            "sampling.min_new_tokens exceeds task.max_new_tokens",
            found=sampling.min_new_tokens,
            allowed=f"0..{new}",
            fix="lower the one or raise the other",
        )
    placement = run.placement
    is_split = placement.draft in (DraftSeat.sharded, DraftSeat.own)
    if placement.draft_degree is not None and placement.draft_ranks is None and not is_split:
        raise UsageError(
            "placement.draft_degree is for a draft that is split or has ranks of its own",
            found=f"placement.draft={placement.draft.value}",
            allowed="sharded, own",
            fix="add placement=sharded or placement=own",
        )
    if placement.splitting is not Splitting.layers and (placement.max_memory or placement.offload_folder):
        raise UsageError(
            "placement.max_memory and offload_folder are for splitting by layers",
            found=f"splitting={placement.splitting.value}",
            fix="use placement=layers",
        )


def _check_drafts(run: RunConf) -> None:
    """Refuses tasks that need drafts where nothing drafts, or drafts more than they can take."""
    task = run.task
    spec = run.speculation
    has_draft = run.draft is not None
    by_model = spec.drafter is Drafting.model
    drafter = f"drafter {spec.drafter.value}, k {spec.k}"
    drafted = [name for name in task.pairs if "/" in name and not name.endswith("/none")]
    if drafted and not (by_model and spec.may_draft):
        raise UsageError(
            "task.pairs names a draft model, but none drafts",
            where="speculation",
            found=f"{drafted[0]}, {drafter}",
            fix="name the target alone, or choose speculation=default",
        )
    own_k = task.own_k and getattr(task, task.own_k) and not task.pairs
    if own_k and by_model and has_draft and not spec.may_draft:
        raise UsageError(
            f"task={task.name} needs drafts, and nothing drafts",
            where="speculation",
            found=drafter,
            allowed="1 or more",
            fix=f"leave speculation.k out: task.{task.own_k} is its K",
        )
    if task.compares and not (run.has_draft_model or run.drafts_from_text):
        what = f"task={task.name} has nothing to compare: nothing drafts"
        model = "a" if has_draft else "no"
        raise UsageError(
            what,
            where="draft, speculation",
            found=f"{drafter}, {model} draft model",
            fix="name a draft model (draft=NAME), or choose speculation=ngram",
        )
    key, most = ("k_max", spec.k_max) if spec.adaptive else ("k", spec.k or 0)
    if most > task.most_drafts:
        raise UsageError(
            f"task={task.name} looks at every way to decide a round",
            where="speculation",
            found=f"up to {most} drafts a round",
            allowed=f"up to {task.most_drafts}",
            fix=f"certify with speculation.{key}={task.most_drafts}: the rule is the same for any number",
        )


def _check_model(role: str, model: ModelConf) -> None:
    if model.weights is Weights.synthetic:
        for name in SIZES:
            fix = f"synthetic weights read no files: name a preset, {role}=NAME"
            between(f"{role}.{name}", getattr(model, name), 1, MAX_INT, fix)
    if model.experts:
        between(f"{role}.experts_per_token", model.experts_per_token, 1, model.experts)
        between(f"{role}.expert_ffn", model.expert_ffn, 1, MAX_INT)
        between(f"{role}.dense_layers", model.dense_layers, 0, model.n_layers)
    if model.full_layers:
        between(f"{role}.full_layers", model.full_layers, 1, model.n_layers)
        between(f"{role}.full_kv_heads", model.full_kv_heads, 1, model.n_heads)
        between(f"{role}.full_head_dim", model.full_head_dim, 1, MAX_INT)
    for name in ("n_kv_heads", "full_kv_heads"):
        count = getattr(model, name)
        if not count or model.n_heads % count == 0:
            continue
        raise UsageError(
            f"{role}.n_heads is not a multiple of {role}.{name}",
            found=f"{model.n_heads} and {count}",
            allowed="whole groups of query heads per KV head",
            fix="take the numbers from the model's config.json",
        )


def check_context(run: RunConf) -> None:
    """Checks of the model's context and vocabulary, after its files have been read."""
    model = run.model
    vocab = run.model.vocab
    sampling = run.sampling.controls
    for key, tokens in (("logit_bias", sampling.logit_bias), ("bad_tokens", sampling.bad_tokens)):
        for token in tokens:
            between(f"sampling.{key} token", token, 0, vocab - 1, f"model {model.name} has {vocab} tokens")
    of = f"model {model.name} has a context of {model.context} tokens"
    prompt = run.task.prompt_tokens or 1
    new = run.task.max_new_tokens or 1
    between("task.prompt_tokens", prompt, 1, model.context - 1, of)
    between("task.max_new_tokens", new, 1, model.context - prompt, f"{of}, prompt included")


def check_sharing(run: RunConf, words: Sequence[str] = ()) -> None:
    """Refuses groups and schedulers for other tasks than a batch job, or a plan, which is about one group.

    Refuses settings of Slurm among the `words`, too, if nothing says which scheduler is meant.
    """
    cluster = run.cluster
    task = run.task
    for key, value, usual in (("scheduler", cluster.scheduler.value, "none"), ("groups", cluster.groups, 1)):
        if value != usual and task.name not in ("batch", "plan"):
            what = f"cluster.{key} is for task=batch"
            found = f"{value}, task={task.name}"
            preset = f" and cluster={value}" if key == "scheduler" else ""
            raise UsageError(
                what,
                found=found,
                fix=f"it would run here and now: leave cluster.{key}{preset} out if that is what you want",
            )
    keys = [word.lstrip("+").partition("=")[0] for word in words]
    unused = [key for key in keys if key.startswith("cluster.slurm.")]
    if unused and cluster.scheduler is Scheduler.none and "cluster.scheduler" not in keys:
        raise UsageError(
            f"{unused[0]} is given, and Slurm starts nothing", fix="write cluster=slurm, or leave it out"
        )
    if task.submit and cluster.scheduler is Scheduler.none:
        raise UsageError(
            "task.submit=true needs a scheduler", found="cluster.scheduler=none", fix="use cluster=slurm"
        )
    if cluster.scheduler is not Scheduler.none and cluster.gpus is None:
        raise UsageError(
            "cluster.gpus is missing: how many ranks a node of the job gets",
            where=f"cluster.scheduler={cluster.scheduler}",
            fix="write cluster.gpus=N; with cluster.gpu=cpu they are N processes",
        )


def listed(name: str, given: Iterable[T]) -> list[T]:
    """Returns the entries. Raises UsageError for a single text: its letters are not meant as entries."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise UsageError(
            f"{name} is of the wrong type", found=repr(given), allowed="a list", fix="write [...] around it"
        )
    return list(given)


def chosen(node: Any) -> Any:
    """Returns the settings with enums in place of names of choices, as the command line has them."""
    named = dict[str, Any]()
    for key, hint in get_type_hints(type(node)).items():
        if isinstance(hint, EnumType) and getattr(node, key) in list(hint):
            named[key] = hint(getattr(node, key))
    return replace(node, **named) if named else node


def check_values(node: Any, prefix: str = "") -> None:
    """Refuses keys that are not there, and values of the wrong type, out of range, or of another shape."""
    hints = get_type_hints(type(node))
    values = vars(node)
    if unknown := values.keys() - hints.keys():  # +KEY=VALUE adds any key
        raise unknown_key(f"{prefix}{min(unknown)}", type(node).__name__)
    for entry in fields(node):
        key = prefix + entry.name
        value = values[entry.name]
        hint = hints[entry.name]
        rules = entry.metadata
        if not _fits(value, hint):
            raise gone(f"{key}={value}") or UsageError(
                f"{key} is of the wrong type",
                found=repr(value),
                allowed=", ".join(hint) if isinstance(hint, EnumType) else entry.type,
                fix="docs/keys.md and --help show what it takes",
            )
        if is_dataclass(value):
            check_values(value, f"{key}.")
        for name, item in _items(key, value):
            if rules["range"] is not None:
                low, high, above = rules["range"]
                between(name, item, low, high, rules["about"], above)
            if rules["shape"] is not None and not re.fullmatch(rules["shape"], item, re.DOTALL):
                raise UsageError(
                    f"{name} cannot be used", found=repr(item), allowed=rules["allowed"], fix=rules["about"]
                )


def _items(key: str, value: Any) -> list[tuple[str, Any]]:
    """Returns the entries of a list or a map with their names; a value itself, unless it is null."""
    if isinstance(value, dict):
        return [(f"{key}.{name}", item) for name, item in value.items()]
    if isinstance(value, list):
        return [(f"{key} entry", item) for item in value]
    return [] if value is None else [(key, value)]


def _fits(value: object, hint: Any) -> bool:
    kind = get_origin(hint)
    inside = get_args(hint)
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
    return hint is Any or isinstance(value, hint)


def between(key: str, value: float, low: float, high: float, fix: str = "", above: bool = False) -> None:
    """Refuses a value outside of [low, high], with `above` of (low, high]; NaN is always outside."""
    if not (low < value <= high if above else low <= value <= high):
        raise UsageError(
            f"{key} is out of range",
            found=value,
            allowed=f"{'(' if above else '['}{low}, {high}]",
            fix=fix or "choose a value inside",
        )
