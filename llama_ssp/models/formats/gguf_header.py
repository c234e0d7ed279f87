"""Reads the header of a GGUF file, which may be hostile, by the gguf package's reader. No torch.

That reader believes every count, and makes some arrays for each item of a list: seconds for a vocabulary, and
no end for a lie. Here no byte after the header's limit is read, and a list is one piece.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFReader, GGUFValueType

from llama_ssp.errors import ModelError
from llama_ssp.models.folder import REFETCH, require_fetched, shards
from llama_ssp.models.formats.kept import GGUF, GGUF_FORMATS

MAX_HEADER_BYTES = 64 * 2**20  # a vocabulary of 260 000 tokens, with its merges, takes a quarter
MAX_TEXTS = 2**21  # in a list: each takes more memory than the file's eight bytes
MAX_ENTRIES = 100_000  # of metadata, or of tensors


class StoredTensor(NamedTuple):
    """Where a tensor lies; its shape in the order of torch, inputs last."""

    file: Path
    format: str
    shape: tuple[int, ...]
    start: int  # a byte of the file
    n_bytes: int


class Header(NamedTuple):
    """The metadata of a model's first file, and the tensors of all."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Reads the header of a model in one file or several; a ModelError unless its tensors lie in them."""
    try:
        states = [(file, file.stat()) for file in shards(path)]
    except OSError as error:
        raise ModelError("a file of the model is missing", error.filename, fix=REFETCH) from None
    return _read_header(path, tuple((file, at.st_size, at.st_mtime_ns, at.st_ino) for file, at in states))


@lru_cache(maxsize=2)  # config, tokenizer and weights need it, and a vocabulary takes a second
def _read_header(path: Path, states: tuple[tuple[Path, int, int, int], ...]) -> Header:
    header = Header(path, {}, {})
    for file, *_ in states:
        metadata, tensors = _read(file)
        twins = sorted(tensors.keys() & header.tensors.keys())
        if (count := metadata.get("split.count") or 1) != len(states) or twins:
            what, fix = "the file is one of several, but not of these", "give all files their first names"
            raise ModelError(what, file, f"{len(states)} files {twins[:5]}", f"{count} by its header", fix)
        header = Header(path, header.metadata or metadata, header.tensors | tensors)
    return header


def _read(file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    if not file.is_file():
        raise ModelError("not a regular file", file, fix="give a GGUF file")
    require_fetched(file)
    try:
        if max(np.fromfile(file, "<u8", 2, offset=8), default=0) > MAX_ENTRIES:
            raise ValueError("more tensors or keys than a model has")
        with np.errstate(over="raise"):  # else a place of 2^64 - 1 is one in the header
            reader = _Reader(file)
            metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors, end = dict[str, StoredTensor](), reader.data_offset
        for each in sorted(reader.tensors, key=lambda each: each.data_offset):
            kind, shape, start = each.tensor_type.name, tuple(each.shape.tolist()[::-1]), each.data_offset
            if kind not in GGUF_FORMATS:
                what, fix = "a tensor has a number format that cannot be loaded", "use a copy in one of these"
                raise ModelError(what, f"{file}: {each.name}", kind, ", ".join(GGUF_FORMATS), fix)
            dims = range(2 if kind in GGUF else 1, 5)
            if len(shape) not in dims or min(shape) < 1 or start != end + -end % reader.alignment:
                raise ValueError(f"{each.name} of {shape} at byte {start}, after byte {end}")
            tensors[each.name] = StoredTensor(file, kind, shape, start, each.n_bytes)
            end = start + each.n_bytes
        if reader.data.size - end > reader.alignment:
            raise ValueError(f"{reader.data.size} bytes, where tensors end at {end}")
    except (MemoryError, OSError, ModelError):
        raise
    except Exception as error:  # bytes that are no header make the reader fail in any way
        what = "the GGUF file cannot be read: it is damaged, cut short, or of another version"
        fix = "fetch it again, or update gguf if the file's version is newer"
        raise ModelError(what, file, str(error), fix=fix) from None
    return metadata, tensors


class _Reader(GGUFReader):
    limit = MAX_HEADER_BYTES

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        limit = min(self.limit, self.data.size)
        if offset + int(count) * np.dtype(dtype).itemsize > limit:
            raise ValueError(f"{count} numbers or letters at byte {offset} of {limit}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, start = GGUFValueType(self._get(orig_offs, np.uint32)[0]), orig_offs + 12
        count, types = int(self._get(orig_offs + 4, np.uint64)[0]), [GGUFValueType.ARRAY, kind]
        if kind != GGUFValueType.STRING:
            numbers = self._get(start, self.gguf_scalar_to_np[kind], count)
            return 12 + numbers.nbytes, [numbers], [0], types
        if count > MAX_TEXTS:
            raise ValueError(f"a list of {count} texts")
        content, at, texts = self.data.data, start, []
        for _ in range(count):
            first, at = at + 8, at + 8 + struct.unpack_from("<Q", content, at)[0]
            texts.append(content[first:at])
        self._get(start, np.uint8, at - start)  # refused unless they end before the limit
        return at - orig_offs, texts, list(range(count)), types

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        self.limit = self.data.size
        super()._build_tensors(start_offs, fields)
