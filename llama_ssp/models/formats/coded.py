"""A quantised matrix as it is kept in memory: codes, and the scales of groups of inputs.

Whatever file a matrix comes from, its weights are

    w[n, k] = (value[code[n, k]] - zero[n, g]) * scale[n, g] * unit - shift[n, g]     where g = k // group

with zeros, a shift, or neither. `decoded` gives the numbers that the format's own library gives, to the bit:
it computes in the type of the scales, and rounds to that type after each step, as the libraries do. Scales
that several rows share in a file (fine-grained FP8) are repeated for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.models.sharding import COLUMNS, Cut

CPU = torch.device("cpu")
DECODED_AT_ONCE = 1 << 22  # weights: bounds the memory of intermediate results
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
FP4 = [
    0.0,
    0.005208333333333333,
    0.6666666666666666,
    1.0,
    0.3333333333333333,
    0.5,
    0.16666666666666666,
    0.25,
    0.0,
    -0.005208333333333333,
    -0.6666666666666666,
    -1.0,
    -0.3333333333333333,
    -0.5,
    -0.16666666666666666,
    -0.25,
]
# Of each table the values of its codes, in fp32: 16 of 4-bit codes, 256 of 8-bit ones.
TABLES: dict[str, Callable[[], Tensor]] = {
    "uint4": lambda: torch.arange(16.0),
    "int4": lambda: torch.arange(-8.0, 8.0),  # code 0 is -8
    "e2m1": lambda: torch.tensor(E2M1),
    "nf4": lambda: torch.tensor(NF4),
    "fp4": lambda: torch.tensor(FP4),  # of bitsandbytes
    "uint8": lambda: torch.arange(256.0),
    "int8": lambda: _bytes().view(torch.int8).float(),  # code 255 is -1
    "e4m3": lambda: _bytes().view(torch.float8_e4m3fn).float(),
    "e5m2": lambda: _bytes().view(torch.float8_e5m2).float(),
}


@cache
def values(table: str, device: torch.device = CPU) -> Tensor:
    """The value of each code of the table, in fp32; one tensor for a device: a copy has the host wait."""
    return TABLES[table]().to(device)


def _bytes() -> Tensor:
    return torch.arange(256, dtype=torch.uint8)


@dataclass(frozen=True)
class Codes:
    """What the codes of a matrix mean; the same on all ranks."""

    table: str  # of TABLES
    group: int = 0  # inputs that share a scale, of which the last group may have fewer; 0: all of a row
    unit: float = 1.0  # LLM.int8: 1/127

    @property
    def bits(self) -> int:
        return 4 if len(values(self.table)) == 16 else 8


@dataclass(frozen=True, eq=False, kw_only=True)
class Coded:
    """A matrix of N outputs and K inputs, or a part of it."""

    kind: Codes
    inputs: int
    codes_NC: Tensor  # uint8; of 4-bit codes two in a byte, that of the even input in the low half
    scale_NG: Tensor  # fp32, bf16 or fp16
    zero_NG: Tensor | None = None  # uint8
    shift_NG: Tensor | None = None  # in the type of the scales

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes_NC.shape[0], self.inputs))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._tensors().values())

    def to(self, device: torch.device) -> Coded:
        return self.changed(lambda part: part.to(device))

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The weights, rounded to this type."""
        rows = max(1, DECODED_AT_ONCE // max(1, self.inputs))
        weight_NK = torch.empty(self.shape, dtype=dtype, device=self.codes_NC.device)
        for first in range(0, len(weight_NK), rows):
            part = self.changed(lambda each, at=first: each[at : at + rows])  # type: ignore[misc]
            weight_NK[first : first + rows] = part._decoded()
        return weight_NK

    def _decoded(self) -> Tensor:
        """In the type of the scales."""
        codes_NK = self.codes_NC
        scale_NG = self.scale_NG
        if self.kind.bits == 4:
            codes_NK = unpacked(codes_NK)[:, : self.inputs]
        # Every table is exact in 16 bit, but for nf4 and fp4.
        table = values(self.kind.table, scale_NG.device).to(scale_NG.dtype)
        # Not `table[codes]`, which takes ten times as long.
        weight_NK = table.index_select(0, codes_NK.int().flatten()).view(codes_NK.shape)
        if self.zero_NG is not None:
            weight_NK -= self._by_input(self.zero_NG.to(scale_NG.dtype))
        weight_NK *= self._by_input(scale_NG)
        if self.kind.unit != 1.0:
            weight_NK *= self.kind.unit
        if self.shift_NG is not None:
            weight_NK -= self._by_input(self.shift_NG)
        return weight_NK

    def _by_input(self, part_NG: Tensor) -> Tensor:
        group = self.kind.group
        return part_NG.repeat_interleave(group, 1)[:, : self.inputs] if group else part_NG

    def cut(self, cut: Cut | None) -> Coded:
        """The part of these outputs, or of this one span of inputs, in memory of its own.

        A span of inputs may begin inside a group: the part then has smaller groups, which share scales.
        """
        if cut is None or cut.dim != COLUMNS:
            return self.changed(lambda part: taken(part, cut))
        ((first, last),) = cut.spans
        per = 8 // self.kind.bits
        group = self.kind.group
        if first % per:
            raise ValueError(f"4-bit codes cannot be cut before input {first}: two are in a byte")
        codes_NC = taken(self.codes_NC, Cut(COLUMNS, ((first // per, -(-last // per)),)))
        if not group:
            scales = self.changed(torch.clone)
            return replace(scales, inputs=last - first, codes_NC=codes_NC)
        own = math.gcd(group, first)
        span = Cut(COLUMNS, ((first // own, -(-last // own)),))
        scales = self.changed(lambda part: taken(part.repeat_interleave(group // own, 1), span))
        return replace(scales, kind=replace(self.kind, group=own), inputs=last - first, codes_NC=codes_NC)

    def chosen(self, spans: Sequence[tuple[int, int]]) -> Coded:
        """Returns the inputs of these spans, one after the other; each span is of whole groups."""
        per = 8 // self.kind.bits
        group = self.kind.group
        if not group or any(place % group or place % per for span in spans for place in span):
            raise ValueError(f"inputs in groups of {group} cannot be put in another order: {spans}")
        changed: dict[str, Any] = {}
        for name, part in self._tensors().items():
            unit = per if name == "codes_NC" else group
            changed[name] = taken(part, Cut(COLUMNS, tuple((a // unit, b // unit) for a, b in spans)))
        return replace(self, inputs=sum(last - first for first, last in spans), **changed)

    def _tensors(self) -> dict[str, Tensor]:
        names = "codes_NC", "scale_NG", "zero_NG", "shift_NG"
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def changed(self, change: Callable[[Tensor], Tensor]) -> Coded:
        changed: dict[str, Any] = {name: change(part) for name, part in self._tensors().items()}
        return replace(self, **changed)


def joined(parts: list[Coded]) -> Coded:
    """One matrix with the outputs of all, which have the same inputs, in groups that may differ."""
    first = parts[0]
    if any(part.kind != first.kind or part.inputs != first.inputs for part in parts):
        raise ValueError(f"matrices of different codes cannot be joined: {[part.kind for part in parts]}")
    if len(parts) == 1:
        return first
    names = first._tensors()
    together: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return replace(first, **together)


def gathered(parts: Iterator[Coded | Tensor], rows: int) -> Coded | Tensor:
    """One matrix of `rows` rows, put together without all parts in memory at once."""
    whole: Coded | Tensor | None = None
    first = 0
    for part in parts:
        if len(tensors_of(part)[0]) == rows:
            return part
        if whole is None:
            whole = part.changed(_empty(rows)) if isinstance(part, Coded) else _empty(rows)(part)
        for own, each in zip(tensors_of(whole), tensors_of(part), strict=True):
            own[first : first + len(each)] = each
        first += len(tensors_of(part)[0])
    if whole is None:
        raise ValueError("a matrix without rows")
    return whole


def tensors_of(part: Coded | Tensor) -> list[Tensor]:
    """Codes first."""
    return list(part._tensors().values()) if isinstance(part, Coded) else [part]


def _empty(rows: int) -> Callable[[Tensor], Tensor]:
    return lambda part: part.new_empty(rows, *part.shape[1:])


def taken(weight: Any, cut: Cut | None) -> Tensor:
    """A copy of the cut part of a tensor or of a slice of a file, or of all of it."""
    if cut is None:
        parts = [weight]
    else:
        outer = (slice(None),) * (cut.dim - (cut.number is not None))
        one = () if cut.number is None else (slice(cut.number, cut.number + 1),)
        parts = [weight[(*one, *outer, slice(first, last))] for first, last in cut.spans]
    if cut is not None and len(parts) > 1:
        copy = torch.cat(parts, cut.dim)
    else:
        copy = parts[0].clone(memory_format=torch.contiguous_format)  # a slice may be a view of the file
    return copy if cut is None or cut.number is None else copy[0]


def packed(code_NK: Tensor) -> Tensor:
    """4-bit codes, one in a byte, as two in a byte."""
    even = functional.pad(code_NK, (0, code_NK.shape[1] % 2))
    return even[:, ::2] | even[:, 1::2] << 4


def unpacked(codes_NC: Tensor) -> Tensor:
    """4-bit codes, one in a byte."""
    return torch.stack([codes_NC & 15, codes_NC >> 4], -1).flatten(1)
