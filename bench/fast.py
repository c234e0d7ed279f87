"""Our loop beside transformers' regular and assisted generation: one pair, one interleaved run.

    python bench/fast.py [repeats=5] [new=96] [ks=2,4,8] [agreement=0.89] [threads=2] [write=FILE.md]

The pair is synthetic (llama_ssp/load/synthetic.py): 222 million parameters with 7 million, bf16, their laws
overlapping as asked. Every repeat gives each contender one turn on every prompt; ratios are taken within a
repeat, and their median is reported with the least and the most. Tokens are counted the same for all: those
after the prompt (contenders.py). The last lines set a round beside its parts: K steps of the draft and one of
the target, alone.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import PROMPTS, by_transformers, by_us, opened, rounds  # noqa: E402
from surroundings import surroundings, write  # noqa: E402

from llama_ssp.config import Dtype, ModelConf, RunConf, Steps  # noqa: E402
from llama_ssp.load.models import DRAFT, load  # noqa: E402
from llama_ssp.metrics import Counts  # noqa: E402
from llama_ssp.report import versions  # noqa: E402
from llama_ssp.tabular import aligned  # noqa: E402
from llama_ssp.tasks.pair import Pair  # noqa: E402
from llama_ssp.tasks.timing import shape  # noqa: E402

log = logging.getLogger("bench")
CPU = torch.device("cpu")
VOCAB = 8192


@dataclass
class Asked:
    """The command line."""

    repeats: int = 5
    new: int = 96
    ks: str = "2,4,8"
    agreement: float = 0.89
    threads: int = 2
    peers: str = "4,8,12,heuristic,dynamic"
    write: str = ""

    @classmethod
    def of(cls, arguments: list[str]) -> Self:
        asked = cls()
        for argument in arguments:
            key, _, value = argument.partition("=")
            if not hasattr(asked, key):
                sys.exit(f"unknown: {argument}; known: {', '.join(vars(asked))}")
            setattr(asked, key, type(getattr(asked, key))(value))
        return asked


@dataclass
class Taken:
    """What a contender's turns took, and what they counted."""

    turn: Callable[[int], tuple[float, Counts]]
    ms: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


def sizes(agreement: float) -> tuple[ModelConf, ModelConf]:
    """The pair of the issue: hidden 1024 x 16 layers, and hidden 256 x 4 layers."""
    target, draft = shape(16, 1024, VOCAB), shape(4, 256, VOCAB, agreement=agreement)
    return replace(target, context=4608), replace(draft, context=4608)


def contenders(asked: Asked, pair: tuple[Pair, Any, RunConf], eager: Any) -> dict[str, Taken]:
    """Everyone who takes turns."""
    target, draft = (
        load(model, None, Dtype.bf16, CPU, role).module
        for model, role in zip(sizes(asked.agreement), ("model", DRAFT), strict=True)
    )
    found = {
        "transformers, regular": Taken(lambda i: by_transformers(target, None, "", asked.new, i)),
        "transformers, regular, static cache": Taken(
            lambda i: by_transformers(target, None, "static cache", asked.new, i)
        ),
    }
    for how in asked.peers.split(","):
        found[f"transformers, assisted, {how}"] = Taken(
            lambda i, how=how: by_transformers(target, draft, how, asked.new, i)
        )
    found["ours, regular, eager"] = Taken(lambda i: by_us(eager, asked.new, i, 0))
    found["ours, K = 4, eager"] = Taken(lambda i: by_us(eager, asked.new, i, 4))
    found["ours, regular"] = Taken(lambda i: by_us(pair, asked.new, i, 0))
    for k in map(int, asked.ks.split(",")):
        found[f"ours, K = {k}"] = Taken(lambda i, k=k: by_us(pair, asked.new, i, k))
    found["ours, adaptive"] = Taken(lambda i: by_us(pair, asked.new, i, None))
    return found


def measure(found: dict[str, Taken], repeats: int) -> None:
    """Everyone in turn; the first repeat does not count."""
    for repeat in range(repeats + 1):
        for name, taken in found.items():
            ms, counts = taken.turn(repeat)
            log.info("repeat %d: %s: %.2f ms/token", repeat, name, ms)
            if repeat:
                taken.ms.append(ms)
                taken.counts.merge(counts)


def faster(one: Taken, others: list[Taken]) -> tuple[float, float, float]:
    """How many times faster than the best of the others, which is the one of the least median time."""
    best = min(others, key=lambda other: median(other.ms))
    ratios = [theirs / ours for ours, theirs in zip(one.ms, best.ms, strict=True)]
    return median(ratios), min(ratios), max(ratios)


def table(found: dict[str, Taken]) -> list[str]:
    regular = found["ours, regular"]
    rows = [["contender", "ms/token", "over ours, regular", "least..most", "accepted", "tokens/round"]]
    for name, taken in found.items():
        middle, least, most = faster(taken, [regular])
        counted = taken.counts.summary()
        rate, per = counted["acceptance_rate"], counted["tokens_per_target_forward"]
        rows.append(
            [
                name, f"{median(taken.ms):.2f}", f"{middle:.2f}x", f"{least:.2f}..{most:.2f}",
                "" if rate is None else f"{rate:.2f}", "" if per is None else f"{per:.2f}",
            ]
        )  # fmt: skip
    return aligned(rows, 1)


def bars(found: dict[str, Taken]) -> list[tuple[str, float, float, float, float]]:
    """What was asked to be shown: its name, how much was asked, and the median, least and most."""
    ours = [taken for name, taken in found.items() if name.startswith("ours, K") and "eager" not in name]
    best = min([*ours, found["ours, adaptive"]], key=lambda taken: median(taken.ms))
    peers = {name.rpartition(" ")[2]: taken for name, taken in found.items() if "assisted" in name}
    chosen = [peers[how] for how in ("4", "8", "heuristic") if how in peers]
    plain = found["transformers, regular"]
    rows: list[tuple[str, float, Taken, list[Taken]]] = [
        ("speculative over transformers assisted, best of 4, 8, heuristic", 2.3, best, chosen),
        ("speculative over transformers assisted, best of all", 1.8, best, list(peers.values())),
        ("speculative over transformers regular", 6.5, best, [plain]),
        ("regular over transformers regular", 1.6, found["ours, regular"], [plain]),
    ]
    return [(name, least, *faster(one, others)) for name, least, one, others in rows if others]


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(asked.threads)
    target, draft = sizes(asked.agreement)
    run = RunConf(model=replace(target, dtype=Dtype.bf16), draft=replace(draft, dtype=Dtype.bf16))
    run = replace(run, speculation=replace(run.speculation, adaptive=True))  # so that costs are measured
    slots = max(map(len, PROMPTS)) + asked.new
    began = time.perf_counter()
    pair = opened(replace(run, engine=Steps.compiled), slots)
    start_s = time.perf_counter() - began
    eager = opened(replace(run, engine=Steps.eager), slots)
    found = contenders(asked, pair, eager)
    measure(found, asked.repeats)
    clock, said = (time.process_time, "CPU time") if asked.threads == 1 else (time.perf_counter, "time")
    parts = rounds(pair, [int(k) for k in asked.ks.split(",")], clock)
    met = [
        [name, f"{least}x", f"{middle:.2f}x", f"{low:.2f}..{high:.2f}", "yes" if middle >= least else "NO"]
        for name, least, middle, low, high in bars(found)
    ]
    text = "\n".join(
        [
            "# A pair of 222M and 7M, bf16: ours beside transformers", "", *surroundings(pair[0].devices),
            f"Temperature 1, {asked.new} new tokens, {len(PROMPTS)} prompts, batch 1, agreement "
            f"{asked.agreement}, {asked.threads} threads, {asked.repeats} repeats. "
            f"Loading and compiling took {start_s:.0f} s.",
            "", "```", *table(found), "```", "", "```",
            *aligned([["faster", "asked", "found", "least..most", "met"], *met], 1), "```", "",
            f"A round beside its parts, by {said}:", "", "```", *aligned(parts, 0), "```", "",
        ]
    )  # fmt: skip
    print(text)
    print(json.dumps({"ms_per_token": {n: t.ms for n, t in found.items()}, "versions": versions()}))
    if asked.write:
        write(asked.write, text)


if __name__ == "__main__":
    main()
