"""Formats that store 4-bit codes in blocks: bitsandbytes' nf4 and fp4, NVFP4, MXFP4 of stacked experts."""

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from llama_ssp.models.formats.coded import Coded, Codes, joined, values
from llama_ssp.models.formats.kept import STORAGE_BYTES
from llama_ssp.models.formats.layouts import Matrix, Stored
from llama_ssp.models.formats.quantised_config import NVFP4_GROUP
from llama_ssp.models.sharding import COLUMNS, Cut, Span

STATE = ".weight.quant_state.bitsandbytes__"
MXFP4_BLOCK = 32  # weights with one exponent
MAX_STATE_BYTES = 1 << 16


class FourBit(Matrix):
    """bitsandbytes: codes of all rows one after the other; the scales of blocks may be coded in turn."""

    def __init__(self, stored: Mapping[str, Stored], table: str) -> None:
        super().__init__(stored)
        codes = stored[".weight"]
        self.scale = stored[".weight.absmax"]
        state = stored[STATE + table]
        if math.prod(state.shape) > MAX_STATE_BYTES:
            raise state.wrong("the state", state.shape, f"{MAX_STATE_BYTES} bytes")
        self.state = json.loads(bytes(state.read().flatten().tolist()))
        block = int(self.state["blocksize"])
        self.nested = ".weight.nested_absmax" in stored
        outputs, inputs = self.shape = tuple(map(int, self.state["shape"]))
        if block < 2 or inputs % block or self.state.get("quant_type", table) != table:
            raise state.wrong("the state", self.state, f"{table} in blocks that divide the inputs")
        scales = outputs * inputs // block
        # Codes may stand in the place of wider numbers, so that FSDP can shard them with the others.
        self.storage = STORAGE_BYTES.get(codes.dtype, 0)
        stored_bytes = math.prod(codes.shape) * self.storage
        if not stored_bytes or inputs % (2 * self.storage):
            raise codes.wrong("the type", codes.dtype, ", ".join(STORAGE_BYTES))
        codes.require("the number of bytes", stored_bytes, outputs * inputs // 2)
        self.scale.require("the shape", math.prod(self.scale.shape), scales)
        self.scale.require("the type", self.scale.dtype, "U8" if self.nested else "F32")
        map_ = stored[".weight.quant_map"].read()
        if map_.shape != (16,) or not torch.equal(map_, values(table)):
            raise stored[".weight.quant_map"].wrong("the table", map_.tolist()[:16], f"that of {table}")
        if self.nested:
            size = int(self.state["nested_blocksize"])
            _ = float(self.state["nested_offset"])
            outer = stored[".weight.nested_absmax"]
            nested_map = stored[".weight.nested_quant_map"]
            outer.require("the shape", outer.shape, (-(-scales // max(size, 1)),))
            nested_map.require("the shape", nested_map.shape, (256,))
        self.kind = Codes(table, block)
        self.borders = (1, block)

    def block(self, rows: Span, columns: Span) -> Coded:
        """Whole rows are read: codes of some columns are no run of bytes."""
        inputs = self.shape[1]
        group = self.kind.group
        first, last = (row * inputs for row in rows)
        per = 2 * self.storage  # codes of a number in the file
        bytes_ = self.stored[".weight"].read((first // per, last // per)).flatten().view(torch.uint8)
        own = slice(columns[0] // 2, -(-columns[1] // 2))
        codes_NC = bytes_.view(-1, inputs // 2)[:, own]
        scale_NG = self._scales((first // group, last // group)).view(-1, inputs // group)
        scale_NG = scale_NG[:, columns[0] // group : columns[1] // group].clone()
        swapped_NC = codes_NC >> 4 | codes_NC << 4  # the first code is in the high half
        return Coded(kind=self.kind, inputs=columns[1] - columns[0], codes_NC=swapped_NC, scale_NG=scale_NG)

    def _scales(self, span: Span) -> Tensor:
        flat = len(self.scale.shape) == 1
        scales = self.scale.read(span) if flat else self.scale.read().flatten()[slice(*span)]
        if not self.nested:
            return scales.float()
        outer = self.stored[".weight.nested_absmax"].read().float()
        table = self.stored[".weight.nested_quant_map"].read().float()
        blocks = torch.arange(*span) // int(self.state["nested_blocksize"])
        return table[scales.int()] * outer[blocks] + float(self.state["nested_offset"])


class Nvfp4(Matrix):
    """Two codes in a byte, a scale in FP8 for 16 inputs, and one scale of the whole matrix in fp32.

    compressed-tensors stores what the weights are divided by, and modelopt what they are multiplied by.
    """

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        super().__init__(stored)
        self.divides = ".weight_global_scale" in stored
        self.codes = stored[".weight_packed" if self.divides else ".weight"]
        self.scale = stored[".weight_scale"]
        self.whole = stored[".weight_global_scale" if self.divides else ".weight_scale_2"]
        if self.codes.dtype != "U8" or len(self.codes.shape) != 2:
            raise self.codes.wrong("the type", f"{self.codes.dtype} {self.codes.shape}", "U8, two dimensions")
        outputs, half = self.codes.shape
        self.shape = (outputs, 2 * half)
        groups = -(-2 * half // NVFP4_GROUP)
        self.scale.require("the shape", (self.scale.dtype, self.scale.shape), ("F8_E4M3", (outputs, groups)))
        self.whole.require("the shape", (self.whole.dtype, math.prod(self.whole.shape)), ("F32", 1))
        self.kind = Codes("e2m1", NVFP4_GROUP)
        self.borders = (1, NVFP4_GROUP)

    def block(self, rows: Span, columns: Span) -> Coded:
        groups = (columns[0] // NVFP4_GROUP, -(-columns[1] // NVFP4_GROUP))
        scale_NG = self.scale.read(rows, groups).float()
        whole = self.whole.read().flatten()
        scale_NG = scale_NG / whole if self.divides else scale_NG * whole
        codes_NC = self.codes.read(rows, (columns[0] // 2, -(-columns[1] // 2))).clone()
        return Coded(kind=self.kind, inputs=columns[1] - columns[0], codes_NC=codes_NC, scale_NG=scale_NG)


class Mxfp4Experts(Matrix):
    """One tensor of all experts: blocks of 32 codes and their exponents. As numbers it has inputs first."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        super().__init__(stored)
        blocks = stored["_blocks"]
        scales = stored["_scales"]
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
        blocks = self.stored["_blocks"]
        scales = self.stored["_scales"]
        experts, inputs, outputs = self.shape
        spans: dict[int, tuple[Span, ...]] = {1: ((0, inputs),), 2: ((0, outputs),)}
        if cut is not None:
            spans[cut.dim] = cut.spans
        ((first, last),) = spans[1]
        runs = spans[2]
        groups = (first // MXFP4_BLOCK, -(-last // MXFP4_BLOCK))
        inside = first % MXFP4_BLOCK
        found = []
        for expert in range(experts) if cut is None or cut.number is None else [cut.number]:
            one = expert, expert + 1
            codes = torch.cat([blocks.read(one, run, groups)[0] for run in runs]).flatten(1)
            exponent = torch.cat([scales.read(one, run, groups)[0] for run in runs])
            scale_NG = (exponent.float() - 127).exp2().bfloat16()
            part = Coded(
                kind=Codes("e2m1", MXFP4_BLOCK), inputs=codes.shape[1] * 2, codes_NC=codes, scale_NG=scale_NG
            )
            found.append(part.cut(Cut(COLUMNS, ((inside, inside + last - first),))))
        return joined(found)
