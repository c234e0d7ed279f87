"""Products with weights in codes on a CPU, beside bf16 and the time to read their bytes.

    python bench/coded.py [threads=2] [repeats=15] [write=FILE.md]

Each format has several layers of the same size, which no cache holds together. All take turns, and the least
time of each counts, as disturbances only add time. The bound is the layer's bytes, codes and scales, at the
fastest reading that was seen: of a sum, or of layers in bf16. Compare bitsandbytes' layers with torch's own
product in bf16, which models without our kernels have.

The plan's table of rates (llama_ssp/planner/rates.py) is made of these figures. A test compares it with every
file of them, bench/results/coded_*.md; that of the Xeon, which has AMX, is known to be planned too fast.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from surroundings import report  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.words import changed  # noqa: E402
from llama_ssp.config import Dtype  # noqa: E402
from llama_ssp.models.formats.coded import Coded, Codes, values  # noqa: E402
from llama_ssp.models.kernels import coded, linear  # noqa: E402
from llama_ssp.models.linear import Kernels, LayerFormat, dense  # noqa: E402
from llama_ssp.models.quantization import quantised, scales_of  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402

OUTPUTS = INPUTS = 4096
LAYERS = 8
ROWS = (1, 2, 5, 12, 64)
PROMPT, SELDOM = 16, 3  # rows from which one turn in SELDOM counts, as they take long
SUMMED = 2**28  # bytes
CPU = torch.device("cpu")
# By name: the codes, the type of the scales, and whether there is a zero or a shift.
FORMATS: dict[str, tuple[Codes, torch.dtype, str]] = {
    "int4, groups of 128": (Codes("int4", 128), torch.bfloat16, ""),
    "int4, groups of 128, zeros (AWQ)": (Codes("uint4", 128), torch.float16, "zero"),
    "int4, groups of 32": (Codes("int4", 32), torch.bfloat16, ""),
    "int4, groups of 32, shifts (Q4_K)": (Codes("uint4", 32), torch.float32, "shift"),
    "MXFP4": (Codes("e2m1", 32), torch.bfloat16, ""),
    "nf4": (Codes("nf4", 64), torch.float32, ""),
    "FP8, blocks of 128": (Codes("e4m3", 128), torch.float32, ""),
    "FP8, a scale an output": (Codes("e4m3"), torch.bfloat16, ""),
    "int8, a scale an output": (Codes("int8", unit=1 / 127), torch.float32, ""),
    "int8, groups of 32 (Q8_0)": (Codes("int8", 32), torch.float16, ""),
}
Work = Callable[[Tensor], object]


def random(kind: Codes, scales: torch.dtype, offset: str) -> Coded:
    numbers, groups = values(kind.table), INPUTS // (kind.group or INPUTS)
    codes = torch.randint(0, 256, (OUTPUTS, INPUTS * kind.bits // 8), dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # in e4m3 no number
    assert len(numbers) == 1 << kind.bits
    scale = torch.rand(OUTPUTS, groups).to(scales)
    zero = torch.randint(0, 16, (OUTPUTS, groups), dtype=torch.uint8) if offset == "zero" else None
    return Coded(
        kind=kind,
        inputs=INPUTS,
        codes_NC=codes,
        scale_NG=scale,
        zero_NG=zero,
        shift_NG=scale.clone() if offset == "shift" else None,
    )


def layers() -> dict[str, tuple[list[Work], int]]:
    """By name, layers of one format, and the bytes of one."""
    form = LayerFormat(Dtype.bf16, kernels=Kernels.all)
    found: dict[str, tuple[list[Work], int]] = {}
    for name, how in FORMATS.items():
        own = [form.linear(random(*how)) for _ in range(LAYERS)]
        parts = [part for part in own[0].buffers() if part is not own[0].table]
        found[name] = list(own), sum(part.nbytes for part in parts)
    weight = torch.randn(OUTPUTS, INPUTS).bfloat16()
    decoded = coded.DecodedLinear(random(*FORMATS["int4, groups of 32"]), None)
    found["int4, decoded for each product"] = [decoded], decoded.codes.nbytes + decoded.scales.nbytes
    for dtype in (Dtype.nf4, Dtype.int8):
        layers = [quantised(dtype, weight.clone(), None, CPU) for _ in range(LAYERS)]
        for layer in layers:
            layer.eval()  # in training the library takes slower ways
        size = layers[0].weight.nbytes + sum(scales.nbytes for scales in scales_of(layers[0]))
        found[f"{dtype.value}, bitsandbytes"] = list(layers), size
    found["bf16, torch's own"] = [dense(weight.clone()) for _ in range(LAYERS // 2)], weight.nbytes
    found["bf16"] = [form.linear(weight) for _ in range(LAYERS // 2)], weight.nbytes
    return found


def speeds(
    found: dict[str, tuple[list[Work], int]], repeats: int
) -> tuple[dict[tuple[str, int], float], float]:
    """By name and rows, the least seconds of a layer; and bytes a second of summing."""
    summed = torch.ones(SUMMED // 8, dtype=torch.int64)
    x = {rows: torch.randn(rows, INPUTS).bfloat16() for rows in ROWS}
    least: dict[tuple[str, int], float] = {}
    fastest = 0.0
    for turn in range(repeats):
        for name, (works, _) in found.items():
            for rows in [rows for rows in ROWS if rows < PROMPT or turn % SELDOM == 0]:
                began = time.perf_counter()
                for work in works:
                    work(x[rows])
                taken = (time.perf_counter() - began) / len(works)
                least[name, rows] = min(least.get((name, rows), taken), taken)
        began = time.perf_counter()
        summed.sum()
        fastest = max(fastest, summed.nbytes / (time.perf_counter() - began))
    return least, fastest


def main() -> None:
    own = changed({"threads": "2", "repeats": "15", "write": ""}, sys.argv[1:])
    torch.set_num_threads(int(own["threads"]))
    linear.operators()
    coded.operators("cpu")
    with torch.inference_mode():
        found = layers()
        least, summing = speeds(found, int(own["repeats"]))
    bandwidth = max(summing, *(found["bf16"][1] / least["bf16", rows] for rows in ROWS))
    multiplying = max(2 * OUTPUTS * INPUTS * rows / taken for (_, rows), taken in least.items())
    over_what = ["1 over bound", "5 over bound", "1 over bf16", "5 over bf16"]
    table = [["format", "MB", "bound", *map(str, ROWS), *over_what]]
    for name, (_, size) in found.items():
        bound = size / bandwidth
        times = (f"{1e6 * least[name, rows]:.0f}" for rows in ROWS)
        over = [f"{least[name, rows] / bound:.2f}" for rows in (1, 5)]
        over += [f"{least[name, rows] / least['bf16', rows]:.2f}" for rows in (1, 5)]
        table.append([name, f"{size / 1e6:.1f}", f"{1e6 * bound:.0f}", *times, *over])
    report(
        own["write"], "Products with weights in codes", {"model": f"cpu, {own['threads']} threads"},
        f"Layers of {OUTPUTS} x {INPUTS}, {own['repeats']} turns. A sum reads {summing / 1e9:.1f} GB/s; "
        f"the fastest reading was {bandwidth / 1e9:.1f} GB/s: so the bound. The fastest multiplication "
        f"was of {multiplying / 1e9:.0f} GFLOP/s.", "",
        f"Microseconds of a layer, for {', '.join(map(str, ROWS[:-1]))} and {ROWS[-1]} rows:",
        "", "```", *aligned(table, 0), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
