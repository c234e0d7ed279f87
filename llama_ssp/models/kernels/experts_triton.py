"""Products of tokens with their experts, for steps on GPUs: the host does not wait for the choice.

A pair is a token and one of its experts. A program has a few outputs of one expert, for up to 16 of its
pairs, which it finds by itself: so an expert's weights are read once for them, and the sizes of a launch
depend only on the number of tokens: one CUDA graph serves every choice.

The sizes below are estimates. It is tested in triton's interpreter, and compiled for every generation of GPUs
(tests/test_triton.py).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # pairs of a program: the fewest of a product on tensor cores
# Of a program, and of one of its steps: 8 KiB of weights.
OUTPUTS = 32
INPUT_BYTES = 256
WARPS = 4
STAGES = 5


def products(x_MK: Tensor, expert_P: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None) -> Tensor:
    """Returns each pair's y = W x + b of its expert, (P, N); x has a row for each pair, or for each token."""
    pairs = len(expert_P)
    _, outputs, inputs = weight_ENK.shape
    y_PN = x_MK.new_empty(pairs, outputs)
    if pairs == 0:
        return y_PN

    device_of: Any = torch.cuda.device_of  # a kernel starts on the current device, which need not be x's
    with device_of(x_MK):
        multiply[(triton.cdiv(outputs, OUTPUTS), pairs)](
            x_ptr=x_MK.contiguous(),
            expert_ptr=expert_P,
            weight_ptr=weight_ENK,
            bias_ptr=bias_EN,
            y_ptr=y_PN,
            pairs=pairs,
            outputs=outputs,
            inputs=inputs,
            num_warps=WARPS,
            num_stages=STAGES,
            **constants(pairs, len(x_MK), x_MK.element_size()),
        )
    return y_PN


def constants(pairs: int, rows: int, bytes_: int) -> dict[str, int]:
    """Returns what the kernel is compiled with, for x of `rows` rows of numbers of `bytes_` bytes."""
    return {
        "SHARE": pairs // rows,  # pairs with one row of x
        "PAIRS": max(triton.next_power_of_2(pairs), ROWS),
        "ROWS": ROWS,
        "OUTPUTS": OUTPUTS,
        "INPUTS": INPUT_BYTES // bytes_,
    }


# triton evaluates annotations, and knows no global names: only tl.constexpr is allowed.
def _pairs_of(expert_ptr, pairs, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """Returns this program's expert, up to ROWS of its pairs, and how many: 0 if another program has them."""
    pair = tl.program_id(1)
    pair_P = tl.arange(0, PAIRS)
    expert_P = tl.load(expert_ptr + pair_P, mask=pair_P < pairs, other=-1)
    expert = tl.load(expert_ptr + pair).to(tl.int64)

    # The program of every ROWS-th pair of an expert has this pair and those that follow.
    same_P = (expert_P == expert).to(tl.int32)
    before = tl.sum(tl.where(pair_P < pair, same_P, 0))
    count = tl.where(before % ROWS == 0, tl.sum(same_P) - before, 0)
    pair_M = tl.zeros((ROWS,), dtype=tl.int32)
    if count > 0:
        place_P = tl.where(same_P != 0, tl.cumsum(same_P) - 1 - before, -1)
        pair_M = tl.sum(tl.where(place_P[None, :] == tl.arange(0, ROWS)[:, None], pair_P[None, :], 0), 1)
    return expert, pair_M, count


def _multiply(
    x_ptr, expert_ptr, weight_ptr, bias_ptr, y_ptr, pairs, outputs, inputs, SHARE: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Computes OUTPUTS outputs (N) of an expert, for up to ROWS of its pairs (M), by INPUTS inputs (K)."""
    expert, pair_M, count = pairs_of(expert_ptr, pairs, PAIRS, ROWS)
    if count > 0:
        output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        input_K = tl.arange(0, INPUTS)
        real_N = output_N < outputs
        real_M = tl.arange(0, ROWS) < count
        row_N = expert * outputs + output_N  # of the experts' weights, one after the other
        weight_ptr_NK = weight_ptr + row_N[:, None] * inputs + input_K[None, :]
        x_ptr_KM = x_ptr + (pair_M // SHARE)[None, :] * inputs + input_K[:, None]

        sum_NM = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
        for first in range(0, inputs, INPUTS):
            real_K = first + input_K < inputs
            weight_NK = tl.load(weight_ptr_NK + first, mask=real_N[:, None] & real_K[None, :], other=0.0)
            x_KM = tl.load(x_ptr_KM + first, mask=real_K[:, None] & real_M[None, :], other=0.0)
            sum_NM = tl.dot(weight_NK, x_KM, sum_NM, input_precision="ieee")

        if bias_ptr is not None:
            sum_NM += tl.load(bias_ptr + row_N, mask=real_N, other=0.0).to(tl.float32)[:, None]
        y_ptr_NM = y_ptr + pair_M[None, :].to(tl.int64) * outputs + output_N[:, None]
        tl.store(y_ptr_NM, sum_NM.to(y_ptr.dtype.element_ty), mask=real_N[:, None] & real_M[None, :])


pairs_of: Any = triton.jit(_pairs_of)
multiply: Any = triton.jit(_multiply)
