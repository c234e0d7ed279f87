"""The time of a start: eager, compiled for the first time, and compiled again.

    python bench/start.py [threads=2] [write=FILE.md]

The pair is that of bench/fast.py. Each start is a process of its own, the first compiled one with empty
caches. The table has the time until the pair is loaded and ready, and the time of the whole process.
Required: the additional time of the second compiled start over an eager one is at most a third of that of the
first. The exit code is 1 if it is more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STARTS = ("eager", "eager", "compiled", "compiled")  # the first one fills the caches of the system
ASKED = 1 / 3


def begin(engine: str, threads: int) -> None:
    """A start: the pair, ready to generate."""
    import torch
    from contenders import opened
    from fast import sizes

    from llama_ssp.config import Dtype, RunConf, Steps

    torch.set_num_threads(threads)
    target, draft = sizes(0.89)
    run = RunConf(model=replace(target, dtype=Dtype.bf16), draft=replace(draft, dtype=Dtype.bf16))
    began = time.perf_counter()
    pair = opened(replace(run, engine=Steps[engine]), 128).models
    print(json.dumps({"ready_s": time.perf_counter() - began, "devices": pair.devices}))


def started(engine: str, threads: str, caches: str) -> tuple[float, float, dict[str, str]]:
    """Seconds until the pair is ready, those of the whole process, and the devices."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, f"threads={threads}", f"engine={engine}"], check=True, text=True,
        stdout=subprocess.PIPE, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches},
    )  # fmt: skip
    found = json.loads(done.stdout)
    return found["ready_s"], time.perf_counter() - began, found["devices"]


def main() -> None:
    own = {"threads": "2", "write": "", "engine": ""}
    own.update(argument.split("=", 1) for argument in sys.argv[1:])
    if own["engine"]:
        begin(own["engine"], int(own["threads"]))
        return
    from surroundings import surroundings, write

    from llama_ssp.report.tables import aligned

    with tempfile.TemporaryDirectory() as caches:
        _, eager, first, second = (started(engine, own["threads"], caches) for engine in STARTS)
    names = {"eager": eager, "compiled, first": first, "compiled, second": second}
    rows = [["start", "pair ready, s", "whole process, s"]]
    rows += [[name, f"{ready:.1f}", f"{whole:.1f}"] for name, (ready, whole, _) in names.items()]
    share = (second[0] - eager[0]) / (first[0] - eager[0])
    text = "\n".join(
        [
            "# How long a start takes", "", *surroundings(eager[2]), f"{own['threads']} threads.",
            "", "```", *aligned(rows, 0), "```", "",
            f"Compiling: {first[0] - eager[0]:.1f} s, then {second[0] - eager[0]:.1f} s, a share of "
            f"{share:.2f}; of whole processes {second[1] / first[1]:.2f}.", "",
        ]
    )  # fmt: skip
    print(text)
    if own["write"]:
        write(own["write"], text)
    sys.exit(int(share > ASKED))


if __name__ == "__main__":
    main()
