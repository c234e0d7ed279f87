"""The command line, written out as flags and overrides of Hydra. No torch.

    compare 30B /models/7b -p "def hello" k=4 --max-new-tokens 64

is `task=compare model=30B draft=local draft.path='/models/7b' task.prompts=['def hello'] ...`: the task, the
target and the draft may come first without their keys, a model by any of its names; a key of the task, of
sampling or of speculation may stand without its group; --KEY VALUE is KEY=VALUE; a key whose type is a text
or a path takes its value as it is. Everything else is as Hydra reads it.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, NoReturn, get_origin, get_type_hints

from llama_ssp.config.presets import GROUPS, ROLES, model_words, nearest, options, quoted
from llama_ssp.config.run import RunConf, key_types, kinds_of
from llama_ssp.config.tasks import TASKS
from llama_ssp.errors import RunError, UsageError

QUIET = ("--quiet", "-q")
VERBOSE = ("--verbose", "-v")
HELP = ("--help", "-h")
VERSION = ("--version",)
DRY = ("--dry-run",)
PROMPT = "prompt"
PROMPTS = "task.prompts"
SHORT_FLAGS = {"-p": PROMPT, "-n": "max_new_tokens"}  # Hydra's own -p is --package, too
AS_WRITTEN = (PROMPTS, "task.system", "task.stop")  # ${...} stands for itself in them
RUN_KEYS = {entry.name for entry in fields(RunConf)} | {*GROUPS}
SHORT_KEYS = {
    leaf: f"{group}.{leaf}"
    for group, _, leaf in (key.partition(".") for key in key_types())
    if group in ("sampling", "speculation", "task") and leaf not in {"", "name", *RUN_KEYS}
}
COMMANDS = ("report",)  # first words, too
SHIPPED = "demo"  # the default target, which has a default draft
WORD = re.compile(r"(?P<sign>~|\+{0,2})(?P<key>[^=]*)(?:=(?P<value>.*))?", re.DOTALL)
TEXT = r'"(?:[^"\\]|\\.)*"|' + r"'(?:[^'\\]|\\.)*'"
TEXTS = re.compile(rf"\[\s*(?:(?:{TEXT})\s*(?:,\s*(?:{TEXT})\s*)*)?\]", re.DOTALL)
MEANT = {"run": "generate", "serve": "batch", "bench": "measure"}  # as other programs have it
# Settings of other programs that change the output distribution.
LOSSY = ("lenience", "typical_acceptance", "posterior_threshold", "accept_threshold", "ensemble_weight")
USAGE = "llama-ssp TASK [TARGET [DRAFT]] [KEY=VALUE ...]"


@dataclass(frozen=True)
class Override:
    """A word of the command line, divided: `sign` is Hydra's +, ++ or ~; without = there is no value."""

    sign: str
    key: str
    value: str | None

    @staticmethod
    def of(word: str) -> Override:
        parts = WORD.fullmatch(word)
        assert parts is not None, word
        return Override(parts["sign"], SHORT_KEYS.get(parts["key"], parts["key"]), parts["value"])

    def __str__(self) -> str:
        return f"{self.sign}{self.key}" + ("" if self.value is None else f"={self.value}")


def hydra_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns the overrides and flags that these arguments mean, overrides first. Raises UsageError."""
    words, flags = divided(arguments)
    flags = [flag for flag in flags if flag not in (*QUIET, *VERBOSE, *DRY)]
    parser = _hydra_parser()
    parser.error = _refuse_flags  # type: ignore[method-assign]
    given = parser.parse_args(flags)
    if not given.shell_completion:  # whose words are its own: install=bash
        words = in_full(words, given.multirun or "hydra.mode=MULTIRUN" in words)
    return [*words, *flags]


def divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line, --KEY VALUE as KEY=VALUE, and its other flags. Raises UsageError."""
    words = list[str]()
    flags = list[str]()
    of_hydra = _hydra_parser()._option_string_actions
    waiting = deque(arguments)
    while waiting:
        argument = waiting.popleft()
        flag, equals, value = argument.partition("=")
        if not flag.startswith("-"):
            words.append(argument)
        elif flag in of_hydra and flag not in SHORT_FLAGS:
            flags.append(argument)
            nargs = of_hydra[flag].nargs
            choices = of_hydra[flag].choices or ()
            if waiting and not equals and (nargs is None or (nargs == "?" and waiting[0] in choices)):
                flags.append(waiting.popleft())
        elif flag in (*QUIET, *VERBOSE, *DRY):
            if equals:  # `--dry-run=true` would start the run
                raise UsageError(f"{flag} takes no value", found=argument, fix=f"write {flag}, or leave it out")
            flags.append(flag)
        else:
            key = _key_of(flag)
            if not equals and not waiting:
                raise UsageError(f"{flag} needs a value", fix=f"write {flag} VALUE")
            words.append(f"{key}={value if equals else waiting.popleft()}")
    return words, flags


def each_key_once(words: Sequence[str]) -> dict[str, str]:
    """Returns the words by key: of a key the last counts; of a list each text, and each bare word."""
    result = dict[str, str]()
    for number, word in enumerate(words):
        key = "" if _is_bare(word) else Override.of(word).key
        result[f"{key} {number}" if not key or key == PROMPT or _holds_texts(key) else key] = word
    return result


def completable(line: str) -> str:
    """Returns a line of the shell that is to be completed: short forms before its last word are written out.

    Hydra divides the line at blanks, so words that hold some are left out.
    """
    *before, last = line.split(" ")
    try:
        words = hydra_arguments(shlex.split(" ".join(before[1:])))
    except (RunError, ValueError):  # a word that is wrong, or a quotation mark without its other
        words = []
    return " ".join([*before[:1], *(word for word in words if not re.search(r"\s", word)), last])


def in_full(words: Sequence[str], sweeps: bool = False) -> list[str]:
    """Returns the overrides that these words mean, in Hydra's grammar. Raises UsageError or ModelError.

    In a sweep, commas divide the values of groups and numbers, and a list of quoted texts those of a text.
    """
    bare = [word for word in words if _is_bare(word)]
    given = [*_named(bare), *(Override.of(word) for word in words if not _is_bare(word))]
    full = list[str]()
    lists = dict[str, list[str]]()
    for override in given:
        key = override.key
        value = override.value
        several = listed_texts(value or "")
        if override.sign == "~" or value is None:
            full.append(str(override))
        elif key in ROLES and not (sweeps and "," in value):
            full += model_words(key, value)
        elif key == PROMPT and sweeps and several:
            full.append(f"{PROMPTS}={','.join(f'[{_quoted(PROMPTS, text)}]' for text in several)}")
        elif key == PROMPT:
            lists.setdefault(PROMPTS, []).append(value)
        elif _holds_texts(key) and not _is_null(key, value):
            lists.setdefault(key, []).extend([value] if several is None else several)
        else:
            lists.pop(key, None)  # null takes earlier texts away
            full.append(_written(override, several or [], sweeps))
    for key, texts in lists.items():
        full.append(f"{key}=[{','.join(_quoted(key, text) for text in texts)}]")
    return full + _no_draft(given)


def listed_texts(value: str) -> list[str] | None:
    """The texts of a value that is wholly a list of quoted texts, such as ["a","b"]; None for another."""
    if not TEXTS.fullmatch(value):
        return None
    # As Hydra reads them: a backslash counts before a quote only.
    return [
        re.sub(rf"(\\+)(?={text[0]}|\Z)", lambda match: match[1][: len(match[1]) // 2], text[1:-1])
        for text in re.findall(TEXT, value, re.DOTALL)
    ]


def unknown_key(key: str, schema: str | None = None) -> UsageError:
    """Returns the error for a key that is not there; `schema` is the class that lacks it."""
    leaf = key.rpartition(".")[2]
    others = [name for name, conf in TASKS.items() if leaf in get_type_hints(conf)]
    task = next((name for name, conf in TASKS.items() if conf.__name__ == schema), None)
    if task and others:
        what = f"task={task} has no key {'prompt' if leaf == 'prompts' else leaf}"
        fix = f"it is for {', '.join(others)}; llama-ssp {task} --help lists the keys of {task}"
        return UsageError(what, found=key, fix=fix)
    if leaf in LOSSY:
        fix = "the output distribution is exactly the target's; there is no option to change that"
        return UsageError(f"{key} is refused: not lossless", fix=fix)
    return UsageError(f"unknown key {key}", fix=_meant(key))


def _meant(key: str) -> str:
    """Suggests a key for an unknown one: the shortest whose last part holds its name, or a similar one."""
    if key.startswith("hydra"):
        return "--cfg hydra shows Hydra's own keys"
    known = key_types()
    leaf = key.rpartition(".")[2]
    longer = [name for name in known if leaf and leaf in name.rpartition(".")[2]]
    likely = [min(longer, key=len)] if longer else difflib.get_close_matches(key, known, n=1)
    return f"did you mean {likely[0]}?" if likely else "llama-ssp TASK --help lists the keys"


def _hydra_parser() -> argparse.ArgumentParser:
    from hydra._internal.utils import get_args_parser  # takes longer than --help

    return get_args_parser()


def _refuse_flags(message: str) -> NoReturn:
    raise UsageError(f"a flag cannot be used: {message}", fix="see --help, or --hydra-help")


def _key_of(flag: str) -> str:
    """The key that a flag names, such as max_new_tokens for --max-new-tokens and -n. Raises UsageError."""
    key = SHORT_FLAGS.get(flag) or flag.removeprefix("--").replace("-", "_")
    known = {PROMPT, *SHORT_KEYS, *RUN_KEYS, *key_types()}
    if key in known or key.startswith(("hydra.", "hydra/")):
        return key
    raise UsageError(f"unknown flag {flag}", fix=_meant(key))


def _is_bare(word: str) -> bool:
    """Returns whether a word is a task or a model: it has no key, or names a file with a = in its name."""
    override = Override.of(word)
    if word.startswith(("/", "./", "../", "~/", "${")):
        return True
    if override.value is None:
        return not override.sign
    return override.key not in {PROMPT, *key_types()} and os.path.exists(word)


def _named(words: Sequence[str]) -> list[Override]:
    """Returns the words without a key, with the keys that their places give them."""
    if not words:
        return []
    first = words[0]
    others = words[1 + len(ROLES) :]
    if first not in TASKS:
        near = MEANT.get(first) or nearest(first, [*TASKS, *COMMANDS])
        raise UsageError(
            "the first word is not a task",
            found=repr(first),
            allowed=", ".join(TASKS),
            fix=f"write llama-ssp {near} ..." if near else f"write {USAGE}; a text is prompt='...'",
        )
    if others:
        raise UsageError(
            "there are words without a key",
            found=" ".join(others),
            allowed=USAGE,
            fix="quote a value that holds blanks, as in prompt='two words'",
        )
    return [Override("", key, word) for key, word in zip(("task", *ROLES), words, strict=False)]


def _written(override: Override, several: Sequence[str], sweeps: bool) -> str:
    """An override in Hydra's grammar, except one of a list of texts; a sweep takes `several` texts."""
    sign = override.sign
    key = override.key
    value = override.value or ""
    kinds = _kinds(key)
    origins = {get_origin(kind) for kind in kinds}
    if NoneType in kinds and str not in kinds:  # such as ranks=auto
        value = re.sub(r"\bauto\b", "null", value)
    if _is_null(key, value) or (value.startswith("[") and str not in kinds):
        pass
    elif key in GROUPS and value not in options(key) and not sweeps:
        value = quoted(value, as_written=False)
    elif str in kinds:
        value = ",".join(_quoted(key, text) for text in (several if sweeps and several else [value]))
    elif list in origins and value and not sweeps:
        value = f"[{value}]"
    elif dict in origins:
        sign = sign or "+"
    return f"{sign}{key}={value}"


def _quoted(key: str, text: str) -> str:
    return quoted(text, as_written=key in AS_WRITTEN)


def _kinds(key: str) -> tuple[Any, ...]:
    return kinds_of(key_types().get(key))


def _is_null(key: str, value: str) -> bool:
    return value == "null" and NoneType in _kinds(key)


def _holds_texts(key: str) -> bool:
    return list[str] in _kinds(key) and key != "task.pairs"  # which are names, without quotes


def _no_draft(given: Sequence[Override]) -> list[str]:
    """draft=none where a target is named and no draft: the default draft is the default target's.

    Refuses files of a model that is not named: they would replace those of the default one.
    """
    chosen = {override.key: override.value for override in given}
    if "experiment" in chosen:  # it may name models
        return []
    for role in ROLES:
        if role not in chosen and (files := {f"{role}.path", f"{role}.repo"} & {*chosen}):
            raise UsageError(
                f"{min(files)} is given, and no {role} is named",
                fix=f"write {role}=FOLDER or {role}=ORG/NAME, or a preset: {role}=NAME {min(files)}=...",
            )
    has_none = chosen.get("model", SHIPPED) != SHIPPED and "draft" not in chosen
    lost = {key for key in chosen if key.startswith("draft.")}
    if lost and (has_none or chosen.get("draft", "") in (None, "none")):
        raise UsageError(
            f"{min(lost)} is given, and no draft is named",
            found="draft=none",
            fix="write draft=NAME, or leave it out",
        )
    return ["draft=none"] if has_none else []
