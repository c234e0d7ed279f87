"""Compares the plan's speed with measurements, after a calibration of this machine in the same run.

    python bench/plan_speed.py [repeats=5] [k=4] [threads=1] [clock=cpu|wall] [write=FILE.md]
    python bench/plan_speed.py threads=2 clock=wall k=0 engine=compiled rows=1,8,32

Synthetic pairs of several shapes, regular and speculative, are timed in turn with the calibration, so that a
machine with drifting speed favours none. The least of the repeats counts, each the median of its rounds. The
prediction uses the calibrated constants and, where tokens are drafted, the measured acceptance. None of the
shapes takes part in the calibration. The exit code is 1 if a prediction is off by more than a fifth.
clock=cpu counts the processor seconds of one thread; with more threads give clock=wall. With k=0 nothing is
drafted.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import yaml  # noqa: E402
from surroundings import report  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config import Dtype, Steps  # noqa: E402
from llama_ssp.config.compose import composed  # noqa: E402
from llama_ssp.distributed.comm import ALONE  # noqa: E402
from llama_ssp.models.devices import device_of, dtype_of  # noqa: E402
from llama_ssp.placing.this_machine import machine_for  # noqa: E402
from llama_ssp.report.run_folder import versions  # noqa: E402
from llama_ssp.speculative.stats import Counts  # noqa: E402
from llama_ssp.tasks import calibrate  # noqa: E402
from llama_ssp.tasks.calibrate import NEW, Case, Player, measured, plain, predicted, shape  # noqa: E402

# (layers, width, vocabulary) of the target, and (layers, width) of its draft.
SHAPES = [
    ((6, 512, 4096), (2, 256)),
    ((12, 512, 8192), (2, 256)),
    ((4, 1024, 8192), (2, 384)),
    ((8, 1024, 16000), (2, 512)),
    ((16, 768, 32000), (3, 384)),
    ((6, 1536, 8192), (2, 512)),
    ((24, 640, 4096), (4, 320)),
]
ALLOWED = 0.20


@dataclass
class Asked(Words):
    """The command line."""

    repeats: int = 5
    k: int = 4
    rows: str = "1"
    engine: str = "eager"
    threads: int = 1
    clock: str = "cpu"
    write: str = ""


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    torch.set_num_threads(asked.threads)
    run = composed(["model=tiny", "draft=tiny_draft"])
    calibrate.now = {"wall": calibrate.now, "cpu": time.process_time}[asked.clock]
    player, engine = Player(run, ALONE, NEW), Steps(asked.engine)
    seen: dict[int, Counts] = {}
    works, cases = [], []
    for batch, ((layers, dim, vocab), (few, narrow)) in product(map(int, asked.rows.split(",")), SHAPES):
        for draft in (None, shape(few, narrow, vocab))[: 1 + (asked.k > 0)]:
            case = Case(shape(layers, dim, vocab), draft, asked.k if draft else 0, batch, engine)
            works.append(partial(timed, player, case, seen, len(works)))
            cases.append(case)
    cluster, taken = measured(run, ALONE, "here", asked.repeats, works)
    machine = machine_for(cluster)
    dtype = dtype_of(Dtype.auto, device_of("auto", "device"), "dtype")
    rows = []
    for number, (case, ms) in enumerate(zip(cases, taken, strict=True)):
        acceptance = seen[number].summary()["acceptance_rate_decided"] or 0.0
        said = predicted(case, machine, dtype, 1).ms_per_token(acceptance, case.k)
        rows.append(
            {
                "rows": case.rows, "target": case.target.name,
                "draft": case.draft.name if case.draft else None, "k": case.k, "acceptance": acceptance,
                "predicted_ms": said, "measured_ms": ms, "off": said / ms - 1,
            }
        )  # fmt: skip
    write_table(rows, yaml.safe_dump(plain(cluster), sort_keys=False), asked)
    print(json.dumps({"rows": rows, "cluster": plain(cluster), "versions": versions()}))
    sys.exit(int(max(abs(row["off"]) for row in rows) > ALLOWED))


def timed(player: Player, case: Case, seen: dict[int, Counts], number: int) -> float:
    """Milliseconds a token; adds drafted and accepted tokens to the counters."""
    spent, seen[number] = player.play(case)
    return 1000 * median(spent) * len(spent) / seen[number].committed


def write_table(rows: list[dict], constants: str, asked: Asked) -> None:
    """Prints and writes the results file."""
    off = [abs(row["off"]) for row in rows]
    lines = [
        f"{asked.engine} steps, {NEW} tokens, synthetic pairs, token rule; {asked.clock} seconds.",
        f"Off by {mean(off):.1%} in the mean, {max(off):.1%} at worst; "
        f"{sum(one <= ALLOWED for one in off)} of {len(off)} within {ALLOWED:.0%}.",
        "",
        "| rows | target (layers x width) | draft | K | acceptance | predicted ms/token | measured | off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        drafted = (row["draft"] or "none").partition(",")[0]
        seen = f"{row['acceptance']:.2f}" if row["draft"] else ""
        lines.append(
            f"| {row['rows']} | {row['target']} | {drafted} | {row['k']} | {seen} "
            f"| {row['predicted_ms']:.2f} | {row['measured_ms']:.2f} | {row['off']:+.1%} |"
        )
    title, devices = "Predicted and measured speed after calibration", f"cpu, {asked.threads} threads"
    lines += ["", "The constants:", "", "```yaml", constants.rstrip(), "```"]
    report(asked.write, title, {"model": devices}, *lines)


if __name__ == "__main__":
    main()
