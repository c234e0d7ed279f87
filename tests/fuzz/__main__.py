"""python -m tests.fuzz [inputs=100000] [seed=0] [minutes=0] [workers=1] [write=FILE.md] [only=KIND:NUMBER]

A table of what became of the inputs; the exit code is 1 if one met a fault. `minutes` ends it earlier.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.surroundings import surroundings
from bench.words import Words
from llama_ssp.report.tables import aligned
from tests.fuzz import door, files, overrides, prompts, whole
from tests.fuzz.trial import LIMIT_S, Trial, judged

SHARES = {"overrides": 0.06, "files": 0.5, "prompts": 0.439, "commands": 0.001}
CHUNK = 100


@dataclass
class Fuzz(Words):
    inputs: int = 100_000
    seed: int = 0
    minutes: float = 0.0
    workers: int = 1
    write: str = ""
    only: str = ""


@dataclass
class Tally:
    """What became of how many, by kind; and every input with a fault."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, kind: str, number: int, trial: Trial) -> None:
        self.outcomes[kind, trial.outcome] += 1
        self.faults += [f"{kind}:{number} {'; '.join(trial.wrong)} {trial.shown}"] if trial.wrong else []

    def join(self, other: Tally) -> None:
        self.outcomes += other.outcomes
        self.faults += other.faults


def trials(kind: str, seed: int, numbers: range, folder: Path) -> Iterator[tuple[int, Trial]]:
    """The inputs of these numbers, tried. A seed and a number make the same input, whatever else is tried."""
    source = {"overrides": overrides, "files": files, "prompts": prompts, "commands": whole}[kind]
    with door.Door().open(kind == "overrides") as opened:
        for number in numbers:
            drawn = source.made(Random(f"{seed}/{kind}/{number}"))
            if kind == "overrides":
                try_ = partial(door.tried, opened, drawn)
            elif kind == "files":
                try_ = partial(files.tried, folder, drawn)
            elif kind == "prompts":
                try_ = partial(prompts.tried, drawn)
            else:
                try_ = partial(whole.tried, folder / str(number), drawn)
            limit = LIMIT_S if kind != "commands" else 2 * whole.PATIENCE_S
            yield number, judged(try_, repr(drawn)[:1000], limit)


def chunk(seed: int, asked: tuple[str, int, int]) -> Tally:
    """So many inputs of a kind."""
    kind, first, last = asked
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        for number, trial in trials(kind, seed, range(first, last), Path(folder)):
            tally.add(kind, number, trial)
    return tally


def counts(inputs: int) -> dict[str, int]:
    """How many of each kind, at least one."""
    return {kind: max(1, round(inputs * share)) for kind, share in SHARES.items()}


def fuzzed(asked: Fuzz) -> Tally:
    """All of them, unless time is up."""
    chunks = [(kind, first, min(first + CHUNK, count)) for kind, count in counts(asked.inputs).items()
              for first in range(0, count, CHUNK)]  # fmt: skip
    Random(asked.seed).shuffle(chunks)
    tally, began = Tally(), time.monotonic()
    with multiprocessing.get_context("fork").Pool(asked.workers, _begin) as pool:
        for done, found in enumerate(pool.imap_unordered(partial(chunk, asked.seed), chunks), start=1):
            tally.join(found)
            for fault in found.faults:
                print(fault, file=sys.stderr, flush=True)
            if done % 50 == 0:
                print(
                    f"{sum(tally.outcomes.values())} inputs, {len(tally.faults)} faults",
                    file=sys.stderr,
                    flush=True,
                )
            if asked.minutes and time.monotonic() - began > 60 * asked.minutes:
                break
        pool.terminate()
    return tally


def _begin() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  forked trials have what is here

    torch.set_num_threads(1)
    logging.disable(logging.ERROR)


def report(asked: Fuzz, tally: Tally, minutes: float) -> str:
    rows = [["kind", "what became of it", "inputs"]]
    rows += [[kind, outcome, f"{count:,}"] for (kind, outcome), count in sorted(tally.outcomes.items())]
    faults = [f"* `{fault[:400]}`" for fault in tally.faults]
    return "\n".join(
        [
            "# Inputs made at random", "",
            *surroundings({}), "",
            f"{sum(tally.outcomes.values()):,} inputs of seed {asked.seed} in {minutes:.0f} minutes: "
            f"{len(tally.faults) or 'no'} faults.",
            "A fault is a traceback, more than 10 s, an exit code or an answer other than documented, "
            "nonsense that is taken, a good value that is refused or lost.", "",
            "```", *aligned(rows, words=2), "```", *(["", "Faults:", "", *faults] if faults else []), "",
        ]
    )  # fmt: skip


def main() -> int:
    asked, began = Fuzz.of(sys.argv[1:]), time.monotonic()
    if asked.only:
        kind, _, number = asked.only.partition(":")
        _begin()
        with tempfile.TemporaryDirectory() as folder:
            for _, trial in trials(kind, asked.seed, range(int(number), int(number) + 1), Path(folder)):
                print(trial.outcome, *trial.wrong, trial.shown, sep="\n")
                return 1 if trial.wrong else 0
    tally = fuzzed(asked)
    text = report(asked, tally, (time.monotonic() - began) / 60)
    print(text)
    if asked.write:
        Path(asked.write).write_text(text, encoding="utf-8")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
