"""Products of tokens with their experts, on GPUs: the host does not wait for the choice.

A pair is a token and one of its experts. A program has a few outputs of one expert, for some of its pairs: so
an expert's weights are read once for them, and the sizes of a launch depend only on the number of tokens: one
CUDA graph serves every choice. A step's programs find their pairs by themselves; many pairs, as those of a
prompt, are first sorted by their experts.

The sizes below are estimates. It is tested in triton's interpreter, and compiled for every generation of GPUs
(tests/test_triton.py).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.models.kernels.kernel_sizes import MOST_PAIRS


class Tile(NamedTuple):
    """What a program has: up to `rows` pairs and `outputs`, and of the inputs so many bytes at a time."""

    rows: int  # 16 are the fewest of a product on tensor cores
    outputs: int
    input_bytes: int
    warps: int
    stages: int  # steps under way at once


STEP = Tile(rows=16, outputs=32, input_bytes=256, warps=4, stages=5)  # 8 KiB of weights at a time
PROMPT = Tile(rows=64, outputs=128, input_bytes=128, warps=8, stages=3)  # 16 KiB, and 8 KiB of x


def products(x_MK: Tensor, expert_P: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None) -> Tensor:
    """Returns each pair's y = W x + b of its expert, (P, N); x has a row for each pair, or for each token."""
    pairs = len(expert_P)
    experts, outputs, inputs = weight_ENK.shape
    y_PN = x_MK.new_empty(pairs, outputs)
    if pairs == 0:
        return y_PN

    many = pairs > MOST_PAIRS
    tile = PROMPT if many else STEP
    programs = pairs
    if many:  # the last one of each expert may have few rows
        programs = triton.cdiv(pairs, tile.rows) + experts

    search = found_by(expert_P, experts, many)
    device_of: Any = torch.cuda.device_of  # a kernel starts on the current device, which need not be x's
    with device_of(x_MK):
        multiply[(programs, triton.cdiv(outputs, tile.outputs))](
            x_ptr=x_MK.contiguous(),
            weight_ptr=weight_ENK,
            bias_ptr=bias_EN,
            y_ptr=y_PN,
            pairs=pairs,
            outputs=outputs,
            inputs=inputs,
            SHARE=pairs // len(x_MK),  # pairs with one row of x
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            INPUTS=tile.input_bytes // x_MK.element_size(),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **search,
        )
    return y_PN


def found_by(expert_P: Tensor, experts: int, many: bool) -> dict[str, Any]:
    """Returns what a program finds its expert by: the pairs' experts, or many pairs in the order of these."""
    if not many:
        span = max(triton.next_power_of_2(len(expert_P)), STEP.rows)
        return {"expert_ptr": expert_P, "start_ptr": None, "SPAN": span}
    span = triton.next_power_of_2(experts)
    sorted_P, order_P = expert_P.sort()
    start_E = torch.searchsorted(sorted_P, torch.arange(span + 1, device=order_P.device), out_int32=True)
    return {"expert_ptr": order_P, "start_ptr": start_E, "SPAN": span}


# triton evaluates annotations, and knows no global names: only tl.constexpr is allowed.
def _pairs_of(pair, expert_ptr, pairs, SPAN: tl.constexpr, ROWS: tl.constexpr):
    """Returns the expert of this pair, up to ROWS of its pairs, and how many: 0 if others have them."""
    pair_P = tl.arange(0, SPAN)
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


def _rows_of(program, expert_ptr, start_ptr, rows, SPAN: tl.constexpr, ROWS: tl.constexpr):
    """Returns the expert of this program, some rows of its result, and how many.

    pairs of experts 0, 1 ...   70, 0, 64, 3                              if they are sorted
    of programs 0, 1 ...        64 and 6 of expert 0, 64 of 2, 3 of 3, then none
    """
    row_M = tl.arange(0, ROWS)
    if expert_ptr is None:
        expert = 0
        row_M = program * ROWS + row_M
        count = rows - program * ROWS
    elif start_ptr is None:
        expert, row_M, count = pairs_of(program, expert_ptr, rows, SPAN, ROWS)
    else:
        # An expert has one program for each ROWS of its pairs. Programs after the last one have none.
        expert_E = tl.arange(0, SPAN)
        start_E = tl.load(start_ptr + expert_E)
        end_E = tl.load(start_ptr + expert_E + 1)
        programs_E = tl.cdiv(end_E - start_E, ROWS)
        before_E = tl.cumsum(programs_E) - programs_E
        is_own_E = (program >= before_E) & (program < before_E + programs_E)
        expert = tl.sum(tl.where(is_own_E, expert_E, 0)).to(tl.int64)
        first = tl.sum(tl.where(is_own_E, start_E + (program - before_E) * ROWS, 0))
        count = tl.sum(tl.where(is_own_E, end_E, 0)) - first
        row_M = tl.load(expert_ptr + first + row_M, mask=row_M < count, other=0)
    return expert, row_M, count


def _multiply(
    x_ptr, expert_ptr, start_ptr, weight_ptr, bias_ptr, y_ptr, pairs, outputs, inputs, SHARE: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Computes OUTPUTS outputs (N) of an expert, for up to ROWS of its pairs (M), by INPUTS inputs (K).

    Programs of one expert's pairs with the same weights start together: the memory is read for the first one.
    """
    expert, pair_M, count = rows_of(tl.program_id(0), expert_ptr, start_ptr, pairs, SPAN, ROWS)
    if count > 0:
        output_N = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        input_K = tl.arange(0, INPUTS)
        real_N = output_N < outputs
        real_M = tl.arange(0, ROWS) < count
        row_N = expert * outputs + output_N  # of the experts' weights, one after the other
        weight_ptr_NK = weight_ptr + row_N[:, None] * inputs + input_K[None, :]
        x_ptr_KM = x_ptr + (pair_M // SHARE).to(tl.int64)[None, :] * inputs + input_K[:, None]

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
rows_of: Any = triton.jit(_rows_of)
multiply: Any = triton.jit(_multiply)
