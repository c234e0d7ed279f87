"""How each format of quantised checkpoints stores a matrix: the tensors of a layer, and what is read of them.

A `Matrix` says its shape from the headers of its tensors, and reads any part as `Coded`. A rank's part may
begin anywhere: what is read begins where the layout can be cut (a word of codes, a group), and is then cut.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from llama_ssp.errors import ModelError
from llama_ssp.models.folder import REFETCH
from llama_ssp.models.formats import coded
from llama_ssp.models.formats.coded import Coded, Codes, gathered, packed, taken, unpacked
from llama_ssp.models.formats.kept import BYTE_TABLES
from llama_ssp.models.sharding import COLUMNS, ROWS, Cut, Span, length

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where the codes of eight outputs are in their word
WORD = 32  # bits of the integers that hold codes


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    handle: Any
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(self.key).get_shape())

    @property
    def dtype(self) -> str:
        """The name that safetensors has for it: F32, I8, F8_E4M3."""
        return str(self.handle.get_slice(self.key).get_dtype())

    def read(self, *spans: Span) -> Tensor:
        """The part of these spans, one for each of the first dimensions, or all."""
        if not spans:
            whole: Tensor = self.handle.get_tensor(self.key)
            return whole
        part: Tensor = self.handle.get_slice(self.key)[tuple(slice(*span) for span in spans)]
        return part

    def require(self, what: str, found: object, allowed: object) -> None:
        if found != allowed:
            raise self.wrong(what, found, allowed)

    def wrong(self, what: str, found: object, allowed: object) -> ModelError:
        return ModelError(
            f"{what} of a quantised matrix is wrong",
            where=self.key,
            found=found,
            allowed=str(allowed),
            fix=REFETCH,
        )


class Matrix:
    """A quantised matrix on disk."""

    shape: tuple[int, ...]
    borders = (1, 1)  # outputs and inputs: whole numbers of them are read

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = stored

    def block(self, rows: Span, columns: Span) -> Coded | Tensor:
        """The part of these outputs and inputs, which lie on borders. A tensor if it cannot be kept coded."""
        raise NotImplementedError

    def read(self, cut: Cut | None) -> Coded | Tensor:
        """Some outputs after the other, because intermediate results take more memory than the codes."""
        dim, spans = (ROWS, ((0, self.shape[0]),)) if cut is None else (cut.dim, cut.spans)
        parts = chain.from_iterable(self._pieces(dim, span) for span in spans)
        return gathered(parts, sum(map(length, spans)) if dim == ROWS else self.shape[0])

    def _pieces(self, dim: int, span: Span) -> Iterator[Coded | Tensor]:
        """The span's outputs, or the span of inputs of some outputs after the other."""
        unit = self.borders[ROWS]
        border = self.borders[dim]
        wide = span[0] // border * border, min(-(-span[1] // border) * border, self.shape[dim])
        rows, columns = (wide, (0, self.shape[COLUMNS])) if dim == ROWS else ((0, self.shape[ROWS]), wide)
        step = max(coded.DECODED_AT_ONCE // max(1, length(columns)) // unit, 1) * unit
        for first in range(*rows, step):
            last = min(first + step, rows[1])
            found = self.block((first, last), columns)
            before = first if dim == ROWS else wide[0]
            end = min(last, span[1]) if dim == ROWS else span[1]
            own = max(before, span[0]) - before, end - before
            if own == (0, (last - first) if dim == ROWS else length(wide)):
                yield found
            else:
                cut = Cut(dim, (own,))
                yield found.cut(cut) if isinstance(found, Coded) else taken(found, cut)


Block = tuple[int, int]  # outputs and inputs that share a scale


class Scaled(Matrix):
    """Codes of a byte each in `weight`, and a grid of scales: FP8, int8, LLM.int8."""

    def __init__(
        self, stored: Mapping[str, Stored], scale: str, block: Block | None, wide: bool, unit: float = 1.0
    ) -> None:
        """`scale`: the name of the scales; `wide`: computes in fp32."""
        super().__init__(stored)
        weight = stored[".weight"]
        self.scale = stored[scale]
        self.wide = wide
        self.zero = stored.get(".weight_zero_point")
        if weight.dtype not in BYTE_TABLES or len(weight.shape) != 2:
            raise weight.wrong("the type", f"{weight.dtype} {weight.shape}", ", ".join(BYTE_TABLES))
        outputs, inputs = self.shape = weight.shape
        grid = self.scale.shape if len(self.scale.shape) == 2 else (math.prod(self.scale.shape), 1)
        self.rows = outputs if grid[0] == 1 else 1
        group = inputs
        if grid[0] not in (1, outputs) or grid[1] != 1:
            self.rows, group = block or (self.rows, -(-inputs // grid[1]))
        self.scale.require("the shape", grid, (-(-outputs // self.rows), -(-inputs // group)))
        if self.zero is not None:
            self.zero.require("the shape", self.zero.shape, self.scale.shape)
            self.zero.require("the type", self.zero.dtype, "I8")
        self.grid = grid
        self.group = group
        table = "uint8" if self.zero is not None else BYTE_TABLES[weight.dtype]
        self.kind = Codes(table, group if grid[1] > 1 else 0, unit)
        self.borders = 1, (group if grid[1] > 1 else 1)

    def block(self, rows: Span, columns: Span) -> Coded:
        codes_NC = self.stored[".weight"].read(rows, columns).view(torch.uint8)
        scale_NG = self._spread(self.scale, rows, columns)
        zero_NG = None
        if scale_NG.dtype in (torch.uint8, torch.float8_e8m0fnu):  # an exponent
            scale_NG = (scale_NG.view(torch.uint8).float() - 127).exp2()
        if self.wide:
            scale_NG = scale_NG.float()
        if self.zero is not None:  # int8 with zeros, as unsigned numbers
            zero_NG = self._spread(self.zero, rows, columns).view(torch.uint8) ^ 128
            codes_NC = codes_NC ^ 128
        return Coded(
            kind=self.kind,
            inputs=columns[1] - columns[0],
            codes_NC=codes_NC.clone(),
            scale_NG=scale_NG,
            zero_NG=zero_NG,
        )

    def _spread(self, stored: Stored, rows: Span, columns: Span) -> Tensor:
        """The part of the grid, repeated for every row."""
        grid = stored.read().reshape(self.grid)
        groups = slice(columns[0] // self.group, -(-columns[1] // self.group))
        own = torch.arange(*rows) // self.rows
        plain = torch.uint8 if grid.itemsize == 1 else grid.dtype
        return grid[:, groups].view(plain)[own].view(grid.dtype)


class PackQuantized(Matrix):
    """compressed-tensors' integers of 4 or 8 bits: codes of a row one after the other, in 32-bit words."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        super().__init__(stored)
        words = stored[".weight_packed"]
        self.scale = stored[".weight_scale"]
        self.zero = stored.get(".weight_zero_point")
        size = stored[".weight_shape"]
        if size.shape != (2,) or len(words.shape) != 2:
            raise size.wrong("the shape", (size.shape, words.shape), "two numbers")
        outputs, inputs = self.shape = tuple(int(number) for number in size.read())
        fitting = [bits for bits in (4, 8) if words.shape == (outputs, -(-inputs * bits // WORD))]
        if not fitting or words.dtype != "I32":
            raise words.wrong("the shape", f"{words.dtype} {words.shape}", f"4 or 8 bits for {self.shape}")
        (self.bits,) = fitting
        groups = self.scale.shape[1] if len(self.scale.shape) == 2 else 1
        if groups == 0 or inputs % groups:
            raise self.scale.wrong("the shape", self.scale.shape, f"groups that divide {inputs}")
        self.group = inputs // groups
        self.scale.require("the shape", self.scale.shape, (outputs, groups))
        if self.zero is not None:
            self.zero.require("the shape", self.zero.shape, (-(-outputs * self.bits // WORD), groups))
        sign = "u" if self.zero is not None else ""
        self.kind = Codes(f"{sign}int{self.bits}", self.group if groups > 1 else 0)
        per = WORD // self.bits
        self.borders = per, math.lcm(per, self.group) if groups > 1 else per

    def block(self, rows: Span, columns: Span) -> Coded:
        per = WORD // self.bits
        groups = (columns[0] // self.group, -(-columns[1] // self.group))
        words = self.stored[".weight_packed"].read(rows, (columns[0] // per, -(-columns[1] // per)))
        codes_NC = bytes_of(words)
        if self.bits == 8 and self.zero is None:
            codes_NC ^= 128  # code 0 is -128
        inputs = columns[1] - columns[0]
        codes_NC = codes_NC[:, : -(-inputs * self.bits // 8)].contiguous()
        zero_NG = None
        if self.zero is not None:
            zeros = self.zero.read((rows[0] // per, -(-rows[1] // per)), groups)
            zero_NG = codes_of(zeros.T, self.bits)[:, : rows[1] - rows[0]].T.contiguous()
        return Coded(
            kind=self.kind,
            inputs=inputs,
            codes_NC=codes_NC,
            scale_NG=self.scale.read(rows, groups).clone(),
            zero_NG=zero_NG,
        )


class ByInput(Matrix):
    """GPTQ and AWQ: inputs first, and a row of scales and zeros for each group of inputs."""

    def __init__(
        self, stored: Mapping[str, Stored], bits: int, group: int, inputs: int, outputs: int
    ) -> None:
        super().__init__(stored)
        zeros = stored[".qzeros"]
        self.scale = stored[".scales"]
        self.bits = bits
        self.shape = (outputs, inputs)
        self.per = WORD // bits
        self.group = group if group > 0 else inputs
        self.groups = -(-inputs // self.group)
        self.scale.require("the shape", self.scale.shape, (self.groups, outputs))
        zeros.require("the shape", zeros.shape, (self.groups, -(-outputs // self.per)))
        zeros.require("the type", zeros.dtype, "I32")
        self.kind = Codes(f"uint{bits}", self.group if self.groups > 1 else 0)
        self.borders = self.per, math.lcm(self.per, self.group) if self.groups > 1 else self.per

    def _coded(self, codes_NC: Tensor, rows: Span, columns: Span, zero_GN: Tensor, groups: Span) -> Coded:
        outputs = rows[1] - rows[0]
        scale_NG = self.scale.read(groups, rows).T.contiguous().clone()
        zero_NG = zero_GN[:, :outputs].T.contiguous()
        return Coded(
            kind=self.kind,
            inputs=columns[1] - columns[0],
            codes_NC=codes_NC,
            scale_NG=scale_NG,
            zero_NG=zero_NG,
        )

    def _words(self, rows: Span) -> Span:
        return rows[0] // self.per, -(-rows[1] // self.per)

    def _groups(self, columns: Span) -> Span:
        return columns[0] // self.group, -(-columns[1] // self.group)


class Awq(ByInput):
    """Codes of eight outputs in a word, in an order of their own."""

    def __init__(self, stored: Mapping[str, Stored], bits: int, group: int) -> None:
        codes = stored[".qweight"]
        codes.require("the type", codes.dtype, "I32")
        inputs, words = codes.shape
        super().__init__(stored, bits, group, inputs, words * WORD // bits)

    def block(self, rows: Span, columns: Span) -> Coded:
        words = self._words(rows)
        groups = self._groups(columns)
        code_KN = self._ordered(self.stored[".qweight"].read(columns, words))[:, : rows[1] - rows[0]]
        zero_GN = self._ordered(self.stored[".qzeros"].read(groups, words))
        return self._coded(packed(code_KN.T.contiguous()), rows, columns, zero_GN, groups)

    def _ordered(self, words: Tensor) -> Tensor:
        codes = codes_of(words, self.bits)
        return codes.view(len(codes), -1, self.per)[:, :, AWQ_ORDER].flatten(1)


class Gptq(ByInput):
    """Codes of eight inputs in a word; with act-order each input says its group."""

    def __init__(self, stored: Mapping[str, Stored], bits: int, group: int, less_one: bool) -> None:
        """`less_one`: zeros are stored less one (the format's first version)."""
        codes = stored[".qweight"]
        self.less_one = less_one
        codes.require("the type", codes.dtype, "I32")
        rows, outputs = codes.shape
        order = stored.get(".g_idx")
        inputs = order.shape[0] if order is not None else rows * WORD // bits
        codes.require("the shape", codes.shape, (-(-inputs * bits // WORD), outputs))
        super().__init__(stored, bits, group, inputs, outputs)
        self.order_K: Tensor | None = None
        if order is not None:
            order_K = order.read().long()
            if not 0 <= int(order_K.min()) <= int(order_K.max()) < self.groups:
                found = int(order_K.min()), int(order_K.max())
                raise order.wrong("a group", found, f"0..{self.groups - 1}")
            if not torch.equal(order_K, torch.arange(inputs) // self.group):
                self.order_K = order_K
                self.borders = (self.per, self.per)

    def block(self, rows: Span, columns: Span) -> Coded | Tensor:
        per = self.per
        order_K = self.order_K
        groups = self._groups(columns) if order_K is None else (0, self.groups)
        words = self.stored[".qweight"].read((columns[0] // per, -(-columns[1] // per)), rows)
        codes_NC = bytes_of(words.T)[:, : -(-(columns[1] - columns[0]) * self.bits // 8)]
        zeros = self.stored[".qzeros"].read(groups, self._words(rows))
        if self.less_one:  # in all codes of a word at once, as they were taken away
            zeros = zeros + (0x11111111 if self.bits == 4 else 0x01010101)
        zero_GN = codes_of(zeros, self.bits)
        found = self._coded(codes_NC.contiguous(), rows, columns, zero_GN, groups)
        return found if order_K is None else self._reordered(found, order_K[slice(*columns)])

    @staticmethod
    def _reordered(part: Coded, order_K: Tensor) -> Tensor:
        """The weights as numbers, where a group is not a run of inputs."""
        assert part.zero_NG is not None
        scale_NK = part.scale_NG[:, order_K]
        zero_NK = part.zero_NG[:, order_K]
        every = Coded(
            kind=Codes(part.kind.table, 1),
            inputs=part.inputs,
            codes_NC=part.codes_NC,
            scale_NG=scale_NK,
            zero_NG=zero_NK,
        )
        return every.decoded(part.scale_NG.dtype)


def codes_of(words: Tensor, bits: int) -> Tensor:
    """The codes in 32-bit words, from the lowest bits up, along the last dimension, one in a byte."""
    found = bytes_of(words)
    return unpacked(found) if bits == 4 else found


def bytes_of(words: Tensor) -> Tensor:
    """In memory of their own; `contiguous` would keep odd strides of a single column."""
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
