"""One GPU in ten minutes: are its texts right, and how fast is it? Synthetic weights, and the shipped pair.

    python bench/gpu.py write=bench/results/gpu_h200_YYYYMM.md [minutes=9.5] [parts=logits,texts,...]
    python bench/gpu.py wheels=FOLDER ...      # first installs the wheels of this folder, without an index
    python bench/gpu.py small=true             # little models, on a CPU, too: the code of all parts

First whether it is right (gpu_right.py), all parts at once:

logits      eager against compiled steps, through load_pair: short and long caches, one row and three
texts       the same of texts: K = 0 and 4, prompts one after the other, captures counted; heads, trees
command     the command with each engine; exit codes
ranks       two ranks on the one GPU: leader, sharded and own; 8 bit
faults      a rank is killed; a rank runs out of memory

Then how fast (gpu_figures.py), one part after the other:

steps       7B with 1B: steps of 1, 2 and 5 tokens after 64 to 32k slots against the measured bandwidth, a
            profiled round (waits, launches, idle), texts, transformers' assisted generation, the plan
large       30B with 7B: the plan's bytes, texts
quantised   7B in 8 and 4 bit against bf16; the kernel for weights in codes

It stops for nothing: each part is a process with a time limit, and the figures of a part that fails are kept.
JSON is written after each part. The exit code is 1 if a figure misses what is asked.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bars import ENDS, Bar, all_met, bars_table, failed  # noqa: E402
from words import Words  # noqa: E402

log = logging.getLogger("bench")
RIGHT = {"logits": 200, "texts": 300, "command": 240, "ranks": 400, "faults": 240}  # seconds at most
FIGURES = {"steps": 240, "large": 180, "quantised": 120}
SMALL_LIMIT_S = 600


@dataclass
class Asked(Words):
    """The command line. With `part` this process is a part."""

    minutes: float = 9.5
    parts: str = ",".join([*RIGHT, *FIGURES])
    wheels: str = ""
    small: bool = False
    part: str = ""
    write: str = ""


@dataclass
class Report:
    """The figures of the parts that have ended."""

    asked: Asked
    began: float
    parts: dict[str, list[Bar]] = field(default_factory=dict)

    def left_s(self) -> float:
        return 60 * self.asked.minutes - (time.monotonic() - self.began)

    def add(self, part: str, bars: list[Bar]) -> None:
        self.parts[part] = bars
        log.info("%s: %.0f s are left", part, self.left_s())
        log.info("%s", "\n".join(f"  {line}" for line in bars_table(bars)))
        if self.asked.write:
            Path(self.asked.write).parent.mkdir(parents=True, exist_ok=True)
            Path(self.asked.write).with_suffix(".json").write_text(json.dumps(self.summary(), indent=1))

    def summary(self) -> dict[str, Any]:
        from llama_ssp.report.run_folder import versions

        every = {part: list(map(Bar.document, bars)) for part, bars in self.parts.items()}
        return {"parts": every, "versions": versions()}

    def text(self) -> str:
        from surroundings import surroundings

        size = "little models, for their code alone" if self.asked.small else "synthetic weights, batch 1"
        lines = ["# One GPU", "", *surroundings({"model": f"{gpu()}, {size}"}), ""]
        for part, bars in self.parts.items():
            lines += [f"{part}:", "", "```", *bars_table(bars), "```", ""]
        return "\n".join(lines)


def gpu() -> str:
    """Name, driver, free memory, mode and MIG of the first GPU, cuDNN's version; or cpu."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    names = "name,driver_version,memory.free,compute_mode,mig.mode.current"
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader", "--id=0"]
    said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return f"{said or torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}"


def part_of(name: str) -> Callable[[bool], Iterator[Bar]]:
    """The part's function: it takes `small` and yields figures."""
    function: Callable[[bool], Iterator[Bar]]
    function = getattr(import_module("gpu_right" if name in RIGHT else "gpu_figures"), name)
    return function


def run(part: str, report: Report) -> list[Bar]:
    """Runs a part in a process group of its own, which is killed when its time is over."""
    limit_s = min((RIGHT | FIGURES)[part], report.left_s())
    if report.asked.small:
        limit_s = min(SMALL_LIMIT_S, report.left_s())
    if limit_s <= 0:
        return [failed(part, "no time is left")]
    command = [sys.executable, __file__, f"part={part}", f"small={str(report.asked.small).lower()}"]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
        try:
            code = process.wait(limit_s)
            why = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"stopped after {limit_s:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        bars = [Bar(**json.loads(line)) for line in out if line.startswith('{"what"')]
        said = [line.strip() for line in err if line.strip()]
    if why:
        bars.append(failed(part, f"{why}: {' | '.join(said[-3:])}"))
    return [*bars, Bar("seconds of this part", time.monotonic() - began)]


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if asked.part:
        for bar in part_of(asked.part)(asked.small):
            if asked.small and asked.part in FIGURES and not bar.what.endswith(ENDS):
                bar = replace(bar, asked=None)  # times of little models mean nothing
            print(json.dumps(asdict(bar)), flush=True)
        return
    report = Report(asked, time.monotonic())
    if asked.wheels:
        wheels = [str(wheel) for wheel in sorted(Path(asked.wheels).glob("*.whl"))]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", f"--find-links={asked.wheels}"]
        subprocess.run([*pip, *wheels])
    chosen = asked.parts.split(",")
    with ThreadPoolExecutor(1 if asked.small else len(RIGHT)) as pool:  # these time nothing
        running = {pool.submit(run, part, report): part for part in RIGHT if part in chosen}
        for done in as_completed(running):
            report.add(running[done], done.result())
    for part in FIGURES:
        if part in chosen:
            report.add(part, run(part, report))
    text = report.text()
    print(text)
    print(json.dumps(report.summary()))
    if asked.write:
        Path(asked.write).write_text(text, encoding="utf-8")
    sys.exit(int(not all(all_met(bars) for bars in report.parts.values())))


if __name__ == "__main__":
    main()
