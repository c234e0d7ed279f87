"""The kernel of int8.py for GPUs.

A program has a few outputs and reads their codes from end to end, with enough reads under way to keep the
memory busy. Codes become exact 16-bit numbers for the tensor cores. The result for a row does not depend on
the other rows.

Not yet run on a GPU: the sizes below are estimates. It is tested in triton's interpreter
(tests/test_int8.py), and compiled for every generation of GPUs (tests/test_triton.py).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of x: the fewest of a product on tensor cores
OUTPUTS, INPUTS = 32, 128  # of a program, and of one of its steps: 4 KiB of codes
FACTORS = tl.bfloat16  # is multiplied; triton's interpreter has no 16-bit products, and needs float32
WARPS, STAGES = 4, 6  # steps under way at once: some 30 KiB, with a program or two a processor


def linear_int8(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """y = x (codes scales / 127)^T + bias, with sums in 32 bits."""
    dense, (outputs, inputs) = x.contiguous(), codes.shape
    y = x.new_empty(*x.shape[:-1], outputs)
    rows = x.numel() // inputs
    if rows == 0:
        return y
    grid = (triton.cdiv(outputs, OUTPUTS), triton.cdiv(rows, ROWS))
    sizes = {"ROWS": ROWS, "OUTPUTS": OUTPUTS, "INPUTS": INPUTS, "FACTORS": FACTORS}
    device_of: Any = torch.cuda.device_of  # a kernel starts on the current device, which need not be x's
    with device_of(x):
        numbers = rows, outputs, inputs
        multiply[grid](dense, codes, scales, bias, y, *numbers, **sizes, num_warps=WARPS, num_stages=STAGES)
    return y


# triton evaluates annotations, and knows no global names: only tl.constexpr is allowed.
def _multiply(
    x_ptr, code_ptr, scale_ptr, bias_ptr, y_ptr, rows, outputs, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_M = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    input_K = tl.arange(0, INPUTS)
    real_N, real_M = output_N < outputs, row_M < rows
    code_ptr_NK = code_ptr + output_N.to(tl.int64)[:, None] * inputs + input_K[None, :]
    x_ptr_KM = x_ptr + row_M[None, :] * inputs + input_K[:, None]
    sum_NM = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for first in range(0, inputs, INPUTS):
        real_K = first + input_K < inputs
        code_NK = tl.load(code_ptr_NK + first, mask=real_N[:, None] & real_K[None, :], other=0)
        x_KM = tl.load(x_ptr_KM + first, mask=real_K[:, None] & real_M[None, :], other=0.0)
        sum_NM = tl.dot(code_NK.to(FACTORS), x_KM.to(FACTORS), sum_NM)
    y_NM = sum_NM * (tl.load(scale_ptr + output_N, mask=real_N, other=0.0) / 127)[:, None]
    if bias_ptr is not None:
        y_NM += tl.load(bias_ptr + output_N, mask=real_N, other=0.0).to(tl.float32)[:, None]
    y_ptr_NM = y_ptr + row_M[None, :].to(tl.int64) * outputs + output_N[:, None]
    tl.store(y_ptr_NM, y_NM.to(y_ptr.dtype.element_ty), mask=real_N[:, None] & real_M[None, :])


multiply: Any = triton.jit(_multiply, do_not_specialize=["rows"])  # one program for all numbers of them
