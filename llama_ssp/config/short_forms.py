"""The short forms of the command line, written out as overrides. No torch.

    compare 30B /models/7b prompt="def hello" max_new_tokens=64

is `task=compare model=30B draft=local draft.path='/models/7b' task.prompts=['def hello'] ...`: the task, the
target and the draft may come first without their keys, a model by any of its names, and a task's key without
`task.` before it, lists of numbers and pairs without brackets too (ks=1,2,4). `prompt` is taken as it is, and
may be given several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from llama_ssp.config.presets import GROUPS, NAMES_OF_A_MODEL, ROLES, UNNAMED, model_words, nearest, quoted
from llama_ssp.config.run import RunConf
from llama_ssp.config.tasks import TASKS
from llama_ssp.errors import UsageError

PROMPT, PROMPTS = "prompt", "task.prompts"
RUN_KEYS = {entry.name for entry in fields(RunConf)} | {*GROUPS}
TASK_KEYS = {entry.name for conf in TASKS.values() for entry in fields(conf)} - RUN_KEYS - {"name"}
LISTS = {  # of numbers, or of pairs
    entry.name
    for conf in TASKS.values()
    for entry in fields(conf)
    if str(entry.type).startswith("list[") and ("range" in entry.metadata or entry.name == "pairs")
}
REPORT, COMPLETION = COMMANDS = "report", "completion"  # first words, too
SHIPPED = "demo"  # the default target, which has a default draft
NAMED_BY = ("path", "repo", "name")  # of a model that is named by its folder or id


def in_full(words: Sequence[str], folders: Sequence[Path] = (), sweeps: bool = False) -> list[str]:
    """The overrides that these words mean; what is in full already stays as it is. Raises UsageError.

    `folders` are private ones that may hold presets. A sweep's model may be a list of presets.
    """
    words = [*_named(words), *(word for word in words if not _is_bare(word))]
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    for key in ("task", *ROLES):
        if keys.count(key) > 1:
            found = ", ".join(word for word, own in zip(words, keys, strict=True) if own == key)
            raise UsageError(f"{key} is given twice", found=found, fix="leave one out")
    full, prompts = list[str](), list[str]()
    for key, word in zip(keys, words, strict=True):
        value = word.partition("=")[2]
        if key in ROLES and value not in ("", "null") and not (sweeps and "," in value):
            if value == UNNAMED and f"{key}.name" not in keys:
                raise UsageError(f"{key}={value} names no model", allowed=f"{key}={NAMES_OF_A_MODEL}")
            chosen = model_words(key, value, folders)
            _require_one_source(key, value, chosen, keys)
            full += chosen
        elif key == PROMPT:
            prompts.append(quoted(value))
        else:
            bare = key in LISTS and value and not value.startswith("[") and not sweeps
            word = f"{key}=[{value}]" if bare else word
            full.append(f"task.{word}" if key in TASK_KEYS else word)
    if prompts and PROMPTS in (word.partition("=")[0] for word in full):
        raise UsageError(f"both {PROMPT} and {PROMPTS} are given", fix=f"write {PROMPT}=... for each")
    if prompts:
        full.append(f"{PROMPTS}=[{','.join(prompts)}]")
    return full + _draft(keys, words)


def _is_bare(word: str) -> bool:
    return "=" not in word and not word.startswith(("+", "~"))


def _named(words: Sequence[str]) -> list[str]:
    """The words without a key, with the keys that their places give them."""
    bare = [word for word in words if _is_bare(word)]
    if not bare:
        return []
    usage = "llama-ssp TASK [TARGET [DRAFT]] [KEY=VALUE ...]"
    if bare[0] in GROUPS:
        fix = f"write {bare[0]}=NAME, or llama-ssp {bare[0]} --help for what there is"
        raise UsageError(f"{bare[0]} has no value", fix=fix)
    if bare[0] in COMMANDS:
        raise UsageError(f"{bare[0]} is not the first word", fix=f"write llama-ssp {bare[0]} ...")
    if bare[0] not in TASKS:
        near = nearest(bare[0], [*TASKS, *COMMANDS])
        fix = f"did you mean {near}?" if near else f"write {usage}; a text is prompt='...'"
        raise UsageError("the first word is not a task", "", repr(bare[0]), ", ".join(TASKS), fix)
    if len(bare) > 1 + len(ROLES):
        found = " ".join(bare[1 + len(ROLES) :])
        fix = "quote a value that holds blanks, as in prompt='two words'"
        raise UsageError("there are words without a key", "", found, usage, fix)
    return [f"{key}={word}" for key, word in zip(("task", *ROLES), bare, strict=False)]


def _require_one_source(role: str, value: str, chosen: list[str], keys: list[str]) -> None:
    """Refuses a folder, an id or a name where the model's own name gives them already."""
    given = [f"{role}.{key}" for key in NAMED_BY if f"{role}.{key}" in keys]
    if len(chosen) > 1 and given:
        what = f"{given[0]} is given, and {role}={value} names a model already"
        raise UsageError(what, allowed=f"{role}={NAMES_OF_A_MODEL}", fix="drop one of the two")


def _draft(keys: list[str], words: list[str]) -> list[str]:
    """draft=none where a target is named and no draft: the default draft is the default target's.

    Refuses files of a model that is not named: they would replace those of the default one.
    """
    if "experiment" in keys:  # it may name models
        return []
    for role in ROLES:
        lost = [key for key in keys if key in (f"{role}.path", f"{role}.repo")]
        if role not in keys and lost:
            fix = f"write {role}=FOLDER or {role}=ORG/NAME, or a preset: {role}=NAME {lost[0]}=..."
            raise UsageError(f"{lost[0]} is given, and no {role} is named", fix=fix)
    if "model" not in keys or "draft" in keys or f"model={SHIPPED}" in words:
        return []
    if lost := [key for key in keys if key.startswith("draft.")]:
        what, fix = f"{lost[0]} is given, and no draft is named", "write draft=NAME"
        raise UsageError(what, allowed=f"draft={NAMES_OF_A_MODEL}", fix=fix)
    return ["draft=none"]
