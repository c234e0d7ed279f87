"""Log-probabilities of tokens: as data, with the tokens' text, and in OpenAI's two formats. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, NamedTuple

Spell = Callable[[int], tuple[str, bytes | None]]  # a token's text, and its bytes; see TokenLogprob
LEAST = -9999.0  # stands for less in JSON, as in OpenAI's API: JSON has no infinities
DIGITS = 6  # of a log-probability in JSON


class ScoredToken(NamedTuple):
    """A token's log-probability, and those of the likeliest tokens at its place, the best first.

    It is None for the first token of a text that is scored whole: nothing stands before it.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenLogprob:
    """A scored token with its text.

    `bytes` is what the token adds to a text: exact where it is half a character, for which `token` has a
    replacement character; None for a special token, of which `token` is the name.
    """

    token_id: int
    token: str
    bytes: bytes | None
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


def spelled(found: Iterable[ScoredToken], spell: Spell) -> list[TokenLogprob]:
    """Returns the tokens with their text."""

    def one(token_id: int, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        token, added = spell(token_id)
        return TokenLogprob(token_id=token_id, token=token, bytes=added, logprob=logprob, top=top)

    return [one(each.token_id, each.logprob, tuple(one(*pair) for pair in each.top)) for each in found]


def plain(found: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Returns an object a token: `token_id`, `token`, `logprob`; `top_logprobs` has the likeliest."""
    return [{**_named(one), "top_logprobs": [_named(other) for other in one.top]} for one in found]


def _named(one: TokenLogprob) -> dict[str, Any]:
    return {"token_id": one.token_id, "token": one.token, "logprob": number(one.logprob)}


def chat(found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Returns them in the form of OpenAI's chat completions."""

    def item(one: TokenLogprob) -> dict[str, Any]:
        letters = None if one.bytes is None else list(one.bytes)
        return {"token": one.token, "logprob": number(one.logprob), "bytes": letters}

    return {"content": [{**item(one), "top_logprobs": list(map(item, one.top))} for one in found]}


def completions(found: Sequence[TokenLogprob], text: str) -> dict[str, Any]:
    """Returns them in the form of OpenAI's completions, for the tokens of `text`.

    Of alternatives with the same text the likeliest is listed.
    """
    letters = b""
    offsets = []
    for one in found:
        offsets.append(min(len(text), len(letters.decode("utf-8", "ignore"))))
        letters += one.bytes or b""
        if letters[:1] == b" " and not text.startswith(" "):
            letters = letters[1:]  # some tokenizers put a space before a text
    return {
        "tokens": [one.token for one in found],
        "token_logprobs": [number(one.logprob) for one in found],
        "top_logprobs": [
            None if one.logprob is None else {other.token: number(other.logprob) for other in one.top[::-1]}
            for one in found
        ],
        "text_offset": offsets,
    }


def number(logprob: float | None) -> float | None:
    """Returns a log-probability for JSON, which has no NaN."""
    return None if logprob is None or isnan(logprob) else round(max(logprob, LEAST), DIGITS)


def are_damaged(found: Iterable[ScoredToken]) -> bool:
    """Returns whether some are not numbers, because logits were not."""
    return any(one.logprob is not None and isnan(one.logprob) for one in found)
