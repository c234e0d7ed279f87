"""What bytes of a text a token stands for, whatever notation its tokenizer has for them. No torch.

Three notations are common: letters that stand for bytes (GPT-2 and all byte-level BPE), a mark for the
space with numbered bytes for the rest (SentencePiece), and plain text.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import cache
from typing import Any

SPACE_MARK = "\u2581"
NUMBERED = re.compile(r"<0x([0-9A-F]{2})>")
AS_THEMSELVES = (range(33, 127), range(161, 173), range(174, 256))  # bytes written as their own letters


class Notation(Enum):
    """How token strings are to be read."""

    letters = "byte-level"
    marks = "SentencePiece"
    plain = "plain text"


def notation_of(decoder: Any) -> Notation:
    """By the decoder of a tokenizer.json."""
    steps = _steps(decoder)
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return Notation.letters
    replaces = any((step.get("pattern") or {}).get("String") == SPACE_MARK for step in steps)
    return Notation.marks if replaces or kinds & {"Metaspace", "ByteFallback"} else Notation.plain


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    return [decoder, *(step for part in decoder.get("decoders") or [] for step in _steps(part))]


def notation_guessed(tokens: list[str]) -> Notation:
    """By the tokens alone, for tokenizers without a tokenizer.json."""
    if any(token.startswith(SPACE_MARK) for token in tokens):
        return Notation.marks
    return Notation.letters if any(token.startswith("\u0120") for token in tokens) else Notation.plain


def surface(token: str, notation: Notation) -> bytes:
    """The bytes of a text that the token stands for."""
    if notation is Notation.letters:
        letters = byte_letters()
        if all(letter in letters for letter in token):
            return bytes(letters[letter] for letter in token)
    if notation is Notation.marks:
        numbered = NUMBERED.fullmatch(token)
        if numbered:
            return bytes([int(numbered[1], 16)])
        return token.replace(SPACE_MARK, " ").encode("utf-8", "surrogatepass")
    return token.encode("utf-8", "surrogatepass")


def is_numbered(token: str) -> bool:
    """Whether the token is a byte that SentencePiece falls back on: there may be a plainer one for it."""
    return NUMBERED.fullmatch(token) is not None


@cache
def byte_letters() -> dict[str, int]:
    """GPT-2's letters: printable bytes stand for themselves, the others for letters from 256 on."""
    own = {byte for span in AS_THEMSELVES for byte in span}
    others = (byte for byte in range(256) if byte not in own)
    return {chr(byte): byte for byte in sorted(own)} | {chr(256 + n): byte for n, byte in enumerate(others)}
