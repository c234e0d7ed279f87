"""The kernels of coded.py for GPUs: `multiply_few` for steps, `multiply` for prompts.

A program has a few outputs and reads their codes from end to end, with enough reads under way to keep the
memory busy. Codes become numbers of 16 bits for the tensor cores, exactly but for nf4 and fp4, and the sum
over a group is scaled. So a weight is read once for up to 8 rows. In a step each warp of a program has some
of the inputs: warps with the same ones would each decode the same codes.

torch's own products (2.13) are no substitute: `_weight_int4pack_mm` takes bf16 scales alone, and
`_scaled_mm` quantises inputs.

It is tested in triton's interpreter, without what is in PTX, and compiled for every generation of GPUs
(tests/test_triton.py), and tested on a GPU (tests/gpu).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.models.formats.coded import TABLES, values
from llama_ssp.models.kernels.experts_triton import found_by, rows_of
from llama_ssp.models.kernels.kernel_sizes import MOST_PAIRS

FEW = 16  # rows of a step at most
ROWS = (16 if torch.version.hip else 8, 64)  # of a program, of a step and of a prompt; AMD multiplies 16
OUTPUTS = (16, 128)
PARTS = 4  # of the inputs, in a step: a warp each
HOW = ((PARTS, 3), (8, 3))  # warps, and steps under way at once
INPUTS = 128  # of a warp's step, or of a step of a program, at most: some KiB of codes
# How a code becomes a number, unless the table says it: of integers the bits that are flipped, and what is
# then subtracted; of floating point the bits behind the point. The bits of an integer become the last ones of
# a large number in 32 bits, which is subtracted again: a GPU converts integers 8 times as slowly as it adds.
INTEGERS = {"uint4": (0, 0), "int4": (0, 8), "uint8": (0, 0), "int8": (128, 128)}
FLOATS = {"e2m1": 1, "e4m3": 3}
# The same of four bytes at a time, in bf16: a byte behind 0x43 is 128 and its last 7 bits. A signed byte is
# that less 128, or less 256 if its first bit is set; codes of 4 bits are left with 128 too much. It is PTX,
# which AMD's GPUs do not have.
QUICK_8: Any = tl.constexpr("""{
    .reg .b32 last, sign, a, b, c, d, minus;
    and.b32 last, $2, 0x7f7f7f7f;
    and.b32 sign, $2, 0x80808080;
    prmt.b32 a, last, 0x43434343, 0x4140;
    prmt.b32 b, last, 0x43434343, 0x4342;
    prmt.b32 c, sign, 0x43434343, 0x4140;
    prmt.b32 d, sign, 0x43434343, 0x4342;
    mov.b32 minus, 0xbf80bf80;
    fma.rn.bf16x2 $0, c, minus, a;
    fma.rn.bf16x2 $1, d, minus, b;
}""")
QUICK_4: Any = tl.constexpr("""{
    .reg .b32 low, high;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, 0x43434343, 0x4140;
    prmt.b32 $1, low, 0x43434343, 0x4342;
    prmt.b32 $2, high, 0x43434343, 0x4140;
    prmt.b32 $3, high, 0x43434343, 0x4342;
}""")
QUICK = ("int8", "uint4", "int4")
FACTORS: Any = None  # what is multiplied: as x; triton's interpreter, without 16-bit products, needs float32


def linear_coded(
    x: Tensor,
    codes: Tensor,
    table: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    outputs: int,
    group: int,
    table_number: int,
    *,
    wide: bool = False,
    expert_P: Tensor | None = None,
) -> Tensor:
    """Computes the operators of coded.py: y = x W^T + bias, with sums in 32 bits.

    Codes, scales and offsets have a row for each output. With the experts of pairs, as in experts_triton.py,
    they and the bias are those of all experts, and the result has a row for each pair.
    """
    inputs = x.shape[-1]
    shape = x.shape[:-1] if expert_P is None else expert_P.shape
    y = x.new_empty(*shape, outputs, dtype=torch.float32 if wide else x.dtype)
    rows = shape.numel()
    if rows == 0:
        return y

    factors = FACTORS or {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(x.dtype, tl.float32)
    experts = 0 if expert_P is None else len(codes)
    few = min(FEW * experts, MOST_PAIRS) if experts else FEW
    many = rows > few
    sizes = constants(many, inputs, group, list(TABLES)[table_number], factors is tl.bfloat16)
    programs = triton.cdiv(rows, sizes["ROWS"]) + experts  # the last one of each expert may have few rows
    if experts and not many:
        programs = rows

    kernel = multiply if many else multiply_few
    search: dict[str, Any] = {"expert_ptr": None, "start_ptr": None, "SPAN": 0}
    if expert_P is not None:
        search = found_by(expert_P, experts, many)
    device_of: Any = torch.cuda.device_of  # a kernel starts on the current device, which need not be x's
    with device_of(x):
        kernel[(triton.cdiv(outputs, sizes["OUTPUTS"]), programs)](
            x_ptr=x.contiguous(),
            code_ptr=codes,
            table_ptr=table,
            scale_ptr=scales,
            offset_ptr=offsets,
            bias_ptr=bias,
            y_ptr=y,
            rows=rows,
            outputs=outputs,
            inputs=inputs,
            bytes_=codes.shape[-1],
            groups=scales.shape[-1],
            group=group,
            SHARE=rows * inputs // x.numel(),  # pairs with one row of x
            FACTORS=factors,
            **search,
            **sizes,
        )
    return y


def constants(many: bool, inputs: int, group: int, table: str, in_bf16: bool) -> dict[str, Any]:
    """Returns what the kernel for few or many rows is compiled with. INPUTS taken together share a scale."""
    fraction = -1  # the table is read
    if table in INTEGERS:
        fraction = 0
    elif table in FLOATS:
        fraction = FLOATS[table]
    flip, lowest = INTEGERS.get(table, (0, 0))
    warps, stages = HOW[many]
    sizes = {
        "BITS": 4 if len(values(table)) == 16 else 8,
        "FRACTION": fraction,
        "FLIP": flip,
        "LOWEST": lowest,
        "QUICK": in_bf16 and table in QUICK and torch.version.hip is None,
        "ROWS": ROWS[many],
        "OUTPUTS": OUTPUTS[many],
        "INPUTS": INPUTS if group >= inputs else min(group & -group, INPUTS),
        "num_warps": warps,
        "num_stages": stages if fraction >= 0 else 1,  # numbers of a table would fill the memory
    }
    return sizes if many else {**sizes, "PARTS": PARTS}


# triton evaluates annotations, and knows no global names: only tl.constexpr is allowed.
def _numbers(
    code, offset, table_ptr, HAS_ZERO: tl.constexpr,
    BITS: tl.constexpr, FRACTION: tl.constexpr, FLIP: tl.constexpr, LOWEST: tl.constexpr,
    QUICK: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """The numbers of bytes of codes, less a zero: of first codes, and of second ones if a byte has two."""
    if QUICK and BITS == 8:
        first = tl.inline_asm_elementwise(QUICK_8, "=r,=r,r", [code], tl.bfloat16, True, 4)
        if HAS_ZERO:
            first -= offset.to(FACTORS)
        second = first
    elif QUICK:
        first, second = tl.inline_asm_elementwise(
            QUICK_4, "=r,=r,=r,=r,r", [code], (tl.bfloat16, tl.bfloat16), True, 4
        )
        lowest = (offset + (128 + LOWEST)).to(FACTORS)
        first -= lowest
        second -= lowest
    else:
        first = portable(code, offset, table_ptr, 0, HAS_ZERO, BITS, FRACTION, FLIP, LOWEST).to(FACTORS)
        second = first
        if BITS == 4:
            second = portable(code, offset, table_ptr, 1, HAS_ZERO, BITS, FRACTION, FLIP, LOWEST).to(FACTORS)
    return first, second


def _portable(
    code, offset, table_ptr, half: tl.constexpr, HAS_ZERO: tl.constexpr,
    BITS: tl.constexpr, FRACTION: tl.constexpr, FLIP: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Decodes one half of a pair of codes, in 32 bits, by any table."""
    SIGN: tl.constexpr = 1 << (BITS - 1)
    TIMES: tl.constexpr = 2.0 ** (128 - 2 ** (BITS - 2 - FRACTION))
    LARGE: tl.constexpr = 2.0 ** (23 - 4 * half)
    code = code.to(tl.int32)
    if FRACTION == 0:
        if BITS == 8:
            wide = (code ^ (150 << 23 | FLIP)).to(tl.float32, bitcast=True)
        else:
            wide = (code & (15 << 4 * half) | (150 - 4 * half << 23)).to(tl.float32, bitcast=True)
        number = wide - (offset + (LARGE + LOWEST))
    else:
        bits_of_half = (code >> (4 * half)) & ((1 << BITS) - 1)
        if FRACTION > 0:  # as bits of a number in 32, which is then too small by a power of two
            magnitude = (bits_of_half & (SIGN - 1)) << (23 - FRACTION)
            bits = magnitude | ((bits_of_half & SIGN) << (32 - BITS))
            number = bits.to(tl.float32, bitcast=True) * TIMES
            if BITS == 8:
                number = tl.where((bits_of_half & 127) == 127, float("nan"), number)
        else:
            number = tl.load(table_ptr + bits_of_half)
        if HAS_ZERO:
            number -= offset
    return number


def _multiply_few(
    x_ptr, code_ptr, table_ptr, scale_ptr, offset_ptr, bias_ptr, y_ptr,
    rows, outputs, inputs, bytes_, groups, group, expert_ptr, start_ptr,
    BITS: tl.constexpr, FRACTION: tl.constexpr, FLIP: tl.constexpr, LOWEST: tl.constexpr,
    QUICK: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SHARE: tl.constexpr, SPAN: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Multiplies up to ROWS rows (M) with OUTPUTS outputs (N), for a step."""
    HALVES: tl.constexpr = 8 // BITS  # codes of a byte: inputs 0, 2, 4 ... and 1, 3, 5 ...
    HAS_OFFSET: tl.constexpr = offset_ptr is not None
    HAS_ZERO: tl.constexpr = HAS_OFFSET and offset_ptr.dtype.element_ty == tl.uint8
    BYTES: tl.constexpr = INPUTS // HALVES
    expert, row_M, count = rows_of(tl.program_id(1), expert_ptr, start_ptr, rows, SPAN, ROWS)
    if count <= 0:
        return

    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part_P = tl.arange(0, PARTS)
    real_N = output_N < outputs
    real_M = tl.arange(0, ROWS) < count
    place_N = expert * outputs + output_N.to(tl.int64)
    byte_PK = part_P[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    input_PK = part_P[:, None] * INPUTS + tl.arange(0, INPUTS)[None, :]
    code_ptr_PNK = code_ptr + (place_N * bytes_)[None, :, None] + byte_PK[:, None, :]
    x_ptr_PMK = x_ptr + ((row_M // SHARE).to(tl.int64) * inputs)[None, :, None] + input_PK[:, None, :]

    # Each warp sums over a part (P) of the inputs. A step takes PARTS * INPUTS of them.
    sum_PNM = tl.zeros((PARTS, OUTPUTS, ROWS), dtype=tl.float32)
    for first in range(0, inputs, INPUTS * PARTS):
        byte = first // HALVES
        mask_PNK = real_N[None, :, None] & (byte + byte_PK < bytes_)[:, None, :]
        code_PNK = tl.load(code_ptr_PNK + byte, mask=mask_PNK, other=0)
        mask_PMK = real_M[None, :, None] & (first + input_PK < inputs)[:, None, :]
        x_PMK = tl.load(x_ptr_PMK + first, mask=mask_PMK, other=0.0).to(FACTORS)

        start_P = first + part_P * INPUTS
        place_PN = place_N[None, :] * groups + (start_P // group)[:, None]
        real_PN = real_N[None, :] & (start_P < inputs)[:, None]
        scale_PN = tl.load(scale_ptr + place_PN, mask=real_PN, other=0.0).to(tl.float32)
        zero_PN1 = tl.zeros((1, 1, 1), dtype=tl.float32)
        if HAS_OFFSET:
            offset_PN = tl.load(offset_ptr + place_PN, mask=real_PN, other=0).to(tl.float32)
            if HAS_ZERO:
                zero_PN1 = offset_PN[:, :, None]
        first_PNK, second_PNK = numbers(
            code_PNK, zero_PN1, table_ptr, HAS_ZERO, BITS, FRACTION, FLIP, LOWEST, QUICK, FACTORS
        )

        part_PNM = tl.zeros((PARTS, OUTPUTS, ROWS), dtype=tl.float32)
        if HALVES == 2:
            even_PMK, odd_PMK = tl.split(tl.reshape(x_PMK, (PARTS, ROWS, BYTES, 2)))
            x_PKM = tl.permute(even_PMK, (0, 2, 1))
            odd_PKM = tl.permute(odd_PMK, (0, 2, 1))
            part_PNM = tl.dot(second_PNK, odd_PKM, part_PNM, input_precision="ieee")
        else:
            x_PKM = tl.permute(x_PMK, (0, 2, 1))
        part_PNM = tl.dot(first_PNK, x_PKM, part_PNM, input_precision="ieee")
        sum_PNM += part_PNM * scale_PN[:, :, None]
        if HAS_OFFSET and not HAS_ZERO:
            x_PM = tl.sum(x_PMK.to(tl.float32), 2)
            sum_PNM -= offset_PN[:, :, None] * x_PM[:, None, :]

    sum_NM = tl.sum(sum_PNM, 0)
    if bias_ptr is not None:
        sum_NM += tl.load(bias_ptr + place_N, mask=real_N, other=0.0).to(tl.float32)[:, None]
    y_ptr_NM = y_ptr + row_M[None, :].to(tl.int64) * outputs + output_N[:, None]
    tl.store(y_ptr_NM, sum_NM.to(y_ptr.dtype.element_ty), mask=real_N[:, None] & real_M[None, :])


def _multiply(
    x_ptr, code_ptr, table_ptr, scale_ptr, offset_ptr, bias_ptr, y_ptr,
    rows, outputs, inputs, bytes_, groups, group, expert_ptr, start_ptr,
    BITS: tl.constexpr, FRACTION: tl.constexpr, FLIP: tl.constexpr, LOWEST: tl.constexpr,
    QUICK: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SHARE: tl.constexpr, SPAN: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows (M) with OUTPUTS outputs (N), for a prompt."""
    HALVES: tl.constexpr = 8 // BITS
    HAS_OFFSET: tl.constexpr = offset_ptr is not None
    HAS_ZERO: tl.constexpr = HAS_OFFSET and offset_ptr.dtype.element_ty == tl.uint8
    expert, row_M, count = rows_of(tl.program_id(1), expert_ptr, start_ptr, rows, SPAN, ROWS)
    if count <= 0:
        return

    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    byte_K = tl.arange(0, INPUTS // HALVES)
    real_N = output_N < outputs
    real_M = tl.arange(0, ROWS) < count
    place_N = expert * outputs + output_N.to(tl.int64)
    code_ptr_NK = code_ptr + place_N[:, None] * bytes_ + byte_K[None, :]
    x_ptr_KM = x_ptr + (row_M // SHARE).to(tl.int64)[None, :] * inputs + byte_K[:, None] * HALVES

    sum_NM = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for first in range(0, inputs, INPUTS):
        byte = first // HALVES
        mask_NK = real_N[:, None] & (byte + byte_K < bytes_)[None, :]
        code_NK = tl.load(code_ptr_NK + byte, mask=mask_NK, other=0)
        group_ptr_N = place_N * groups + first // group
        scale_N = tl.load(scale_ptr + group_ptr_N, mask=real_N, other=0.0).to(tl.float32)
        zero_N1 = tl.zeros((1, 1), dtype=tl.float32)
        if HAS_OFFSET:
            offset_N = tl.load(offset_ptr + group_ptr_N, mask=real_N, other=0).to(tl.float32)
            if HAS_ZERO:
                zero_N1 = offset_N[:, None]
        first_NK, second_NK = numbers(
            code_NK, zero_N1, table_ptr, HAS_ZERO, BITS, FRACTION, FLIP, LOWEST, QUICK, FACTORS
        )

        part_NM = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
        x_M = tl.zeros((ROWS,), dtype=tl.float32)
        for half in tl.static_range(HALVES):
            real_K = first + byte_K * HALVES + half < inputs
            x_mask_KM = real_K[:, None] & real_M[None, :]
            x_KM = tl.load(x_ptr_KM + first + half, mask=x_mask_KM, other=0.0).to(FACTORS)
            number_NK = first_NK if half == 0 else second_NK
            part_NM = tl.dot(number_NK, x_KM, part_NM, input_precision="ieee")
            if HAS_OFFSET and not HAS_ZERO:
                x_M += tl.sum(x_KM.to(tl.float32), 0)
        sum_NM += part_NM * scale_N[:, None]
        if HAS_OFFSET and not HAS_ZERO:
            sum_NM -= offset_N[:, None] * x_M[None, :]

    if bias_ptr is not None:
        sum_NM += tl.load(bias_ptr + place_N, mask=real_N, other=0.0).to(tl.float32)[:, None]
    y_ptr_NM = y_ptr + row_M[None, :].to(tl.int64) * outputs + output_N[:, None]
    tl.store(y_ptr_NM, sum_NM.to(y_ptr.dtype.element_ty), mask=real_N[:, None] & real_M[None, :])


portable: Any = triton.jit(_portable)
numbers: Any = triton.jit(_numbers)
# One program for all numbers of rows of a step.
multiply: Any = triton.jit(_multiply, do_not_specialize=["rows", "groups", "group"])
multiply_few: Any = triton.jit(_multiply_few, do_not_specialize=["rows", "groups", "group"])
