"""Reads weights a slice at a time from GGUF files, quantised ones as codes and scales.

The formats are those of ggml-quants. A weight is code * scale, less a shift in some; all is computed in fp32,
so that `Coded.decoded` gives the numbers of `gguf.quants.dequantize`. Blocks are (rows, blocks, bytes).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor

from llama_ssp.models.formats.coded import Coded, Codes, packed
from llama_ssp.models.formats.gguf_header import ROTARY, Header
from llama_ssp.models.formats.kept import GGUF
from llama_ssp.models.formats.layouts import Matrix
from llama_ssp.models.shape import shape_of
from llama_ssp.models.sharding import Cut, Span

SIZES = {kind.name: sizes for kind, sizes in GGML_QUANT_SIZES.items()}  # numbers and bytes of a block
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSource:
    """The weights of a GGUF file whose header was checked, by the names of transformers.

    What the format does to weights is undone: rows of Llama's queries and keys are in another order, and
    Gemma's norms have one added.
    """

    def __init__(self, header: Header, config: Any, names: Iterable[str]) -> None:
        """`names`: of the model's tensors; others in the file keep the file's names."""
        self._shape = shape_of(config)
        (kind,) = (kind for kind, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
        table = get_tensor_name_map(kind, config.num_hidden_layers)
        known = {table.get_name(name, (".weight", ".bias")): name for name in names}
        stored = [tensor for name, tensor in header.tensors.items() if name not in ROTARY]
        self._tensors = {known.get(tensor.name, tensor.name): tensor for tensor in stored}
        self.shapes = {name: header.shapes[tensor.name] for name, tensor in self._tensors.items()}

    def close(self) -> None:
        self._tensors.clear()

    def read(self, name: str, cut: Cut | None) -> Tensor | Coded:
        """The cut part, or all: numbers as they are in the file, or codes."""
        family = self._shape.family
        turned = family.gguf.interleaved and name.rpartition(".")[0].endswith(family.names.qkv[:2])
        weight = StoredMatrix(self._tensors[name], self._shape.head_dim if turned else 0).read(cut)
        if isinstance(weight, Coded):
            return weight
        if name.endswith("norm.weight") and family.norm_offset:
            weight = weight.float() - family.norm_offset
        return weight if len(self.shapes[name]) > 1 else weight.flatten()


class StoredMatrix(Matrix):
    """A tensor of the file; a vector is a matrix of one column."""

    def __init__(self, tensor: Any, head_dim: int) -> None:
        """`head_dim`: of a head whose rows have number i next to number head_dim / 2 + i; 0 of other rows."""
        super().__init__({})
        self._tensor = tensor
        self._head_dim = head_dim
        self._format = tensor.tensor_type.name
        self.shape = (*tensor.shape.tolist()[::-1], 1)[:2]
        self.borders = (head_dim or 1, SIZES[self._format][0])

    def block(self, rows: Span, columns: Span) -> Coded | Tensor:
        at = self._tensor
        numbers, size = SIZES[self._format]
        # Mapped anew, so that the pages are given back; to be read only, as else Linux refuses large files.
        byte_N = np.memmap(at.data.filename, np.uint8, "r", at.data_offset, (at.n_bytes,))
        first, last = (column // numbers * size for column in columns)
        byte_NB = torch.from_numpy(byte_N.reshape(self.shape[0], -1)[slice(*rows), first:last].copy())
        if self._head_dim:
            byte_NB = byte_NB.view(-1, self._head_dim // 2, 2, last - first).transpose(1, 2).flatten(0, 2)
        if self._format in PLAIN:
            return byte_NB.view(PLAIN[self._format])
        return coded(self._format, byte_NB.view(len(byte_NB), -1, size))


def coded(kind: str, byte_NBS: Tensor) -> Coded:
    """Returns the rows of a matrix in this format."""
    code_NBK, scale_NBG, shift_NBG = _parts(kind, byte_NBS)
    codes = Codes(GGUF[kind].table, GGUF[kind].group)
    code_NK = code_NBK.flatten(1)
    codes_NC = packed(code_NK) if codes.bits == 4 else code_NK
    shift_NG = None if shift_NBG is None else shift_NBG.flatten(1)
    return Coded(
        kind=codes,
        inputs=code_NK.shape[1],
        codes_NC=codes_NC,
        scale_NG=scale_NBG.flatten(1),
        shift_NG=shift_NG,
    )


def _parts(kind: str, byte: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns codes, one in a byte, scales and shifts of blocks, whose bytes are the last dimension."""
    match kind:
        case "Q8_0":
            return byte[..., 2:], _half(byte[..., :2]), None
        case "Q4_0" | "Q4_1" | "Q5_0" | "Q5_1":  # in Q5 the fifth bits of all codes, then the lower four
            fifth = kind[1] == "5"
            codes = _fields(byte[..., -16:], 4, 16)
            if fifth:
                codes = codes | _fields(byte[..., -20:-16], 1, 1) << 4
            if kind.endswith("1"):
                return codes, _half(byte[..., :2]), -_half(byte[..., 2:4])
            return codes - 16 * fifth, _half(byte[..., :2]), None
        case "Q2_K":
            scales = byte[..., :16]
            codes = _fields(byte[..., 16:80], 2, 32)
            shifts = _half(byte[..., 82:]) * (scales >> 4)
            return codes, _half(byte[..., 80:82]) * (scales & 15), shifts
        case "Q3_K":  # codes of 3 bits, 4 to 11 of the table; of scales first the lower 4 bits of all
            codes = _fields(byte[..., 32:96], 2, 32) + 4 * _fields(byte[..., :32], 1, 32) + 4
            scales = _fields(byte[..., 96:104], 4, 8) | _fields(byte[..., 104:108], 2, 4) << 4
            return codes, _half(byte[..., 108:]) * (scales.float() - 32), None
        case "Q4_K" | "Q5_K":  # eight scales and eight shifts of 6 bits
            codes = _fields(byte[..., -128:], 4, 32)
            first, second, last = torch.split(byte[..., 4:16], 4, -1)
            if kind == "Q5_K":
                codes = codes | _fields(byte[..., 16:48], 1, 32) << 4
            scales = torch.cat([first & 63, last & 15 | first >> 2 & 48], -1)
            shifts = torch.cat([second & 63, last >> 4 | second >> 2 & 48], -1)
            return codes, _half(byte[..., :2]) * scales, _half(byte[..., 2:4]) * shifts
        case _:  # Q6_K
            codes = _fields(byte[..., :128], 4, 64) | _fields(byte[..., 128:192], 2, 32) << 4
            scales = byte[..., 192:208].contiguous().view(torch.int8)
            return codes - 32, _half(byte[..., 208:]) * scales, None


def _half(byte: Tensor) -> Tensor:
    """Returns pairs of bytes as fp16 numbers, in fp32."""
    return byte.contiguous().view(torch.float16).float()


def _fields(byte: Tensor, bits: int, run: int) -> Tensor:
    """Returns fields of `bits` bits: of each `run` bytes all first fields, then all second ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    byte_NBP1R = byte.reshape(*byte.shape[:-1], -1, 1, run)
    return ((byte_NBP1R >> shifts) & ((1 << bits) - 1)).flatten(-3)
