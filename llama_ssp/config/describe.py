"""What each key of the configuration means, as its dataclass describes it. No torch."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import EnumType
from typing import Any, get_type_hints

from llama_ssp.config.run import RunConf, kinds_of
from llama_ssp.config.schema import ModelConf
from llama_ssp.config.tasks import TASKS


@dataclass(frozen=True)
class Key:
    """A key with its default as it is written, and its description with what it may be."""

    name: str
    default: str
    text: str


def intro(schema: type) -> list[str]:
    """The description of a schema: its first line, and the rest in one."""
    first, _, rest = inspect.cleandoc(schema.__doc__ or "").partition("\n\n")
    return [" ".join(part.split()) for part in (first, rest) if part]


def descriptions(schema: type) -> dict[str, str]:
    """The description of each key."""
    return {entry.name: entry.metadata["about"] for entry in fields(schema)}


def keys_of(schema: type, prefix: str = "") -> Iterator[Key]:
    """The keys of a schema and of the schemas in it, except the name of a model or task."""
    hints = get_type_hints(schema)
    for entry in fields(schema):
        inner = entry.default_factory
        if isinstance(inner, type) and is_dataclass(inner):
            yield from keys_of(inner, f"{prefix}{entry.name}.")
        elif entry.name != "name":
            text = f"{entry.metadata['about']} {_allowed(hints[entry.name], entry)}".strip()
            yield Key(prefix + entry.name, _default(entry), text)


def keys_of_group(group: str) -> list[Key]:
    """The keys of a group of the run, such as sampling."""
    known = keys_of(ModelConf, "draft.") if group == "draft" else keys_of(RunConf)
    return [key for key in known if key.name.startswith(f"{group}.")]


def keys_of_task(task: str) -> list[Key]:
    """The keys of a task, as they are written after its name: with task. where the run has the same key."""
    of_run = {entry.name for entry in fields(RunConf)}
    keys = keys_of(TASKS[task])
    return [replace(key, name=f"task.{key.name}") if key.name in of_run else key for key in keys]


def keys_of_run() -> list[Key]:
    """The keys that are in no group of presets."""
    keys = [key for key in keys_of(RunConf) if "." not in key.name and key.name != "draft"]
    return [*keys, *keys_of_group("plan")]


def _default(entry: Field[Any]) -> str:
    factory = entry.default_factory
    value = entry.default if factory is MISSING else factory()
    return str(value) if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _allowed(hint: Any, entry: Field[Any]) -> str:
    """The choices of a key, or the range of its numbers; empty where the type says enough."""
    kind = kinds_of(hint)[0]
    if isinstance(kind, EnumType):
        return f"[{'|'.join(kind)}]"
    if "range" in entry.metadata:
        low, high, above = entry.metadata["range"]
        if high >= 2**20:
            return f"[{'above' if above else 'from'} {low:g}]"
        return f"[above {low:g}, up to {high:g}]" if above else f"[{low:g}..{high:g}]"
    return ""
