"""Linear layers on a CPU against the memory's speed: ours, oneDNN's, torch's; in bf16 and in 8 bit.

    python bench/linear.py [threads=2] [repeats=9] [write=FILE.md]

The layers of a 222M model, repeated so that no cache holds them. The bound is the time to sum the same bytes.
All take turns. The least time of each counts, as disturbances only add time. The second table is the distance
of 8-bit products from those of the weights before quantisation, and from LLM.int8's: for inputs without
outliers, and with some (one in a hundred, twenty times as large).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from surroundings import report  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.words import changed  # noqa: E402
from llama_ssp.config import Dtype  # noqa: E402
from llama_ssp.models.kernels import coded, linear  # noqa: E402
from llama_ssp.models.quantization import coded_of, quantised, scales_of  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402

SHAPES = ((1024, 1024, 64), (2816, 1024, 32), (1024, 2816, 16))  # outputs, inputs, number of layers
ROWS = (1, 2, 5, 9, 16)
OURS, OURS_8, LLM_8 = "bf16, ours", "8 bit, ours", "8 bit, LLM.int8"
Work = Callable[[Tensor], object]  # one layer's product with rows of inputs


def layers() -> dict[str, list[tuple[int, Work]]]:
    """By name, the object that multiplies with each layer, and its number of inputs."""
    found: dict[str, list[tuple[int, Work]]] = {}
    for outputs, inputs, count in SHAPES:
        for _ in range(count):
            for name, work in of(torch.randn(outputs, inputs).bfloat16()).items():
                found.setdefault(name, []).append((inputs, work))
    return found


def of(weight: Tensor) -> dict[str, Work]:
    """Every contender's product with one weight."""
    packed = linear.packed(weight)
    theirs = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    layer: Any = quantised(Dtype.int8, weight, None, torch.device("cpu")).eval()
    codes, scales = layer.weight.data, next(scales_of(layer))
    ours = coded.CodedLinear(coded_of(layer), None, torch.device("cpu"))
    narrow = (scales / 127).bfloat16()  # torch's kernel takes scales of 16 bits
    return {
        "bf16, plain": lambda x: torch.nn.functional.linear(x, weight),
        "bf16, oneDNN packed": lambda x: torch.ops.mkldnn._linear_pointwise(x, theirs, None, "none", [], ""),
        OURS: lambda x: torch.ops.llama_ssp.linear(x, packed, None, len(weight)),
        LLM_8: layer,
        "8 bit, torch": lambda x: torch._weight_int8pack_mm(x, codes, narrow),
        OURS_8: ours,
    }


def speeds(
    found: dict[str, list[tuple[int, Work]]], repeats: int
) -> tuple[dict[tuple[str, int], float], float]:
    """By name and rows, the least seconds of a pass over all layers; and bytes a second of summing."""
    weights = sum(outputs * inputs * count for outputs, inputs, count in SHAPES)
    summed = torch.ones(weights // 2)  # the same bytes as in bf16
    x = {rows: {inputs: torch.randn(rows, inputs).bfloat16() for _, inputs, _ in SHAPES} for rows in ROWS}
    least: dict[tuple[str, int], float] = {}
    for _ in range(repeats):
        for rows in ROWS:
            for name, works in found.items():
                began = time.perf_counter()
                for inputs, work in works:
                    work(x[rows][inputs])
                least[name, rows] = min(least.get((name, rows), 1e9), time.perf_counter() - began)
        began = time.perf_counter()
        summed.sum()
        least["sum", 0] = min(least.get(("sum", 0), 1e9), time.perf_counter() - began)
    return least, summed.nbytes / least.pop(("sum", 0))


def errors() -> list[list[str]]:
    """Norms of differences over the norm of the exact product, of five rows."""
    lines = [["inputs", "from", *(name for name in (OURS, LLM_8, OURS_8))]]
    torch.manual_seed(0)
    weight = torch.randn(2816, 1024).bfloat16()
    works = of(weight)
    for kind, times in (("plain", 1), ("with outliers", 20)):
        x = torch.randn(5, 1024)
        x[:, ::100] *= times
        x = x.bfloat16()
        exact = x.double() @ weight.double().T
        others = {"the exact product": exact, "LLM.int8's": works[LLM_8](x)}
        for name, other in others.items():
            off = [
                (works[one](x).double() - other.double()).norm() / exact.norm()
                for one in (OURS, LLM_8, OURS_8)
            ]
            lines.append([kind, name, *(f"{float(one):.4f}" for one in off)])
    return lines


def main() -> None:
    own = changed({"threads": "2", "repeats": "9", "write": ""}, sys.argv[1:])
    torch.set_num_threads(int(own["threads"]))
    linear.operators()
    coded.operators("cpu")
    with torch.inference_mode():
        found = layers()
        least, bandwidth = speeds(found, int(own["repeats"]))
        off = errors()
    weights = sum(outputs * inputs * count for outputs, inputs, count in SHAPES)
    table = [["rows", *(f"{name}" for name in found), "8 bit over bf16, ours"]]
    for rows in ROWS:
        over = least[OURS, rows] / least[OURS_8, rows]
        table.append([str(rows), *(f"{1000 * least[name, rows]:.1f}" for name in found), f"{over:.2f}x"])
    bounds = [f"{1000 * weights * width / bandwidth:.1f}" for width in (2, 1)]
    report(
        own["write"], "A linear layer's speed over the memory's", {"model": f"cpu, {own['threads']} threads"},
        f"{weights / 1e6:.0f} million weights, {own['repeats']} turns. Summing reads "
        f"{bandwidth / 1e9:.1f} GB/s: so the bound of a pass is {bounds[0]} ms in bf16, and "
        f"{bounds[1]} ms in 8 bit.",
        "", "Milliseconds of a pass:", "", "```", *aligned(table, 0), "```", "",
        "Relative errors:", "", "```", *aligned(off, 2), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
