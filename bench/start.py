"""The time of a start: eager, compiled for the first time, and compiled again.

    python bench/start.py [threads=2] [write=FILE.md]

The pair is that of bench/fast.py. Each start is a process of its own, the first compiled one with empty
caches. The table has the time until the pair is loaded and ready, and the time of the whole process.
The exit code is 1 if a start takes longer than is asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bars import all_met, bars_table, most  # noqa: E402
from words import Words  # noqa: E402

STARTS = ("eager", "eager", "compiled", "compiled")  # the first one fills the caches of the system
COLD_S, WARM_S, SHARE = 23.5, 3.0, 1 / 3  # the most that is asked


@dataclass
class Asked(Words):
    """The command line. With `engine` this process is a start."""

    threads: int = 2
    small: bool = False
    engine: str = ""
    write: str = ""


def begin(asked: Asked) -> None:
    """A start: the pair, ready to generate."""
    import torch
    from contenders import opened, sizes

    from llama_ssp.config import Dtype, RunConf, Steps

    torch.set_num_threads(asked.threads)
    target, draft = sizes(0.89, asked.small)
    run = RunConf(model=replace(target, dtype=Dtype.bf16), draft=replace(draft, dtype=Dtype.bf16))
    began = time.perf_counter()
    pair = opened(replace(run, engine=Steps[asked.engine]), 128).models
    print(json.dumps({"ready_s": time.perf_counter() - began, "devices": pair.devices}))


def started(engine: str, threads: int, small: bool, caches: str) -> tuple[float, float, dict[str, str]]:
    """Seconds until the pair is ready, those of the whole process, and the devices."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, f"threads={threads}", f"engine={engine}", f"small={str(small).lower()}"],
        check=True, text=True, stdout=subprocess.PIPE, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches},
    )  # fmt: skip
    found = json.loads(done.stdout)
    return found["ready_s"], time.perf_counter() - began, found["devices"]


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    if asked.engine:
        begin(asked)
        return
    from surroundings import report

    from llama_ssp.report.tables import aligned

    with tempfile.TemporaryDirectory() as caches:
        _, eager, first, second = (started(engine, asked.threads, asked.small, caches) for engine in STARTS)
    names = {"eager": eager, "compiled, first": first, "compiled, second": second}
    rows = [["start", "pair ready, s", "whole process, s"]]
    rows += [[name, f"{ready:.1f}", f"{whole:.1f}"] for name, (ready, whole, _) in names.items()]
    share = (second[0] - eager[0]) / (first[0] - eager[0])
    asked_of = [
        most("compiled, first: pair ready, s", first[0], COLD_S),
        most("compiled, second: pair ready, s", second[0], WARM_S),
        most("compiling: second over first, both without an eager start", share, SHARE),
    ]
    report(
        asked.write, "How long a start takes", eager[2],
        f"The pair of bench/fast.py, 222M and 7M, bf16; {asked.threads} threads.",
        "", "```", *aligned(rows, 0), "```", "", "```", *bars_table(asked_of), "```",
    )  # fmt: skip
    sys.exit(int(not all_met(asked_of)))


if __name__ == "__main__":
    main()
