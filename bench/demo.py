"""make demo, on one screen: both ways side by side, their scores, and a larger pair beside transformers.

    python bench/demo.py [new=32] [repeats=1] [questions=200] [small=true]

The first two parts are commands of the program, on the pair that ships. The third is bench/fast.py's pair of
222M and 7M synthetic parameters with fewer contenders and repeats: it is a look at this machine, no
measurement. With small=true little models and one repeat show that the code runs.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "bench"))

from words import Words  # noqa: E402

from llama_ssp.models.kernels.build import compiler  # noqa: E402
from llama_ssp.report.console import Console  # noqa: E402
from llama_ssp.report.tables import Column, Table  # noqa: E402

K = 8
COLUMNS = (
    Column("name", "", is_text=True), Column("ms_per_token", "ms/token", digits=1),
    Column("faster", "times as fast", digits=1),
)  # fmt: skip
OURS, REGULAR, ASSISTED = f"ours, K = {K}", "transformers, regular", f"transformers, assisted, {K}"


@dataclass
class Asked(Words):
    """The command line."""

    new: int = 32
    repeats: int = 1
    questions: int = 200
    small: bool = False


def main() -> int:
    asked, console = Asked.of(sys.argv[1:]), Console()
    console.line("1. A small pair that ships, greedy, regular and with drafts: the same text, sooner")
    shown("experiment=demo")
    console.line("\n2. The same pair at temperature 0.5, questions about products: the same score")
    console.line("(in batches of 64 with few drafts accepted, which is not where drafts save time)")
    shown("experiment=demo_score", f"task.sizes=[{asked.questions}]")
    console.line("\n3. Speed on this machine: 222 and 7 million random parameters, 0.89 of drafts accepted")
    rows = speeds(asked)
    console.show([Table("speeds", COLUMNS, rows)])
    taken = {row["name"]: row["ms_per_token"] for row in rows}
    regular, assisted = (taken[name] / taken[OURS] for name in (REGULAR, ASSISTED))
    console.line(
        f"{regular:.1f} times as fast as transformers' regular sampling, {assisted:.1f} times as fast as its "
        "assisted generation"
    )
    if compiler() is None:
        console.line("There is no C++ compiler (g++ 11 or later): all of this works, but more slowly")
    console.line("\nNext, your own models: source .venv/bin/activate; llama-ssp compare TARGET DRAFT")
    return 0


def shown(*words: str) -> None:
    """Runs a command of the program on this screen; its log is shown only if it fails."""
    is_terminal = sys.stdout.isatty()
    command = [sys.executable, str(ROOT / "launch" / "run.py"), "-q", *words, "out=null"]
    with tempfile.TemporaryFile("w+") as log:
        out = None if is_terminal else subprocess.PIPE
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # models so small gain nothing by more
        done = subprocess.run(command, stdout=out, stderr=log, text=True, env=one_thread)
        if done.returncode:
            log.seek(0)
            sys.exit(log.read() or f"exit code {done.returncode}")
    if not is_terminal:  # without the document at the end
        lines = [line for line in done.stdout.splitlines() if not line.startswith("{")]
        print("\n".join(lines), flush=True)


def speeds(asked: Asked) -> list[dict[str, str | float]]:
    """Each contender's milliseconds a token, and how many times as fast as the first it is."""
    import torch
    import transformers
    from contenders import PROMPTS, by_transformers, by_us, opened, sizes

    from llama_ssp.config import Dtype, RunConf, Steps
    from llama_ssp.models.loader import DRAFT, load_module

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(min(4, os.cpu_count() or 1))
    models = [replace(model, dtype=Dtype.bf16) for model in sizes(0.89, asked.small)]
    run = RunConf(model=models[0], draft=models[1], engine=Steps.compiled)
    pair = opened(replace(run, speculation=replace(run.speculation, k=K)), max(map(len, PROMPTS)) + asked.new)
    target, draft = (
        load_module(model, None, Dtype.bf16, torch.device("cpu"), role)
        for model, role in zip(models, ("model", DRAFT), strict=True)
    )
    turns = {
        REGULAR: lambda i: by_transformers(target, None, "", asked.new, i),
        ASSISTED: lambda i: by_transformers(target, draft, str(K), asked.new, i),
        "ours, regular": lambda i: by_us(pair, asked.new, i, 0),
        OURS: lambda i: by_us(pair, asked.new, i, K),
    }
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for repeat in range(asked.repeats + 1):  # the first does not count
        for name, turn in turns.items():
            ms, _ = turn(repeat)
            taken[name] += [ms] if repeat else []
    found = {name: median(times) for name, times in taken.items()}
    return [{"name": name, "ms_per_token": ms, "faster": found[REGULAR] / ms} for name, ms in found.items()]


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    sys.exit(main())
