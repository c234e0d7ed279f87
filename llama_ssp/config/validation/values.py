"""Values as such: their types, and numbers within their range."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from llama_ssp.errors import UsageError

NEVER_EMPTY = (
    "name", "repo", "revision", "path", "prompt_file", "out", "plot", "record", "image", "offload_folder",
    "gpu", "folder", "input", "output", "work", "python",
)  # fmt: skip


def check_types(node: Any, prefix: str) -> None:
    """Refuses what OmegaConf lets through: values of nested lists and of interpolations, empty names."""
    hints = get_type_hints(type(node))
    for entry in fields(node):
        key, value = prefix + entry.name, getattr(node, entry.name)
        fits = _fits(value, hints[entry.name])
        if fits and is_dataclass(value):
            check_types(value, key + ".")
        elif not fits:
            raise UsageError(
                f"{key} is of the wrong type", found=repr(value), allowed=_in_words(hints[entry.name]),
                fix="write it as --help shows",
            )  # fmt: skip
        elif entry.name in NEVER_EMPTY and isinstance(value, str) and (not value or "\0" in value):
            raise UsageError(f"{key} is empty", found=repr(value), fix="give it a value, or leave it out")


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


def _in_words(hint: Any) -> str:
    inside = [_in_words(option) for option in get_args(hint)]
    if get_origin(hint) is UnionType:
        return " or ".join(inside)
    if get_origin(hint) is list:
        return f"a list of {inside[0]}"
    if get_origin(hint) is dict:
        return f"a map from {inside[0]} to {inside[1]}"
    return {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


def between(key: str, value: float, low: float, high: float, fix: str = "", above: bool = False) -> None:
    inside = low < value <= high if above else low <= value <= high  # NaN is never inside
    if not inside:
        raise UsageError(
            f"{key} is out of range",
            found=value,
            allowed=f"{'(' if above else '['}{low}, {high}]",
            fix=fix or "choose a value inside",
        )
