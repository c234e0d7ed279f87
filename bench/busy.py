"""How much slower a run becomes next to programs that keep every core busy, by how long waiting threads spin.

    python bench/busy.py [spins=usual,30000] [rounds=3] [new=24] [write=FILE.md] [KEY=VALUE ...]

Each turn is a process of its own, with a real model in its codes (the preset smollm2-135m-instruct-q4) by
compiled steps, alone and next to as many loops as there are cores. `usual` is libgomp's own number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.surroundings import report  # noqa: E402
from bench.words import divided  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402

MODEL, PROMPT = "smollm2-135m-instruct-q4", "prompt=The capital of France is a city where"
LOOP = [sys.executable, "-c", "while True: pass"]


def ms_per_token(spins: str, words: list[str], is_busy: bool) -> float:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    env["GOMP_SPINCOUNT"] = "300000" if spins == "usual" else spins  # as libgomp has it, with a core a thread
    command = [sys.executable, str(ROOT / "launch/run.py"), "generate", MODEL, PROMPT, *words, "output=json"]
    with ExitStack() as loops:
        for _ in range(is_busy * (os.cpu_count() or 1)):
            loops.callback(subprocess.Popen(LOOP).kill)
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return float(json.loads(done.stdout)["ms_per_token"])


def main() -> None:
    own = {"spins": "usual,30000", "rounds": "3", "new": "24", "write": ""}
    own, others = divided(own, sys.argv[1:])
    fixed = ["engine=compiled", "ignore_eos=true", "download=true", "out=null", "sampling=greedy"]
    words = [*fixed, f"max_new_tokens={own['new']}", *others]
    counts = own["spins"].split(",")
    taken: dict[tuple[str, bool], list[float]] = {}
    for _ in range(int(own["rounds"])):
        for spins in counts:
            for is_busy in (False, True):
                taken.setdefault((spins, is_busy), []).append(ms_per_token(spins, words, is_busy))
    head = ["spins", "alone, ms/token", "least..most", "busy, ms/token", "least..most", "busy / alone"]
    rows = []
    for spins in counts:
        alone, busy = taken[spins, False], taken[spins, True]
        row = [spins]
        for times in (alone, busy):
            row += [f"{median(times):.2f}", f"{min(times):.1f}..{max(times):.1f}"]
        rows.append([*row, f"{median(busy) / median(alone):.1f}"])
    report(
        own["write"], "A run next to busy loops, by how long waiting threads spin", {},
        f"{own['rounds']} rounds, in turn; {os.cpu_count()} loops.",
        "", "```", *aligned([head, *rows], 1), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
