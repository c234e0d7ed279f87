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


def spelled(scored: Iterable[ScoredToken], spell: Spell) -> list[TokenLogprob]:
    """Returns the tokens with their text."""

    def with_text(token_id: int, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        token, added = spell(token_id)
        return TokenLogprob(token_id=token_id, token=token, bytes=added, logprob=logprob, top=top)

    result = []
    for item in scored:
        top = tuple(with_text(token_id, logprob) for token_id, logprob in item.top)
        result.append(with_text(item.token_id, item.logprob, top))
    return result


def plain(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Returns an object a token: `token_id`, `token`, `logprob`; `top_logprobs` has the likeliest."""
    return [{**_named(token), "top_logprobs": list(map(_named, token.top))} for token in tokens]


def _named(token: TokenLogprob) -> dict[str, Any]:
    return {"token_id": token.token_id, "token": token.token, "logprob": number(token.logprob)}


def chat(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Returns them in the form of OpenAI's chat completions."""

    def item(token: TokenLogprob) -> dict[str, Any]:
        letters = None if token.bytes is None else list(token.bytes)
        return {"token": token.token, "logprob": number(token.logprob), "bytes": letters}

    return {"content": [{**item(token), "top_logprobs": list(map(item, token.top))} for token in tokens]}


def completions(tokens: Sequence[TokenLogprob], text: str) -> dict[str, Any]:
    """Returns them in the form of OpenAI's completions, for the tokens of `text`.

    Of alternatives with the same text the likeliest is listed.
    """
    letters = b""
    offsets = []
    for token in tokens:
        offsets.append(min(len(text), len(letters.decode("utf-8", "ignore"))))
        letters += token.bytes or b""
        if letters[:1] == b" " and not text.startswith(" "):
            letters = letters[1:]  # some tokenizers put a space before a text

    alternatives = list[dict[str, float | None] | None]()
    for token in tokens:
        if token.logprob is None:
            alternatives.append(None)
        else:  # the likeliest last: it stays
            alternatives.append({other.token: number(other.logprob) for other in token.top[::-1]})
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [number(token.logprob) for token in tokens],
        "top_logprobs": alternatives,
        "text_offset": offsets,
    }


def number(logprob: float | None) -> float | None:
    """Returns a log-probability for JSON, which has no NaN."""
    return None if logprob is None or isnan(logprob) else round(max(logprob, LEAST), DIGITS)


def are_damaged(scored: Iterable[ScoredToken]) -> bool:
    """Returns whether some are not numbers, because logits were not."""
    return any(item.logprob is not None and isnan(item.logprob) for item in scored)
