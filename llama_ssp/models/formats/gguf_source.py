"""Reads weights a slice at a time from GGUF files, quantised ones as codes and scales.

The formats are those of ggml-quants. A weight is code * scale, less a shift in some; all is computed in fp32,
so that `Coded.decoded` gives the numbers of `gguf.quants.dequantize`. Blocks are (rows, blocks, bytes).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from torch import Tensor

from llama_ssp.models.formats.coded import DECODED_AT_ONCE, Coded, Codes, gathered, packed, taken
from llama_ssp.models.formats.gguf_header import Header
from llama_ssp.models.formats.gguf_model import ROTARY, name_of
from llama_ssp.models.formats.kept import GGUF
from llama_ssp.models.shape import shape_of
from llama_ssp.models.sharding import COLUMNS, Cut

Parts = tuple[Tensor, Tensor, Tensor | None]  # codes, one in a byte; scales; shifts
SIZES = {kind.name: sizes for kind, sizes in GGML_QUANT_SIZES.items()}  # numbers and bytes of a block
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSource:
    """The weights of a GGUF file whose header was checked, by the names of transformers.

    What the format does to weights is undone: rows of Llama's queries and keys are in another order, and
    Gemma's norms have one added.
    """

    def __init__(self, header: Header, config: Any) -> None:
        self._shape = shape_of(config)
        row = self._shape.family.gguf
        self._interleaved = row is not None and row.interleaved
        stored = {name: place for name, place in header.tensors.items() if name not in ROTARY}
        self._places = {name_of(config.model_type, name): place for name, place in stored.items()}
        self.shapes = {name: place.shape for name, place in self._places.items()}

    def close(self) -> None:
        self._places.clear()

    def read(self, name: str, cut: Cut | None) -> Tensor | Coded:
        """The cut part, or all: numbers as they are in the file, or codes."""
        place = self._places[name]
        numbers, size = SIZES[place.format]
        inner = None
        if cut is not None and cut.dim == COLUMNS:  # all blocks that the columns touch are read, and then cut
            ((first, last),) = cut.spans
            begin = first // numbers
            inner = Cut(COLUMNS, ((first - begin * numbers, last - begin * numbers),))
            cut = Cut(COLUMNS, ((begin * size, -(-last // numbers) * size),))
        byte_NB = self._bytes(name, cut)
        if place.format not in PLAIN:
            # Some rows after the other, because intermediate results take more memory than the codes.
            some = torch.split(byte_NB, max(1, DECODED_AT_ONCE // place.shape[-1]))
            parts = (coded(place.format, rows_RB.view(len(rows_RB), -1, size)) for rows_RB in some)
            whole = gathered((part.cut(inner) if inner else part for part in parts), len(byte_NB))
            assert isinstance(whole, Coded), "parts are codes"
            return whole
        weight = byte_NB.view(PLAIN[place.format])
        if name.endswith("norm.weight") and self._shape.family.norm_offset:
            weight = weight.float() - self._shape.family.norm_offset
        return weight if len(place.shape) > 1 else weight.flatten()

    def _bytes(self, name: str, cut: Cut | None) -> Tensor:
        """Returns the bytes of each row, or of each number of a vector; of the cut ones alone."""
        place = self._places[name]
        # Mapped, not read; and to be read only, as else Linux refuses a file larger than its memory.
        mapped = np.memmap(place.file, np.uint8, "r", place.start, (place.n_bytes,))
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it cannot be written
            byte_NB = taken(torch.from_numpy(mapped).view(place.shape[0], -1), cut)
        if not self._interleaved or not name.rpartition(".")[0].endswith(self._shape.family.names.qkv[:2]):
            return byte_NB
        pairs = byte_NB.view(-1, self._shape.head_dim // 2, 2, byte_NB.shape[1])
        return pairs.transpose(1, 2).reshape(byte_NB.shape)


def coded(kind: str, byte_NBS: Tensor) -> Coded:
    """Returns the rows of a matrix in this format."""
    code_NBK, scale_NBG, shift_NBG = BLOCKS[kind](byte_NBS, kind)
    codes, code_NK = Codes(GGUF[kind].table, GGUF[kind].group), code_NBK.flatten(1)
    codes_NC = packed(code_NK) if codes.bits == 4 else code_NK
    shift_NG = None if shift_NBG is None else shift_NBG.flatten(1)
    return Coded(codes, code_NK.shape[1], codes_NC, scale_NBG.flatten(1), shift_NG=shift_NG)


def _half(byte: Tensor) -> Tensor:
    """Returns pairs of bytes as fp16 numbers, in fp32."""
    return byte.contiguous().view(torch.float16).float()


def _fields(byte: Tensor, bits: int, run: int) -> Tensor:
    """Returns fields of `bits` bits: of each `run` bytes all first fields, then all second ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    byte_NBP1R = byte.reshape(*byte.shape[:-1], -1, 1, run)
    return ((byte_NBP1R >> shifts) & ((1 << bits) - 1)).flatten(-3)


def _by_32(byte: Tensor, kind: str) -> Parts:
    """Q4 and Q5: a scale, in some a shift, in some the fifth bits of all codes, then the lower four."""
    fifth, shifted, codes = kind[1] == "5", kind[-1] == "1", _fields(byte[..., -16:], 4, 16)
    if fifth:
        codes = codes | _fields(byte[..., -20:-16], 1, 1) << 4
    if shifted:
        return codes, _half(byte[..., :2]), -_half(byte[..., 2:4])
    return codes - 16 * fifth, _half(byte[..., :2]), None


def _q2_k(byte: Tensor, _: str) -> Parts:
    scales, codes = byte[..., :16], _fields(byte[..., 16:80], 2, 32)
    return codes, _half(byte[..., 80:82]) * (scales & 15), _half(byte[..., 82:]) * (scales >> 4)


def _q3_k(byte: Tensor, _: str) -> Parts:
    """Codes of 3 bits, 4 to 11 of the table; scales of 6 bits: first the lower 4 of all, then the rest."""
    codes = _fields(byte[..., 32:96], 2, 32) + 4 * _fields(byte[..., :32], 1, 32) + 4
    scales = _fields(byte[..., 96:104], 4, 8) | _fields(byte[..., 104:108], 2, 4) << 4
    return codes, _half(byte[..., 108:]) * (scales.float() - 32), None


def _q45_k(byte: Tensor, kind: str) -> Parts:
    """Eight scales and eight shifts of 6 bits, in Q5 the fifth bits of all codes, then the lower four."""
    codes, (first, second, last) = _fields(byte[..., -128:], 4, 32), torch.split(byte[..., 4:16], 4, -1)
    if kind == "Q5_K":
        codes = codes | _fields(byte[..., 16:48], 1, 32) << 4
    scales = torch.cat([first & 63, last & 15 | first >> 2 & 48], -1)
    shifts = torch.cat([second & 63, last >> 4 | second >> 2 & 48], -1)
    return codes, _half(byte[..., :2]) * scales, _half(byte[..., 2:4]) * shifts


def _q6_k(byte: Tensor, _: str) -> Parts:
    codes = _fields(byte[..., :128], 4, 64) | _fields(byte[..., 128:192], 2, 32) << 4
    scales = byte[..., 192:208].contiguous().view(torch.int8)
    return codes - 32, _half(byte[..., 208:]) * scales, None


BLOCKS: dict[str, Callable[[Tensor, str], Parts]] = {
    "Q4_0": _by_32, "Q4_1": _by_32, "Q5_0": _by_32, "Q5_1": _by_32,
    "Q8_0": lambda byte, _: (byte[..., 2:], _half(byte[..., :2]), None),
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q45_k, "Q5_K": _q45_k, "Q6_K": _q6_k,
}  # fmt: skip
