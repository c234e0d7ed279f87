"""A tokenizer's vocabulary: its tokens, the bytes they stand for, its settings. No torch.

Token strings have three common notations: letters that stand for bytes (GPT-2 and all byte-level BPE), a mark
for the space with numbered bytes for the rest (SentencePiece), and plain text.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from filecmp import cmpfiles
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from llama_ssp.errors import DataError, ModelError
from llama_ssp.models.folder import is_gguf, read_json
from llama_ssp.models.wrapped import text_part
from llama_ssp.text.gguf_tokenizer import SPACE_MARK, HeaderTokenizer, end_ids

Encode = Callable[[str], list[int]]
log = logging.getLogger(__name__)

PANIC = "PanicException"
FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
ENDS_IN = ("generation_config.json", "config.json")  # the first that names a possible id counts
NUMBERED = re.compile(r"<0x([0-9A-F]{2})>")
OWN_LETTERS = (range(33, 127), range(161, 173), range(174, 256))  # bytes written as their own letters


Notation = Enum("Notation", ["letters", "marks", "plain"])  # how token strings are read


def notation_of(decoder: Any) -> Notation:
    """Returns the notation that the decoder of a tokenizer.json says."""
    text = json.dumps(decoder, ensure_ascii=False)  # its steps are nested
    if '"ByteLevel"' in text:
        return Notation.letters
    has_marks = any(f'"{word}"' in text for word in ("Metaspace", "ByteFallback", SPACE_MARK))
    return Notation.marks if has_marks else Notation.plain


def notation_guessed(tokens: list[str]) -> Notation:
    """Guesses by the tokens alone, for tokenizers without a tokenizer.json."""
    if any(token.startswith(SPACE_MARK) for token in tokens):
        return Notation.marks
    if any(token.startswith("\u0120") for token in tokens):
        return Notation.letters
    return Notation.plain


def surface(token: str, notation: Notation) -> bytes:
    """Returns the bytes that the token stands for."""
    letters = byte_letters() if notation is Notation.letters else {}
    if letters and all(letter in letters for letter in token):
        return bytes(letters[letter] for letter in token)
    if notation is Notation.marks:
        if numbered := NUMBERED.fullmatch(token):
            return bytes([int(numbered[1], 16)])
        token = token.replace(SPACE_MARK, " ")
    return token.encode("utf-8", "surrogatepass")


@cache
def byte_letters() -> dict[str, int]:
    """GPT-2's letters: printable bytes are their own letters, the others have letters from 256 on."""
    printable = {byte for span in OWN_LETTERS for byte in span}
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in sorted(printable)}
    return letters | {chr(256 + number): byte for number, byte in enumerate(rest)}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The meaning of a tokenizer's ids.

    `encode` tokenizes a text without adding special tokens or reading any from it; `start` is what the
    tokenizer puts before every text, `ends` are the ids that end one.
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
        """Returns the largest id that has a token, plus one."""
        return 1 + max(self.names, default=-1)

    @cached_property
    def surfaces(self) -> list[bytes | None]:
        """Returns the bytes of each id; None for special tokens and for ids without a token."""
        result: list[bytes | None] = [None] * self.size
        for i, name in self.names.items():
            if i not in self.special:
                result[i] = surface(name, Notation.plain if i in self.added else self.notation)
        return result

    @cached_property
    def by_surface(self) -> dict[bytes, int]:
        """Maps bytes to their token: the lowest id of several, and <0xNN> only if there is no other."""
        result: dict[bytes, int] = {}
        for i in sorted(self.names, key=lambda i: (NUMBERED.fullmatch(self.names[i]) is not None, i)):
            if text := self.surfaces[i]:
                result.setdefault(text, i)
        return result

    @cached_property
    def longest(self) -> int:
        return max((len(text) for text in self.by_surface), default=0)

    @cached_property
    def begins_with_space(self) -> bool:
        """Returns whether it puts a space before a text, as SentencePiece does."""
        return self.text_of(self.encode("a")) == b" a"

    def text_of(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes of the ids; special ones and ids without a token have none."""
        return b"".join(self.surfaces[i] or b"" for i in ids if i < self.size)

    def cut(self, text: bytes) -> list[int]:
        """Returns tokens for any bytes: always the longest that fits, up to a byte with which none begins."""
        ids = []
        at = 0
        while at < len(text):
            sizes = range(min(self.longest, len(text) - at), 0, -1)
            size = next((n for n in sizes if text[at : at + n] in self.by_surface), 0)
            if not size:
                break
            ids.append(self.by_surface[text[at : at + size]])
            at += size
        return ids

    def encoded(self, text: bytes) -> list[int]:
        """Tokenizes bytes: with the tokenizer where they are UTF-8, else with `cut`.

        Bytes that are no UTF-8 and that no token stands for are left out.
        """
        ids: list[int] = []
        inside = False
        while True:
            try:
                return [*ids, *self._encoded(text.decode("utf-8"), inside)]
            except UnicodeDecodeError as error:  # half a character, usually at the end
                ids += self._encoded(text[: error.start].decode("utf-8"), inside)
                ids += self.cut(text[error.start : error.end])
                text = text[error.end :]
                inside = True

    def _encoded(self, text: str, inside: bool) -> list[int]:
        """Tokenizes a text; one that is `inside`, after other bytes, gets no space before it."""
        if not text:
            return []
        if not self.begins_with_space:
            return self.encode(text)

        # The tokenizer puts a space before what it is given, so the text's own first space is taken off.
        bare = text.removeprefix(" ")
        if not bare:  # the text is a space
            return self.cut(text.encode())
        if bare != text or not inside:
            return self.encode(bare)

        # No space is wanted: it goes before a newline, whose tokens are then taken off.
        newline = self.encode("\n")
        whole = self.encode("\n" + text)
        if whole[: len(newline)] != newline:  # the newline was merged with the text
            return self.cut(text.encode())
        return whole[len(newline) :]


def vocabulary_of(
    content: Mapping[str, Any], ids: Mapping[str, int], encode: Encode, begin: Encode, ends: frozenset[int]
) -> Vocabulary:
    """Makes it of the content of a tokenizer.json, to which `chat_template` is added.

    `begin` tokenizes a text as `encode` does, after what the tokenizer puts before every text, such as BOS.
    """
    tokens = content.get("added_tokens") or []
    added = frozenset(token["id"] for token in tokens)
    special = frozenset(token["id"] for token in tokens if token["special"]) | (added & ends)
    template = content["chat_template"]

    return Vocabulary(
        ids=ids,
        special=special,
        added=added,
        ends=ends,
        start=before(begin, encode),
        notation=notation_of(content.get("decoder")),
        encode=encode,
        normaliser=json.dumps(content.get("normalizer"), sort_keys=True),
        template=template if isinstance(template, str) else "",
    )


def before(begin: Encode, encode: Encode) -> tuple[int, ...]:
    """Returns the ids that `begin` puts before a text."""
    whole = begin("a")
    bare = encode("a")
    at = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    return tuple(whole[:at])


def tokenizer_folder(path: Path) -> Path | None:
    """Returns the folder with a model's tokenizer; None where the header of its GGUF file has it."""
    if not is_gguf(path):
        return path
    return path.parent if (path.parent / FILE).exists() else None


def template_of(folder: Path) -> str | None:
    """Returns a model's chat template; None if it has none, or several by name.

    Multimodal models may have it where their processor looks for it.
    """
    template = folder / "chat_template.jinja"
    if template.is_file():
        return template.read_text(encoding="utf-8")
    for name in (SETTINGS, "chat_template.json", "processor_config.json"):
        content = read_json(folder / name) if (folder / name).is_file() else {}
        entry = content.get("chat_template")
        if entry is not None:
            return entry if isinstance(entry, str) else None
    return None


def read_vocabulary(path: Path) -> Vocabulary | None:
    """Reads a model's vocabulary from tokenizer.json or a GGUF header; returns None if it cannot."""
    from tokenizers import Tokenizer

    folder = tokenizer_folder(path)
    try:
        if folder is None:
            hub = HeaderTokenizer(path)
            tokenizer = hub.backend_tokenizer
            settings = {"chat_template": hub.chat_template}
            content = json.loads(tokenizer.to_str())
        else:
            content = json.loads((folder / FILE).read_text(encoding="utf-8"))
            settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
            tokenizer = Tokenizer.from_str(json.dumps(content))
    except ModelError:
        raise
    except Exception:  # the Rust tokenizers raise bare Exceptions; loading reports what is wrong
        return None
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True

    def begin(text: str, add_special_tokens: bool = True) -> list[int]:
        with tokenizing(path):
            ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    ids = tokenizer.get_vocab(with_added_tokens=True)
    ends = ends_with_token(path, ids) or _named(settings.get("eos_token"), ids)
    content["chat_template"] = template_of(folder) if folder is not None else settings.get("chat_template")
    return vocabulary_of(content, ids, lambda text: begin(text, False), begin, ends)


@contextmanager
def tokenizing(folder: Path) -> Iterator[None]:
    """Turns a tokenizer's panic into a DataError: usually a pattern that backtracks without end.

    Rust's panics are no Exceptions, and their class cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        raise DataError(
            "the tokenizer fails on a text",
            where=folder,
            found=str(error)[:200],
            fix="take long repetitions out of the text, or correct the pattern in tokenizer.json",
        ) from None


def read_vocabularies(target: Path, draft: Path) -> tuple[Vocabulary | None, Vocabulary | None]:
    """Reads those of two models; equal files are read once, as large ones take a second."""
    result = read_vocabulary(target)
    files = [FILE, SETTINGS]
    if target == draft:
        return result, result
    target_folder = tokenizer_folder(target)
    draft_folder = tokenizer_folder(draft)
    if target_folder and draft_folder:
        equal, _, _ = cmpfiles(target_folder, draft_folder, files, shallow=False)
        if equal == files and end_ids_of(target) == end_ids_of(draft):
            return result, result
    return result, read_vocabulary(draft)


def end_ids_of(path: Path) -> frozenset[int]:
    """Returns all ids that end a text, from generation_config.json or config.json, or a GGUF header.

    The config.json of a multimodal model may have them with its text part.

    Raises ModelError for what is no id. An id may have no token: models have such, negative ones, too.
    """
    if is_gguf(path):
        return end_ids(path)
    named = set[int]()
    for name in ENDS_IN:
        named.update(_ends_named_in(path / name))
        if max(named, default=-1) >= 0:
            break
    return frozenset(named)


def ends_with_token(path: Path, ids: Mapping[str, int], warns: bool = False) -> frozenset[int]:
    """Returns those ids of `end_ids_of` that have a token in the vocabulary `ids`: others are never drawn.

    With `warns` they are named in the log.
    """
    ends = end_ids_of(path)
    known = {*ids.values()}
    if warns and (lost := sorted(ends - known)):
        names = ", ".join(map(str, lost))
        log.warning("%s: no text ends by eos_token_id %s: the vocabulary has no such token", path, names)
    return ends & known


def _ends_named_in(file: Path) -> list[int]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        entry = text_part(content).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    if entry is None:
        return []
    ids = entry if isinstance(entry, list) else [entry]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelError(
            f"{file.name} does not say which tokens end a text",
            where=file.parent,
            found=f"eos_token_id {entry!r}",
            allowed="a whole number, or a list of them",
            fix="correct it, or fetch the model again",
        )
    return ids


def _named(token: object, ids: Mapping[str, int]) -> frozenset[int]:
    name = token.get("content") if isinstance(token, dict) else token
    return frozenset({ids[name]} if isinstance(name, str) and name in ids else ())
