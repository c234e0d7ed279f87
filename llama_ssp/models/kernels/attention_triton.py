"""The kernels of attention.py for GPUs: the cache is read once, and long contexts are divided over a device.

`attend_part` serves all tokens of a row and all heads of a KV head together, in one part of the row's
context; `merge_parts` adds up what the parts give. Where a row's slots begin and end is read from tensors on
the device, and the sizes of a launch depend only on the number of tokens: so one CUDA graph serves every
context. Slots behind a row's last position are not read, because their values may be NaN. The number of
parts depends on the number of tokens, so the last bits of a result may too.

Why no library does this (torch 2.13):

* FlexAttention divides the context only where a KV head has 1, 2, 4, 8 ... heads, and needs a program for
  each number of tokens and a table of blocks, which every step would have to make. NaN of masked values
  reaches its results. On a CPU it gives no log-sum-exp once it is compiled: prompts with sinks, which need
  it, could not be tested without a GPU.
* `torch.nn.attention.varlen_attn` (FlashAttention) has no soft caps and no sinks, and needs the number of
  rows. In its version 3, NaN of unused slots reaches results (Dao-AILab/flash-attention issue 2374); version
  2 may make NaN of its own where it divides contexts (pytorch/torchtitan issue 3235).
* A library of kernels (flash-attn, FlashInfer) would be a dependency that is built for each version of torch.

It is tested in triton's interpreter, compiled for every generation of GPUs (tests/test_triton.py), and tested
on a GPU (tests/gpu).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.models.graph_sizes import MOST
from llama_ssp.models.kernels.kernel_sizes import FEW, LEAST_PARTS, MOST_PARTS, PROGRAMS

UNIT = 128  # slots: a part has whole units
TILE_BYTES = 16384  # of keys, and of values, that a program reads at a time
# Rows of a product, which are tokens and heads; tensor cores need 16.
LEAST_ROWS = 16
ROWS = 64
QUERY_BYTES = 32768  # of the queries of a product, unless one token has more
CHUNK = tl.constexpr(64)  # numbers of a head; each program merges this many
WARPS = 4
STAGES = 2
LOG2_E = tl.constexpr(1.4426950408889634)


def attend(
    query_THD: Tensor,
    keys_GND: Tensor,
    values_GND: Tensor,
    first_T: Tensor,
    position_T: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sink_H: Tensor | None,
) -> Tensor:
    """Computes the operator of attention.py, (T, H, D); T is not 0; a `window` or `softcap` of 0 is none."""
    if len(query_THD) > MOST:  # of a prompt: the memory of sums is bounded
        chunks = zip(*(torch.split(tensor, MOST) for tensor in (query_THD, first_T, position_T)), strict=True)
        return torch.cat(
            [
                attend(query, keys_GND, values_GND, first, position, scale, window, softcap, sink_H)
                for query, first, position in chunks
            ]
        )

    query_THD = query_THD.contiguous()
    tokens, heads, size = query_THD.shape
    groups, slots, _ = keys_GND.shape
    parts = parts_of(tokens, groups)
    y_THD = torch.empty_like(query_THD)

    # Of each part of a token's context: the weighted sum of values, the largest score, the sum of weights.
    sum_THPD = query_THD.new_empty((tokens, heads, parts, size), dtype=torch.float32)
    top_THP = query_THD.new_empty((tokens, heads, parts), dtype=torch.float32)
    total_THP = query_THD.new_empty((tokens, heads, parts), dtype=torch.float32)

    sizes = constants(tokens, heads // groups, size, query_THD.element_size())
    device_of: Any = torch.cuda.device_of  # a kernel starts on the current device, which may be another
    with device_of(query_THD):
        attend_part[(tokens, groups, parts)](
            query_ptr=query_THD,
            key_ptr=keys_GND,
            value_ptr=values_GND,
            first_ptr=first_T,
            position_ptr=position_T,
            sum_ptr=sum_THPD,
            top_ptr=top_THP,
            total_ptr=total_THP,
            tokens=tokens,
            slots=slots,
            SCALE=scale,
            WINDOW=window,
            SOFTCAP=softcap,
            PARTS=parts,
            num_warps=max(WARPS, sizes["ROWS"] // LEAST_ROWS),
            num_stages=STAGES,
            **sizes,
        )
        merge_parts[(tokens * heads, triton.cdiv(size, CHUNK.value))](
            sum_ptr=sum_THPD,
            top_ptr=top_THP,
            total_ptr=total_THP,
            sink_ptr=sink_H,
            y_ptr=y_THD,
            heads=heads,
            SIZE=size,
            PARTS=parts,
            num_warps=WARPS,
        )
    return y_THD


def parts_of(tokens: int, groups: int) -> int:
    """Returns how many parts each token's context has at most: a power of two."""
    wanted = max(PROGRAMS * FEW // (groups * max(tokens, FEW)), LEAST_PARTS)
    return min(1 << wanted.bit_length() - 1, MOST_PARTS)


def constants(tokens: int, group: int, size: int, bytes_: int) -> dict[str, int]:
    """Returns `attend_part`'s constants for heads of `size` numbers of `bytes_` bytes, `group` a KV head."""
    padded = max(triton.next_power_of_2(size), 16)
    limit = min(ROWS, QUERY_BYTES // (padded * bytes_))
    rows = max(LEAST_ROWS, min(triton.next_power_of_2(tokens * group), limit), triton.next_power_of_2(group))
    return {
        "TOKENS": triton.next_power_of_2(tokens),
        "GROUP": group,
        "SIZE": size,
        "PADDED": padded,
        "ROWS": rows,
        "TILE": min(max(TILE_BYTES // (padded * bytes_), 16), UNIT),
        "UNIT": UNIT,
    }


# triton evaluates annotations, and knows no global names: only tl.constexpr is allowed.
def _attend_part(
    query_ptr, key_ptr, value_ptr, first_ptr, position_ptr, sum_ptr, top_ptr, total_ptr, tokens, slots,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Computes attention of tokens and heads (M) over a part of their context, TILE slots (N) at a time."""
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)

    # Tokens of one row of the batch have the same first slot and stand together. The program of a row's first
    # token serves `SERVED` tokens, that of the token behind these the next, and so on; others have no work.
    SERVED: tl.constexpr = ROWS // GROUP
    token_T = tl.arange(0, TOKENS)
    first = tl.load(first_ptr + token)
    same_T = tl.load(first_ptr + token_T, mask=token_T < tokens, other=-1) == first
    begin = tl.min(tl.where(same_T, token_T, TOKENS))
    end = begin + tl.sum(same_T.to(tl.int32))
    if (token - begin) % SERVED != 0:
        return

    row_M = tl.arange(0, ROWS)
    size_D = tl.arange(0, PADDED)
    token_M = token + row_M // GROUP
    head_M = kv_head * GROUP + row_M % GROUP
    real_M = (row_M < SERVED * GROUP) & (token_M < end)
    real_D = size_D < SIZE
    heads = tl.num_programs(1) * GROUP
    place_M = (token_M * heads + head_M).to(tl.int64)
    query_ptr_MD = query_ptr + place_M[:, None] * SIZE + size_D[None, :]
    query_MD = tl.load(query_ptr_MD, mask=real_M[:, None] & real_D[None, :], other=0.0)
    position_M = tl.load(position_ptr + token_M, mask=real_M, other=-1).to(tl.int32)

    # Each slot from `lowest` to `highest` is seen by one of these tokens. Parts begin with whole tiles: what
    # a tile adds to a token does not depend on the tokens that are served with it.
    highest = tl.max(position_M)
    lowest = 0
    if WINDOW > 0:
        least = tl.min(tl.where(real_M, position_M, highest))
        lowest = tl.maximum(least - WINDOW + 1, 0) // TILE * TILE
    length = tl.cdiv(highest + 1 - lowest, PARTS * UNIT) * UNIT
    start = lowest + part * length
    stop = tl.minimum(start + length, highest + 1)
    base = (kv_head.to(tl.int64) * slots + first) * SIZE

    # The softmax while it is read: with the largest score so far, m, in base 2, sums of 2^(score - m) and of
    # these times the values. Where a tile has a larger score, what was summed is scaled down to it.
    top_M = tl.full((ROWS,), float("-inf"), tl.float32)
    total_M = tl.zeros((ROWS,), tl.float32)
    sum_MD = tl.zeros((ROWS, PADDED), tl.float32)
    for tile in range(start, stop, TILE):
        slot_N = tile + tl.arange(0, TILE)
        written_N = slot_N < stop  # behind it nothing is read: 0 times NaN is NaN
        offset_ND = slot_N[:, None] * SIZE + size_D[None, :]
        inside_ND = written_N[:, None] & real_D[None, :]

        key_ND = tl.load(key_ptr + base + offset_ND, mask=inside_ND, other=0.0)
        score_MN = tl.dot(query_MD, tl.trans(key_ND), input_precision="ieee") * SCALE
        if SOFTCAP > 0:
            score_MN = SOFTCAP * (2 * tl.sigmoid(2 * score_MN / SOFTCAP) - 1)  # tanh
        seen_MN = slot_N[None, :] <= position_M[:, None]
        if WINDOW > 0:
            seen_MN &= slot_N[None, :] > position_M[:, None] - WINDOW
        score_MN = tl.where(seen_MN, score_MN * LOG2_E, float("-inf"))

        higher_M = tl.maximum(top_M, tl.max(score_MN, 1))
        shift_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)  # of a token that sees nothing here
        weight_MN = tl.exp2(score_MN - shift_M[:, None])
        kept_M = tl.exp2(top_M - shift_M)
        value_ND = tl.load(value_ptr + base + offset_ND, mask=inside_ND, other=0.0)
        total_M = total_M * kept_M + tl.sum(weight_MN, 1)
        sum_MD = sum_MD * kept_M[:, None]
        sum_MD = tl.dot(weight_MN.to(value_ND.dtype), value_ND, sum_MD, input_precision="ieee")
        top_M = higher_M

    part_M = place_M * PARTS + part
    tl.store(top_ptr + part_M, top_M, mask=real_M)
    tl.store(total_ptr + part_M, total_M, mask=real_M)
    full_M = real_M & (top_M > float("-inf"))
    sum_ptr_MD = sum_ptr + part_M[:, None] * SIZE + size_D[None, :]
    tl.store(sum_ptr_MD, sum_MD, mask=full_M[:, None] & real_D[None, :])


def _merge_parts(
    sum_ptr, top_ptr, total_ptr, sink_ptr, y_ptr, heads, SIZE: tl.constexpr, PARTS: tl.constexpr
):
    """Adds up the parts (P) of a token's head, each scaled to the largest score of all; CHUNK numbers (D)."""
    place = tl.program_id(0).to(tl.int64)
    size_D = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    part_P = place * PARTS + tl.arange(0, PARTS)
    top_P = tl.load(top_ptr + part_P)  # minus infinity where a part has nothing
    top = tl.max(top_P)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + place % heads).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)

    factor_P = tl.exp2(top_P - top)
    total = tl.sum(factor_P * tl.load(total_ptr + part_P))
    if sink_ptr is not None:
        total += tl.exp2(sink - top)
    full_PD = (top_P > float("-inf"))[:, None] & (size_D < SIZE)[None, :]
    sum_PD = tl.load(sum_ptr + part_P[:, None] * SIZE + size_D[None, :], mask=full_PD, other=0.0)
    y_D = tl.sum(sum_PD * factor_P[:, None], 0) / total
    tl.store(y_ptr + place * SIZE + size_D, y_D.to(y_ptr.dtype.element_ty), mask=size_D < SIZE)


# One program for all numbers of tokens with one power of two, and for all sizes of the cache.
attend_part: Any = triton.jit(_attend_part, do_not_specialize=["tokens", "slots"])
merge_parts: Any = triton.jit(_merge_parts)
