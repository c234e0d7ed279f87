"""The values of any part of the configuration: types, ranges, names that may not be empty."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from enum import EnumType
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from llama_ssp.config.schema import MAX_INT
from llama_ssp.config.translation import unknown_key
from llama_ssp.errors import UsageError

T = TypeVar("T")
NEVER_EMPTY = (
    "name", "repo", "revision", "path", "prompt_file", "out", "plot", "offload_folder", "gpu", "folder",
    "input", "output", "work", "python",
)  # fmt: skip


def listed(name: str, given: Iterable[T]) -> list[T]:
    """The entries. Raises UsageError for a single text: its letters are not meant as entries."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise UsageError(f"{name} is of the wrong type", "", repr(given), "a list", "write [...] around it")
    return list(given)


def chosen(node: Any) -> Any:
    """The same with its choices that are given by name, as on the command line."""
    named = dict[str, Any]()
    for key, hint in get_type_hints(type(node)).items():
        if isinstance(hint, EnumType) and getattr(node, key) in list(hint):
            named[key] = hint(getattr(node, key))
    return replace(node, **named) if named else node


def check_values(node: Any, prefix: str = "") -> None:
    """Refuses keys that are not there, values of the wrong type or out of range, and empty names."""
    hints, values = get_type_hints(type(node)), vars(node)
    if unknown := values.keys() - hints.keys():  # +KEY=VALUE adds any key
        raise unknown_key(f"{prefix}{min(unknown)}")
    for entry in fields(node):
        key, value = prefix + entry.name, values[entry.name]
        if not _fits(value, hints[entry.name]):
            hint = hints[entry.name]
            allowed = ", ".join(hint) if isinstance(hint, EnumType) else entry.type
            what, fix = f"{key} is of the wrong type", "write it as --help shows"
            raise UsageError(what, "", repr(value), allowed, fix)
        if is_dataclass(value):
            check_values(value, f"{key}.")
        elif entry.name in NEVER_EMPTY and isinstance(value, str) and (not value or "\0" in value):
            raise UsageError(f"{key} is empty", found=repr(value), fix="give it a value, or leave it out")
        elif "range" in entry.metadata:
            _check_range(key, value, *entry.metadata["range"])


def _check_range(
    key: str, value: Any, low: float, high: float, fix: str, above: bool, least_key: int
) -> None:
    if isinstance(value, dict):
        for number, one in value.items():
            between(f"{key} key", number, least_key, MAX_INT)
            between(f"{key}.{number}", one, low, high, fix, above)
    elif isinstance(value, list):
        for one in value:
            between(f"{key} entry", one, low, high, fix, above)
    elif value is not None:
        between(key, value, low, high, fix, above)


def _fits(value: object, hint: Any) -> bool:
    kind, inside = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(_fits(value, option) for option in inside)
    if kind is list:
        return isinstance(value, list) and all(_fits(item, inside[0]) for item in value)
    if kind is dict:
        return isinstance(value, dict) and all(
            _fits(k, inside[0]) and _fits(v, inside[1]) for k, v in value.items()
        )
    if hint in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole or (hint is float and isinstance(value, float))
    return hint is Any or isinstance(value, hint)


def between(key: str, value: float, low: float, high: float, fix: str = "", above: bool = False) -> None:
    """Refuses a value outside of [low, high], with `above` of (low, high]; NaN is always outside."""
    if not (low < value <= high if above else low <= value <= high):
        allowed = f"{'(' if above else '['}{low}, {high}]"
        raise UsageError(f"{key} is out of range", "", value, allowed, fix or "choose a value inside")
