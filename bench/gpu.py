"""The required figures of one GPU, in parts of at most ten minutes on an H200: synthetic weights, batch 1.

    python bench/gpu.py [minutes=9.5] [new=64] [repeats=3] [write=bench/results/gpu_h200_YYYYMM.md]
    python bench/gpu.py part=regular|int8|syncs|small|large       # one of them, in this process
    python bench/gpu.py small=true engine=eager                   # the same code on small models, anywhere

regular   the 7B alone: a step against its bytes over the measured bandwidth (required: 85 %)
int8      the 7B in int8 against bf16 (1.4x faster); the kernel's error
syncs     how often the host waits for the GPU in a round of the 30B with 1B (once)
small     30B with 1B at agreement 0.8: against our regular (2.5x), transformers assisted (4x), a round (1.05)
large     30B with 7B, the same (1.8x over our regular)

Without part= all parts run, each in a process of its own, as long as there is time. Finished parts are kept
next to the report as JSON, and the next call continues with the rest. The exit code is 1 if a figure misses
its requirement, or a part is left. No GPU has run it yet.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import PROMPTS, alone, by_transformers, by_us, one_round, opened, rounds, wait  # noqa: E402
from pictures import write_json  # noqa: E402
from surroundings import surroundings, write  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config import Dtype, ModelConf, RunConf, Steps  # noqa: E402
from llama_ssp.models.kernels.int8 import Int8Linear  # noqa: E402
from llama_ssp.models.loader import DRAFT, load  # noqa: E402
from llama_ssp.planner.speed import pass_cost  # noqa: E402
from llama_ssp.planner.workload import Role  # noqa: E402
from llama_ssp.report.run_folder import versions  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.tasks.microbench import now, shape  # noqa: E402

log = logging.getLogger("bench")
VOCAB, AGREEMENT, K = 32000, 0.8, 4
KS = (2, 4, 6)
LENGTH = 64  # tokens before a timed step
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
SIZES = {  # layers, dim and ffn: of real models, and of small ones in their place
    False: {"7B": (32, 4096, 11008), "30B": (60, 6656, 17920), "1B": (16, 2048, 8192)},
    True: {"7B": (2, 256, 512), "30B": (3, 256, 768), "1B": (1, 128, 256)},
}
STREAMED = {False: 2**32, True: 2**26}  # numbers; more than any cache holds


@dataclass
class Asked(Words):
    """The command line."""

    part: str = ""
    minutes: float = 9.5
    new: int = 64
    repeats: int = 3
    small: bool = False
    engine: str = "compiled"
    write: str = ""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    def model(self, name: str, dtype: Dtype = Dtype.bf16) -> ModelConf:
        """A Llama of this size, with the requested agreement of its distributions with the target's."""
        layers, dim, ffn = SIZES[self.small][name]
        model = shape(layers, dim, VOCAB, ffn, AGREEMENT, head_dim=128)
        return replace(model, name=name, context=2048, dtype=dtype)

    def run(self, target: ModelConf, draft: ModelConf | None = None) -> RunConf:
        return RunConf(model=target, draft=draft, engine=Steps(self.engine))


@dataclass(frozen=True)
class Row:
    """A figure, and the least required value; None if nothing is required."""

    what: str
    asked: float | None
    found: float

    @property
    def met(self) -> bool:
        return self.asked is None or self.found >= self.asked


@dataclass
class Report:
    """The figures of all parts."""

    parts: dict[str, list[Row]] = field(default_factory=dict)

    @staticmethod
    def read(place: Path) -> Report:
        """The figures of earlier calls."""
        if not place.exists():
            return Report()
        kept = json.loads(place.read_text(encoding="utf-8"))["parts"]
        return Report({name: [Row(**row) for row in rows] for name, rows in kept.items()})

    def table(self) -> list[str]:
        lines = [["part", "what", "asked", "found", "met"]]
        for name, rows in self.parts.items():
            for row in rows:
                asked = "" if row.asked is None else f"{row.asked:.2f}"
                met = "" if row.asked is None else "yes" if row.met else "NO"
                lines.append([name, row.what, asked, f"{row.found:.3f}", met])
        return aligned(lines, 2)

    def summary(self) -> dict[str, Any]:
        return {
            "parts": {name: [vars(row) for row in rows] for name, rows in self.parts.items()},
            "versions": versions(),
        }

    @property
    def met(self) -> bool:
        return all(row.met for rows in self.parts.values() for row in rows)


def seconds(work: Callable[[], object], turns: int = 20) -> float:
    """The median of some turns, without the first ones, which compile and capture."""
    taken = []
    for turn in range(turns + 3):
        wait()
        began = now()
        work()
        wait()
        if turn >= 3:
            taken.append(now() - began)
    return median(taken)


def bandwidth(asked: Asked) -> float:
    """Bytes a second that summing a large tensor reads."""
    large = torch.ones(STREAMED[asked.small], dtype=torch.bfloat16, device=asked.device)
    return large.nbytes / seconds(lambda: large.sum())


def share_read(asked: Asked, model: ModelConf) -> tuple[float, float]:
    """A step's bytes over those that the bandwidth allows, and its seconds. The embedding is not read."""
    pair = opened(asked.run(model), 4 * LENGTH).models
    assert pair.target is not None
    step_s = seconds(alone(pair.target, LENGTH, 1))
    return pass_cost(Role("", model, model.dtype), 1).weights / step_s / bandwidth(asked), step_s


def regular(asked: Asked) -> list[Row]:
    share, step_s = share_read(asked, asked.model("7B"))
    return [Row("7B: share of the read bandwidth", 0.85, share), Row("7B: ms/token", None, 1000 * step_s)]


def int8(asked: Asked) -> list[Row]:
    (share, eight_s), (_, sixteen_s) = (
        share_read(asked, asked.model("7B", dtype)) for dtype in (Dtype.int8, Dtype.bf16)
    )
    rows = [
        Row("7B: int8 over bf16", 1.4, sixteen_s / eight_s),
        Row("7B in int8: share of the read bandwidth", None, share),
    ]
    return rows + products(asked)


def products(asked: Asked) -> list[Row]:
    """One layer's product in int8: error, and speed for several numbers of rows, against LLM.int8's own."""
    run = replace(asked.run(asked.model("7B", Dtype.int8)), engine=Steps.compiled)
    pair = opened(run, LENGTH).models
    assert pair.target is not None
    layer = next(one for one in pair.target.module.modules() if isinstance(one, Int8Linear))
    weight, rows = layer.codes.double() * layer.scales.double()[:, None] / 127, []
    for count in (1, 1 + K, 16):
        x = torch.randn(count, layer.in_features, dtype=torch.bfloat16, device=asked.device)
        exact = x.double() @ weight.T
        error = (layer(x).double() - exact).norm() / exact.norm()
        rows.append(Row(f"{count} rows: 2^-8 over the error", 1.0, float(2**-8 / error)))
        with torch.inference_mode():
            ours, theirs = (seconds(lambda work=work, x=x: work(x)) for work in (layer, layer.plain))
        rows.append(Row(f"{count} rows: over LLM.int8's own", None, theirs / ours))
    return rows


def syncs(asked: Asked) -> list[Row]:
    pair = opened(asked.run(asked.model("30B"), asked.model("1B")), 4 * LENGTH)
    engine = pair.engine(0, end_ids=frozenset())
    state: Any = engine.prefill([Prompt("0", PROMPTS[0])], LENGTH)
    for _ in range(3):
        one_round(engine, state, K)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        one_round(engine, state, K)
    counts = {event.key: event.count for event in seen.key_averages()}
    waits = sum(counts.get(name, 0) for name in WAITS)
    return [
        Row("one wait over the waits in a round", 1.0, 1 / max(waits, 1)),
        Row("launches of graphs in a round", None, counts.get("cudaGraphLaunch", 0)),
        Row("launches of kernels beside them", None, counts.get("cudaLaunchKernel", 0)),
    ]


def beside(asked: Asked, name: str, least: float) -> list[Row]:
    """A pair against our regular sampling and transformers' assisted generation, in turn."""
    draft = asked.model(name)
    ready = opened(asked.run(asked.model("30B"), draft), max(map(len, PROMPTS)) + asked.new)
    module = load(draft, None, Dtype.bf16, asked.device, DRAFT).module
    assert ready.models.target is not None
    works: dict[str, Callable[[int], float]] = {"regular": lambda i: by_us(ready, asked.new, i, 0)[0]}
    for k in KS:
        works[f"K = {k}"] = lambda i, k=k: by_us(ready, asked.new, i, k)[0]
    for how in ("4", "heuristic"):
        works[f"assisted, {how}"] = lambda i, how=how: by_transformers(
            ready.models.target.module, module, how, asked.new, i
        )[0]
    taken: dict[str, list[float]] = {one: [] for one in works}
    for repeat in range(asked.repeats + 1):
        for one, work in works.items():
            ms = work(repeat)
            log.info("%s: %.2f ms/token", one, ms)
            if repeat:
                taken[one].append(ms)
    best = min((f"K = {k}" for k in KS), key=lambda one: median(taken[one]))
    peer = min((one for one in works if "assisted" in one), key=lambda one: median(taken[one]))
    over = [
        median(theirs / ours for ours, theirs in zip(taken[best], taken[one], strict=True))
        for one in ("regular", peer)
    ]
    parts = rounds(ready, [K])
    return [
        Row(f"30B with {name}, {best}: over our regular", least, over[0]),
        Row(f"30B with {name}, {best}: over transformers, {peer}", 4.0, over[1]),
        Row(f"30B with {name}: parts over round (1/1.05)", 1 / 1.05, 1 / float(parts[1][-1])),
        *(Row(f"30B with {name}, {one}: ms/token", None, median(times)) for one, times in taken.items()),
    ]


PARTS: dict[str, Callable[[Asked], list[Row]]] = {
    "regular": regular,
    "int8": int8,
    "syncs": syncs,
    "small": lambda asked: beside(asked, "1B", 2.5),
    "large": lambda asked: beside(asked, "7B", 1.8),
}


def of_its_own(part: str, limit_s: float) -> list[Row] | None:
    """Runs a part in a process, which frees the GPU's memory; None if time ran out, or it failed."""
    command = [sys.executable, __file__, *sys.argv[1:], f"part={part}", "write="]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        log.info("%s: not done in the time that was left", part)
        return None
    if not done.stdout.strip():
        log.info("%s: failed, exit code %d", part, done.returncode)
        return None
    return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])["parts"][part]]


def main() -> None:
    began, asked = now(), Asked.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if asked.device.type != "cuda" and not asked.small:
        sys.exit("bench/gpu.py needs a GPU: torch sees none (small=true tries its code without)")
    kept = Path(asked.write).with_suffix(".json") if asked.write else None
    report = Report.read(kept) if kept else Report()
    left = []
    if asked.part:
        report.parts[asked.part] = PARTS[asked.part](asked)
    else:
        for part in [part for part in PARTS if part not in report.parts]:
            remaining = 60 * asked.minutes - (now() - began)
            rows = of_its_own(part, remaining) if remaining > 0 else None
            if rows is None:
                left.append(part)
                continue
            report.parts[part] = rows
            if asked.write:
                write_json(asked.write, report.summary())
            log.info("%s: done, %.0f s since the beginning", part, now() - began)
    sizes = "little models, for their code alone" if asked.small else "bf16, batch 1"
    name = torch.cuda.get_device_name() if asked.device.type == "cuda" else "cpu"
    head = ["# One GPU", "", *surroundings({"model": f"{name}, {sizes}"}), ""]
    rest = [f"Left for another call: {', '.join(left)}.", ""] if left else []
    text = "\n".join([*head, "```", *report.table(), "```", "", *rest])
    print(text)
    print(json.dumps(report.summary()))
    if asked.write:
        write(asked.write, text)
        write_json(asked.write, report.summary())
    sys.exit(0 if report.met and not left else 1)


if __name__ == "__main__":
    main()
