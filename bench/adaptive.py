"""Adaptive K beside every fixed K, at agreements from hardly any to nearly all: one interleaved run each.

    python bench/adaptive.py [agreements=0.05,0.3,0.6,0.8,0.95] [ks=1,2,3,4,6,8,12,16] [new=192] [repeats=5]
                             [threads=2] [write=FILE.md]

The pair is that of bench/fast.py, compiled once: between agreements only the draft's weights change. Costs
are measured once, as a run measures them. Each repeat gives everyone one turn on every prompt, and every turn
begins anew, knowing nothing of the pair. Asked: adaptive K within 3 % of the best fixed K, which may be 0; at
agreement 0.05 at least 0.97 times as fast as regular sampling. Leaves with 1 where a figure misses that.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import PROMPTS, by_us, opened  # noqa: E402
from fast import CPU, Asked, Taken, faster, measure, sizes  # noqa: E402
from surroundings import surroundings, write  # noqa: E402

from llama_ssp.config import Dtype, RunConf, Steps  # noqa: E402
from llama_ssp.kernels.linear import pack  # noqa: E402
from llama_ssp.load.causal import CausalModel  # noqa: E402
from llama_ssp.load.models import DRAFT, load  # noqa: E402
from llama_ssp.tabular import aligned  # noqa: E402

log = logging.getLogger("bench")
NEAR, NEVER_SLOWER, HARDLY = 1 / 1.03, 0.97, 0.05


@dataclass
class Ours(Asked):
    """The command line."""

    agreements: str = "0.05,0.3,0.6,0.8,0.95"
    ks: str = "1,2,3,4,6,8,12,16"
    new: int = 192


@torch.no_grad()
def redrafted(draft: CausalModel, agreement: float) -> None:
    """Gives the compiled draft the weights of one that agrees so far."""
    other = load(sizes(agreement)[1], None, Dtype.bf16, CPU, DRAFT).module
    pack(other)
    for own, new in zip(draft.module.parameters(), other.parameters(), strict=True):
        own.copy_(new)


def main() -> None:
    asked = Ours.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(asked.threads)
    target, draft = sizes(asked.agreement)
    run = RunConf(model=replace(target, dtype=Dtype.bf16), draft=replace(draft, dtype=Dtype.bf16))
    run = replace(run, engine=Steps.compiled, speculation=replace(run.speculation, adaptive=True))
    ready = opened(run, max(map(len, PROMPTS)) + asked.new)
    pair = ready[0]
    assert pair.draft is not None and pair.costs is not None
    fixed = [0, *(int(k) for k in asked.ks.split(","))]
    rows = [["agreement", *(f"K = {k}" for k in fixed), "adaptive", "best K", "over best", "over regular"]]
    missed = False
    for agreement in map(float, asked.agreements.split(",")):
        redrafted(pair.draft, agreement)
        found = {str(k): Taken(lambda i, k=k: by_us(ready, asked.new, i, k)) for k in fixed}
        found["adaptive"] = adaptive = Taken(lambda i: by_us(ready, asked.new, i, None))
        measure(found, asked.repeats)
        best = min((str(k) for k in fixed), key=lambda name: median(found[name].ms))
        near, regular = (faster(adaptive, [found[name]]) for name in (best, "0"))
        missed |= near[0] < NEAR or (agreement <= HARDLY and regular[0] < NEVER_SLOWER)
        rows.append(
            [
                str(agreement), *(f"{median(taken.ms):.2f}" for taken in found.values()), best,
                *(f"{middle:.3f} ({least:.2f}..{most:.2f})" for middle, least, most in (near, regular)),
            ]
        )  # fmt: skip
    spent = ", ".join(f"K = {k} {1000 * pair.costs.round(k):.2f}" for k in (0, 1, 4, 16))
    text = "\n".join(
        [
            "# Adaptive K beside every fixed K, ms a token", "", *surroundings(pair.devices),
            f"Temperature 1, {asked.new} new tokens, {len(PROMPTS)} prompts, batch 1, {asked.threads} "
            f"threads, {asked.repeats} repeats. Rounds, as measured for adapting: {spent} ms.",
            f"Asked: {NEAR:.3f} over best, and at {HARDLY} {NEVER_SLOWER} over regular: "
            f"{'MISSED' if missed else 'met'}.",
            "", "```", *aligned(rows, 0), "```", "",
        ]
    )  # fmt: skip
    print(text)
    if asked.write:
        write(asked.write, text)
    sys.exit(int(missed))


if __name__ == "__main__":
    main()
