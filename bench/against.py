"""How fast two commits decode, in turn on one machine: the pair of bench/fast.py, and SmolLM2 regular.

    python bench/against.py base=COMMIT [head=COMMIT] [turns=9] [new=64] [dtypes=packed,bf16] [write=FILE.md]

Without head it is this checkout. Each side is a process with two threads, and compiles its steps beforehand.
In a turn each side writes the same texts once; who begins alternates. Ratios are of the times within a turn;
the table has their median, the least and the most: two copies of one commit differ by as much as 8 %.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.commits import unpack  # noqa: E402
from bench.words import Words  # noqa: E402

SMOLLM2 = "smollm2-135m-instruct-q4"
WORKER = """
import os, sys
from dataclasses import replace
sys.path[:0] = [os.getcwd(), os.getcwd() + "/bench"]
import torch
torch.set_num_threads(2)
from contenders import PROMPTS, by_us, opened, sizes
from llama_ssp import load_pair
from llama_ssp.config import Dtype, RunConf, Steps
new, *dtypes = sys.argv[1:]
target, draft = (replace(model, dtype=Dtype.bf16) for model in sizes(0.89))
run = RunConf(model=target, draft=draft, engine=Steps.compiled)
pair = opened(run, max(map(len, PROMPTS)) + int(new))
ways = {f"222M with 7M, K = {k}": (pair, k) for k in (0, 4)}
for dtype in dtypes:
    words = ["engine=compiled", f"model.dtype={dtype}", "download=true", "speculation.drafter=none"]
    ways[f"SmolLM2, {dtype}, regular"] = load_pair("SMOLLM2", overrides=words).session, 0
for name, (opened, k) in ways.items():
    by_us(opened, int(new), 0, k)
print("|".join(ways), flush=True)
for seed in sys.stdin:
    print(*(by_us(opened, int(new), int(seed), k)[0] for opened, k in ways.values()), flush=True)
""".replace("SMOLLM2", SMOLLM2)


@dataclass
class Asked(Words):
    """The command line."""

    base: str = ""
    head: str = ""
    turns: int = 9
    new: int = 64
    dtypes: str = "packed,bf16"
    write: str = ""


@contextmanager
def side(commit: str, asked: Asked) -> Iterator[subprocess.Popen[str]]:
    """A process that times the commit's code, or this checkout's; it has said the names of what it times."""
    with tempfile.TemporaryDirectory() as folder:
        tree = unpack(commit, Path(folder)) if commit else ROOT
        command = [sys.executable, "-c", WORKER, str(asked.new), *filter(None, asked.dtypes.split(","))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, cwd=tree, text=True, **pipes) as process:
            yield process
            process.kill()


def said(process: subprocess.Popen[str], seed: int | None = None) -> str:
    """What it answers; leaves if it has ended."""
    assert process.stdin is not None and process.stdout is not None
    if seed is not None:
        process.stdin.write(f"{seed}\n")
        process.stdin.flush()
    return process.stdout.readline().strip() or sys.exit("a side has ended; run its commit alone to see why")


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    from bench.surroundings import report
    from llama_ssp.report.tables import aligned

    if not asked.base:
        sys.exit("base=COMMIT is missing")
    with side(asked.base, asked) as base, side(asked.head, asked) as head:
        sides = [base, head]
        names, _ = said(base).split("|"), said(head)
        taken: list[list[list[float]]] = [[], []]
        for seed in range(1, asked.turns + 1):
            for number in (0, 1) if seed % 2 else (1, 0):
                taken[number].append(list(map(float, said(sides[number], seed).split())))
    rows = [["way", asked.base[:8], asked.head[:8] or "this checkout", "ratio", "least..most"]]
    for at, name in enumerate(names):
        old, new = ([turn[at] for turn in turns] for turns in taken)
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
        rows.append([name, f"{median(old):.2f}", f"{median(new):.2f}", f"{median(ratios):.3f}", spread])
    report(
        asked.write,
        "Milliseconds a token of two commits, in turn",
        {"model": "cpu"},
        f"{asked.new} tokens a prompt, 2 threads, medians of {asked.turns} turns.",
        "",
        "```",
        *aligned(rows, 1),
        "```",
    )


if __name__ == "__main__":
    main()
