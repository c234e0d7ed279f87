"""The command line of a benchmark: key=value, by the fields of a dataclass and their types."""

from __future__ import annotations

import sys
from typing import Self


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
            setattr(asked, key, value == "true" if kind is bool else kind(value))
        return asked
