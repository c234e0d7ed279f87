"""The command line of a benchmark: key=value, by the fields of a dataclass and their types."""

from __future__ import annotations

import os
import sys
from typing import Self

# What was measured of a machine would decide K and placements in some benchmarks' runs and not in others.
os.environ.setdefault("LLAMA_SSP_MEASURED", "0")


class Words:
    """The base of a dataclass of settings; every field has a default."""

    @classmethod
    def of(cls, arguments: list[str]) -> Self:
        asked = cls()
        for argument in arguments:
            key, _, value = argument.partition("=")
            if not hasattr(asked, key):
                sys.exit(f"unknown: {argument}; known: {', '.join(vars(asked))}")
            kind = type(getattr(asked, key))
            if kind is bool and value not in ("true", "false"):
                sys.exit(f"unknown: {argument}; known: {key}=true, {key}=false")
            setattr(asked, key, value == "true" if kind is bool else kind(value))
        return asked


def divided(own: dict[str, str], arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """The benchmark's own settings, changed by the arguments, and the others: overrides."""
    found, overrides = dict(own), list[str]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            sys.exit(f"unknown: {argument}; known: {', '.join(own)}")
        if key in own:
            found[key] = value
        else:
            overrides.append(argument)
    return found, overrides


def changed(own: dict[str, str], arguments: list[str]) -> dict[str, str]:
    """The benchmark's own settings, changed by the arguments. Leaves with the known ones for another."""
    found, others = divided(own, arguments)
    if others:
        sys.exit(f"unknown: {others[0]}; known: {', '.join(own)}")
    return found
