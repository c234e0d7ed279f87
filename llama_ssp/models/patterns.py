"""Patterns of names that a folder brings, matched within a time limit: some would take for ever. No torch."""

from collections.abc import Callable
from typing import Any

from llama_ssp.errors import ModelError

PATIENCE_S = 1.0


def matched(pattern: str, name: str) -> Any:
    """Returns the match of a pattern that the name begins with, or None. Raises ModelError."""
    import regex  # Python's own re has no time limit

    return _within(lambda: regex.match(pattern, name, timeout=PATIENCE_S), pattern)


def fully_matched(pattern: str, name: str) -> bool:
    """Returns whether the whole name is as the pattern says. Raises ModelError."""
    import regex

    return _within(lambda: regex.fullmatch(pattern, name, timeout=PATIENCE_S), pattern) is not None


def complaint(pattern: str) -> str:
    """Returns what is wrong with a pattern; empty for one that can be used."""
    import regex

    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        return str(error)
    return ""


def _within(match: Callable[[], Any], pattern: str) -> Any:
    try:
        return match()
    except TimeoutError:
        raise ModelError(
            "a pattern of layers' names takes too long",
            found=repr(pattern[:80]),
            allowed=f"{PATIENCE_S:g} s a name",
            fix="use a copy of the folder with simpler patterns",
        ) from None
