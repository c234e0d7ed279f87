"""Reads weights a slice at a time from GGUF files."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama_ssp.models.formats.coded import DECODED_AT_ONCE, Coded, gathered, taken
from llama_ssp.models.formats.gguf_blocks import PLAIN, coded
from llama_ssp.models.formats.gguf_header import FORMATS, Header, StoredTensor
from llama_ssp.models.formats.gguf_model import ROTARY, name_of
from llama_ssp.models.shape import shape_of
from llama_ssp.models.sharding import COLUMNS, Cut

SIZES = {name: (numbers, size) for name, numbers, size in FORMATS.values()}


class GgufSource:
    """The weights of a GGUF file whose header was checked, by the names of transformers.

    What the format does to weights is undone: rows of Llama's queries and keys are in another order, and
    Gemma's norms have one added.
    """

    def __init__(self, header: Header, config: Any) -> None:
        self._shape = shape_of(config)
        row = self._shape.family.gguf
        self._interleaved = row is not None and row.interleaved
        named = {name_of(config.model_type, name): name for name in header.tensors if name not in ROTARY}
        self._places = {name: header.tensors[theirs] for name, theirs in named.items()}
        self.shapes = {name: place.shape for name, place in self._places.items()}

    def close(self) -> None:
        self._places.clear()

    def read(self, name: str, cut: Cut | None) -> Tensor | Coded:
        """The cut part, or all: numbers as they are in the file, or codes."""
        place, byte_NB = self._places[name], self._bytes(name, cut)
        if place.format not in PLAIN:
            return self._coded(place, byte_NB, cut)
        weight = byte_NB.view(PLAIN[place.format])
        if name.endswith("norm.weight") and self._shape.family.norm_offset:
            weight = weight.float() - self._shape.family.norm_offset
        return weight if len(place.shape) > 1 else weight.flatten()

    def _coded(self, place: StoredTensor, byte_NB: Tensor, cut: Cut | None) -> Coded:
        """Some rows after the other, because intermediate results take more memory than the codes."""
        numbers, size = SIZES[place.format]
        rows = max(1, DECODED_AT_ONCE // place.shape[-1])
        parts = (coded(place.format, some.view(len(some), -1, size)) for some in torch.split(byte_NB, rows))
        if cut is not None and cut.dim == COLUMNS:
            ((first, last),) = cut.spans
            before = first // numbers * numbers
            own = Cut(COLUMNS, ((first - before, last - before),))
            parts = (part.cut(own) for part in parts)
        whole = gathered(parts, len(byte_NB))
        assert isinstance(whole, Coded), "parts are codes"
        return whole

    def _bytes(self, name: str, cut: Cut | None) -> Tensor:
        """The bytes of each row, or number of a vector; of cut columns, those of all touched blocks."""
        place = self._places[name]
        numbers, size = SIZES[place.format]
        # Mapped, not read; and to be read only, as else Linux refuses a file larger than its memory.
        mapped = np.memmap(place.file, np.uint8, "r", place.start, (place.n_bytes,))
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it cannot be written
            byte_NB = torch.from_numpy(mapped).view(place.shape[0], -1)
        if cut is not None and cut.dim == COLUMNS:
            spans = ((first // numbers * size, -(-last // numbers) * size) for first, last in cut.spans)
            cut = Cut(COLUMNS, tuple(spans))
        byte_NB = taken(byte_NB, cut)
        if not self._interleaved or not name.rpartition(".")[0].endswith(self._shape.family.names.qkv[:2]):
            return byte_NB
        pairs = byte_NB.view(-1, self._shape.head_dim // 2, 2, byte_NB.shape[1])
        return pairs.transpose(1, 2).reshape(byte_NB.shape)
