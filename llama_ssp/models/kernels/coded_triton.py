"""The kernels of coded.py for GPUs, by the number of rows: a step's, several rows', a prompt's.

`multiply_few`, up to 16 rows: a program has a few outputs and reads their codes from end to end. It starts
enough reads ahead to keep the memory busy. Codes become numbers of 16 bits for the tensor cores, exactly,
except nf4 and fp4, and the sum over a group is scaled. So a weight is read once for up to 8 rows. Each warp
of a program has some of the inputs: warps with the same ones would each decode the same codes.

`multiply`, up to 256, and more of experts and of an output matrix: with so many rows, programs of few
outputs would read x more often than codes. So a program has more outputs, and where that makes fewer programs
than a GPU has processors, several share the inputs; `add` adds up what they give, in one order.

`decode`, for more rows of other matrices: the weight is decoded once, rounded to 16 bits, and torch
multiplies.

torch's own products (2.13) are no substitute: `_weight_int4pack_mm` takes bf16 scales alone, and
`_scaled_mm` quantises inputs.

It is tested in triton's interpreter, without what is in PTX, and compiled for every generation of GPUs
(tests/test_triton.py), and tested on a GPU (tests/gpu). Only `multiply_few` has been timed on one.
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
from llama_ssp.models.kernels.kernel_sizes import DECODED, FEW_ROWS, MANY_ROWS, MOST_PAIRS, TILE, parts_of

# Of a program of `multiply_few`, and of one of `multiply`.
ROWS = (16 if torch.version.hip else 8, 64)  # AMD multiplies 16
OUTPUTS = (16, TILE)
PARTS = 4  # of the inputs, in a step: a warp each
HOW = ((PARTS, 3), (4, 3))  # warps, and steps under way at once
MOST_STAGES = 8
INPUTS = 128  # of a warp's step, or of a step of a program, at most: some KiB of codes
DECODE = (16, 256)  # outputs and inputs of a program of `decode`
ADD = 1024  # numbers of a program of `add`
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

    weight = {
        "code_ptr": codes,
        "table_ptr": table,
        "scale_ptr": scales,
        "offset_ptr": offsets,
        "outputs": outputs,
        "inputs": inputs,
        "bytes_": codes.shape[-1],
        "groups": scales.shape[-1],
        "group": group,
    }
    name = list(TABLES)[table_number]
    device_of: Any = torch.cuda.device_of  # a kernel starts on the current device, which need not be x's
    with device_of(x):
        if rows > MANY_ROWS and expert_P is None and not wide:
            _multiply_decoded(x.reshape(rows, inputs), y.view(rows, outputs), weight, name, bias)
        else:
            _multiply_codes(x.contiguous(), y, weight, name, bias, expert_P)
    return y


def _multiply_codes(
    x: Tensor, y: Tensor, weight: dict[str, Any], table: str, bias: Tensor | None, expert_P: Tensor | None
) -> None:
    """Computes y by a kernel that reads codes; `weight`: its arguments of the matrix."""
    outputs = weight["outputs"]
    inputs = weight["inputs"]
    rows = y.numel() // outputs
    experts = 0
    few = FEW_ROWS
    search: dict[str, Any] = {"expert_ptr": None, "start_ptr": None, "SPAN": 0}
    if expert_P is not None:
        experts = len(weight["code_ptr"])
        few = min(FEW_ROWS * experts, MOST_PAIRS)
        search = found_by(expert_P, experts, many=rows > few)

    many = rows > few
    factors = FACTORS or {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(x.dtype, tl.float32)
    sizes = constants(many, inputs, weight["group"], table, factors is tl.bfloat16)
    share = rows * inputs // x.numel()  # pairs with one row of x
    given = {"x_ptr": x, "rows": rows, "SHARE": share, "FACTORS": factors} | weight | search | sizes
    tiles = triton.cdiv(outputs, sizes["OUTPUTS"])
    blocks = triton.cdiv(rows, sizes["ROWS"])
    if not many:
        multiply_few[(tiles, rows if experts else blocks)](bias_ptr=bias, y_ptr=y, **given)
        return

    # Experts, and more than MANY_ROWS rows, make programs enough. The last block of an expert may be small.
    parts = 1 if experts or rows > MANY_ROWS else parts_of(outputs, inputs)
    span = triton.cdiv(triton.cdiv(inputs, sizes["INPUTS"]), parts) * sizes["INPUTS"]
    parts = triton.cdiv(inputs, span)
    grid = (blocks + experts, tiles, parts)
    if parts == 1:
        multiply[grid](bias_ptr=bias, y_ptr=y, span=span, **given)
        return
    sum_PMN = y.new_empty(parts, rows, outputs, dtype=torch.float32)
    multiply[grid](bias_ptr=None, y_ptr=sum_PMN, span=span, **given)
    numbers = y.numel()
    add[(triton.cdiv(numbers, ADD),)](
        sum_ptr=sum_PMN,
        bias_ptr=bias,
        y_ptr=y,
        numbers=numbers,
        outputs=outputs,
        parts=parts,
        NUMBERS=ADD,
    )


def _multiply_decoded(
    x_MK: Tensor, y_MN: Tensor, weight: dict[str, Any], table: str, bias_N: Tensor | None
) -> None:
    """Computes y by torch's product with the weight, of which DECODED numbers are decoded at a time."""
    outputs = weight["outputs"]
    inputs = weight["inputs"]
    per_time = min(max(1, DECODED // inputs), outputs)
    weight_NK = x_MK.new_empty(per_time, inputs)
    # Tensors with a row for each output.
    by_output = {name: weight[name] for name in ("code_ptr", "scale_ptr", "offset_ptr")}
    for first in range(0, outputs, per_time):
        some = slice(first, first + per_time)
        count = min(per_time, outputs - first)
        part = {name: None if tensor is None else tensor[some] for name, tensor in by_output.items()}
        decode[(triton.cdiv(inputs, DECODE[1]), triton.cdiv(count, DECODE[0]))](
            weight_ptr=weight_NK,
            **{**weight, **part, "outputs": count},
            **decoding(inputs, weight["group"], table),
        )
        if bias_N is None:
            torch.mm(x_MK, weight_NK[:count].T, out=y_MN[:, some])
        else:
            torch.addmm(bias_N[some], x_MK, weight_NK[:count].T, out=y_MN[:, some])


def codes_of(inputs: int, group: int, table: str) -> dict[str, int]:
    """Returns what codes are, for a kernel. INPUTS taken together share a scale."""
    fraction = -1  # the table is read
    if table in INTEGERS:
        fraction = 0
    elif table in FLOATS:
        fraction = FLOATS[table]
    flip, lowest = INTEGERS.get(table, (0, 0))
    return {
        "BITS": 4 if len(values(table)) == 16 else 8,
        "FRACTION": fraction,
        "FLIP": flip,
        "LOWEST": lowest,
        "INPUTS": INPUTS if group >= inputs else min(group & -group, INPUTS),
    }


def constants(many: bool, inputs: int, group: int, table: str, in_bf16: bool) -> dict[str, Any]:
    """Returns what the kernel for few or many rows is compiled with."""
    codes = codes_of(inputs, group, table)
    warps, stages = HOW[many]
    if many:  # small groups make small steps
        stages = min(stages * INPUTS // codes["INPUTS"], MOST_STAGES)
    sizes = codes | {
        "QUICK": in_bf16 and table in QUICK and torch.version.hip is None,
        "ROWS": ROWS[many],
        "OUTPUTS": OUTPUTS[many],
        "num_warps": warps,
        "num_stages": stages if codes["FRACTION"] >= 0 else 1,  # numbers of a table would fill the memory
    }
    return sizes if many else sizes | {"PARTS": PARTS}


def decoding(inputs: int, group: int, table: str) -> dict[str, Any]:
    """Returns what `decode` is compiled with."""
    codes = codes_of(inputs, group, table)
    outputs, width = DECODE
    return codes | {"OUTPUTS": outputs, "PARTS": width // codes["INPUTS"]}


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
    rows, outputs, inputs, bytes_, groups, group, span, expert_ptr, start_ptr,
    BITS: tl.constexpr, FRACTION: tl.constexpr, FLIP: tl.constexpr, LOWEST: tl.constexpr,
    QUICK: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SHARE: tl.constexpr, SPAN: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows (M) with OUTPUTS outputs (N), over a part of the inputs.

    A part has `span` inputs, and a result of its own, of all rows and outputs. Programs of further rows with
    the same weights start together: the memory is read for the first one.
    """
    HALVES: tl.constexpr = 8 // BITS
    HAS_OFFSET: tl.constexpr = offset_ptr is not None
    HAS_ZERO: tl.constexpr = HAS_OFFSET and offset_ptr.dtype.element_ty == tl.uint8
    expert, row_M, count = rows_of(tl.program_id(0), expert_ptr, start_ptr, rows, SPAN, ROWS)
    if count <= 0:
        return

    output_N = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    byte_K = tl.arange(0, INPUTS // HALVES)
    real_N = output_N < outputs
    real_M = tl.arange(0, ROWS) < count
    place_N = expert * outputs + output_N.to(tl.int64)
    code_ptr_NK = code_ptr + place_N[:, None] * bytes_ + byte_K[None, :]
    input_K = tl.arange(0, INPUTS)
    x_ptr_MK = x_ptr + (row_M // SHARE).to(tl.int64)[:, None] * inputs + input_K[None, :]

    sum_NM = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    begin = tl.program_id(2) * span
    for first in range(begin, tl.minimum(begin + span, inputs), INPUTS):
        byte = first // HALVES
        mask_NK = real_N[:, None] & (byte + byte_K < bytes_)[None, :]
        code_NK = tl.load(code_ptr_NK + byte, mask=mask_NK, other=0)
        x_mask_MK = real_M[:, None] & (first + input_K < inputs)[None, :]
        x_MK = tl.load(x_ptr_MK + first, mask=x_mask_MK, other=0.0).to(FACTORS)

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
        if HALVES == 2:
            even_MK, odd_MK = tl.split(tl.reshape(x_MK, (ROWS, INPUTS // HALVES, HALVES)))
            x_KM = tl.trans(even_MK)
            part_NM = tl.dot(second_NK, tl.trans(odd_MK), part_NM, input_precision="ieee")
        else:
            x_KM = tl.trans(x_MK)
        part_NM = tl.dot(first_NK, x_KM, part_NM, input_precision="ieee")
        sum_NM += part_NM * scale_N[:, None]
        if HAS_OFFSET and not HAS_ZERO:
            x_M = tl.sum(x_MK.to(tl.float32), 1)
            sum_NM -= offset_N[:, None] * x_M[None, :]

    if bias_ptr is not None:
        sum_NM += tl.load(bias_ptr + place_N, mask=real_N, other=0.0).to(tl.float32)[:, None]
    y_ptr += tl.program_id(2).to(tl.int64) * rows * outputs
    y_ptr_NM = y_ptr + row_M[None, :].to(tl.int64) * outputs + output_N[:, None]
    tl.store(y_ptr_NM, sum_NM.to(y_ptr.dtype.element_ty), mask=real_N[:, None] & real_M[None, :])


def _add(sum_ptr, bias_ptr, y_ptr, numbers, outputs, parts, NUMBERS: tl.constexpr):
    """Adds up what parts of the inputs gave, first to last, for NUMBERS numbers of the result (R)."""
    place_R = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    real_R = place_R < numbers
    sum_R = tl.zeros((NUMBERS,), dtype=tl.float32)
    for part in range(parts):
        sum_R += tl.load(sum_ptr + part * numbers + place_R, mask=real_R, other=0.0)
    if bias_ptr is not None:
        sum_R += tl.load(bias_ptr + place_R % outputs, mask=real_R, other=0.0).to(tl.float32)
    tl.store(y_ptr + place_R, sum_R.to(y_ptr.dtype.element_ty), mask=real_R)


def _decode(
    code_ptr, table_ptr, scale_ptr, offset_ptr, weight_ptr, outputs, inputs, bytes_, groups, group,
    BITS: tl.constexpr, FRACTION: tl.constexpr, FLIP: tl.constexpr, LOWEST: tl.constexpr,
    PARTS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Writes the weights of OUTPUTS outputs (N) and of PARTS (P) times INPUTS inputs, rounded once."""
    HALVES: tl.constexpr = 8 // BITS
    HAS_OFFSET: tl.constexpr = offset_ptr is not None
    HAS_ZERO: tl.constexpr = HAS_OFFSET and offset_ptr.dtype.element_ty == tl.uint8
    BYTES: tl.constexpr = INPUTS // HALVES
    output_N = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part_P = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    real_N = output_N < outputs
    place_N = output_N.to(tl.int64)

    byte_PK = part_P[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    mask_NPK = real_N[:, None, None] & (byte_PK < bytes_)[None, :, :]
    code_ptr_NPK = code_ptr + (place_N * bytes_)[:, None, None] + byte_PK[None, :, :]
    code_NPK = tl.load(code_ptr_NPK, mask=mask_NPK, other=0)
    start_P = part_P * INPUTS
    place_NP = (place_N * groups)[:, None] + (start_P // group)[None, :]
    real_NP = real_N[:, None] & (start_P < inputs)[None, :]
    scale_NP = tl.load(scale_ptr + place_NP, mask=real_NP, other=0.0).to(tl.float32)
    zero_NP1 = tl.zeros((1, 1, 1), dtype=tl.float32)
    if HAS_OFFSET:
        offset_NP = tl.load(offset_ptr + place_NP, mask=real_NP, other=0).to(tl.float32)
        if HAS_ZERO:
            zero_NP1 = offset_NP[:, :, None]

    number_NPK = portable(code_NPK, zero_NP1, table_ptr, 0, HAS_ZERO, BITS, FRACTION, FLIP, LOWEST)
    if HALVES == 2:
        odd_NPK = portable(code_NPK, zero_NP1, table_ptr, 1, HAS_ZERO, BITS, FRACTION, FLIP, LOWEST)
        number_NPK = tl.reshape(tl.join(number_NPK, odd_NPK), (OUTPUTS, PARTS, INPUTS))
    number_NPK *= scale_NP[:, :, None]
    if HAS_OFFSET and not HAS_ZERO:
        number_NPK -= offset_NP[:, :, None]

    input_PK = start_P[:, None] + tl.arange(0, INPUTS)[None, :]
    weight_ptr_NPK = weight_ptr + (place_N * inputs)[:, None, None] + input_PK[None, :, :]
    real_NPK = real_N[:, None, None] & (input_PK < inputs)[None, :, :]
    tl.store(weight_ptr_NPK, number_NPK.to(weight_ptr.dtype.element_ty), mask=real_NPK)


portable: Any = triton.jit(_portable)
numbers: Any = triton.jit(_numbers)
# One program for all numbers of rows.
multiply: Any = triton.jit(_multiply, do_not_specialize=["rows", "groups", "group"])
add: Any = triton.jit(_add, do_not_specialize=["numbers", "parts"])
decode: Any = triton.jit(_decode, do_not_specialize=["outputs", "groups", "group"])
multiply_few: Any = triton.jit(_multiply_few, do_not_specialize=["rows", "groups", "group"])
