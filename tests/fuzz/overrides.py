"""Command lines: known keys with values of every kind, misspelt keys, Hydra's syntax, flags, noise.

What is nonsense is known when it is made: an unknown key, a value of another type, a number out of reason. It
must be refused; what is plainly good must come through as written; and whatever else comes through is looked
at by rules of this module's own.
"""

from __future__ import annotations

import enum
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from random import Random
from typing import Any, Union, get_args, get_origin, get_type_hints

from llama_ssp.config import TASKS, ModelConf, RunConf, known_keys
from llama_ssp.config.presets import GROUPS
from tests.fuzz.nasty import NASTY, noise

ABSURD = 1e20  # no setting is so large
MAY_BE_NEGATIVE = (
    "sampling.frequency_penalty", "sampling.presence_penalty", "sampling.logit_bias",
)  # fmt: skip
ZERO_IS_NONSENSE = (
    "sampling.top_p", "sampling.repetition_penalty", "task.max_new_tokens", "task.batch_size", "task.repeats",
    "task.prefill_chunk", "task.shard_size", "task.samples", "speculation.k_max", "speculation.ngram_max",
    "cluster.nodes", "cluster.groups", "cluster.gpus", "placement.timeout_s", "placement.draft_degree",
)  # fmt: skip
GOOD = {
    "sampling.temperature": ("0", "0.5", "1e-5", "100"), "sampling.top_p": ("1", "0.9", "1e-9"),
    "sampling.top_k": ("0", "1", "50"), "sampling.min_p": ("0", "1", "0.05"),
    "sampling.frequency_penalty": ("-2", "2"), "speculation.k": ("1", "64"), "speculation.k_max": ("1", "64"),
    "seed": ("0", str(2**63 - 1), "null"), "task.max_new_tokens": ("1", "1000000"), "out": ("null", "here"),
    "task.batch_size": ("1", "4096"), "placement.timeout_s": ("1", "86400"), "cluster.gib": ("40", "0.5"),
}  # fmt: skip
DEPENDS = (  # on what else is set
    "output", "task.echo", "task.submit", "task.chat", "task.special_tokens", "cluster.scheduler", "speculation.drafter",
    "speculation.overlap",
)  # fmt: skip
WRONG: dict[object, tuple[str, ...]] = {
    int: ("abc", "2.5", "true", "[1]", "{a:1}", "''", "nan", "inf", "-5", "1" + "0" * 30, "9" * 5000, "1e30"),
    float: ("abc", "true", "[1]", "{a:1}", "''", "nan", "inf", "-inf", "-5", "1e30", "-1e30", "1e999"),
    bool: ("maybe", "[true]", "{a:1}", "''", "nan"),
    str: ("[a]", "{a:1}", "[]"),
    list: ("x", "5", "{a:1}", "[[[1]]]", "[{a:1}]", "[null]", "true"),
    dict: ("x", "5", "[a]", "true"),
    enum.Enum: ("nope", "[auto]", "{a:1}", "''", "1.5", "AUTOMATIC"),
}
MODELS = ("model", "draft")
FLAGS = (
    "--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "--cfg", "-c", "--info", "-i", "--package",
    "-p", "--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--experimental-rerun", "--multi",
    "--conf", "--", "-", "---", "-x", "--cfg=job", "--cfg=", "--info=all", "-cjob", "--config-dir=/nowhere",
    "--shell-completion", "-sc",
)  # fmt: skip
FLAG_VALUES = (
    "job",
    "hydra",
    "all",
    "config",
    "defaults",
    "/nowhere",
    "/dev/null",
    "",
    ".",
    "/",
    "install=bash",
    "x",
)


@dataclass(frozen=True)
class Words:
    """A command line. `good` keys must have these values afterwards; `nonsense` must be refused."""

    words: tuple[str, ...]
    nonsense: str = ""
    good: tuple[str, ...] | None = None


@cache
def leaves(task: str) -> dict[str, Any]:
    """Every key that a task's command line may set, with its type."""
    return dict(_leaves(RunConf, "", task))


def _leaves(schema: type, prefix: str, task: str) -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(schema).items():
        if (schema, name) == (RunConf, "task"):
            hint = TASKS[task]
        inner = ModelConf if hint == ModelConf | None else hint
        if is_dataclass(inner) and isinstance(inner, type):
            yield from _leaves(inner, f"{prefix}{name}.", task)
        else:
            yield prefix + name, hint


def made(random: Random, tasks: tuple[str, ...] = tuple(TASKS)) -> Words:
    """A command line of one to four words, beside the task's name."""
    task = random.choice(tasks) if random.random() < 0.5 else "generate"
    words = [] if task == "generate" else [f"task={task}"]
    nonsense, good, seen = [], list[str](), set[str]()
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        kind = random.choices(KINDS, WEIGHTS)[0]
        word, key, why = kind(random, task)
        if key in seen:
            continue  # which of two stands is Hydra's business, and no two kinds of verdict
        seen.add(key)
        words += word
        nonsense += [why] if why else []
        good += word if kind is _good else []
    if any(word.startswith("-") for word in words):  # asked to print something, or to sweep
        nonsense = []
    plain = len(good) + (task != "generate") == len(words)
    return Words(tuple(words), "; ".join(nonsense), tuple(good) if plain else None)


Made = tuple[list[str], str, str]  # words, the key that they are about, why they are nonsense


def _good(random: Random, task: str) -> Made:
    sure = [(k, h) for k, h in leaves(task).items() if _is_sure(k, h)]
    if task == "certify":  # which takes fewer drafts a round than other tasks
        sure = [(k, h) for k, h in sure if k not in ("speculation.k", "speculation.k_max")]
    key, hint = random.choice(sure)
    return [f"{key}={_good_value(random, key, hint)}"], key, ""


def _is_sure(key: str, hint: Any) -> bool:
    """Whether what _good_value gives is good, whatever else is set."""
    return key in GOOD or (kind_of(hint)[0] in (bool, enum.Enum) and key not in DEPENDS)


def _wrong(random: Random, task: str) -> Made:
    """A value that the key cannot have."""
    key, hint = _key(random, task)
    kind, inside, optional = kind_of(hint)
    pool = list(WRONG[kind])
    if key in ZERO_IS_NONSENSE:
        pool.append("0")
    if not optional:
        pool.append("null")
    if kind in (list, dict):  # an element of another type
        pool += [f"[{text}]" for text in WRONG[inside]] if kind is list and inside in (int, float) else []
    if key in MAY_BE_NEGATIVE:
        pool = [text for text in pool if text.strip("[]") != "-5"]
    value = random.choice(pool)
    if value == "''" and kind is str:
        return [f"{key}={value}"], key, ""
    return [f"{key}={value}"], key, f"{key}={value[:40]}"


def _misspelt(random: Random, task: str) -> Made:
    """A key that there is not, or not here."""
    if random.random() < 0.2:
        other = random.choice(tuple(TASKS))
        name = random.choice(tuple(leaves(other)))
        if name not in leaves(task):
            return [f"{name}={random.choice(('1', 'true', 'x', '[a]'))}"], name, f"{name} of task={other}"
    name = random.choice(tuple(leaves(task)))
    at = random.randrange(len(name))
    changed = random.choice(
        (
            name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], name[:at] + name[at].upper() + name[at + 1 :],
            name + ".x", "x." + name, name.replace(".", "..", 1), name + "_", name[:at] + random.choice("éж_07") + name[at:],
            name[::-1], name.partition(".")[2], name.replace(".", "/"),
        )
    )  # fmt: skip
    known = changed in leaves(task) or f"task.{changed}" in leaves(task)
    if not changed or known or changed in known_keys() or changed in GROUPS:
        return [], "", ""
    prefix = random.choice(("", "", "+", "++"))
    return [f"{prefix}{changed}={random.choice(('1', 'x', 'null', '[1]'))}"], changed, f"{changed} is no key"


def _syntax(random: Random, task: str) -> Made:
    """Hydra's own ways to delete, to add, to move, to sweep."""
    key, hint = _key(random, task)
    value = _good_value(random, key, hint)
    word, refused = random.choice(
        (
            (f"~{key}", True), (f"~{key}={value}", True), (f"{key}@x={value}", True), (f"{key}@:x={value}", True),
            (f"model@draft:model={value}", True), (f"+model@task={value}", True), ("hydra.run.dir=/tmp/x", True),
            ("+hydra.job_logging.formatters.x={'()': print}", True), ("hydra/job_logging=default", True),
            ("++hydra.verbose=true", True), (f"+{key}.x={value}", True), (f"+_target_={value}", True),
            (f"{key}={value},{value}", True), (f"{key}=choice({value},{value})", True),
            (f"{key}=range(1,5)", True), (f"{key}=interval(0,1)", True), (f"{key}=glob(*)", True),
            (f"++{key}={value}", False), (f"+{key}={value}", False), (f"{key}=int({value})", False),
            (f"{key}=float({value})", False), (f"{key}=str({value})", False), (f"{key}=json_str({value})", False),
            (f"{key}=shuffle({value})", False), (f"{key}=sort(3,2)", False), (f"{key}=tag(a,{value})", False),
            (f"{key}=extend_list({value})", False), (f"{key}:{value}", False), (f"{key}==", False), (f"={value}", False),
        )
    )  # fmt: skip
    return [word], key, f"{word[:60]} is Hydra's" if refused else ""


def _group(random: Random, task: str) -> Made:
    from llama_ssp.config.presets import CONF

    group = random.choice([name for name in GROUPS if name != "task"])
    option = random.choice([file.stem for file in (CONF / group).glob("*.yaml")])
    if random.random() < 0.5:
        return [f"{group}={option}"], group, ""
    value = random.choice(
        (option + "x", option[:-1] + "_", "", "null", "../absent", "/etc/passwd", "a/b", "[a]", "é")
    )
    allowed = (CONF / group / f"{value}.yaml").is_file() or (group == "experiment" and value in ("", "null"))
    allowed = allowed or (group in MODELS and value == "a/b")  # an id on the hub
    return [f"{group}={value}"], group, "" if allowed else f"{group}={value}"


def _nasty(random: Random, task: str) -> Made:
    key, _ = _key(random, task)
    return [f"{key}={random.choice(NASTY)}"], key, ""


def _flag(random: Random, task: str) -> Made:
    flag = random.choice(FLAGS)
    return [flag, *([random.choice(FLAG_VALUES)] if random.random() < 0.5 else [])], flag, ""


def _noise(random: Random, task: str) -> Made:
    """A good word, broken somewhere; or no word at all."""
    if random.random() < 0.2:
        return [noise(random, 30)], "", ""
    key, hint = _key(random, task)
    word = f"{key}={_good_value(random, key, hint)}"
    for _ in range(random.randrange(1, 4)):
        at = random.randrange(len(word) + 1)
        word = word[:at] + noise(random, 3) + word[at + random.randrange(3) :]
    return [word], "", ""


def _sweep(random: Random, task: str) -> Made:
    key, hint = _key(random, task)
    values = ",".join(_good_value(random, key, hint) for _ in range(random.randrange(1, 4)))
    return ["-m", f"{key}={values}"], "-m", ""


KINDS = (_good, _wrong, _misspelt, _syntax, _group, _nasty, _flag, _noise, _sweep)
WEIGHTS = (22, 25, 14, 12, 5, 10, 3, 8, 1)


def _key(random: Random, task: str) -> tuple[str, Any]:
    return random.choice(tuple(leaves(task).items()))


def kind_of(hint: Any) -> tuple[Any, Any, bool]:
    """The type as a row of WRONG, the type of its elements, whether null is one of its values."""
    optional = get_origin(hint) in (types.UnionType, Union)
    if optional:
        hint = next(option for option in get_args(hint) if option is not type(None))
    origin = get_origin(hint) or hint
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return enum.Enum, hint, optional
    return origin, get_args(hint)[-1] if get_args(hint) else None, optional


def _good_value(random: Random, key: str, hint: Any) -> str:
    if key in GOOD:
        return random.choice(GOOD[key])
    kind, inside, _ = kind_of(hint)
    if kind is enum.Enum:
        return str(random.choice(list(inside)).value)
    if kind is bool:
        return random.choice(("true", "false"))
    return random.choice(("1", "x", "[1]", "{1:1}"))


def names_a_folder(words: tuple[str, ...]) -> bool:
    """Whether the command line is refused for what a folder holds, if it is refused."""
    paths = tuple(f"{model}={start}" for model in MODELS for start in ("../", "/"))
    return any(word.startswith(("--config-dir", "-cd", *paths)) for word in words)


def as_written(run: RunConf, word: str) -> bool:
    """Whether the run has the good value that the word gives."""
    key, _, text = word.partition("=")
    value = _value(run, key)
    if isinstance(value, bool) or value is None:
        return text == {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, enum.Enum):
        return text == value.value
    return text == value if isinstance(value, str) else type(value)(text) == value


def misdeeds(run: RunConf) -> list[str]:
    """What no checked configuration may hold, by rules that are not the checks' own."""
    return [f"{key} is {value!r:.60}" for key, hint in leaves(run.task.name).items()
            for value in [_value(run, key)] if value is not _ABSENT and not _sound(key, value, hint)]  # fmt: skip


_ABSENT = object()


def _value(run: RunConf, key: str) -> Any:
    found: Any = run
    for name in key.split("."):
        if found is None:
            return _ABSENT
        found = getattr(found, name)
    return found


def _sound(key: str, value: Any, hint: Any) -> bool:
    kind, inside, optional = kind_of(hint)
    if value is None:
        return optional
    if kind is list:
        return type(value) is list and all(_sound(key, item, inside) for item in value)
    if kind is dict:
        names = get_args(hint)[0] if not optional else object
        return type(value) is dict and all(
            type(n) is names and _sound(key, v, inside) for n, v in value.items()
        )
    if kind in (int, float):
        fits = type(value) is int or (kind is float and type(value) is float)
        return (
            fits and math.isfinite(value) and abs(value) < ABSURD and (value >= 0 or key in MAY_BE_NEGATIVE)
        )
    if kind is enum.Enum:
        return isinstance(value, inside)
    return type(value) is kind and not (kind is str and "\0" in value)
