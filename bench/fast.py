"""Our loop against transformers' regular and assisted generation: one pair, one interleaved run.

    python bench/fast.py [repeats=5] [new=96] [ks=2,4,8] [agreement=0.89] [threads=2] [write=FILE.md]
    python bench/fast.py small=true        # little models: its code alone

The pair is synthetic (llama_ssp/models/synthetic.py): 222 million and 7 million parameters, bf16, with this
mean acceptance probability. In every repeat each contender gets one turn on every prompt. Ratios are computed
within a repeat; the table has their median, the least and the most. Tokens are counted the same for all:
those after the prompt (contenders.py).

The last lines compare a round with its parts: K steps of the draft and one of the target, alone. Each
contender is compared with its bounds: the bytes that its own forward passes read over the bandwidth measured
here, and, for ours, its steps alone. Then comes what is required, of prefill too. With write= the same
figures are written as JSON and a plot.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from bars import Bar, bars_table, most  # noqa: E402
from contenders import (  # noqa: E402
    PROMPTS,
    by_transformers,
    by_us,
    opened,
    prefills_ms,
    rounds,
    sizes,
    steps_ms,
)
from pictures import caption, plot_contenders, write_json  # noqa: E402
from surroundings import report  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config import Dtype, RunConf, Steps  # noqa: E402
from llama_ssp.models.loader import DRAFT, load_module  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.planner.speed import pass_cost  # noqa: E402
from llama_ssp.planner.workload import Role  # noqa: E402
from llama_ssp.report.run_folder import versions  # noqa: E402
from llama_ssp.report.tables import aligned, figure  # noqa: E402
from llama_ssp.speculative.stats import Counts, ratio  # noqa: E402

log = logging.getLogger("bench")
CPU = torch.device("cpu")
OVER_BYTES, BEST_OVER_BYTES = 1.35, 2.2  # the most that is asked of regular sampling, and at the best K
VERIFYING, OVER_REGULAR = 5, 1.25  # tokens of a step, and the most over a step of one


@dataclass
class Asked(Words):
    """The command line."""

    repeats: int = 5
    new: int = 96
    ks: str = "2,4,8"
    agreement: float = 0.89
    threads: int = 2
    peers: str = "4,8,12,heuristic,dynamic"
    small: bool = False
    write: str = ""


@dataclass(frozen=True)
class Both:
    """A figure of the target, and of the draft."""

    target: float
    draft: float


@dataclass
class Taken:
    """The times and counters of a contender's turns."""

    turn: Callable[[int], tuple[float, Counts]]
    ms: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    passes: list[Both] = field(default_factory=list)  # a token, of each turn


class Meter:
    """Counts the forward passes of transformers' modules."""

    def __init__(self, target: Any, draft: Any) -> None:
        self._seen = {"target": 0, "draft": 0}
        for name, module in (("target", target), ("draft", draft)):
            module.register_forward_pre_hook(lambda *_, name=name: self._count(name))

    def _count(self, name: str) -> None:
        self._seen[name] += 1

    def read(self, new: int) -> Both:
        """Passes a token since the last read, without the two that read a prompt (contenders.py)."""
        seen, tokens = dict(self._seen), new * len(PROMPTS)
        self._seen = dict.fromkeys(seen, 0)
        return Both((seen["target"] - 2 * len(PROMPTS)) / tokens, seen["draft"] / tokens)


def passes_of(counts: Counts) -> Both:
    """Of our loop: a round is one pass of the target, and a drafted token one pass of the draft."""
    counted = counts.summary()
    tokens = counted["tokens_committed"]
    return Both(counted["row_rounds"] / tokens, counted["tokens_drafted"] / tokens)


def contenders(
    asked: Asked, pair: PairSession, eager: PairSession, target: Any, draft: Any
) -> dict[str, Taken]:
    """All contenders; `target` and `draft` are transformers' modules of the same pair."""
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


def measure(found: dict[str, Taken], repeats: int, read: Callable[[], Both] | None = None) -> None:
    """All in turn; the first repeat does not count. `read` gives passes of contenders without a counter."""
    for repeat in range(repeats + 1):
        for name, taken in found.items():
            ms, counts = taken.turn(repeat)
            theirs = read() if read else None
            log.info("repeat %d: %s: %.2f ms/token", repeat, name, ms)
            if repeat:
                taken.ms.append(ms)
                taken.counts.merge(counts)
                own = passes_of(counts) if counts.row_rounds else theirs
                taken.passes += [] if own is None else [own]


def read_per_s(turns: int = 9) -> float:
    """The most bytes a second that a sum reads."""
    large, taken = torch.ones(10**8), []
    for _ in range(turns):
        began = time.perf_counter()
        large.sum()
        taken.append(time.perf_counter() - began)
    return large.nbytes / min(taken)


def steps_alone(parts: list[list[str]], regular: float, found: dict[str, Taken]) -> dict[str, float]:
    """Milliseconds a token that a contender's steps take alone, where `parts` has them."""
    known = {"ours, regular": regular}
    for k, draft, target, *_ in parts[1:]:
        per = found[f"ours, K = {k}"].counts.summary()["tokens_per_target_forward"]
        known[f"ours, K = {k}"] = (int(k) * float(draft) + float(target)) / per
    return known


def figures(
    found: dict[str, Taken], read: Both, bandwidth: float, steps: dict[str, float]
) -> list[dict[str, Any]]:
    """The report's figures of each contender, under names for programs."""
    rows = []
    for name, taken in found.items():
        middle, least, most = faster(taken, [found["ours, regular"]])
        counted = taken.counts.summary()
        bytes_ = median(each.target * read.target + each.draft * read.draft for each in taken.passes)
        rows.append(
            {
                "contender": name, "ms_per_token": median(taken.ms), "turns_ms_per_token": taken.ms,
                "over_ours_regular": middle, "over_ours_regular_least": least,
                "over_ours_regular_most": most, "acceptance_rate": counted["acceptance_rate"],
                "tokens_per_target_forward": counted["tokens_per_target_forward"],
                "target_forwards_per_token": median(each.target for each in taken.passes),
                "draft_forwards_per_token": median(each.draft for each in taken.passes),
                "bytes_bound_ms_per_token": 1000 * bytes_ / bandwidth,
                "steps_bound_ms_per_token": steps.get(name),
            }
        )  # fmt: skip
    return rows


def faster(one: Taken, others: list[Taken]) -> tuple[float, float, float]:
    """How many times faster than the best of the others: the one with the least median time."""
    best = min(others, key=lambda other: median(other.ms))
    ratios = [theirs / ours for ours, theirs in zip(one.ms, best.ms, strict=True)]
    return median(ratios), min(ratios), max(ratios)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """For people. Bounds are in ms/token; next to each is the contender's time over it."""
    head = ["contender", "ms/token", "over ours, regular", "least..most", "accepted", "tokens/round"]
    lines = [[*head, "bytes", "over", "steps", "over"]]
    for row in rows:
        ms, bytes_, steps = (row[f"{of}ms_per_token"] for of in ("", "bytes_bound_", "steps_bound_"))
        least, most = row["over_ours_regular_least"], row["over_ours_regular_most"]
        lines.append(
            [
                row["contender"], f"{ms:.2f}", f"{row['over_ours_regular']:.2f}x", f"{least:.2f}..{most:.2f}",
                *(figure(row[key]) for key in ("acceptance_rate", "tokens_per_target_forward")),
                figure(bytes_), figure(ratio(ms, bytes_)),
                figure(steps), figure(None if steps is None else ratio(ms, steps)),
            ]
        )  # fmt: skip
    return aligned(lines, 1)


def bars(found: dict[str, Taken], rows: list[dict[str, Any]], steps: dict[str, list[float]]) -> list[Bar]:
    """What is required of texts and of steps."""
    compiled = {name: taken for name, taken in found.items() if "eager" not in name}
    ours = {name: taken for name, taken in compiled.items() if name.startswith(("ours, K", "ours, adaptive"))}
    best = min(ours, key=lambda name: median(ours[name].ms))
    peers = {name.rpartition(" ")[2]: taken for name, taken in found.items() if "assisted" in name}
    chosen = [peers[how] for how in ("4", "8", "heuristic") if how in peers]
    plain, regular = found["transformers, regular"], found["ours, regular"]
    known: list[tuple[str, float, Taken, list[Taken]]] = [
        ("speculative over transformers assisted, best of 4, 8, heuristic", 2.3, ours[best], chosen),
        ("speculative over transformers assisted, best of all", 1.8, ours[best], list(peers.values())),
        ("speculative over transformers regular", 6.5, ours[best], [plain]),
        ("regular over transformers regular", 1.6, regular, [plain]),
    ]
    over = {row["contender"]: row["ms_per_token"] / row["bytes_bound_ms_per_token"] for row in rows}
    verifying = [five / one for one, five in zip(steps["1"], steps[str(VERIFYING)], strict=True)]
    return [
        *(faster_bar(name, least, one, others) for name, least, one, others in known if others),
        most("regular / its bytes", over["ours, regular"], OVER_BYTES),
        most(f"{best} / its bytes", over[best], BEST_OVER_BYTES),
        most(f"a step of {VERIFYING} tokens / of 1", median(verifying), OVER_REGULAR),
    ]


def prefill_bars(pair: PairSession, module: Any) -> list[Bar]:
    """The target's prefill of one text against transformers' pass over the same tokens, with a cache."""
    found = []
    for length, taken in prefills_ms(pair, module).items():
        ratios = [their / our for our, their in zip(taken["ours"], taken["theirs"], strict=True)]
        what = f"prefill of {length} tokens, over transformers'"
        found.append(Bar(what, median(ratios), 1.0, note=f"{median(taken['ours']):.0f} ms"))
    return found


def faster_bar(name: str, least: float, one: Taken, others: list[Taken]) -> Bar:
    middle, low, high = faster(one, others)
    return Bar(name, middle, least, note=f"{low:.2f}..{high:.2f}")


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(asked.threads)
    target, draft = sizes(asked.agreement, asked.small)
    run = RunConf(model=replace(target, dtype=Dtype.bf16), draft=replace(draft, dtype=Dtype.bf16))
    run = replace(run, speculation=replace(run.speculation, adaptive=True))  # so that costs are measured
    slots = max(map(len, PROMPTS)) + asked.new
    began = time.perf_counter()
    pair = opened(replace(run, engine=Steps.compiled), slots)
    start_s = time.perf_counter() - began
    eager = opened(replace(run, engine=Steps.eager), slots)
    modules = [
        load_module(model, None, Dtype.bf16, CPU, role)
        for model, role in zip((target, draft), ("model", DRAFT), strict=True)
    ]
    meter, found = Meter(*modules), contenders(asked, pair, eager, *modules)
    measure(found, asked.repeats, lambda: meter.read(asked.new))
    bandwidth = read_per_s()
    clock, said = (time.process_time, "CPU time") if asked.threads == 1 else (time.perf_counter, "time")
    parts = rounds(pair, [int(k) for k in asked.ks.split(",")], clock)
    read = Both(*(pass_cost(Role("", model, Dtype.bf16), 1).weights for model in (target, draft)))
    each = steps_ms(pair, (1, VERIFYING), clock)
    rows = figures(found, read, bandwidth, steps_alone(parts, median(each["1"]), found))
    required = bars(found, rows, each) + prefill_bars(pair, modules[0])
    report(
        asked.write, "A pair of 222M and 7M, bf16: ours beside transformers", pair.models.devices,
        f"Temperature 1, {asked.new} new tokens, {len(PROMPTS)} prompts, batch 1, agreement "
        f"{asked.agreement}, {asked.threads} threads, {asked.repeats} repeats. "
        f"Loading and compiling took {start_s:.0f} s.",
        f"Summing reads {bandwidth / 1e9:.1f} GB/s; a pass reads {read.target / 1e6:.0f} MB of the "
        f"target, {read.draft / 1e6:.1f} MB of the draft. `bytes` and `steps` are ms/token that reading "
        "the weights of its passes takes, and that its steps take alone.",
        "", "```", *table(rows), "```", "", "```", *bars_table(required), "```", "",
        f"A round beside its parts, by {said}:", "", "```", *aligned(parts, 0), "```",
    )  # fmt: skip
    summary = {
        "contenders": rows, "rounds": parts, "bandwidth_gb_s": bandwidth / 1e9, "start_s": start_s,
        "bars": [asdict(bar) for bar in required], "versions": versions(),
    }  # fmt: skip
    print(json.dumps(summary))
    if asked.write:
        write_json(asked.write, summary)
        title = caption("222M with 7M, bf16: least, middle and most of its turns", asked.repeats)
        plot_contenders(asked.write, rows, title)


if __name__ == "__main__":
    main()
