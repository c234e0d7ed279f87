"""The command line, written out as flags and overrides of Hydra. No torch.

    compare 30B /models/7b -p "def hello" k=4 --max-new-tokens 64

is `task=compare model=30B draft=local draft.path='/models/7b' task.prompts=['def hello'] ...`:

* The task, the target and the draft may come first without their keys, a model by any of its names.
* A key of the task, of sampling or of speculation may stand without its group.
* --KEY VALUE is KEY=VALUE.
* A key whose type is a text or a path takes its value as it is.
* A key whose type is a map takes JSON, too, and its entries may be given one by one: template.NAME=VALUE.

Everything else is as Hydra reads it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, NoReturn, get_origin, get_type_hints

from llama_ssp.config.gone import gone
from llama_ssp.config.presets import GROUPS, ROLES, cluster_words, model_words, nearest, options, quoted
from llama_ssp.config.run import RunConf, key_types, kinds_of
from llama_ssp.config.tasks import TASKS
from llama_ssp.errors import RunError, UsageError

# Flags of this program, which cli.py answers.
QUIET = ("--quiet", "-q")
VERBOSE = ("--verbose", "-v")
HELP = ("--help", "-h")
VERSION = ("--version",)
DRY = ("--dry-run",)
PROMPT = "prompt"
PROMPTS = "task.prompts"
SHORT_FLAGS = {"-p": PROMPT, "-n": "max_new_tokens"}  # before Hydra's own -p, which is --package
AS_WRITTEN = (PROMPTS, "task.system", "task.stop")  # ${...} stands for itself in them
RUN_KEYS = {entry.name for entry in fields(RunConf)} | {*GROUPS}


def _short_keys() -> dict[str, str]:
    """Returns the dotted keys of the task, of sampling and of speculation by their last part.

    Left out are task.name, and parts that are a key of the run themselves, such as `output`.
    """
    result = dict[str, str]()
    for key in key_types():
        group, _, leaf = key.partition(".")
        if group in ("sampling", "speculation", "task") and leaf not in {"", "name", *RUN_KEYS}:
            result[leaf] = key
    return result


SHORT_KEYS = _short_keys()
MAPS = {key for key, hint in key_types().items() if get_origin(hint) is dict}
COMMANDS = ("report",)  # first words that are no tasks; cli.py answers them
SHIPPED = "demo"  # the default target, which has a default draft
WORD = re.compile(r"(?P<sign>~|\+{0,2})(?P<key>[^=]*)(?:=(?P<value>.*))?", re.DOTALL)
ESCAPED_BLANK = r"\ "
# A map's name that is a text in Hydra's grammar, or the number of a token.
MAP_NAME = re.compile(
    r"(?!(?:true|false|null|nan|inf)$)[A-Za-z_$][A-Za-z0-9_$./ -]*(?<! )|\d+", re.ASCII | re.IGNORECASE
)
DOUBLE_QUOTED = r'"(?:[^"\\]|\\.)*"'
SINGLE_QUOTED = r"'(?:[^'\\]|\\.)*'"
TEXT = f"{DOUBLE_QUOTED}|{SINGLE_QUOTED}"
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
        return Override(parts["sign"], _in_full(parts["key"]), parts["value"])

    def __str__(self) -> str:
        return f"{self.sign}{self.key}" + ("" if self.value is None else f"={self.value}")


def _in_full(key: str) -> str:
    """Returns a key with its group; the entry of a map may be named after it: template.NAME."""
    first, dot, rest = key.partition(".")
    if SHORT_KEYS.get(first) in MAPS:
        return f"{SHORT_KEYS[first]}{dot}{rest}"
    return SHORT_KEYS.get(key, key)


def _is_entry(key: str) -> bool:
    """Returns whether a key, in full, is that of a map's entry: task.template.NAME."""
    return any(key.startswith(f"{name}.") for name in MAPS)


def hydra_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns the overrides and flags that these arguments mean, overrides first. Raises UsageError."""
    words, flags = divided(arguments)
    flags = [flag for flag in flags if flag not in (*QUIET, *VERBOSE, *DRY)]
    parser = _hydra_parser()
    parser.error = _refuse_flags  # type: ignore[method-assign]
    given = parser.parse_args(flags)
    if not given.shell_completion:  # its words stay as they are: install=bash is no override
        words = in_full(words, given.multirun or "hydra.mode=MULTIRUN" in words)
    return [*words, *flags]


def divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line, --KEY VALUE as KEY=VALUE, and its other flags. Raises UsageError."""
    words = list[str]()
    flags = list[str]()
    of_hydra = _hydra_parser()._option_string_actions  # argparse has no public table of its flags
    waiting = deque(arguments)
    while waiting:
        argument = waiting.popleft()
        flag, equals, value = argument.partition("=")
        if not flag.startswith("-"):
            words.append(argument)
        elif flag in of_hydra and flag not in SHORT_FLAGS:
            flags.append(argument)
            if waiting and not equals and _takes_value(of_hydra[flag], waiting[0]):
                flags.append(waiting.popleft())
        elif flag in (*QUIET, *VERBOSE, *DRY):
            if equals:  # `--dry-run=true` would start the run
                raise UsageError(
                    f"{flag} takes no value", found=argument, fix=f"write {flag}, or leave it out"
                )
            flags.append(flag)
        else:
            key = _key_of(flag)
            if not equals and not waiting:
                raise UsageError(f"{flag} needs a value", fix=f"write {flag} VALUE")
            words.append(f"{key}={value if equals else waiting.popleft()}")
    return words, flags


def _takes_value(flag: argparse.Action, next_word: str) -> bool:
    """Returns whether the word after this flag of Hydra's is its value: --cfg job, --config-dir mine."""
    return flag.nargs is None or (flag.nargs == "?" and next_word in (flag.choices or ()))


def each_key_once(words: Sequence[str]) -> dict[str, str]:
    """Returns the words of a command line under distinct keys.

    A later word replaces an earlier one with its key. Bare words, and words that add to a list of texts or to
    a map, are all kept: the number of the word is part of their keys.
    """
    result = dict[str, str]()
    for number, word in enumerate(words):
        key = "" if _is_bare(word) else Override.of(word).key
        if not key or key == PROMPT or _holds_texts(key) or key in MAPS or _is_entry(key):
            key = f"{key} {number}"
        result[key] = word
    return result


def completable(line: str) -> str:
    """Returns a shell's line for Hydra to complete: all words but the last are written out as overrides.

    Hydra divides the line at blanks, so words that hold a blank are left out.
    """
    *before, last = line.split(" ")
    try:
        words = hydra_arguments(shlex.split(" ".join(before[1:])))
    except (RunError, ValueError):  # a word that is wrong, or a quotation mark without its other
        words = []
    return " ".join([*before[:1], *(word for word in words if not re.search(r"\s", word)), last])


def in_full(words: Sequence[str], sweeps: bool = False) -> list[str]:
    """Returns the overrides that these words mean, in Hydra's grammar. Raises UsageError or ModelError.

    With `sweeps`, a key may have several values, each for runs of its own. Values of a group or a number are
    divided by commas (k=2,4). Values of a text are a list of quoted texts: prompt=["a","b"] is two runs;
    without `sweeps` it is one prompt, brackets included.
    """
    bare = [word for word in words if _is_bare(word)]
    given = [*_named(bare), *(Override.of(word) for word in words if not _is_bare(word))]
    full = list[str]()
    lists = dict[str, list[str]]()
    for override in given:
        key = override.key
        value = override.value
        listed = listed_texts(value or "")  # None for a value that is no list; the list may be empty
        if override.sign == "~" or value is None:  # ~draft
            full.append(str(override))
        elif key in ROLES and not (sweeps and "," in value):  # model=7B, draft=/models/7b
            full += model_words(key, value)
        elif key == "cluster" and not (sweeps and "," in value):  # cluster=p4d, cluster=8xH100
            full += cluster_words(value)
        elif key == PROMPT and sweeps and listed:  # prompt=["a","b"]: each text is a run's only prompt
            full.append(f"{PROMPTS}={','.join(f'[{_quoted(PROMPTS, text)}]' for text in listed)}")
        elif key == PROMPT:  # prompt=a prompt=b: one run with two prompts
            lists.setdefault(PROMPTS, []).append(value)
        elif _holds_texts(key) and not _is_null(key, value):  # stop=a stop=["b","c"]: three texts
            lists.setdefault(key, []).extend([value] if listed is None else listed)
        else:  # k=2, out=a; stop=null, after which earlier texts do not count
            lists.pop(key, None)
            full.append(_written(override, listed or [], sweeps))
    for key, texts in lists.items():
        full.append(f"{key}=[{','.join(_quoted(key, text) for text in texts)}]")
    return full + _no_draft(given) + _of_other_files(given)


def listed_texts(value: str) -> list[str] | None:
    """The texts of a value that is wholly a list of quoted texts, such as ["a","b"]; None for another."""
    if not TEXTS.fullmatch(value):
        return None
    return [_unquoted(text) for text in re.findall(TEXT, value, re.DOTALL)]


def _unquoted(text: str) -> str:
    """Returns a text without its quotation marks, as Hydra reads it.

    Backslashes escape only in a run that ends at a mark like the text's own, or at its end: there two mean
    one, and an odd one takes the mark as it is. Elsewhere they stand for themselves, as in "a\\n".
    """
    mark = text[0]
    return re.sub(rf"(\\+)(?={mark}|\Z)", lambda run: run[1][: len(run[1]) // 2], text[1:-1])


def unknown_key(key: str, schema: str | None = None) -> UsageError:
    """Returns the error for a key that is not there; `schema` is the class that lacks it."""
    leaf = key.rpartition(".")[2]
    tasks_with_it = [name for name, conf in TASKS.items() if leaf in get_type_hints(conf)]
    task = next((name for name, conf in TASKS.items() if conf.__name__ == schema), None)
    if known_before := gone(key) or gone(f"task={task} {leaf}"):
        return known_before
    if task and tasks_with_it:
        what = f"task={task} has no key {'prompt' if leaf == 'prompts' else leaf}"
        fix = f"it is for {', '.join(tasks_with_it)}; llama-ssp {task} --help lists the keys of {task}"
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
    from hydra._internal.utils import get_args_parser  # this import takes longer than all of --help

    return get_args_parser()


def _refuse_flags(message: str) -> NoReturn:
    raise UsageError(f"a flag cannot be used: {message}", fix="see --help, or --hydra-help")


def _key_of(flag: str) -> str:
    """The key that a flag names, such as max_new_tokens for --max-new-tokens and -n. Raises UsageError."""
    key = SHORT_FLAGS.get(flag) or flag.removeprefix("--").replace("-", "_")
    known = {PROMPT, *SHORT_KEYS, *RUN_KEYS, *key_types()}
    if key in known or _is_entry(_in_full(key)) or key.startswith(("hydra.", "hydra/")):
        return key
    raise gone(key) or UsageError(f"unknown flag {flag}", fix=_meant(key))


def _is_bare(word: str) -> bool:
    """Returns whether a word is a task or a model, without a key; a file's name may hold a = itself."""
    override = Override.of(word)
    if word.startswith(("/", "./", "../", "~/", "${")):
        return True
    if override.value is None:
        return not override.sign
    is_key = override.key in {PROMPT, *key_types()} or _is_entry(override.key)
    return not is_key and os.path.exists(word)


def _named(words: Sequence[str]) -> list[Override]:
    """Returns the words without a key, with the keys that their places give them."""
    if not words:
        return []
    first = words[0]
    surplus = words[1 + len(ROLES) :]
    if first not in TASKS:
        near = MEANT.get(first) or nearest(first, [*TASKS, *COMMANDS])
        raise gone(first) or UsageError(
            "the first word is not a task",
            found=repr(first),
            allowed=", ".join(TASKS),
            fix=f"write llama-ssp {near} ..." if near else f"write {USAGE}; a text is prompt='...'",
        )
    if surplus:
        raise UsageError(
            "there are words without a key",
            found=" ".join(surplus),
            allowed=USAGE,
            fix="quote a value that holds blanks, as in prompt='two words'",
        )
    return [Override("", key, word) for key, word in zip(("task", *ROLES), words, strict=False)]


def _written(override: Override, listed: Sequence[str], sweeps: bool) -> str:
    """Returns an override in Hydra's grammar; those of lists of texts are written elsewhere (`in_full`).

    `listed` are the texts of a value such as ["a","b"]: in a sweep each is a value of the key.
    """
    sign = override.sign
    key = override.key
    value = override.value or ""
    kinds = _kinds(key)
    origins = {get_origin(kind) for kind in kinds}
    if NoneType in kinds and str not in kinds:  # `auto` is the user's word for null: ranks=auto
        value = re.sub(r"\bauto\b", "null", value)

    if _is_entry(key):  # template.enable_thinking=false: the entry may be there already, or not
        sign = sign or "++"
        value = _of_json(key, value)
    elif _is_null(key, value) or (value.startswith("[") and str not in kinds):
        pass  # Hydra reads null and lists as they are written
    elif key in GROUPS and value not in options(key) and not sweeps:
        # It is no preset: quoted, Hydra can read it, and refuses it.
        value = quoted(value, as_written=False)
    elif str in kinds:
        texts = listed if sweeps and listed else [value]
        value = ",".join(_quoted(key, text) for text in texts)
    elif list in origins and value and not sweeps:  # ks=1,2
        value = f"[{value}]"
    elif dict in origins and "{" in value:
        # logit_bias={5:-2}: without the + Hydra refuses a key that is not there yet.
        sign = sign or "+"
        value = _of_json(key, value)
    return f"{sign}{key}={value}"


def _of_json(key: str, value: str) -> str:
    """Returns a value that is a JSON object or array in Hydra's grammar, any other as it is.

    Raises UsageError for an object with a name that the grammar has no form for.
    """
    try:
        read = json.loads(value)
    except ValueError:
        return value
    if not isinstance(read, dict | list):
        return value
    return _hydra_form(key, read)


def _hydra_form(key: str, node: Any) -> str:
    """Returns a JSON document, a value of `key`, in Hydra's grammar. Raises as `_of_json`."""
    if isinstance(node, list):
        return f"[{','.join(_hydra_form(key, item) for item in node)}]"
    if isinstance(node, str):
        return quoted(node)
    if not isinstance(node, dict):
        return json.dumps(node)

    entries = list[str]()
    for name, item in node.items():
        if not MAP_NAME.fullmatch(name):
            raise UsageError(
                f"{key} has a name that a command line cannot have",
                found=repr(name),
                allowed="letters, digits, blanks, and _ - $ . /",
                fix="write it into a file of --config-dir",
            )
        entries.append(f"{name.replace(' ', ESCAPED_BLANK)}:{_hydra_form(key, item)}")
    return f"{{{','.join(entries)}}}"


def _quoted(key: str, text: str) -> str:
    return quoted(text, as_written=key in AS_WRITTEN)


def _kinds(key: str) -> tuple[Any, ...]:
    return kinds_of(key_types().get(key))


def _is_null(key: str, value: str) -> bool:
    return value == "null" and NoneType in _kinds(key)


def _holds_texts(key: str) -> bool:
    # These two hold names of models (13B/7B), which need no quotes.
    return list[str] in _kinds(key) and key not in ("task.pairs", "task.drafts")


def _no_draft(given: Sequence[Override]) -> list[str]:
    """Returns draft=none where a target is named and no draft: the default draft fits its target only.

    Raises UsageError for files of a model that is not named: they would replace those of the default one.
    """
    chosen = {override.key: override.value for override in given}
    if "experiment" in chosen:  # it may name models
        return []
    for role in ROLES:
        files = [key for key in (f"{role}.path", f"{role}.repo", f"{role}.adapter") if key in chosen]
        if files and role not in chosen:
            raise UsageError(
                f"{files[0]} is given, and no {role} is named",
                fix=f"write {role}=FOLDER or {role}=ORG/NAME, or a preset: {role}=NAME {files[0]}=...",
            )
    has_none = chosen.get("model", SHIPPED) != SHIPPED and "draft" not in chosen
    lost = {key for key in chosen if key.startswith("draft.")}  # settings of a draft that is not there
    if lost and (has_none or chosen.get("draft", "") in (None, "none")):
        raise UsageError(
            f"{min(lost)} is given, and no draft is named",
            found="draft=none",
            fix="write draft=NAME, or leave it out",
        )
    return ["draft=none"] if has_none else []


def _of_other_files(given: Sequence[Override]) -> list[str]:
    """Clears what a preset says of its own files, where its shape is used for others."""
    chosen = {override.key for override in given}
    cleared: list[str] = []
    for role in ROLES:
        if role in chosen and chosen & {f"{role}.path", f"{role}.repo"}:
            facts = {f"{role}.commit": "null", f"{role}.licence": "''"}
            cleared += [f"{key}={value}" for key, value in facts.items() if key not in chosen]
    return cleared
