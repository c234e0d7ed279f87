"""Tokens to text, as they come: no half characters, no half stop strings, special tokens left out."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

Decode = Callable[[list[int]], str]

# How many of a prompt's tokens are decoded with the text: a token's text may depend on its neighbours.
CONTEXT_TOKENS = 8
CHARACTER_TOKENS = 4  # the most that one character is cut into
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
TAB = "    "


class Detokenizer:
    """Turns a growing list of tokens into growing text.

    A byte-level token may hold part of a character: its text then ends in a replacement character
    and is held back until the character is whole. What is decoded always begins where a character
    does: from half a character on, some tokenizers give no character of a run of byte tokens.
    """

    def __init__(self, decode: Decode, before: list[int]) -> None:
        self._decode = decode
        self._tokens = _tail(decode, before)
        self._read = len(self._tokens)

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        self._tokens.append(token)
        known = self._decode(self._tokens[: self._read])
        grown = self._decode(self._tokens)
        if len(grown) <= len(known) or grown.endswith(INCOMPLETE):
            return ""
        self._tokens = self._tokens[self._read :]
        self._read = len(self._tokens)
        return grown[len(known) :]


def _tail(decode: Decode, tokens: list[int]) -> list[int]:
    """The last few tokens, from the beginning of a character on."""
    tails = [tokens[-CONTEXT_TOKENS - more :] for more in range(CHARACTER_TOKENS)]
    return next((tail for tail in tails if not decode(tail).startswith(INCOMPLETE)), tails[0])


class Writing:
    """The texts of a batch: says where a stop string ends a row, and what may be printed."""

    def __init__(self, decode: Decode, prompts: list[tuple[int, ...]], stops: list[str]) -> None:
        self._decode = decode
        self._rows = [_RowText(Detokenizer(decode, list(prompt)), stops) for prompt in prompts]

    def begin(self, row: int, prompt: tuple[int, ...], stops: list[str]) -> None:
        """Another text comes into the row."""
        self._rows[row] = _RowText(Detokenizer(self._decode, list(prompt)), stops)

    def kept(self, row: int, tokens: list[int]) -> int | None:
        """Takes the row's next tokens; how many stand if a stop string ends inside them."""
        for count, token in enumerate(tokens, start=1):
            if self._rows[row].push(token):
                return count
        return None

    def text(self, row: int) -> str:
        """All of the row's text so far, without a stop string that ended it."""
        return self._rows[row].text

    def printable(self, row: int, ended: bool) -> str:
        """What may be printed now and has not been: a possible beginning of a stop string waits."""
        return self._rows[row].take(ended)


class _RowText:
    def __init__(self, detokenizer: Detokenizer, stops: list[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=0)
        self._taken = 0
        self.text = ""

    def push(self, token: int) -> bool:
        """Adds a token; whether a stop string is now complete."""
        old = len(self.text)
        self.text += self._detokenizer.push(token)
        since = max(0, old - self._longest + 1)
        found = [at for stop in self._stops if (at := self.text.find(stop, since)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def take(self, ended: bool) -> str:
        safe = len(self.text) if ended else len(self.text) - self._unsure()
        piece = self.text[self._taken : safe]
        self._taken = max(self._taken, safe)
        return piece

    def _unsure(self) -> int:
        """The length of the longest tail that a stop string may begin with."""
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


def visible(text: str) -> str:
    """The text with what would steer a terminal written out: controls, direction marks, line separators."""
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character == "\t":
        return TAB
    steers = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    if character == "\n" or character in JOINERS or not steers:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()
