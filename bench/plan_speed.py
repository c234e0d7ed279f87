"""Compares the plan's speed with measurements, after a calibration of this machine in the same run.

    python bench/plan_speed.py [repeats=5] [k=4] [clock=wall|cpu] [write=FILE.md]

Synthetic pairs of several shapes, regular and speculative, are timed in turn with the calibration, so that a
machine with drifting speed favours none. The least of the repeats counts, each the median of its rounds. The
prediction uses the calibrated constants and, where tokens are drafted, the measured acceptance. None of the
shapes takes part in the calibration. The exit code is 1 if a prediction is off by more than a fifth. If
others use the machine, too, clock=cpu with OMP_NUM_THREADS=1 counts the processor seconds of the one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import yaml  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402

from llama_ssp.config import Dtype, register  # noqa: E402
from llama_ssp.config.presets import CONF  # noqa: E402
from llama_ssp.config.validation import to_run  # noqa: E402
from llama_ssp.distributed.comm import ALONE  # noqa: E402
from llama_ssp.models.devices import device_of, dtype_of  # noqa: E402
from llama_ssp.planner.hardware import machine_of  # noqa: E402
from llama_ssp.report.run_folder import versions  # noqa: E402
from llama_ssp.speculative.stats import Counts  # noqa: E402
from llama_ssp.tasks import microbench as timing  # noqa: E402
from llama_ssp.tasks.calibrate import NEW, measured, plain, predicted, processor  # noqa: E402
from llama_ssp.tasks.microbench import Case, Player, shape  # noqa: E402

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


def main() -> None:
    own = {"repeats": "5", "k": "4", "clock": "wall", "write": ""}
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        assert key in own, f"{key} is none of {', '.join(own)}"
        own[key] = value
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        run = to_run(compose("run", ["model=tiny", "draft=tiny_draft"]))
    timing.now = {"wall": time.perf_counter, "cpu": time.process_time}[own["clock"]]
    began, k = time.perf_counter(), int(own["k"])
    player = Player(run, ALONE, NEW)
    seen: dict[int, Counts] = {}
    works, cases = [], []
    for (layers, dim, vocab), (few, narrow) in SHAPES:
        for draft in (None, shape(few, narrow, vocab)):
            case = Case(shape(layers, dim, vocab), draft, k if draft else 0)
            works.append(partial(timed, player, case, seen, len(works)))
            cases.append(case)
    cluster, taken = measured(run, ALONE, "here", int(own["repeats"]), works)
    machine = machine_of(cluster)
    dtype = dtype_of(Dtype.auto, device_of("auto", "device"), "dtype")
    rows = []
    for number, (case, ms) in enumerate(zip(cases, taken, strict=True)):
        acceptance = seen[number].summary()["acceptance_rate_decided"] or 0.0
        said = predicted(case, machine, dtype, 1).ms_per_token(acceptance, case.k)
        rows.append(
            {
                "target": case.target.name, "draft": case.draft.name if case.draft else None, "k": case.k,
                "acceptance": acceptance, "predicted_ms": said, "measured_ms": ms, "off": said / ms - 1,
            }
        )  # fmt: skip
    text = table(rows, yaml.safe_dump(plain(cluster), sort_keys=False), time.perf_counter() - began)
    print(text)
    print(json.dumps({"rows": rows, "cluster": plain(cluster), "versions": versions()}))
    if own["write"]:
        Path(own["write"]).parent.mkdir(parents=True, exist_ok=True)
        Path(own["write"]).write_text(text, encoding="utf-8")
    sys.exit(int(max(abs(row["off"]) for row in rows) > ALLOWED))


def timed(player: Player, case: Case, seen: dict[int, Counts], number: int) -> float:
    """Milliseconds a token; adds drafted and accepted tokens to the counters."""
    spent, seen[number] = player.play(case)
    return 1000 * median(spent) * len(spent) / seen[number].committed.total()


def table(rows: list[dict], constants: str, spent_s: float) -> str:
    """A complete results file."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    found, off = versions(), [abs(row["off"]) for row in rows]
    lines = [
        "# Predicted and measured speed after calibration",
        "",
        f"Command: `python bench/plan_speed.py {' '.join(sys.argv[1:])}`",
        f"Hardware: {processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; "
        f"load of the machine {os.getloadavg()[1]:.1f} over the last five minutes of {spent_s:.0f} s",
        f"Versions: python {found['python']}, torch {found['torch']}, transformers {found['transformers']}",
        f"Commit {commit}, {time.strftime('%Y-%m-%d')}. Batch 1, {NEW} tokens, synthetic pairs, token rule.",
        f"Off by {mean(off):.1%} in the mean, {max(off):.1%} at worst; "
        f"{sum(one <= ALLOWED for one in off)} of {len(off)} within {ALLOWED:.0%}.",
        "",
        "| target (layers x width) | draft | K | acceptance | predicted ms/token | measured | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        drafted = (row["draft"] or "none").partition(",")[0]
        seen = f"{row['acceptance']:.2f}" if row["draft"] else ""
        lines.append(
            f"| {row['target']} | {drafted} | {row['k']} | {seen} | {row['predicted_ms']:.2f} "
            f"| {row['measured_ms']:.2f} | {row['off']:+.1%} |"
        )
    return "\n".join([*lines, "", "The constants:", "", "```yaml", constants.rstrip(), "```", ""])


if __name__ == "__main__":
    main()
