"""How near to the memory's speed a linear layer comes on a CPU: ours, oneDNN's packed one, torch's plain one.

    python bench/linear.py [threads=2] [repeats=9] [write=FILE.md]

A 222M model's layers in bf16, over and over, so that no cache holds them. The bound is what summing as many
bytes takes. All take turns; the least time of each counts, as what disturbs a machine only ever adds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from surroundings import surroundings, write  # noqa: E402

from llama_ssp.kernels.linear import operators, packed  # noqa: E402
from llama_ssp.tabular import aligned  # noqa: E402

SHAPES = ((1024, 1024, 64), (2816, 1024, 32), (1024, 2816, 16))  # outputs, inputs, how many
ROWS = (1, 2, 5, 9, 16)


def works() -> tuple[dict[tuple[str, int], Callable[[], object]], int]:
    """By name and rows, one pass over all layers each; and the bytes of the layers."""
    operators()
    weights = [torch.randn(n, k).bfloat16() for n, k, count in SHAPES for _ in range(count)]
    ours = [packed(weight) for weight in weights]
    theirs = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
    summed = torch.ones(sum(weight.nbytes for weight in weights) // 4)
    found: dict[tuple[str, int], Callable[[], object]] = {("sum", 0): summed.sum}
    for rows in ROWS:
        x = {inputs: torch.randn(rows, inputs).bfloat16() for _, inputs, _ in SHAPES}
        found["plain", rows] = lambda x=x: [torch.nn.functional.linear(x[w.shape[1]], w) for w in weights]
        found["oneDNN, packed", rows] = lambda x=x: [
            torch.ops.mkldnn._linear_pointwise(x[w.shape[1]], p, None, "none", [], "")
            for w, p in zip(weights, theirs, strict=True)
        ]
        found["ours", rows] = lambda x=x: [
            torch.ops.llama_ssp.linear(x[w.shape[1]], p, None, w.shape[0])
            for w, p in zip(weights, ours, strict=True)
        ]
    return found, summed.nbytes


def main() -> None:
    own = {"threads": "2", "repeats": "9", "write": ""}
    own.update(argument.split("=", 1) for argument in sys.argv[1:])
    torch.set_num_threads(int(own["threads"]))
    found, size = works()
    least: dict[tuple[str, int], float] = {}
    with torch.inference_mode():
        for _ in range(int(own["repeats"])):
            for key, work in found.items():
                began = time.perf_counter()
                work()
                least[key] = min(least.get(key, 1e9), time.perf_counter() - began)
    bound = least.pop(("sum", 0))
    names = list(dict.fromkeys(name for name, _ in least))
    rows = [["rows", *(f"{name}, GB/s" for name in names)]]
    rows += [[str(r), *(f"{size / least[name, r] / 1e9:.1f}" for name in names)] for r in ROWS]
    text = "\n".join(
        [
            "# A linear layer's speed over the memory's", "",
            *surroundings({"model": f"cpu, {own['threads']} threads, bf16"}),
            f"{size / 1e6:.0f} MB of weights, {own['repeats']} turns. "
            f"Summing them: {size / bound / 1e9:.1f} GB/s.",
            "", "```", *aligned(rows, 0), "```", "",
        ]
    )  # fmt: skip
    print(text)
    if own["write"]:
        write(own["write"], text)


if __name__ == "__main__":
    main()
