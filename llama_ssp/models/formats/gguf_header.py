"""Reads the header of a GGUF file, which may be hostile: metadata, and where each tensor lies. No torch.

Not by the gguf package: it makes some numpy arrays for each element of a list, which for a lying header is a
hundred times the file. Here every count is held against the bytes that are left before anything is made.
"""

from __future__ import annotations

import math
import mmap
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError
from llama_ssp.models.folder import MAX_NAME, REFETCH, damaged, require_fetched, require_inside, shards
from llama_ssp.models.formats.kept import Kept

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_HEADER_BYTES = 64 * 2**20  # a vocabulary of 260 000 tokens, with its merges, takes a quarter
MAX_TEXTS = 2**21  # in a list: each takes more memory than the file's eight bytes
MAX_ENTRIES = 100_000  # of metadata, or of tensors
MAX_DIMS = 4
# Of metadata, by number: the letter of `struct`.
SCALARS = dict(enumerate(["B", "b", "H", "h", "I", "i", "f", "?"])) | {10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
# Formats of tensors: by number the name, how many numbers a block has, and how many bytes.
FORMATS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}  # fmt: skip
# What is kept in memory: scales and shifts are in fp32, and codes of 5 and 6 bits take a byte.
KEPT = {
    "Q4_0": Kept(4, 32, 4, "int4"), "Q4_1": Kept(4, 32, 8, "uint4"), "Q5_0": Kept(8, 32, 4, "int8"),
    "Q5_1": Kept(8, 32, 8, "uint8"), "Q8_0": Kept(8, 32, 4, "int8"), "Q2_K": Kept(4, 16, 8, "uint4"),
    "Q3_K": Kept(4, 16, 4, "int4"), "Q4_K": Kept(4, 32, 8, "uint4"), "Q5_K": Kept(8, 32, 8, "uint8"),
    "Q6_K": Kept(8, 16, 4, "int8"),
}  # fmt: skip
UNREAD = {  # for messages
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
ARCHITECTURE, ALIGNMENT, SHARDS = "general.architecture", "general.alignment", "split.count"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies; its shape in the order of torch, inputs last."""

    file: Path
    format: str  # a name of FORMATS
    shape: tuple[int, ...]
    start: int  # a byte of the file
    n_bytes: int


@dataclass(frozen=True)
class Header:
    """The metadata of a model's first file, and the tensors of all."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> Header:
    """The header of a model in one file or several; a ModelError unless every tensor lies in its file."""
    return _read_header(path, tuple((file, _state(file)) for file in shards(path)))


@lru_cache(maxsize=2)  # config, tokenizer and weights need it, and a vocabulary takes a second
def _read_header(path: Path, files: tuple[tuple[Path, object], ...]) -> Header:
    metadata: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    for file, _ in files:
        own, held = _Reader(file).whole()
        if len(files) > 1 and own.get(SHARDS) != len(files):
            found = f"{own.get(SHARDS)} files by the header, {len(files)} by the name"
            raise damaged(file, found)
        if twins := sorted(held.keys() & tensors.keys()):
            raise damaged(file, f"tensors of another file again: {', '.join(twins[:5])}")
        metadata = metadata or own
        tensors |= held
    if len(files) == 1 and metadata.get(SHARDS, 1) not in (0, 1):
        fix = "give all files their first names, NAME-00001-of-0000N.gguf"
        raise ModelError("the file is one of several", path, f"{metadata[SHARDS]} by its header", fix=fix)
    return Header(path, metadata, tensors)


def _state(file: Path) -> object:
    try:
        status = file.stat()
    except OSError:
        raise ModelError("a file of the model is missing", file, "no such file", fix=REFETCH) from None
    return status.st_size, status.st_mtime_ns, status.st_ino


class _Reader:
    """Reads one file from its start; `at` is the next byte."""

    def __init__(self, file: Path) -> None:
        if not file.is_file():
            raise ModelError("not a regular file", file, fix="give a GGUF file")
        require_inside(file)
        require_fetched(file)
        self.file, self.size, self.at = file, file.stat().st_size, 0
        if self.size < 24:
            raise damaged(file, f"{self.size} bytes")
        with file.open("rb") as stream:
            self.limit = min(self.size, MAX_HEADER_BYTES)
            self.bytes = mmap.mmap(stream.fileno(), self.limit, access=mmap.ACCESS_READ)

    def whole(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        with self.bytes:
            if self.bytes[:4] != MAGIC:
                what, fix = "the file is not a GGUF file", REFETCH
                raise ModelError(what, self.file, repr(self.bytes[:4]), repr(MAGIC), fix)
            self.at, version = 8, int.from_bytes(self.bytes[4:8], "little")
            if version not in VERSIONS:
                fix = "use a newer file, of a machine with little-endian numbers"
                raise ModelError("the GGUF version cannot be read", self.file, version, "2 or 3", fix)
            n_tensors, n_keys = self.count("tensors", 24, MAX_ENTRIES), self.count("keys", 13, MAX_ENTRIES)
            metadata = dict(self.unique("key", n_keys, self.value))
            alignment = metadata.get(ALIGNMENT, 32)
            if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
                raise damaged(self.file, f"{ALIGNMENT} {alignment!r}")
            places = dict(self.unique("tensor", n_tensors, self.place))
            data = -(-self.at // alignment) * alignment
        return metadata, self.tensors(places, data, alignment)

    def unique(self, what: str, count: int, read: Any) -> Iterator[tuple[str, Any]]:
        """As many pairs of a name and what `read` finds after it."""
        seen = set[str]()
        for _ in range(count):
            name = self.text()
            if name in seen or not 0 < len(name) <= MAX_NAME or not name.isprintable():
                raise damaged(
                    self.file, f"{'twice ' * (name in seen)}a {what} by the name of {name[:MAX_NAME]!r}"
                )
            seen.add(name)
            yield name, read()

    def take(self, size: int) -> bytes:
        if size > self.limit - self.at:
            limit = "the file has" if self.limit == self.size else "a header may have"
            raise damaged(
                self.file, f"a header of {self.at + size} bytes or more, where {limit} {self.limit}"
            )
        self.at += size
        return self.bytes[self.at - size : self.at]

    def number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]

    def count(self, of: str, least: int, most: int) -> int:
        """A number of things that take at least `least` bytes each."""
        found: int = self.number("Q")
        if found > most or found * least > self.limit - self.at:
            raise damaged(self.file, f"{found} {of} by the header, in {self.size} bytes")
        return found

    def text(self) -> str:
        try:
            return self.take(self.count("characters", 1, MAX_HEADER_BYTES)).decode()
        except UnicodeDecodeError:
            raise damaged(self.file, f"a name or text that is not UTF-8, before byte {self.at}") from None

    def value(self) -> Any:
        kind = self.number("I")
        if kind == TEXT:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        kind = self.number("I") if kind == LIST else kind
        if kind == TEXT:
            return [self.text() for _ in range(self.count("texts", 8, MAX_TEXTS))]
        if kind not in SCALARS:
            raise damaged(self.file, f"metadata of kind {kind}")
        letter = SCALARS[kind].replace("?", "B")
        size = struct.calcsize(f"<{letter}")
        return array(letter, self.take(size * self.count("numbers", size, MAX_HEADER_BYTES)))

    def place(self) -> tuple[tuple[int, ...], int, int]:
        """A tensor's shape, the number of its format, and its first byte among the data."""
        dims = self.number("I")
        if not 1 <= dims <= MAX_DIMS:
            raise damaged(self.file, f"a tensor of {dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(dims))
        return shape[::-1], self.number("I"), self.number("Q")

    def tensors(self, places: dict[str, Any], data: int, alignment: int) -> dict[str, StoredTensor]:
        found = {}
        for name, (shape, number, first) in places.items():
            if number not in FORMATS:
                what, kind = "a tensor has a number format that cannot be loaded", UNREAD.get(number, number)
                allowed, fix = ", ".join(each[0] for each in FORMATS.values()), "use a copy in one of these"
                raise ModelError(what, f"{self.file}: {name}", kind, allowed, fix)
            kind, numbers, size = FORMATS[number]
            if min(shape) < 1 or shape[-1] % numbers or len(shape) < 2 < numbers:
                raise damaged(self.file, f"{name} of {shape} in {kind}, which has blocks of {numbers}")
            n_bytes = math.prod(shape) // numbers * size
            if first % alignment or data + first + n_bytes > self.size:
                raise damaged(self.file, f"{name} of {shape} at byte {data + first}, in {self.size} bytes")
            found[name] = StoredTensor(self.file, kind, shape, data + first, n_bytes)
        for one, other in pairwise(sorted(found.values(), key=lambda each: each.start)):
            if one.start + one.n_bytes > other.start:
                raise damaged(self.file, f"tensors that overlap at byte {other.start}")
        return found
