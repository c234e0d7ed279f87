"""Errors of Hydra and OmegaConf as UsageErrors: one line with the key, what was found, what is allowed."""

from __future__ import annotations

import re
from typing import get_type_hints

from llama_ssp.config.arguments import meant
from llama_ssp.config.presets import GROUPS, NAMES_OF_A_MODEL, ROLES, nearest, options
from llama_ssp.config.tasks import TASKS
from llama_ssp.errors import UsageError, shortened

# Settings of other programs that change the output distribution.
LOSSY = ("lenience", "typical_acceptance", "posterior_threshold", "accept_threshold", "ensemble_weight")
HYDRA_NOISE = (
    "full_key:", "object_type", "reference_type", "Set the env", "Config search path", "provider=",
    "To append to your", "Error merging override",
)  # fmt: skip
NO_KEY = re.compile(r"Key '(?P<key>[^']*)' (?:not in '(?P<schema>\w+)'|is not in struct)")
NOT_THERE = re.compile(r"Could not override '(?P<key>[^']*)'")
NO_OPTION = re.compile(r"Could not find '(?P<group>[^']+)/(?P<option>[^'/]*)'")


def translated(error: Exception) -> UsageError:
    """The error in one line."""
    if override := getattr(error, "override", ""):  # a word that is not in Hydra's grammar
        fix = 'write KEY=VALUE; quote a text in a list: KEY=["a b"]'
        return UsageError("an override cannot be read", shortened(override, 80), fix=fix)
    text = f"{error}\n{error.__cause__ or ''}"
    key = next((line.split(":", 1)[1].strip() for line in text.splitlines() if "full_key:" in line), "")
    if match := NO_OPTION.search(text):
        return _no_option(match["group"], match["option"])
    if match := NO_KEY.search(text):
        given = NOT_THERE.search(text)  # has the whole key even if its group is unknown
        return unknown_key(given["key"] if given else key, match["schema"])
    batch_hint = "; task=batch writes its answers to task.output=FILE" * (key == "output")
    lines = dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())
    said = "; ".join(line for line in lines if not line.startswith(HYDRA_NOISE)) or type(error).__name__
    return UsageError(shortened(said, 400), key, fix=f"see --help for keys and values{batch_hint}")


def unknown_key(key: str, schema: str | None = None) -> UsageError:
    """The error for a key that is not there; `schema` is the class that lacks it."""
    leaf = key.rpartition(".")[2]
    others = [name for name, conf in TASKS.items() if leaf in get_type_hints(conf)]
    task = next((name for name, conf in TASKS.items() if conf.__name__ == schema), None)
    if task and others:
        what = f"task={task} has no key {'prompt' if leaf == 'prompts' else leaf}"
        fix = f"it is for {', '.join(others)}; llama-ssp {task} --help lists the keys of {task}"
        return UsageError(what, "", key, fix=fix)
    if leaf in LOSSY:
        fix = "the output distribution is exactly the target's; there is no option to change that"
        return UsageError(f"{key} is refused: not lossless", fix=fix)
    return UsageError(f"unknown key {key}", fix=meant(key))


def _no_option(group: str, option: str) -> UsageError:
    known = options(group) if group in GROUPS else []
    near, allowed = nearest(option, known), NAMES_OF_A_MODEL if group in ROLES else ", ".join(known)
    fix = f"did you mean {group}={near}?" if near else "see --help; a text is prompt='...'"
    return UsageError(f"there is no {group}={option}", allowed=allowed, fix=fix)
