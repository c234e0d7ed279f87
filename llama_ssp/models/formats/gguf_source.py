"""Reads weights a slice at a time from GGUF files, quantised ones as codes and scales.

The formats are those of ggml-quants. A weight is code * scale, less a shift in some; all is computed in fp32,
so that `Coded.decoded` gives the numbers of `gguf.quants.dequantize`. Blocks are (rows, blocks, bytes).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, ReaderTensor, get_tensor_name_map
from torch import Tensor

from llama_ssp.errors import ModelError
from llama_ssp.models.families import DeltaNames
from llama_ssp.models.folder import REFETCH
from llama_ssp.models.formats.coded import Coded, Codes, packed, taken
from llama_ssp.models.formats.gguf_header import Header
from llama_ssp.models.formats.kept import GGUF
from llama_ssp.models.formats.layouts import Matrix
from llama_ssp.models.layout_sizes import DeltaSizes
from llama_ssp.models.shape import shape_of
from llama_ssp.models.sharding import COLUMNS, ROWS, Cut, Span, shifted

SIZES = {kind.name: sizes for kind, sizes in GGML_QUANT_SIZES.items()}  # numbers and bytes of a block
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ENDS = (".weight", ".bias")
EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
BOTH = ("gate_proj", "up_proj")  # of an expert, which are one matrix in some files
# Names that gguf's table has for what the model calls otherwise.
STEP = "linear_attn.dt_proj.bias"
IN_PAIRS = "linear_attn.in_proj_ba.weight"


@dataclass(frozen=True, kw_only=True)
class UnitOrder:
    """Where rows, or columns, of a matrix of the model are in the file.

    Those from `first` on are units of `size`: unit i of the model is unit `places[i]` of the file.
    """

    first: int = 0
    size: int = 1
    places: tuple[int, ...]

    def in_file(self, spans: Iterable[Span]) -> list[Span]:
        """Returns spans of the model by their places in the file, in the model's order."""
        result: list[Span] = []
        for start, end in self._within_units(spans):
            if result and result[-1][1] == start:
                result[-1] = (result[-1][0], end)
            else:
                result.append((start, end))
        return result

    def _within_units(self, spans: Iterable[Span]) -> Iterator[Span]:
        for at, last in spans:
            if at < self.first:
                yield at, min(last, self.first)
                at = self.first
            while at < last:
                unit, inside = divmod(at - self.first, self.size)
                count = min(last - at, self.size - inside)
                start = self.first + self.places[unit] * self.size + inside
                yield start, start + count
                at += count


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor of the model is in the file: in one with these rows, in an order of its own."""

    tensor: ReaderTensor
    shape: tuple[int, ...]  # of the model's tensor
    rows: Span | None = None  # of an expert, in the tensor of all; None: all
    row_order: UnitOrder | None = None
    column_order: UnitOrder | None = None


class GgufSource:
    """The weights of a GGUF file whose header was checked, by the names of transformers.

    What the format does to weights is undone. Rows of Llama's queries and keys are in another order, and
    norms of Gemma and of models with linear attention have one added. Experts are in one tensor. Of linear
    attention decays are -exp(A_log), heads of values are in another order, and a kernel has no dimension
    for its one channel.
    """

    def __init__(self, header: Header, config: Any, names: Iterable[str]) -> None:
        """`names`: of the model's tensors; others in the file keep the file's names."""
        self._shape = shape_of(config)
        self._header = header
        (kind,) = (kind for kind, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
        self._table = get_tensor_name_map(kind, config.num_hidden_layers)
        places = {name: self._place(name) for name in names}
        self._places = {name: place for name, place in places.items() if place is not None}
        self.shapes = {name: place.shape for name, place in self._places.items()}
        known = {place.tensor.name for place in self._places.values()}
        for name, shape in header.shapes.items():
            if header.reads(name) and name not in known:
                self.shapes[name] = shape

    def close(self) -> None:
        self._places.clear()

    def read(self, name: str, cut: Cut | None) -> Tensor | Coded:
        """The cut part, or all: numbers as they are in the file, or codes."""
        family = self._shape.family
        place = self._places[name]
        turned = family.gguf.interleaved and name.rpartition(".")[0].endswith(family.names.qkv[:2])
        matrix = StoredMatrix(place.tensor, self._shape.head_dim if turned else 0, place.rows)
        weight = _in_order(matrix, place, cut)
        if isinstance(weight, Coded):
            return weight
        if matrix.shape != place.shape:
            weight = weight.reshape(-1, *place.shape[1:])

        delta = family.names.delta
        if delta is not None and name.endswith(delta.decay):
            return _logarithms(weight.float(), name)
        has_offset = name.endswith("norm.weight") and bool(family.norm_offset)
        if has_offset and not (delta is not None and name.endswith(f"{delta.norm}.weight")):
            weight = weight.float() - family.norm_offset
        return weight

    def _place(self, name: str) -> StoredTensor | None:
        """Returns where the tensor is; None if it is not in the file."""
        if match := EXPERT.fullmatch(name):
            return self._place_of_expert(match[1], int(match[2]), match[3])
        names = self._shape.family.names
        if names.delta is not None and self._shape.delta is not None:
            for end in names.delta.by_heads:
                if name.removesuffix(".weight").endswith(f".{end}"):
                    return self._place_of_delta(names.delta, self._shape.delta, name, end)

        stored_name = self._stored_name(name)
        if stored_name is None:
            return None
        shape = self._header.shapes[stored_name]
        if names.shared_gate and name.endswith(f".{names.shared_gate}.weight") and len(shape) == 1:
            shape = (1, *shape)
        return StoredTensor(tensor=self._header.tensors[stored_name], shape=shape)

    def _stored_name(self, name: str) -> str | None:
        """Returns the file's name; None if it is not in the file."""
        stored_name = self._table.get_name(name, ENDS)
        return stored_name if stored_name in self._header.tensors else None

    def _place_of_expert(self, layer: str, number: int, leaf: str) -> StoredTensor | None:
        """Returns where a matrix of one expert is in the tensor of all, (experts, outputs, inputs)."""
        stored_name = self._stored_name(f"{layer}{leaf}.weight")
        parts = 1
        if stored_name is None and leaf in BOTH:
            stored_name = self._stored_name(f"{layer}gate_up_proj.weight")
            parts = 2
        if stored_name is None:
            return None
        tensor = self._header.tensors[stored_name]
        shape = self._header.shapes[stored_name]
        if len(shape) != 3 or shape[0] != self._shape.experts:
            return StoredTensor(tensor=tensor, shape=shape)  # which is refused: it is not that of one expert
        outputs = shape[1] // parts
        first = number * shape[1]
        if parts == 2 and leaf == BOTH[1]:
            first += outputs
        return StoredTensor(tensor=tensor, shape=(outputs, shape[2]), rows=(first, first + outputs))

    def _place_of_delta(
        self, names: DeltaNames, delta: DeltaSizes, name: str, end: str
    ) -> StoredTensor | None:
        """Returns where a tensor of linear attention is; `end` is its name in a block."""
        keys = delta.key_heads
        per_key = delta.per_key
        if self._header.row.tiled:  # the first value of each key, then the second of each
            heads = tuple(value * keys + key for key in range(keys) for value in range(per_key))
        else:
            heads = tuple(range(delta.value_heads))

        layer = name.removesuffix(".weight").removesuffix(end)
        stored_name = self._stored_name(name)
        row_order = UnitOrder(places=heads)
        column_order = None
        divisor = 1
        if end in (names.inputs[0], names.convolution):  # channels: queries, keys, values
            row_order = UnitOrder(first=2 * delta.keys, size=delta.value_dim, places=heads)
        elif end == names.inputs[1]:
            row_order = UnitOrder(size=delta.value_dim, places=heads)
        elif end == names.step:
            stored_name = self._stored_name(f"{layer}{STEP}")
        elif end in names.inputs and stored_name is None:  # of each key betas of its values, then decays
            stored_name = self._stored_name(f"{layer}{IN_PAIRS}")
            divisor = 2
            before = per_key if end == names.inputs[3] else 0
            pairs = [key * 2 * per_key + before + value for key in range(keys) for value in range(per_key)]
            row_order = UnitOrder(places=tuple(pairs))
        elif end == names.output:
            column_order = UnitOrder(size=delta.value_dim, places=heads)
        if stored_name is None:
            return None

        shape = self._header.shapes[stored_name]
        if divisor == 2:
            shape = (shape[0] // 2, *shape[1:])
        if end == names.convolution and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        return StoredTensor(
            tensor=self._header.tensors[stored_name],
            shape=shape,
            row_order=None if column_order else row_order,
            column_order=column_order,
        )


def _in_order(matrix: "StoredMatrix", place: StoredTensor, cut: Cut | None) -> Coded | Tensor:
    """Returns the cut part, or all, with rows or columns in the model's order."""
    dim = None if cut is None else cut.dim
    if place.row_order is not None and dim in (None, ROWS):
        spans = ((0, place.shape[0]),) if cut is None else cut.spans
        return matrix.read(Cut(ROWS, tuple(place.row_order.in_file(spans))))

    order = place.column_order
    if order is None or dim not in (None, COLUMNS):
        return matrix.read(cut)
    in_file = order.in_file(((0, place.shape[1]),) if cut is None else cut.spans)
    first = min(start for start, _ in in_file)
    part = matrix.read(Cut(COLUMNS, ((first, max(end for _, end in in_file)),)))
    own = tuple(shifted(span, -first) for span in in_file)
    if isinstance(part, Tensor):
        return taken(part, Cut(COLUMNS, own))
    if order.size % GGUF[place.tensor.tensor_type.name].group:  # a group has inputs of two heads
        return taken(part.decoded(torch.float32), Cut(COLUMNS, own))
    return part.chosen(own)


def _logarithms(decay: Tensor, name: str) -> Tensor:
    """Returns A_log of -exp(A_log)."""
    if not bool((decay <= 0).all()):
        raise ModelError(
            "decays of linear attention are above 0",
            where=name,
            found=float(decay.max()),
            allowed="at most 0",
            fix=REFETCH,
        )
    return torch.log(-decay)


class StoredMatrix(Matrix):
    """A tensor of the file, or some rows of it; a vector is a matrix of one column."""

    def __init__(self, tensor: ReaderTensor, head_dim: int, rows: Span | None = None) -> None:
        """`head_dim`: of a head whose rows have number i next to number head_dim / 2 + i; 0 of other rows.

        `rows`: of a tensor with more than two dimensions, as a matrix of all its rows.
        """
        super().__init__({})
        self._tensor: Any = tensor  # whose data is mapped
        self._head_dim = head_dim
        self._format = tensor.tensor_type.name
        sizes = tensor.shape.tolist()[::-1]
        if len(sizes) == 1:
            sizes.append(1)
        self._every = prod(sizes[:-1])
        self._first, last = rows or (0, self._every)
        self.shape = (last - self._first, sizes[-1])
        self.borders = (head_dim or 1, SIZES[self._format][0])

    def block(self, rows: Span, columns: Span) -> Coded | Tensor:
        at = self._tensor
        numbers, size = SIZES[self._format]
        # Mapped anew, so that the pages are given back; to be read only, as else Linux refuses large files.
        byte_N = np.memmap(at.data.filename, np.uint8, "r", at.data_offset, (at.n_bytes,))
        first, last = (column // numbers * size for column in columns)
        own = slice(*shifted(rows, self._first))
        byte_NB = torch.from_numpy(byte_N.reshape(self._every, -1)[own, first:last].copy())
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
