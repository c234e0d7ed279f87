"""The kernel of coded.py for GPUs.

A program has a few outputs and reads their codes from end to end, with enough reads under way to keep the
memory busy. Codes become numbers of 16 bits for the tensor cores, exactly but for nf4 and fp4, and the sum
over a group is scaled. So a weight is read once for up to 16 rows.

torch's own products (2.13) are no substitute: `_weight_int4pack_mm` takes bf16 scales alone, and
`_scaled_mm` quantises inputs.

Not yet run on a GPU: the sizes below are estimates. It is tested in triton's interpreter, and compiled for
every generation of GPUs (tests/test_triton.py).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.models.formats.coded import TABLES, values

FEW, MANY = 16, 64  # rows of a program: of a step, and of a prompt
OUTPUTS = {FEW: 32, MANY: 128}  # of a program
HOW = {FEW: (4, 5), MANY: (8, 3)}  # warps, and steps under way at once
INPUTS = 128  # of a step of a program at most: some KiB of codes
# How a code becomes a number, unless the table says it: of integers the bits that are flipped, and what is
# then subtracted; of floating point the bits behind the point.
INTEGERS = {"uint4": (0, 0), "int4": (0, 8), "uint8": (0, 0), "int8": (128, 128)}
FLOATS = {"e2m1": 1, "e4m3": 3}
FACTORS: Any = (
    None  # what is multiplied: as x; triton's interpreter has no 16-bit products, and needs float32
)


def linear_coded(
    x: Tensor, codes: Tensor, table: Tensor, scales: Tensor, offsets: Tensor | None, bias: Tensor | None,
    outputs: int, group: int, table_number: int,
) -> Tensor:  # fmt: skip
    """y = x W^T + bias, with sums in 32 bits; codes, scales and offsets have a row for each output."""
    dense, inputs = x.contiguous(), x.shape[-1]
    y = x.new_empty(*x.shape[:-1], outputs)
    rows = x.numel() // inputs
    if rows == 0:
        return y
    factors = FACTORS or {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(x.dtype, tl.float32)
    sizes = constants(rows, inputs, group, list(TABLES)[table_number])
    grid = (triton.cdiv(outputs, sizes["OUTPUTS"]), triton.cdiv(rows, sizes["ROWS"]))
    warps, stages = HOW[sizes["ROWS"]]
    device_of: Any = torch.cuda.device_of  # a kernel starts on the current device, which need not be x's
    with device_of(x):
        multiply[grid](
            dense, codes, table, scales, offsets, bias, y, rows, outputs, inputs, codes.shape[1],
            scales.shape[1], group, **sizes, FACTORS=factors, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y


def constants(rows: int, inputs: int, group: int, table: str) -> dict[str, Any]:
    """Of `multiply`; a step's inputs are of one group, and a power of two."""
    step = INPUTS if group >= inputs else min(group & -group, INPUTS)
    own = FEW if rows <= FEW else MANY
    bits, fraction = 4 if len(values(table)) == 16 else 8, FLOATS.get(table, 0 if table in INTEGERS else -1)
    flip, lowest = INTEGERS.get(table, (0, 0))
    codes = {"BITS": bits, "FRACTION": fraction, "FLIP": flip, "LOWEST": lowest}
    return {**codes, "ROWS": own, "OUTPUTS": OUTPUTS[own], "INPUTS": step}


# triton evaluates annotations, and knows no global names: only tl.constexpr is allowed.
def _multiply(
    x_ptr, code_ptr, table_ptr, scale_ptr, offset_ptr, bias_ptr, y_ptr,
    rows, outputs, inputs, bytes_, groups, group,
    BITS: tl.constexpr, FRACTION: tl.constexpr, FLIP: tl.constexpr, LOWEST: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = 8 // BITS  # codes of a byte: inputs 0, 2, 4 ... and 1, 3, 5 ...
    SIGN: tl.constexpr = 1 << (BITS - 1)
    TIMES: tl.constexpr = 2.0 ** (128 - 2 ** (BITS - 2 - FRACTION))
    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_M = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    byte_K = tl.arange(0, INPUTS // HALVES)
    real_N, real_M = output_N < outputs, row_M < rows
    place_N = output_N.to(tl.int64)
    code_ptr_NK = code_ptr + place_N[:, None] * bytes_ + byte_K[None, :]
    x_ptr_KM = x_ptr + row_M.to(tl.int64)[None, :] * inputs + byte_K[:, None] * HALVES
    scale_ptr_N = scale_ptr + place_N * groups
    sum_NM = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for first in range(0, inputs, INPUTS):
        byte = first // HALVES
        mask_NK = real_N[:, None] & (byte + byte_K < bytes_)[None, :]
        code_NK = tl.load(code_ptr_NK + byte, mask=mask_NK, other=0).to(tl.int32)
        part_NM = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
        x_M = tl.zeros((ROWS,), dtype=tl.float32)
        for half in tl.static_range(HALVES):
            own_NK = (code_NK >> (4 * half)) & ((1 << BITS) - 1)
            if FRACTION == 0:
                number_NK = ((own_NK ^ FLIP) - LOWEST).to(FACTORS)
            elif FRACTION > 0:  # as bits of a number in 32, which is then too small by a power of two
                bits_NK = ((own_NK & (SIGN - 1)) << (23 - FRACTION)) | ((own_NK & SIGN) << (32 - BITS))
                wide_NK = bits_NK.to(tl.float32, bitcast=True) * TIMES
                if BITS == 8:
                    wide_NK = tl.where((own_NK & 127) == 127, float("nan"), wide_NK)
                number_NK = wide_NK.to(FACTORS)
            else:
                number_NK = tl.load(table_ptr + own_NK).to(FACTORS)
            real_K = first + byte_K * HALVES + half < inputs
            x_mask_KM = real_K[:, None] & real_M[None, :]
            x_KM = tl.load(x_ptr_KM + first + half, mask=x_mask_KM, other=0.0).to(FACTORS)
            part_NM = tl.dot(number_NK, x_KM, part_NM, input_precision="ieee")
            if offset_ptr is not None:
                x_M += tl.sum(x_KM.to(tl.float32), 0)
        scale_N = tl.load(scale_ptr_N + first // group, mask=real_N, other=0.0).to(tl.float32)
        sum_NM += part_NM * scale_N[:, None]
        if offset_ptr is not None:
            offset_ptr_N = offset_ptr + place_N * groups + first // group
            offset_N = tl.load(offset_ptr_N, mask=real_N, other=0).to(tl.float32)
            if offset_ptr.dtype.element_ty == tl.uint8:  # a zero
                offset_N *= scale_N
            sum_NM -= offset_N[:, None] * x_M[None, :]
    if bias_ptr is not None:
        sum_NM += tl.load(bias_ptr + output_N, mask=real_N, other=0.0).to(tl.float32)[:, None]
    y_ptr_NM = y_ptr + row_M[None, :].to(tl.int64) * outputs + output_N[:, None]
    tl.store(y_ptr_NM, sum_NM.to(y_ptr.dtype.element_ty), mask=real_N[:, None] & real_M[None, :])


# One program for all numbers of rows of a step.
multiply: Any = triton.jit(_multiply, do_not_specialize=["rows", "groups", "group"])
