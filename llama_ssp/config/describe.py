"""What each key of the configuration means, as its dataclass describes it. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from llama_ssp.config.run import RunConf
from llama_ssp.config.schema import ModelConf
from llama_ssp.config.tasks import TASKS


@dataclass(frozen=True)
class Key:
    """A key with its default as it is written, what it may be, and its description."""

    name: str
    default: str
    allowed: str
    text: str


def intro(schema: type) -> list[str]:
    """The description of a schema: its first line, and the rest in one."""
    first, _, rest = inspect.cleandoc(schema.__doc__ or "").partition("\n\n")
    return [" ".join(part.split()) for part in (first, rest) if part]


def descriptions(schema: type) -> dict[str, str]:
    """The description of each key."""
    return {entry.name: entry.metadata.get("about", "") for entry in fields(schema)}


def keys_of(schema: type, prefix: str = "") -> Iterator[Key]:
    """The keys of a schema and of the schemas in it, but the name of a model or task."""
    hints, texts = get_type_hints(schema), descriptions(schema)
    for entry in fields(schema):
        inner = entry.default_factory
        if isinstance(inner, type) and is_dataclass(inner):
            yield from keys_of(inner, f"{prefix}{entry.name}.")
        elif entry.name != "name":
            allowed = _allowed(hints[entry.name], entry)
            yield Key(prefix + entry.name, _default(entry), allowed, texts.get(entry.name, ""))


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
    own = [key for key in keys_of(RunConf) if "." not in key.name and key.name != "draft"]
    return [*own, *keys_of_group("plan")]


def _default(entry: Field[Any]) -> str:
    value = entry.default
    if value is MISSING and entry.default_factory is not MISSING:
        value = entry.default_factory()
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value.value if isinstance(value, Enum) else value)


def _allowed(hint: Any, entry: Field[Any]) -> str:
    """The choices of a key, or the range of its numbers; empty where the type says enough."""
    if get_origin(hint) is UnionType:
        hint = next(option for option in get_args(hint) if option is not type(None))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "|".join(choice.value for choice in hint)
    if "range" in entry.metadata:
        low, high, above = entry.metadata["range"]
        if high >= 2**20:
            return f"{'above' if above else 'from'} {low:g}"
        return f"above {low:g}, up to {high:g}" if above else f"{low:g}..{high:g}"
    return ""
