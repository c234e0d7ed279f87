"""Formats that store 4-bit codes in blocks: bitsandbytes' nf4 and fp4, and MXFP4 of stacked experts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llama_ssp.models.formats.coded import Coded, Codes, joined, values
from llama_ssp.models.formats.layouts import Matrix, Stored
from llama_ssp.models.sharding import COLUMNS, Cut, Span

STATE = ".weight.quant_state.bitsandbytes__"
MXFP4_BLOCK = 32  # weights with one exponent
MAX_STATE_BYTES = 1 << 16


class FourBit(Matrix):
    """bitsandbytes: codes of all rows one after the other; the scales of blocks may be coded in turn."""

    def __init__(self, stored: Mapping[str, Stored], table: str) -> None:
        super().__init__(stored)
        codes, self.scale, state = stored[".weight"], stored[".weight.absmax"], stored[STATE + table]
        self.state = _state(state)
        shape, block = self.state.get("shape"), self.state.get("blocksize")
        if self.state.get("quant_type", table) != table:
            raise state.wrong("the table", self.state["quant_type"], table)
        if not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)):
            raise state.wrong("the shape", shape, "outputs and inputs")
        outputs, inputs = self.shape = tuple(shape)
        if type(block) is not int or block < 2 or inputs % block:
            raise state.wrong("the block size", block, f"one that divides the inputs, {inputs}")
        count = outputs * inputs
        codes.require("the shape", (codes.dtype, math.prod(codes.shape)), ("U8", count // 2))
        self.scale.require("the shape", math.prod(self.scale.shape), count // block)
        map_ = stored[".weight.quant_map"].read()
        if map_.shape != (16,) or not torch.equal(map_, values(table)):
            raise stored[".weight.quant_map"].wrong("the table", map_.tolist()[:16], f"that of {table}")
        self.nested = ".weight.nested_absmax" in stored
        self.scale.require("the type", self.scale.dtype, "U8" if self.nested else "F32")
        if self.nested:
            self._require_nested(state, count // block)
        self.kind, self.borders = Codes(table, block), (1, block)

    def _require_nested(self, state: Stored, scales: int) -> None:
        """What codes of scales need."""
        size, offset = self.state.get("nested_blocksize"), self.state.get("nested_offset")
        if type(size) is not int or size < 1 or type(offset) not in (int, float):
            raise state.wrong("the state", f"nested_blocksize {size!r}, nested_offset {offset!r}", "numbers")
        outer, table = self.stored[".weight.nested_absmax"], self.stored[".weight.nested_quant_map"]
        outer.require("the shape", outer.shape, (-(-scales // size),))
        table.require("the shape", table.shape, (256,))

    def block(self, rows: Span, columns: Span) -> Coded:
        """Whole rows are read: codes of some columns are no run of bytes."""
        inputs, group = self.shape[1], self.kind.group
        first, last = (row * inputs for row in rows)
        bytes_ = self.stored[".weight"].read((first // 2, -(-last // 2))).flatten()
        own = slice(columns[0] // 2, -(-columns[1] // 2))
        codes_NC = bytes_.view(-1, inputs // 2)[:, own]
        scale_NG = self._scales((first // group, last // group)).view(-1, inputs // group)
        scale_NG = scale_NG[:, columns[0] // group : columns[1] // group].clone()
        swapped_NC = codes_NC >> 4 | codes_NC << 4  # the first code is in the high half
        return Coded(self.kind, columns[1] - columns[0], swapped_NC, scale_NG)

    def _scales(self, span: Span) -> Tensor:
        scales = (
            self.scale.read(span) if len(self.scale.shape) == 1 else self.scale.read().flatten()[slice(*span)]
        )
        if not self.nested:
            return scales.float()
        outer = self.stored[".weight.nested_absmax"].read().float()
        table = self.stored[".weight.nested_quant_map"].read().float()
        blocks = torch.arange(*span) // int(self.state["nested_blocksize"])
        return table[scales.int()] * outer[blocks] + float(self.state["nested_offset"])


def _state(stored: Stored) -> dict[str, Any]:
    """The numbers that bitsandbytes writes as text into a tensor."""
    if stored.dtype != "U8" or math.prod(stored.shape) > MAX_STATE_BYTES:
        raise stored.wrong("the state", f"{stored.dtype} {stored.shape}", "text of some bytes")
    try:
        found = json.loads(bytes(stored.read().flatten().tolist()))
    except (ValueError, RecursionError) as error:
        raise stored.wrong("the state", error, "JSON") from None
    if not isinstance(found, dict):
        raise stored.wrong("the state", found, "a JSON object")
    return found


class Mxfp4Experts(Matrix):
    """One tensor of all experts: blocks of 32 codes and their exponents. As numbers it has inputs first."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        super().__init__(stored)
        blocks, scales = stored["_blocks"], stored["_scales"]
        if len(blocks.shape) != 4 or blocks.shape[3] != MXFP4_BLOCK // 2 or blocks.dtype != "U8":
            raise blocks.wrong(
                "the shape", f"{blocks.dtype} {blocks.shape}", "U8 (experts, outputs, blocks, 16)"
            )
        scales.require("the shape", (scales.dtype, scales.shape), ("U8", blocks.shape[:3]))
        experts, outputs, groups, _ = blocks.shape
        self.shape = experts, groups * MXFP4_BLOCK, outputs

    def read(self, cut: Cut | None) -> Coded:
        """The outputs of an expert, or of all, one after the other; a cut is of the numbers' dimensions.

        Scales are powers of two, which bf16 has.
        """
        blocks, scales = self.stored["_blocks"], self.stored["_scales"]
        experts, inputs, outputs = self.shape
        spans: dict[int, tuple[Span, ...]] = {1: ((0, inputs),), 2: ((0, outputs),)}
        if cut is not None:
            spans[cut.dim] = cut.spans
        ((first, last),), runs = spans[1], spans[2]
        groups, inside = (first // MXFP4_BLOCK, -(-last // MXFP4_BLOCK)), first % MXFP4_BLOCK
        found = []
        for expert in range(experts) if cut is None or cut.number is None else [cut.number]:
            one = expert, expert + 1
            codes = torch.cat([blocks.read(one, run, groups)[0] for run in runs]).flatten(1)
            exponent = torch.cat([scales.read(one, run, groups)[0] for run in runs])
            scale_NG = (exponent.float() - 127).exp2().bfloat16()
            part = Coded(Codes("e2m1", MXFP4_BLOCK), codes.shape[1] * 2, codes, scale_NG)
            found.append(part.cut(Cut(COLUMNS, ((inside, inside + last - first),))))
        return joined(found)
