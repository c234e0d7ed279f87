"""Overrides and flags, checked before Hydra reads them; and Hydra's messages as UsageErrors. No torch.

A mistake gets one line with a suggestion. No override reaches Hydra's own settings, which can run code; nor
does a private config folder (private_folder.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from llama_ssp import config
from llama_ssp.config.environment import rank_environment
from llama_ssp.config.presets import GROUPS, nearest, options
from llama_ssp.config.private_folder import check_folder, is_unsafe
from llama_ssp.config.short_forms import in_full
from llama_ssp.errors import UsageError, shortened

LOSSY = {  # settings of other programs that change the output distribution
    **dict.fromkeys(("lenience", "lenient"), "lenience accepts more than the exact rule"),
    **dict.fromkeys(("typical_acceptance", "typical", "posterior_threshold"), "typical acceptance is lossy"),
    "accept_threshold": "an acceptance threshold changes the distribution",
    **dict.fromkeys(("ensemble_weight", "assistant_ensemble_weight"), "an ensemble is not the target alone"),
}
REFUSED_FLAGS = dict.fromkeys(
    ("--config-path", "-cp", "--config-name", "-cn"), "it would replace the project's configuration"
) | {
    "--experimental-rerun": "it reads pickled files",
    **dict.fromkeys(("--shell-completion", "-sc"), "write source <(llama-ssp completion bash)"),
}
ADDED_TO = {  # maps, to which Hydra adds with a plus sign
    "sampling.logit_bias": "{5: -2.0}', token: bias",
    "placement.max_memory": "{0: 20GiB, cpu: 60GiB}', device: bytes",
}
HYDRA_NOISE = ("object_type", "reference_type", "Set the env", "Config search path", "provider=")
# The flags and their values: () is none, None is any. Hydra itself takes the beginning of a flag for the
# flag, which would pass the flags refused above.
QUIET, VERBOSE = ("--quiet", "-q"), ("--verbose", "-v")
HELP, VERSION = ("--help", "-h"), ("--version",)
SWEEP, CONFIG_DIR = {"--multirun", "-m"}, ("--config-dir", "-cd")
FILES_FROM = ("path", "repo", "revision")  # of a model's files
FLAGS: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys((*HELP, *VERSION, *QUIET, *VERBOSE, *SWEEP, "--resolve"), ()),
    **dict.fromkeys(("--cfg", "-c"), ("job",)),
    **dict.fromkeys(CONFIG_DIR, None),
}
WRONG_TYPE = re.compile(
    r"(?s)[Vv]alue '(?P<found>.*?)' .*(?:could not be converted to|is not a valid) (?P<wanted>\w+)"
)
NOT_IN_ENUM = re.compile(r"Invalid value '(?P<found>.*?)', expected one of \[(?P<wanted>.*?)\]", re.DOTALL)
NOT_A_LIST = re.compile(r"Invalid value assigned: (?P<found>\w+) is not a ListConfig")
NOT_OPTIONAL = re.compile(r"is not Optional|Incompatible value '?None'?")
NO_RESOLVER = re.compile(
    r"(?:Unsupported interpolation type |Error resolving interpolation '\$\{)(?P<name>[\w.]+)(?:[:\s]|$)"
)
SEVERAL = re.compile(r"Ambiguous value for argument '(?P<key>[^=']*)=(?P<found>[^']*)'")
NO_KEY = re.compile(r"Key '(?P<key>\w+)' not in '(?P<schema>\w+)'")
NO_OPTION = re.compile(r"Could not find '(?P<group>[^'/]+)/(?P<option>[^']*)'")
TYPE_NAMES = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def check_arguments(arguments: list[str]) -> list[str]:
    """The arguments in full, overrides first, then flags: Hydra's parser needs the overrides in one piece.

    Refuses what Hydra accepts and this program does not, with a suggestion.
    """
    words, flags, folders = list[str](), list[str](), list[Path]()
    waiting = iter(arguments)
    for argument in waiting:
        if argument.startswith("-"):
            flag = _checked_flag(argument, waiting)
            flags += flag
            if flag[0].partition("=")[0] in CONFIG_DIR:
                folders.append(Path(flag[-1].removeprefix(f"{flag[0].partition('=')[0]}=")))
        else:
            words.append(argument)
    words = in_full(words, folders, sweeps=bool(SWEEP & set(flags)))
    known = config.known_keys()
    for word in words:
        name, equals, value = word.partition("=")
        _check_override(name, value if equals else None, known)
        if "draft=none" in words and name.startswith("draft."):
            raise UsageError(f"{name} is set, but draft=none leaves no draft", fix="drop one of the two")
    return words + [flag for flag in flags if flag not in (*QUIET, *VERBOSE)]


def check_sources(run: config.RunConf, arguments: list[str]) -> None:
    """Refuses a model, a folder, a repository or a revision on the command line that nothing reads."""
    given = [word.lstrip("+").partition("=")[0] for word in arguments if "=" in word]
    named = [key for key in given if key.partition(".")[0] in ("model", "draft")]
    if run.task.named_pairs and named:
        what, found = "task.pairs names the models, so nothing reads others' settings", ", ".join(named)
        raise UsageError(what, "task.pairs", found, fix=f"leave out {named[0]}, or task.pairs")
    for role, model in (("model", run.model), ("draft", run.draft)):
        unused = [key for key in FILES_FROM if f"{role}.{key}" in given]
        if model is None or not unused:
            continue
        if model.weights is config.Weights.synthetic:
            what, found = f"{role}.weights=synthetic reads no files", f"{role}.{unused[0]}"
            raise UsageError(what, f"{role} {model.name}", found, fix=f"drop {found}, or {role}.weights")
        unused = [key for key in unused if key != "path" and getattr(model, key) is not None]
        if model.path is not None and unused:
            what = f"{role}.{unused[0]} is given, and the files are in a folder"
            found = f"{role}.path={model.path}"
            fix = f"write {role}=ORG/NAME for the hub, or leave {role}.{unused[0]} out"
            raise UsageError(what, f"{role} {model.name}", found, fix=fix)


def translated(error: Exception) -> UsageError:
    """A message of Hydra or OmegaConf in one line: the key, what was found, what is allowed."""
    from hydra.errors import OverrideParseException

    if isinstance(error, OverrideParseException):
        found_words = " ".join(str(error).split()).partition(" See ")[0]
        fix = "quote a value that holds blanks or signs: 'task.stop=[\"a b\"]'; a prompt is prompt='any text'"
        return UsageError("an override cannot be read", error.override[:80], found_words, fix=fix)
    text = f"{error}\n{error.__cause__ or ''}"
    key = next((line.split(":", 1)[1].strip() for line in text.splitlines() if "full_key:" in line), "")
    if found := NO_RESOLVER.search(text):
        what, value = f"{key or 'an interpolation'} may not use the resolver {found['name']}", found["name"]
        allowed = "${KEY}, " + ", ".join(f"${{{name}:...}}" for name in config.RESOLVERS)
        fix = 'write the value itself; one of the environment the shell fills in: "KEY=$NAME"'
        return UsageError(what, "", f"${{{value}:...}}", allowed, fix)
    if found := NO_OPTION.search(text):
        return _no_option(found["group"], found["option"])
    if found := SEVERAL.search(text):
        fix = "add --multirun (-m) for a run with each; write a list as [1,2]"
        return UsageError(f"{found['key']} has several values", "", found["found"], "one", fix)
    tasks = {schema.__name__: name for name, schema in config.TASKS.items()}
    if (found := NO_KEY.search(text)) and found["schema"] in tasks:
        return _not_of_the_task(tasks[found["schema"]], found["key"])
    if found := WRONG_TYPE.search(text):
        allowed = TYPE_NAMES.get(found["wanted"], found["wanted"])
        return UsageError(
            f"{key} is of the wrong type", "", repr(found["found"]), allowed, "write it as --help shows"
        )
    if found := NOT_IN_ENUM.search(text):
        fix = "the file of answers of task=batch is task.output=FILE" if key == "output" else ""
        return UsageError(f"{key} has no such choice", "", repr(found["found"]), found["wanted"], fix)
    if found := NOT_A_LIST.search(text):
        fix = "prompt='your text'" if key == "task.prompts" else f"'{key}=[\"...\"]'"
        return UsageError(f"{key} is not a list", "", found["found"], "a list", f"write {fix}")
    if NOT_OPTIONAL.search(text):
        return UsageError(f"{key} may not be null", "", "null", fix="give it a value, or leave it out")
    return UsageError(_plain(error), fix="see --help for keys and values")


def _not_of_the_task(task: str, key: str) -> UsageError:
    of_task = {
        name: [entry.name for entry in fields(schema) if entry.name != "name"]
        for name, schema in config.TASKS.items()
    }
    shown = "prompt" if key == "prompts" else key
    fix = f"it is for {', '.join(name for name, keys in of_task.items() if key in keys)}"
    return UsageError(f"task={task} has no key {shown}", "", f"task.{key}", ", ".join(of_task[task]), fix)


def _no_option(group: str, option: str) -> UsageError:
    what, allowed = f"there is no {group}={option}", options(group) if group in GROUPS else []
    near = nearest(option, allowed)
    fix = f"did you mean {group}={near}?" if near else "choose one" if allowed else "see --help"
    return UsageError(what, allowed=", ".join(allowed), fix=fix)


def _checked_flag(argument: str, waiting: Iterator[str]) -> list[str]:
    """The flag, and the argument after it where that is its value."""
    flag, equals, value = argument.partition("=")
    if flag in REFUSED_FLAGS:
        raise UsageError(f"{flag} is refused", fix=REFUSED_FLAGS[flag])
    if flag not in FLAGS:
        close = difflib.get_close_matches(flag, FLAGS, n=1)
        raise UsageError(f"unknown flag {flag}", fix=f"did you mean {close[0]}?" if close else "see --help")
    if flag in SWEEP and rank_environment().world > 1:
        raise UsageError(f"{flag} needs one process", fix="loop over torchrun in the shell")
    allowed = FLAGS[flag]
    if allowed == ():
        return [argument]
    following = [] if equals else list(islice(waiting, 1))
    value = value or "".join(following)
    if not value or (allowed and value not in allowed):
        fix = f"write {flag} {(allowed or ('VALUE',))[0]}"
        raise UsageError(f"{flag} needs a value", "", repr(value), ", ".join(allowed or ("text",)), fix)
    if flag in CONFIG_DIR:
        check_folder(Path(value), GROUPS)
    return [argument, *following]


def _check_override(key: str, value: str | None, known: list[str]) -> None:
    bare, _, package = key.lstrip("+~").partition("@")
    leaf, draft_none = bare.rpartition(".")[2], "write draft=none"
    if is_unsafe(bare) or package:
        what = "Hydra's own settings are not for overriding"
        fix = "use out=FOLDER for where results go, -v for a longer log"
        raise UsageError(what, found=key, fix=fix)
    if key.startswith("~"):
        fix = draft_none if bare == "draft" else f"give {bare} another value"
        raise UsageError(f"{key} is refused: a setting cannot be deleted", fix=fix)
    if bare in GROUPS and value in ("", "null") and bare != "experiment":
        what, fix = f"{bare}={value} names no option", draft_none if bare == "draft" else "choose one"
        raise UsageError(what, allowed=", ".join(options(bare)), fix=fix)
    if bare in GROUPS and ".." in (value or ""):
        what = f"{bare} names a file outside of the configuration"
        fix = "put the file into a folder of yours, and name that by --config-dir"
        raise UsageError(what, "", value, ", ".join(options(bare)), fix)
    for name, example in ADDED_TO.items():
        if bare.startswith(f"{name}.") or key == name:  # Hydra reads keys after a point as text
            raise UsageError(f"{key} cannot be set this way", fix=f"write '+{name}={example}")
    if bare in known or bare in GROUPS:
        return
    if leaf in LOSSY:
        fix = "the output distribution is exactly the target's; there is no option to change that"
        raise UsageError(f"{bare} is refused: not lossless", found=LOSSY[leaf], fix=fix)
    raise UsageError(f"unknown key {bare}", fix=_meant(bare, known))


def _meant(key: str, known: list[str]) -> str:
    """A suggestion for an unknown key: one with the same last part, or a longer one, or one spelt alike."""
    group, _, leaf = key.rpartition(".")
    same = [name for name in known if name.rpartition(".")[2] == leaf]
    longer = [name for name in known if name.startswith(f"{group}.{leaf}" if group else leaf)]
    close = difflib.get_close_matches(key, [*known, *GROUPS], n=1, cutoff=0.6)
    found = (same or longer or close or [""])[0]
    return f"did you mean {found}?" if found else "llama-ssp TASK --help lists the keys"


def _plain(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if cause is not None:
        lines = [*lines[:1], *(line.strip() for line in str(cause).splitlines() if line.strip())]
    lines = [line for line in dict.fromkeys(lines) if not line.startswith(HYDRA_NOISE)]
    return shortened("; ".join(lines) or type(error).__name__, 400)
