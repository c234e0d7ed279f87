"""The memory of each rank during and after loading a model over ranks, against the rank's share of the model.

    python bench/load_memory.py [gib=2.1] [ranks=4] [ways=files:bf16,seed:bf16] [write=FILE.md]

Writes a checkpoint of at least `gib` to a temporary folder a layer at a time (a LLaMA shape, bf16, a file a
layer), and loads it over gloo ranks, each a process of its own. A way `seed:DTYPE` loads a synthetic model of
the same shape instead. Measured is the anonymous memory (RssAnon) of the process, Python and torch included;
pages of the weight files belong to the system's cache and do not count. The exit code is 1 if a rank exceeds
1.15 times its share + 450 MiB. In the times, the ranks share the machine's cores, and the files are newly
written.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from surroundings import report  # noqa: E402

from bench.words import changed  # noqa: E402
from llama_ssp.config import Dtype, ModelConf, Weights  # noqa: E402
from llama_ssp.distributed.process_group import open_ranks  # noqa: E402
from llama_ssp.models.loader import load  # noqa: E402
from llama_ssp.models.passes import Pass, all_rows  # noqa: E402
from llama_ssp.models.synthetic import SyntheticSource, config_for  # noqa: E402
from llama_ssp.planner.weights import parameters  # noqa: E402

MIB, GIB = 2**20, 2**30
FACTOR, BESIDES = 1.15, 450 * MIB  # a rank's limit: times its share, plus Python, torch and buffers
SAMPLE_S = 0.005
CPU = torch.device("cpu")


def main() -> None:
    own = changed({"gib": "2.1", "ranks": "4", "ways": "files:bf16,seed:bf16", "write": ""}, sys.argv[1:])
    world, model = int(own["ranks"]), shape(float(own["gib"]))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, size = Path(folder) / "model", 2 * parameters(model)
        write_checkpoint(model, checkpoint)
        rows = []
        for way in own["ways"].split(","):
            rows += loaded(way, world, model, checkpoint, Path(folder) / "found")
    title = f"Memory of a rank at load: {size / GIB:.2f} GiB in bf16 over {world} ranks"
    report(own["write"], title, {}, *table(rows))
    sys.exit(any(row["peak"] > allowed(row) or row["after"] > allowed(row) for row in rows))


def shape(gib: float) -> ModelConf:
    """A LLaMA with enough layers for this size."""
    sizes: dict[str, Any] = {
        "n_heads": 16, "n_kv_heads": 16, "head_dim": 128, "dim": 2048, "ffn": 5632, "vocab": 32000,
    }  # fmt: skip
    layers = 1
    while 2 * parameters(ModelConf(name="", family="llama", n_layers=layers, **sizes)) < gib * GIB:
        layers += 1
    return ModelConf(
        name=f"llama-{layers}-layers", weights=Weights.synthetic, family="llama", n_layers=layers,
        context=512, **sizes,
    )  # fmt: skip


def write_checkpoint(model: ModelConf, folder: Path) -> None:
    """A file a layer, as on the hub; at most one of them in memory."""
    folder.mkdir()
    config = config_for(model)
    config.save_pretrained(folder)
    source = SyntheticSource.of_config(config, model, torch.bfloat16, CPU, drafts=False)
    files: dict[str, list[str]] = {}
    for name in source.shapes:
        part = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "tables"
        files.setdefault(f"model-{part}.safetensors", []).append(name)
    for file, names in files.items():
        weights = {name: source.read(name, None) for name in names}
        save_file(weights, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def loaded(way: str, world: int, model: ModelConf, checkpoint: Path, found: Path) -> list[dict[str, Any]]:
    """The figures of each rank, started by torchrun."""
    found.mkdir()
    job = {"way": way, "model": {**asdict(model), "weights": None, "dtype": None}}
    (found / "job").write_text(json.dumps(job | {"checkpoint": str(checkpoint)}))
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command, env = [sys.executable, *start, __file__, str(found)], {**os.environ, RANKS: "1"}
    subprocess.run(command, check=True, stdout=sys.stderr, env=env)  # standard output is the table's
    rows = [json.loads((found / f"{rank}").read_text()) for rank in range(world)]
    shutil.rmtree(found)
    return rows


RANKS = "LOAD_MEMORY_RANK"  # set for the processes that load


def load_and_watch(found: Path) -> None:
    """One rank: loads its part while a thread samples the memory."""
    job = json.loads((found / "job").read_text())
    way, _, dtype = job["way"].partition(":")
    model = ModelConf(**{**job["model"], "weights": Weights.synthetic, "dtype": Dtype(dtype)})
    ranks = open_ranks(CPU)
    watch = Watch()
    before, began = anonymous(), time.perf_counter()
    path = Path(job["checkpoint"]) if way == "files" else None
    part = load(model, path, Dtype(dtype), CPU, "model", ranks)
    spent = time.perf_counter() - began
    peak, after = watch.end(), anonymous()
    tokens = torch.ones(1, 1, dtype=torch.int64)
    pass_ = Pass(spans=all_rows([0], [1]), device=CPU, last_only=True)
    logits = part.logits(tokens, pass_, part.new_cache(1, 1))
    assert torch.isfinite(logits).all(), "what was loaded does not run"
    row = {
        "way": job["way"], "rank": ranks.rank, "share": part.weights_bytes, "before": before, "peak": peak,
        "after": after, "seconds": spent,
    }  # fmt: skip
    (found / f"{ranks.rank}").write_text(json.dumps(row))
    ranks.close()


class Watch:
    """A thread that keeps the largest anonymous memory."""

    def __init__(self) -> None:
        self._most, self._on = 0, True
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while self._on:
            self._most = max(self._most, anonymous())
            time.sleep(SAMPLE_S)

    def end(self) -> int:
        self._on = False
        self._thread.join()
        return max(self._most, anonymous())


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the system does not tell RssAnon")


def allowed(row: dict[str, Any]) -> int:
    return int(FACTOR * row["share"]) + BESIDES


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of the results file."""
    lines = [
        "MiB of anonymous memory of the whole process; allowed: 1.15 x share + 450 MiB, at load and after.",
        "",
        "| from | rank | share | before | most at load | after | allowed | load, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mib = [f"{row[key] / MIB:.0f}" for key in ("share", "before", "peak", "after")]
        lines.append(
            f"| {row['way']} | {row['rank']} | {' | '.join(mib)} | {allowed(row) / MIB:.0f} "
            f"| {row['seconds']:.1f} |"
        )
    return lines


if __name__ == "__main__":
    if os.environ.get(RANKS):
        load_and_watch(Path(sys.argv[1]))
    else:
        main()
