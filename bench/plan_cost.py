"""The cost of a plan: time and memory of task=plan as a process of its own.

    python bench/plan_cost.py [repeats=5] [write=FILE.md]

All placements on an 8-GPU node, and one of them; wall and processor time, and the largest resident memory, in
the median over fresh processes. Torch must not be imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
PAIR = ["task=plan", "model=65B", "draft=7B", "cluster=p4d", "out=null", "output=json"]
PLANS = {
    "every placement": PAIR,
    "one placement": [*PAIR, "placement=sharded"],
    "one that does not fit, with advice": [*PAIR, "placement=leader", "cluster.gpus=4"],
}


def main() -> None:
    own = {"repeats": "5", "write": ""}
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        assert key in own, f"{key} is none of {', '.join(own)}"
        own[key] = value
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    lines = [
        "# What task=plan costs: 65B + 7B on p4d",
        "",
        f"Command: `python bench/plan_cost.py {' '.join(sys.argv[1:])}`",
        f"Hardware: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}. "
        f"Python {sys.version.split()[0]}. Commit {commit}, {time.strftime('%Y-%m-%d')}. "
        f"Medians over {own['repeats']} processes.",
        "",
        "| plan | placements | wall s | processor s | resident MB |",
        "|---|---|---|---|---|",
    ]
    for name, words in PLANS.items():
        taken = [run(words) for _ in range(int(own["repeats"]))]
        wall, processor, memory = (median(one[i] for one in taken) for i in range(3))
        lines.append(f"| {name} | {taken[0][3]} | {wall:.2f} | {processor:.2f} | {memory:.0f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if own["write"]:
        Path(own["write"]).write_text(text, encoding="utf-8")


def run(words: list[str]) -> tuple[float, float, float, int]:
    """Wall and processor seconds, megabytes, and the number of planned placements."""
    code = (
        "import sys; from llama_ssp import cli\ntry: cli.main()\nfinally: assert 'torch' not in sys.modules"
    )
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    wall = time.perf_counter() - began
    return wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3, len(json.loads(said)["placements"])


if __name__ == "__main__":
    main()
