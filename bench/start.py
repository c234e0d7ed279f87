"""How much later a model with compiled steps is ready than an eager one, without and with caches.

    python bench/start.py [repeats=3] [threads=2] [write=FILE.md]
    python bench/start.py small=true        # a little model: its code alone

The model has the shape of SmolLM2-135M, with synthetic weights in bf16. Each start is a process of its own.
In every repeat there is an eager start, a compiled one with empty caches (kernels and programs are compiled),
and one that finds what the second has kept. Medians of the differences are compared with what is asked; the
exit code is 1 if a start takes longer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bars import all_met, bars_table, most  # noqa: E402
from words import Words  # noqa: E402

EAGER, COLD, WARM = "eager", "compiled, empty caches", "compiled, full caches"
LATER_S = {COLD: 10.0, WARM: 2.5}  # the most that is asked


@dataclass
class Asked(Words):
    """The command line. With `engine` this process is a start."""

    repeats: int = 3
    threads: int = 2
    small: bool = False
    engine: str = ""
    write: str = ""


def start(asked: Asked) -> None:
    """Prints the seconds until the model is ready to generate."""
    import torch
    from contenders import opened

    from llama_ssp.config import Dtype, ModelConf, RunConf, Steps, Weights

    torch.set_num_threads(asked.threads)
    model = ModelConf(
        name="SmolLM2-135M", weights=Weights.synthetic, family="llama", dtype=Dtype.bf16,
        n_layers=2 if asked.small else 30, n_heads=9, n_kv_heads=3, head_dim=64, dim=576, ffn=1536,
        vocab=49152, context=2048, tied=True,
    )  # fmt: skip
    began = time.perf_counter()
    pair = opened(RunConf(model=model, engine=Steps[asked.engine]), 128)
    print(json.dumps({"ready_s": time.perf_counter() - began, "devices": pair.models.devices}))


def started(asked: Asked, engine: str, caches: str) -> tuple[float, dict[str, str]]:
    """Runs a start; returns its seconds, and the devices."""
    words = f"threads={asked.threads}", f"small={str(asked.small).lower()}", f"engine={engine}"
    done = subprocess.run(
        [sys.executable, __file__, *words], check=True, text=True, stdout=subprocess.PIPE,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches},
    )  # fmt: skip
    document = json.loads(done.stdout)
    return document["ready_s"], document["devices"]


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    if asked.engine:
        start(asked)
        return
    from surroundings import report

    from llama_ssp.report.tables import aligned

    seconds: dict[str, list[float]] = {EAGER: [], COLD: [], WARM: []}
    devices = dict[str, str]()
    for _ in range(asked.repeats):
        with tempfile.TemporaryDirectory() as caches:
            for name, taken in seconds.items():
                ready, devices = started(asked, EAGER if name == EAGER else "compiled", caches)
                taken.append(ready)
    later = {
        name: median(ready - eager for ready, eager in zip(seconds[name], seconds[EAGER], strict=True))
        for name in LATER_S
    }
    rows = [["start", "model ready, s", "later than eager, s"]]
    rows += [
        [name, f"{median(taken):.1f}", f"{later[name]:.1f}" if name in later else ""]
        for name, taken in seconds.items()
    ]
    bars = [most(f"{name}: s later than eager", later[name], asked_s) for name, asked_s in LATER_S.items()]
    report(
        asked.write, "How long a start takes", devices,
        f"The shape of SmolLM2-135M, bf16; {asked.threads} threads; medians of {asked.repeats} repeats.",
        "", "```", *aligned(rows, 0), "```", "", "```", *bars_table(bars), "```",
    )  # fmt: skip
    sys.exit(int(not all_met(bars)))


if __name__ == "__main__":
    main()
