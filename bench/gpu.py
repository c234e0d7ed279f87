"""What is asked of one GPU, part by part, each within ten minutes on an H200: synthetic weights, batch 1.

    python bench/gpu.py part=regular|large|small|int8|syncs [new=64] [repeats=3] [write=FILE.md]

regular   the 7B alone, a step beside its bytes over the measured bandwidth (asked: 85 %)
large     30B with 7B at agreement 0.8: over our regular (1.8x), transformers assisted (4x), a round (1.05)
small     30B with 1B, the same (2.5x over our regular)
int8      the 7B in int8 beside bf16 (1.4x faster)
syncs     how often the host waits for the GPU in a round of the 30B with 1B (once)

Leaves with 1 where a figure misses what was asked. No GPU has run it yet.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import PROMPTS, alone, by_transformers, by_us, one_round, opened, rounds, wait  # noqa: E402
from surroundings import surroundings, write  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from llama_ssp.config import Dtype, ModelConf, RunConf, Steps  # noqa: E402
from llama_ssp.engine import Prompt  # noqa: E402
from llama_ssp.load.models import DRAFT, load  # noqa: E402
from llama_ssp.tabular import aligned  # noqa: E402
from llama_ssp.tasks.pair import engine_for  # noqa: E402
from llama_ssp.tasks.timing import now, shape  # noqa: E402

VOCAB, AGREEMENT, K = 32000, 0.8, 4
KS = (2, 4, 6)
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
Row = tuple[str, float, float]  # what, asked, found


def of(layers: int, dim: int, ffn: int, name: str) -> ModelConf:
    """A Llama of these sizes, its laws as near to the target's as asked."""
    model = shape(layers, dim, VOCAB, ffn, AGREEMENT, head_dim=128)
    return replace(model, name=name, context=2048, dtype=Dtype.bf16)


SEVEN = of(32, 4096, 11008, "7B")
THIRTY = of(60, 6656, 17920, "30B")
ONE = of(16, 2048, 8192, "1B")


def run_of(model: ModelConf, draft: ModelConf | None) -> RunConf:
    return RunConf(model=model, draft=draft, engine=Steps.compiled)


def seconds(work: Callable[[], object], turns: int = 20) -> float:
    """The middle of some turns, of which the first ones do not count."""
    taken = []
    for turn in range(turns + 3):
        wait()
        began = now()
        work()
        wait()
        if turn >= 3:
            taken.append(now() - began)
    return median(taken)


def bandwidth() -> float:
    """Bytes a second that summing a large tensor reads."""
    large = torch.ones(2**32, dtype=torch.bfloat16, device="cuda")
    return large.nbytes / seconds(lambda: large.sum())


def regular(_new: int, _repeats: int) -> list[Row]:
    pair, _, _ = opened(run_of(SEVEN, None), 256)
    assert pair.target is not None
    step_s = seconds(alone(pair.target, 64, 1))
    return [("7B: share of the read bandwidth", 0.85, pair.target.weights_bytes / step_s / bandwidth())]


def beside(draft: ModelConf, asked: float, new: int, repeats: int) -> list[Row]:
    """A pair beside our regular sampling and transformers' assisted generation, in turn."""
    ready = opened(run_of(THIRTY, draft), max(map(len, PROMPTS)) + new)
    draft_module = load(draft, None, Dtype.bf16, torch.device("cuda:0"), DRAFT).module
    assert ready[0].target is not None
    works: dict[str, Callable[[int], float]] = {"regular": lambda i: by_us(ready, new, i, 0)[0]}
    for k in KS:
        works[f"K = {k}"] = lambda i, k=k: by_us(ready, new, i, k)[0]
    for how in ("4", "heuristic"):
        works[f"assisted, {how}"] = lambda i, how=how: by_transformers(
            ready[0].target.module, draft_module, how, new, i
        )[0]
    taken: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            ms = work(repeat)
            logging.info("%s: %.2f ms/token", name, ms)
            if repeat:
                taken[name].append(ms)
    best = min((f"K = {k}" for k in KS), key=lambda name: median(taken[name]))
    peer = min((n for n in works if "assisted" in n), key=lambda name: median(taken[name]))
    over = [
        median(theirs / ours for ours, theirs in zip(taken[best], taken[name], strict=True))
        for name in ("regular", peer)
    ]
    found = rounds(ready, [K])
    return [
        (f"30B with {draft.name}: over our regular", asked, over[0]),
        (f"30B with {draft.name}: over transformers, {peer}", 4.0, over[1]),
        (f"30B with {draft.name}: parts over round (1/1.05)", 1 / 1.05, 1 / float(found[1][-1])),
    ]


def int8(_new: int, _repeats: int) -> list[Row]:
    spent = []
    for dtype in (Dtype.int8, Dtype.bf16):
        pair, _, _ = opened(run_of(replace(SEVEN, dtype=dtype), None), 256)
        assert pair.target is not None
        spent.append(seconds(alone(pair.target, 64, 1)))
    return [("7B: int8 over bf16", 1.4, spent[1] / spent[0])]


def syncs(_new: int, _repeats: int) -> list[Row]:
    pair, tokens, run = opened(run_of(THIRTY, ONE), 256)
    engine = engine_for(pair, run, tokens, frozenset(), 0, 512)
    state: Any = engine.prefill([Prompt("0", PROMPTS[0])], 64)
    for _ in range(3):
        one_round(engine, state, K)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        one_round(engine, state, K)
    count = sum(event.count for event in seen.key_averages() if event.key in WAITS)
    return [("one wait over the waits in a round", 1.0, 1 / max(count, 1))]


PARTS: dict[str, Callable[[int, int], list[Row]]] = {
    "regular": regular,
    "large": lambda new, repeats: beside(SEVEN, 1.8, new, repeats),
    "small": lambda new, repeats: beside(ONE, 2.5, new, repeats),
    "int8": int8,
    "syncs": syncs,
}


def main() -> None:
    own = {"part": "", "new": "64", "repeats": "3", "write": ""}
    own.update(argument.split("=", 1) for argument in sys.argv[1:])
    if own["part"] not in PARTS:
        sys.exit(f"part={own['part']}; allowed: {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        sys.exit("bench/gpu.py needs a GPU: torch sees none")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    rows = PARTS[own["part"]](int(own["new"]), int(own["repeats"]))
    lines = [["what", "asked", "found", "met"]]
    lines += [
        [what, f"{asked:.2f}", f"{found:.2f}", "yes" if found >= asked else "NO"]
        for what, asked, found in rows
    ]
    device = {"model": f"{torch.cuda.get_device_name()}, bf16"}
    head = [f"# One GPU: {own['part']}", "", *surroundings(device), ""]
    text = "\n".join([*head, "```", *aligned(lines, 1), "```", ""])
    print(text)
    if own["write"]:
        write(own["write"], text)
    sys.exit(0 if all(found >= asked for _, asked, found in rows) else 1)


if __name__ == "__main__":
    main()
