"""What the pair of bench/fast.py loses without each of our C++ files.

    python bench/without.py [repeats=5] [new=96] [k=4] [threads=2] [write=FILE.md]
    python bench/without.py small=true        # little models: its code alone

Regular sampling, and K drafts. In bf16: as it is; with attention compiled from torch's operators, which
repeats no keys (attention.cpp is not used); with torch's products (linear.cpp is not used). With an 8-bit
target: as it is, and with bitsandbytes' layers, whose steps run eagerly (coded.cpp is not used). All take
turns; each has caches of its own. The last columns are medians of the ratios within a repeat. A file is kept
while the headline, or a packed model's step, takes 10 % longer without it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from bars import Bar, bars_table  # noqa: E402
from contenders import by_us, opened, sizes  # noqa: E402
from surroundings import report  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config import Dtype, RunConf, Steps  # noqa: E402
from llama_ssp.models import linear  # noqa: E402
from llama_ssp.models.attention import Places, Scores  # noqa: E402
from llama_ssp.models.kernels import attention as attention_kernel  # noqa: E402
from llama_ssp.models.kernels import coded, large_pages  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402

LOSS = 1.1  # the least ratio for which a file is kept
PAIRS = {  # the target's number format, and what is not used
    "bf16": (Dtype.bf16, ""),
    "bf16, no attention.cpp": (Dtype.bf16, "attention.cpp"),
    "bf16, no linear.cpp": (Dtype.bf16, "linear.cpp"),
    "int8": (Dtype.int8, ""),
    "int8, no coded.cpp": (Dtype.int8, "coded.cpp"),
}


@dataclass
class Asked(Words):
    """The command line."""

    repeats: int = 5
    new: int = 96
    k: int = 4
    threads: int = 2
    small: bool = False
    write: str = ""


def attend_grouped(
    places: Places,
    query_THD: Tensor,
    keys_GND: Tensor,
    values_GND: Tensor,
    scores: Scores,
    sink_H: Tensor | None,
) -> Tensor:
    """Attention in torch's operators, of any number of tokens: every token reads all slots, under a mask."""
    assert scores.window is None and scores.softcap is None and sink_H is None
    slot_N = torch.arange(keys_GND.shape[1], device=keys_GND.device)
    sees_TN = (slot_N >= places.first_T[:, None]) & (slot_N <= places.slot_T[:, None])
    y_1HTD = functional.scaled_dot_product_attention(
        query_THD.transpose(0, 1)[None], keys_GND[None], values_GND[None], sees_TN, scale=scores.scale,
        enable_gqa=True,
    )  # fmt: skip
    return y_1HTD[0].transpose(0, 1)


@contextmanager
def without(file: str, caches: str) -> Iterator[None]:
    """A pair that is opened here does not use this file, and keeps its programs in a folder of its own."""
    patches = {
        "attention.cpp": mock.patch.object(attention_kernel, "attend", attend_grouped),
        "linear.cpp": mock.patch.object(linear, "packable", lambda _: False),
        "coded.cpp": mock.patch.object(coded, "available", lambda _: False),
    }
    own_caches = mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=os.path.join(caches, file or "all"))
    with own_caches, patches.get(file, nullcontext()):
        yield


def pair_of(asked: Asked, dtype: Dtype) -> PairSession:
    target, draft = sizes(0.89, asked.small)
    run = RunConf(model=replace(target, dtype=dtype), draft=replace(draft, dtype=Dtype.bf16))
    return opened(replace(run, engine=Steps.compiled), 128 if asked.small else 256)


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    torch.set_num_threads(asked.threads)
    ways = {"regular": 0, f"K = {asked.k}": asked.k}
    times: dict[tuple[str, str], list[float]] = {(name, way): [] for name in PAIRS for way in ways}
    # Torch's attention multiplies what it masks by 0: in memory that was never written there may be a NaN.
    zeroed = mock.patch.object(large_pages, "empty", lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    with tempfile.TemporaryDirectory() as caches, zeroed:
        pairs = dict[str, PairSession]()
        for name, (dtype, file) in PAIRS.items():
            with without(file, caches):
                pairs[name] = pair_of(asked, dtype)
        for repeat in range(asked.repeats + 1):
            for name, way in times:
                ms, counts = by_us(pairs[name], asked.new, repeat, ways[way])
                assert counts.summary()["tokens_committed"] >= asked.new, f"{name}: its texts end early"
                times[name, way] += [ms] if repeat else []
    table = [["pair", *(f"{way}, ms/token" for way in ways), *(f"{way}, over all files" for way in ways)]]
    bars = []
    for name, (dtype, file) in PAIRS.items():
        over = {
            way: median(a / b for a, b in zip(times[name, way], times[dtype.name, way], strict=True))
            for way in ways
        }
        table.append([name, *(f"{median(times[name, way]):.2f}" for way in ways)])
        if file:
            table[-1] += [f"{ratio:.3f}" for ratio in over.values()]
            bars.append(Bar(f"{file}: the greater ratio without it", max(over.values()), LOSS))
        else:
            table[-1] += ["" for _ in ways]
    devices = pairs["bf16"].models.devices
    report(
        asked.write, "What the pair of bench/fast.py loses without each C++ file", devices,
        f"222M and 7M, {asked.new} tokens, {asked.repeats} repeats.",
        "", "```", *aligned(table, 0), "```", "", "```", *bars_table(bars), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
