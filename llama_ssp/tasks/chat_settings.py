"""What /set changes in a conversation: how the next replies are sampled, drafted, thought and shown."""

from dataclasses import fields, replace
from typing import Any

import yaml

from llama_ssp.config import RunConf, SamplingConfig, SpeculationConfig
from llama_ssp.config.validation import between, check, check_context
from llama_ssp.errors import UsageError

OF_SAMPLING = tuple(entry.name for entry in fields(SamplingConfig))
OF_TASK = ("max_new_tokens", "enable_thinking", "show_thinking")
AUTO = "auto"
# As ollama has them.
SHORT = {"think": "enable_thinking true", "nothink": "enable_thinking false"}
OTHER_NAMES = {"num_predict": "max_new_tokens", "repeat_penalty": "repetition_penalty"}
FIXED = {"num_ctx": "context", "context": "context", "seed": "seed"}


def with_setting(run: RunConf, words: str, begun: RunConf) -> RunConf:
    """Returns the run with a setting changed, given as `KEY VALUE`. Raises UsageError.

    `begun` is the run as the chat began: K may be what rounds were prepared for, and `auto` is its own.
    """
    words = SHORT.get(words, words.removeprefix("parameter "))
    key, _, text = words.replace("=", " ", 1).partition(" ")
    key = key.removeprefix("sampling.").removeprefix("speculation.").removeprefix("task.")
    key = OTHER_NAMES.get(key, key)
    if key in FIXED:
        raise UsageError(
            f"{FIXED[key]} is fixed while a chat runs", fix=f"go on with resume=last {FIXED[key]}=..."
        )
    settable = (*OF_SAMPLING, "k", *OF_TASK)
    if key not in settable:
        raise UsageError("there is no such setting", found=key, allowed=", ".join(settable))
    if not text.strip():
        raise UsageError(f"/set {key} needs a value", fix=f"write /set {key} VALUE")

    value = _value(text)
    if key in OF_SAMPLING:
        changed = replace(run, sampling=replace(run.sampling, **{key: value}))
    elif key == "k":
        changed = replace(run, speculation=_with_k(value, begun))
    else:
        changed = replace(run, task=replace(run.task, **{key: value}))
    check(changed)
    check_context(changed)
    return changed


def _value(text: str) -> Any:
    """Returns what the text means, as on the command line. Raises UsageError."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(
            "the value cannot be read", found=text.strip(), fix="write a number or true"
        ) from None


def _with_k(value: Any, begun: RunConf) -> SpeculationConfig:
    """Returns the speculation with this K, which rounds must have been prepared for. Raises UsageError."""
    spec = begun.speculation
    if value == AUTO:
        return spec
    most = spec.longest if begun.drafter_name is not None else 0
    changed = replace(spec, k=value, adaptive=False)
    if isinstance(value, int):
        between("k", value, 0, most, "a larger one is for a chat that begins with it: resume=last k=...")
    return changed


def in_words(run: RunConf) -> str:
    """Returns the settings as they are now, for people; those without a value are left out."""
    named = [f"{key} {value}" for key, value in run.sampling.named.items()]
    drafts = [run.speculation.k_in_words] if run.most_drafts else []
    of_task = {key: getattr(run.task, key) for key in OF_TASK}
    if run.task.max_new_tokens == 0:
        of_task["max_new_tokens"] = "0 (the room that is left)"
    task = [f"{key} {value}" for key, value in of_task.items() if value is not None]
    return ", ".join([*(named or ["no sampling control"]), *drafts, *task])
