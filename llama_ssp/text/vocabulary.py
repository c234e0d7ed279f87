"""One tokenizer as the doctor and the bridges see it: its tokens, their bytes, its habits. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from llama_ssp.errors import DataError, ModelError
from llama_ssp.models.bounds import require_short_text
from llama_ssp.models.folder import read_json
from llama_ssp.text.surface import Notation, is_numbered, notation_of, surface

Encode = Callable[[str], list[int]]
PANIC = "PanicException"
FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer's ids mean.

    `encode` cuts a text without adding special tokens, and reads none out of it; `start` is what the
    tokenizer puts before every text, `ends` what ends one.
    """

    ids: Mapping[str, int]
    special: frozenset[int]
    added: frozenset[int]
    ends: frozenset[int]
    start: tuple[int, ...]
    notation: Notation
    encode: Encode = field(repr=False)
    normaliser: str = ""
    template: str = ""

    @cached_property
    def names(self) -> dict[int, str]:
        return {i: token for token, i in sorted(self.ids.items(), key=lambda item: (item[1], item[0]))}

    @cached_property
    def size(self) -> int:
        """Ids from here on have no token."""
        return 1 + max(self.names, default=-1)

    @cached_property
    def surfaces(self) -> list[bytes | None]:
        """By id: the bytes it stands for. None for special tokens, which stand for no text, and gaps."""
        return [self._surface(i) for i in range(self.size)]

    @cached_property
    def by_surface(self) -> dict[bytes, int]:
        """The token for some bytes; of several the plainest: no numbered byte, then the lowest id."""
        found: dict[bytes, int] = {}
        for i in sorted(self.names, key=lambda i: (is_numbered(self.names[i]), i)):
            text = self.surfaces[i]
            if text:
                found.setdefault(text, i)
        return found

    @cached_property
    def longest(self) -> int:
        return max((len(text) for text in self.by_surface), default=0)

    @cached_property
    def begins_with_space(self) -> bool:
        """Whether it puts a space before a text, as SentencePiece does."""
        return self.text_of(self.encode("a")) == b" a"

    def text_of(self, ids: Iterable[int]) -> bytes:
        """The bytes that ids stand for; special ones and ids without a token stand for none."""
        known = self.surfaces
        return b"".join(known[i] or b"" for i in ids if i < len(known))

    def cut(self, text: bytes) -> list[int]:
        """Tokens for any bytes, the longest first; up to where no token fits."""
        ids, at = [], 0
        while at < len(text):
            sizes = range(min(self.longest, len(text) - at), 0, -1)
            size = next((n for n in sizes if text[at : at + n] in self.by_surface), 0)
            if not size:
                break
            ids.append(self.by_surface[text[at : at + size]])
            at += size
        return ids

    def encoded(self, text: bytes) -> list[int]:
        """Tokens for bytes, as the tokenizer itself would cut them where they are text."""
        try:
            written = text.decode("utf-8")
        except UnicodeDecodeError as error:  # half a character, as a rule at the end
            good = error.start
            bad = self.cut(text[good : error.end])
            return [*(self.encoded(text[:good]) if good else []), *bad, *self.encoded(text[error.end :])]
        if self.begins_with_space and written.startswith(" "):
            written = written[1:]  # it comes back by itself
        return self.encode(written) if written else []

    def _surface(self, i: int) -> bytes | None:
        name = self.names.get(i)
        if name is None or i in self.special:
            return None
        return name.encode("utf-8", "surrogatepass") if i in self.added else surface(name, self.notation)


def vocabulary_of(
    content: Mapping[str, Any], ids: Mapping[str, int], encode: Encode, begin: Encode,
    ends: frozenset[int], template: object = None, notation: Notation | None = None,
) -> Vocabulary:  # fmt: skip
    """From the content of a tokenizer.json; `begin` cuts a text with what comes before it."""
    tokens = content.get("added_tokens") or []
    added = frozenset(token["id"] for token in tokens)
    return Vocabulary(
        ids=ids,
        special=frozenset(token["id"] for token in tokens if token["special"]) | (added & ends),
        added=added,
        ends=ends,
        start=before(begin, encode),
        notation=notation or notation_of(content.get("decoder")),
        encode=encode,
        normaliser=json.dumps(content.get("normalizer"), sort_keys=True),
        template=template if isinstance(template, str) else "",
    )


def before(begin: Encode, encode: Encode) -> tuple[int, ...]:
    """What `begin` puts before a text."""
    whole, bare = begin("a"), encode("a")
    at = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    return tuple(whole[:at])


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary of a folder with a tokenizer.json; None without one, or where it cannot be read."""
    from tokenizers import Tokenizer

    try:
        text = (folder / FILE).read_text(encoding="utf-8")
        content = json.loads(text)
        require_short_text(folder / FILE, content)
        tokenizer = Tokenizer.from_str(text)
    except ModelError:
        raise
    except Exception:  # the loading room says what is wrong with it, and its Rust raises bare Exceptions
        return None
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        with at_work(folder):
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def begin(text: str) -> list[int]:
        with at_work(folder):
            ids: list[int] = tokenizer.encode(text).ids
        return ids

    ids = tokenizer.get_vocab(with_added_tokens=True)
    own = end_ids_of(folder) or _named(settings.get("eos_token"), ids)
    return vocabulary_of(content, ids, encode, begin, own, settings.get("chat_template"))


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Makes a DataError of a tokenizer's panic: a pattern that backtracks without end, as a rule.

    Rust's panics are no Exceptions, and their class can be imported from nowhere.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        raise DataError(
            "the tokenizer fails on a text", where=str(folder), found=str(error)[:200],
            fix="take long repetitions out of the text, or correct the pattern in tokenizer.json",
        ) from None  # fmt: skip


def read_vocabularies(target: Path, draft: Path) -> tuple[Vocabulary | None, Vocabulary | None]:
    """Those of two folders; files of one content are read once, as large ones take a second."""
    found = read_vocabulary(target)
    alike = all(_content(target / name) == _content(draft / name) for name in (FILE, SETTINGS))
    if alike and end_ids_of(target) == end_ids_of(draft):
        return found, found
    return found, read_vocabulary(draft)


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def end_ids_of(path: Path) -> frozenset[int]:
    """All tokens that end a text, from generation_config.json and config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((path / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        ids = found if isinstance(found, list) else [found]
        whole = [i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
        if whole:
            return frozenset(whole)
    return frozenset()


def _named(token: object, ids: Mapping[str, int]) -> frozenset[int]:
    name = token.get("content") if isinstance(token, dict) else token
    return frozenset({ids[name]} if isinstance(name, str) and name in ids else ())


def readable(token: str) -> str:
    """A token for messages."""
    return repr(token if len(token) <= 40 else token[:40] + "...")


def shown(tokens: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(readable, tokens[:most]))
