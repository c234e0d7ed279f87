"""The values of any part of the configuration: types, ranges, names that may not be empty."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from enum import EnumType
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from llama_ssp.config.translation import unknown_key
from llama_ssp.errors import UsageError

T = TypeVar("T")


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
    """Refuses keys that are not there, and values of the wrong type, out of range, or of another shape."""
    hints, values = get_type_hints(type(node)), vars(node)
    if unknown := values.keys() - hints.keys():  # +KEY=VALUE adds any key
        raise unknown_key(f"{prefix}{min(unknown)}")
    for entry in fields(node):
        key, value, hint, rules = prefix + entry.name, values[entry.name], hints[entry.name], entry.metadata
        if not _fits(value, hint):
            allowed = ", ".join(hint) if isinstance(hint, EnumType) else entry.type
            what, fix = f"{key} is of the wrong type", "write it as --help shows"
            raise UsageError(what, "", repr(value), allowed, fix)
        if is_dataclass(value):
            check_values(value, f"{key}.")
        for name, item in _items(key, value):
            if "range" in rules:
                low, high, above = rules["range"]
                between(name, item, low, high, rules["about"], above)
            if "shape" in rules and not re.fullmatch(rules["shape"], item, re.DOTALL):
                raise UsageError(f"{name} cannot be used", "", repr(item), rules["allowed"], rules["about"])


def _items(key: str, value: Any) -> list[tuple[str, Any]]:
    """The entries of a list or a map with their names; a value itself, unless it is null."""
    if isinstance(value, dict):
        return [(f"{key}.{name}", item) for name, item in value.items()]
    if isinstance(value, list):
        return [(f"{key} entry", item) for item in value]
    return [] if value is None else [(key, value)]


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
