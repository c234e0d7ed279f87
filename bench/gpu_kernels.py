"""Parts of bench/gpu.py about the memory alone: how fast it is read, and by products with few rows and codes.

Two kernels in Triton: one that only reads, and one for products of up to 16 rows, in six tile sizes. Without
a GPU they run in Triton's interpreter, if TRITON_INTERPRET=1 is set before this file is imported.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from bars import Bar, most
from contenders import in_turn, wait
from torch import Tensor
from torch.nn import functional

from llama_ssp.models.formats.coded import Coded, Codes
from llama_ssp.models.kernels import coded_triton
from llama_ssp.models.kernels.coded import CodedLinear, operators
from llama_ssp.models.quantization import LLM_INT8

if TYPE_CHECKING:
    from gpu import How

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NUMBERS = {False: 2**31, True: 2**16}  # int32 that are read, 8 GiB: more than any cache holds
BLOCK, ROUNDS = 4096, 8  # numbers that a program of the read kernel loads at once, and how often
ROWS = 16  # of a product, at most
CODED_ROWS = {False: (1, 5, 16, 32, 64, 2048), True: (1, 32)}  # of a product with codes: steps, and a prompt
# Warps, of which each has some of the inputs; outputs of a program; inputs of a warp's step; stages.
TILES = ((4, 16, 128, 4), (4, 16, 256, 3), (8, 16, 128, 3), (4, 32, 128, 3), (2, 32, 256, 3), (4, 64, 64, 4))
BESIDE = 2**28  # bytes of the copies of a matrix that take turns: no cache holds them
COPIES = 8  # at least
NARROW = 32  # inputs that share a scale, as dtype=int4 has it
# Matrices of a layer, and how often a step reads each: outputs x inputs.
SHAPES: dict[str, list[tuple[str, int, int, int]]] = {
    "7B": [
        ("qkv", 12288, 4096, 32), ("o", 4096, 4096, 32), ("gate-up", 22016, 4096, 32),
        ("down", 4096, 11008, 32), ("head", 32000, 4096, 1),
    ],
    "1B": [
        ("qkv", 3072, 2048, 16), ("o", 2048, 2048, 16), ("gate-up", 16384, 2048, 16),
        ("down", 2048, 8192, 16),
    ],
    "30B/8": [
        ("qkv", 2688, 6656, 60), ("o", 6656, 896, 60), ("gate-up", 4480, 6656, 60), ("down", 6656, 2240, 60),
    ],
}  # fmt: skip
SMALL_SHAPES = {"small": [("o", 48, 160, 1)]}


# triton evaluates annotations, and knows no global names: only tl.constexpr is allowed.
def _read(x_ptr, y_ptr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """Loads BLOCK x ROUNDS numbers and writes one, which depends on all of them."""
    program = tl.program_id(0).to(tl.int64)
    place = program * (BLOCK * ROUNDS) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for number in tl.static_range(ROUNDS):
        total += tl.load(x_ptr + place + number * BLOCK)
    tl.store(y_ptr + program, tl.sum(total, 0))


def _multiply(
    x_ptr, weight_ptr, y_ptr, rows, outputs, inputs,
    PARTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """y = x W^T for up to ROWS rows. Each warp sums over some of the inputs, in 32 bits."""
    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_M = tl.arange(0, ROWS)
    real_N, real_M = output_N < outputs, row_M < rows
    input_PK = tl.arange(0, PARTS)[:, None] * INPUTS + tl.arange(0, INPUTS)[None, :]
    weight_ptr_PNK = weight_ptr + (output_N.to(tl.int64) * inputs)[None, :, None] + input_PK[:, None, :]
    x_ptr_PMK = x_ptr + (row_M * inputs)[None, :, None] + input_PK[:, None, :]
    sum_PNM = tl.zeros((PARTS, OUTPUTS, ROWS), dtype=tl.float32)
    for first in range(0, inputs, PARTS * INPUTS):
        real_P1K = (first + input_PK < inputs)[:, None, :]
        weight_PNK = tl.load(weight_ptr_PNK + first, mask=real_N[None, :, None] & real_P1K, other=0.0)
        x_PMK = tl.load(x_ptr_PMK + first, mask=real_M[None, :, None] & real_P1K, other=0.0)
        x_PKM = tl.permute(x_PMK, (0, 2, 1))
        sum_PNM = tl.dot(weight_PNK, x_PKM, sum_PNM, input_precision="ieee")
    sum_NM = tl.sum(sum_PNM, 0)
    y_ptr_NM = y_ptr + row_M[None, :] * outputs + output_N[:, None]
    tl.store(y_ptr_NM, sum_NM.to(y_ptr.dtype.element_ty), mask=real_N[:, None] & real_M[None, :])


read: Any = triton.jit(_read)
multiply: Any = triton.jit(_multiply, do_not_specialize=["rows"])


def device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def graph(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """Returns the calls as a CUDA graph, without the time of their launches; on a CPU one after the other."""
    if not torch.cuda.is_available():
        return lambda: [call() for call in calls]
    for call in calls:
        call()
    wait()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for call in calls:
            call()
    return captured.replay


def bandwidths(small: bool) -> dict[str, float]:
    """Returns bytes a second that a sum reads, a copy reads and writes, and the read kernel reads."""
    numbers_N = torch.arange(NUMBERS[small], dtype=torch.int32, device=device())
    copy_N, size = numbers_N[: len(numbers_N) // 2].clone(), numbers_N.nbytes
    programs = len(numbers_N) // (BLOCK * ROUNDS)
    total_N = torch.empty(programs, dtype=torch.int32, device=device())
    works: dict[str, Callable[[], object]] = {
        "a sum": numbers_N.view(torch.bfloat16).sum,
        "a copy": partial(copy_N.copy_, numbers_N[len(copy_N) :]),
    }
    if torch.cuda.is_available() or INTERPRETED:
        works["the read kernel"] = partial(
            read[(programs,)], numbers_N, total_N, BLOCK=BLOCK, ROUNDS=ROUNDS, num_warps=8
        )
    taken = {name: size / median(ms) * 1000 for name, ms in in_turn(works, 3 if small else 15).items()}
    if "the read kernel" in works:
        expected_N = numbers_N.view(programs, -1).sum(1, dtype=torch.int64).to(torch.int32)
        if not torch.equal(total_N, expected_N):
            raise RuntimeError("the read kernel has not read all numbers")
    del numbers_N, copy_N, works
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # else it would count as the pair's
    return taken


def best_bandwidth(small: bool) -> float:
    """Returns the bytes a second of the fastest way to read: what steps are compared with."""
    return max(bandwidths(small).values())


def bandwidth(how: How) -> Iterator[Bar]:
    """Three ways to read the memory."""
    taken = bandwidths(how.small)
    for name, bytes_a_second in taken.items():
        yield Bar(f"GB/s of {name}", bytes_a_second / 1e9)
    yield Bar("GB/s of the best", max(taken.values()) / 1e9)


def multiply_few(x: Tensor, weight: Tensor, tile: tuple[int, int, int, int]) -> Tensor:
    """Returns x W^T by the kernel with one of TILES."""
    warps, per_program, per_warp, stages = tile
    (rows, inputs), outputs = x.shape, len(weight)
    y = x.new_empty(rows, outputs)
    sizes = {"PARTS": warps, "ROWS": ROWS, "OUTPUTS": per_program, "INPUTS": per_warp}
    grid = (triton.cdiv(outputs, per_program),)
    multiply[grid](x, weight, y, rows, outputs, inputs, **sizes, num_warps=warps, num_stages=stages)
    return y


def products(how: How) -> Iterator[Bar]:
    """Products with 1 and 5 rows: cuBLAS beside the kernel with each tile size, and a step's sum of them."""
    dtype = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter has no products of 16 bits
    copies, turns = (2, 1) if how.small else (COPIES, 7)
    for model, shapes in (SMALL_SHAPES if how.small else SHAPES).items():
        library = dict.fromkeys((1, 5), 0.0)
        best = dict.fromkeys((1, 5), 0.0)
        for name, outputs, inputs, times in shapes:
            weight = torch.randn(outputs, inputs, dtype=dtype, device=device()) / inputs**0.5
            count = copies if how.small else max(copies, ceil(BESIDE / weight.nbytes))
            weights = [weight, *(weight.clone() for _ in range(count - 1))]
            for rows in (1, 5):
                what = f"{model} {name} {outputs} x {inputs}, {rows} rows"
                x = torch.randn(rows, inputs, dtype=dtype, device=device())
                exact = x.double() @ weight.double().T
                error = max(
                    float((multiply_few(x, weight, tile).double() - exact).norm() / exact.norm())
                    for tile in TILES
                )
                yield most(f"{what}: error", error, 2**-8)
                works = {"cuBLAS": graph([partial(functional.linear, x, each) for each in weights])}
                for tile in TILES:
                    calls: list[Callable[[], object]]
                    calls = [partial(multiply_few, x, each, tile) for each in weights]
                    works["x".join(map(str, tile))] = graph(calls)
                us = {way: 1000 * median(ms) / count for way, ms in in_turn(works, turns).items()}
                fastest = min((way for way in us if way != "cuBLAS"), key=us.__getitem__)
                library[rows] += times * us["cuBLAS"]
                best[rows] += times * us[fastest]
                note = f"{fastest}: {weight.nbytes / us[fastest] / 1e3:.0f} GB/s; us: "
                note += ", ".join(f"{way} {each:.1f}" for way, each in us.items())
                yield Bar(f"{what}: cuBLAS over the best tile", us["cuBLAS"] / us[fastest], note=note)
        for rows in (1, 5):
            note = f"{library[rows] / 1000:.3f} and {best[rows] / 1000:.3f} ms"
            what = f"{model}, {rows} rows: all products of a step, cuBLAS over the best tiles"
            yield Bar(what, library[rows] / best[rows], note=note)


def coded_products(small: bool) -> Iterator[Bar]:
    """Error and speed of products with codes, and of cuBLAS in bf16: in graphs, as steps have them."""
    operators(device().type)
    outputs, inputs, group, count = (64, 256, 128, 2) if small else (11008, 4096, 128, 16)
    kinds = {"int8": LLM_INT8, "int4": Codes("uint4", group), "int4 by 32": Codes("uint4", NARROW)}
    for name, kind in {**kinds, "fp8": Codes("e4m3", group)}.items():
        code_NK = torch.randint(256, (outputs, inputs * kind.bits // 8), dtype=torch.uint8, device=device())
        if kind.table == "e4m3":
            code_NK[code_NK & 127 == 127] = 1  # these are NaN
        scale_NG = torch.rand(outputs, inputs // (kind.group or inputs), device=device())
        zero_NG = torch.randint(16, scale_NG.shape, dtype=torch.uint8, device=device())
        weight = Coded(
            kind=kind,
            inputs=inputs,
            codes_NC=code_NK,
            scale_NG=scale_NG,
            zero_NG=zero_NG if kind.bits == 4 else None,
        )
        exact_NK = weight.decoded(torch.float64)
        copies = [replace(weight, codes_NC=code_NK.clone()) for _ in range(count)]  # no cache holds them all
        layers = [CodedLinear(each, None, device()) for each in copies]
        sixteen = [exact_NK.bfloat16() for _ in range(count)]
        for rows in CODED_ROWS[small]:
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device())
            exact = x.double() @ exact_NK.T
            what = f"the kernel for {name}, {rows} rows"
            error = float((layers[0](x).double() - exact).norm() / exact.norm())
            yield most(f"{what}: error", error, 2**-8)
            works: dict[str, Callable[[], object]] = {
                "codes": graph([partial(layer, x) for layer in layers]),
                "sixteen": graph([partial(functional.linear, x, each) for each in sixteen]),
            }
            taken = {way: median(ms) for way, ms in in_turn(works, 9).items()}
            yield Bar(f"{what}: GB/s", count * code_NK.nbytes / taken["codes"] / 1e6)
            yield Bar(f"{what}: over bf16", taken["sixteen"] / taken["codes"])
            if kind.group == NARROW and rows == 1:
                yield from _in_more_parts(what, layers, x, exact, taken["codes"])


def _in_more_parts(
    what: str, layers: list[CodedLinear], x: Tensor, exact: Tensor, ms: float
) -> Iterator[Bar]:
    """Of groups of 32 inputs a warp takes one at a time: here as many inputs as of large groups."""
    few, coded_triton.PARTS = coded_triton.PARTS, coded_triton.PARTS * coded_triton.INPUTS // NARROW
    error = float((layers[0](x).double() - exact).norm() / exact.norm())
    (more,) = in_turn({"": graph([partial(layer, x) for layer in layers])}, 9).values()
    yield most(f"{what}, in {coded_triton.PARTS} parts: error", error, 2**-8)
    yield Bar(f"{what}, in {coded_triton.PARTS} parts: over {few}", ms / median(more))
    coded_triton.PARTS = few
