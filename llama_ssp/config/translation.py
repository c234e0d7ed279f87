"""Errors of Hydra and OmegaConf as UsageErrors: one line with the key, what was found, what is allowed."""

from __future__ import annotations

import re
from dataclasses import fields

from omegaconf.errors import OmegaConfBaseException

from llama_ssp import config
from llama_ssp.config.arguments import meant
from llama_ssp.config.presets import GROUPS, nearest, options
from llama_ssp.config.run import key_types, kinds_of
from llama_ssp.errors import UsageError, shortened

LOSSY = {  # settings of other programs that change the output distribution
    **dict.fromkeys(("lenience", "lenient"), "lenience accepts more than the exact rule"),
    **dict.fromkeys(("typical_acceptance", "typical", "posterior_threshold"), "typical acceptance is lossy"),
    "accept_threshold": "an acceptance threshold changes the distribution",
    **dict.fromkeys(("ensemble_weight", "assistant_ensemble_weight"), "an ensemble is not the target alone"),
}
HYDRA_NOISE = (
    "full_key:", "object_type", "reference_type", "Set the env", "Config search path", "provider=",
    "To append to your",
)  # fmt: skip
WRONG_TYPE = re.compile(
    r"(?s)[Vv]alue '(?P<found>.*?)' .*(?:could not be converted to|is not a valid) (?P<wanted>\w+)"
)
NOT_IN_ENUM = re.compile(r"Invalid value '(?P<found>.*?)', expected one of \[(?P<wanted>.*?)\]", re.DOTALL)
NOT_A_LIST = re.compile(r"Invalid value assigned: (?P<found>\w+) is not a ListConfig")
NOT_OPTIONAL = re.compile(r"is not Optional|Incompatible value '?None'?")
SEVERAL = re.compile(r"Ambiguous value for argument '(?P<key>[^=']*)=(?P<found>[^']*)'")
NO_KEY = re.compile(r"Key '(?P<key>[^']*)' (?:not in '(?P<schema>\w+)'|is not in struct)")
NOT_THERE = re.compile(r"Could not override '(?P<key>[^']*)'")
NO_OPTION = re.compile(r"Could not find '(?P<group>[^']+)/(?P<option>[^'/]*)'")
TYPE_NAMES = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def translated(error: Exception) -> UsageError:
    """The error in one line."""
    from hydra.errors import OverrideParseException

    if isinstance(error, OverrideParseException):
        said = " ".join(str(error).split()).partition(" See ")[0]
        found = None if said.startswith("Lexer") else said  # which repeats the override
        fix = 'write KEY=VALUE; quote a text in a list: KEY=["a b"]'
        return UsageError("an override cannot be read", shortened(error.override, 80), found, fix=fix)
    text = f"{error}\n{error.__cause__ or ''}"
    key = next((line.split(":", 1)[1].strip() for line in text.splitlines() if "full_key:" in line), "")
    if "set_int_max_str_digits" in text:
        return UsageError("a number is too long", found="more than 4300 digits", fix="write a smaller one")
    if match := NO_OPTION.search(text):
        return _no_option(match["group"], match["option"])
    if match := SEVERAL.search(text):
        fix = "add --multirun (-m) for a run with each; write a list as [1,2]"
        return UsageError(f"{match['key']} has several values", "", match["found"], "one", fix)
    if match := NO_KEY.search(text):
        given = NOT_THERE.search(text)  # the whole key, where its group is not there either
        return unknown_key(given["key"] if given else key, match["schema"])
    if match := WRONG_TYPE.search(text):
        allowed, fix = TYPE_NAMES.get(match["wanted"], match["wanted"]), "write it as --help shows"
        return UsageError(f"{key} is of the wrong type", "", repr(match["found"]), allowed, fix)
    if match := NOT_IN_ENUM.search(text):
        fix = "the file of answers of task=batch is task.output=FILE" if key == "output" else ""
        return UsageError(f"{key} has no such choice", "", repr(match["found"]), match["wanted"], fix)
    if match := NOT_A_LIST.search(text):
        example = '["a","b"]' if list[str] in kinds_of(key_types().get(key)) else "[1,2]"
        return UsageError(f"{key} is not a list", "", match["found"], "a list", f"write '{key}={example}'")
    if NOT_OPTIONAL.search(text):
        return UsageError(f"{key} may not be null", "", "null", fix="give it a value, or leave it out")
    return UsageError(_plain(error), key, fix="see --help for keys and values")


def unknown_key(key: str, schema: str | None = None) -> UsageError:
    """The error for a key that is not there; `schema` is the class that lacks it."""
    leaf = key.rpartition(".")[2]
    keys = {
        name: [entry.name for entry in fields(conf) if entry.name != "name"]
        for name, conf in config.TASKS.items()
    }
    others = [name for name in keys if leaf in keys[name]]
    task = next((name for name, conf in config.TASKS.items() if conf.__name__ == schema), None)
    if task and others:
        what = f"task={task} has no key {'prompt' if leaf == 'prompts' else leaf}"
        return UsageError(what, "", key, ", ".join(keys[task]), f"it is for {', '.join(others)}")
    if leaf in LOSSY:
        fix = "the output distribution is exactly the target's; there is no option to change that"
        return UsageError(f"{key} is refused: not lossless", found=LOSSY[leaf], fix=fix)
    return UsageError(f"unknown key {key}", fix=meant(key))


def _no_option(group: str, option: str) -> UsageError:
    what, allowed = f"there is no {group}={option}", options(group) if group in GROUPS else []
    near = nearest(option, allowed)
    fix = f"did you mean {group}={near}?" if near else "choose one" if allowed else "see --help"
    return UsageError(what, allowed=", ".join(allowed), fix=fix)


def _plain(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if cause is not None:
        lines = [*lines[:1], *(line.strip() for line in str(cause).splitlines() if line.strip())]
    lines = [line for line in dict.fromkeys(lines) if not line.startswith(HYDRA_NOISE)]
    return shortened("; ".join(lines) or type(error).__name__, 400)
