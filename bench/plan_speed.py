"""Predicted over measured times, in one table: this machine, H200s, and gpt-fast's published A100 rows.

    python bench/plan_speed.py write=FILE.md [state=FILE.json] [minutes=25]
    python bench/plan_speed.py groups=a100,h200,engines           # computes only: seconds
    python bench/plan_speed.py groups=real only=smollm2 again=true

The rows are those of plan_rows.py, of which every second one is held out. Rows of this machine are measured
in parts, and each result is kept in `state`: the same command goes on where an earlier one stopped, which is
after about `minutes`.

* real: published models, by regular sampling, with a draft in 4 bits or with n-grams (bench/plan_real.py).
* synthetic: pairs of several shapes. The least of the repeats counts, each the median of its rounds. None of
  the shapes takes part in the calibration.
* h200, a100: what committed results files and the README of gpt-fast have.
* engines: what other engines do in plain decoding, for information: the plan is of this engine.

Real and synthetic rows are measured in turn with a calibration, so that a machine with drifting speed favours
none. Where tokens are drafted, the plan is of the measured acceptance.

A row is marked if it is outside its band. The exit code is 1 if more than one held-out row of a group is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.plan_known import measured_ms, planned_ms  # noqa: E402
from bench.plan_rows import (  # noqa: E402
    GROUPS,
    EngineRow,
    GpuRow,
    PublishedRow,
    RealRow,
    Row,
    SyntheticRow,
    held_out,
    threads_of,
)
from bench.surroundings import commit, report  # noqa: E402
from bench.words import Words  # noqa: E402

BANDS = {"a100": 0.15, "h200": 0.15, "synthetic": 0.25, "real": 0.25}
MOST_HELD_OUT = 1  # rows of a group that may miss their band, each with its reason
K = 4  # of synthetic pairs
REAL_PART = ROOT / "bench/plan_real.py"
PART_MINUTES = 10.0  # about the longest part; none is begun with less time left
CACHE = Path(tempfile.gettempdir(), f"llama-ssp-plan-speed-{os.getuid()}")  # of these calibrations alone

Result = dict[str, Any]  # of a row: planned and measured milliseconds


@dataclass
class Asked(Words):
    """The command line; with `part` this process measures the synthetic rows of an engine."""

    groups: str = "a100,h200,synthetic,real"
    only: str = ""  # rows with this in their names
    state: str = ""  # by default a temporary file, of this commit alone
    again: bool = False  # forgets the rows that are asked for
    minutes: float = 25.0
    repeats: int = 3
    new: int = 96
    write: str = ""
    part: str = ""
    small: bool = False  # tries the code: the figures mean nothing


def main() -> int:
    asked = Asked.of(sys.argv[1:])
    if asked.part:
        print(json.dumps(synthetic_results(asked)))
        return 0

    rows = {
        group: [row for row in GROUPS[group]() if asked.only in row.name] for group in asked.groups.split(",")
    }
    state = State(Path(asked.state) if asked.state else CACHE / f"rows_{commit()}.json")
    if asked.again:
        state.forget(row.name for group in rows.values() for row in group)
    begun = time.monotonic()
    for name, missing, measure in parts(rows, asked):
        if not (left := [row for row in missing if row.name not in state.results]):
            continue
        if time.monotonic() - begun > 60 * (asked.minutes - PART_MINUTES):
            print("time is over: the same command goes on", file=sys.stderr)
            break
        print(f"{name}: {len(left)} rows", file=sys.stderr)
        for row, result in measure(left):
            state.keep(row, result)
    return show(rows, state.results, asked)


class State:
    """The results of this machine's rows, in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.results: dict[str, Result] = json.loads(file.read_text()) if file.exists() else {}

    def keep(self, name: str, result: Result) -> None:
        self.results[name] = result
        self._write()

    def forget(self, names: Iterator[str]) -> None:
        for name in names:
            self.results.pop(name, None)
        self._write()

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        part.replace(self._file)


Results = Iterator[tuple[str, Result]]
Part = tuple[str, list[Row], Callable[[list[Row]], Results]]


def parts(rows: dict[str, list[Row]], asked: Asked) -> Iterator[Part]:
    """Yields what measures this machine, with the rows that it is for."""
    synthetic = [row for row in rows.get("synthetic", []) if isinstance(row, SyntheticRow)]
    for engine in dict.fromkeys(row.engine for row in synthetic):
        of_engine: list[Row] = [row for row in synthetic if row.engine == engine]
        yield f"synthetic, {engine}", of_engine, partial(_synthetic_apart, asked, engine)

    real = [row for row in rows.get("real", []) if isinstance(row, RealRow)]
    for dtype, threads, ranks in dict.fromkeys((row.dtype, row.threads, row.ranks) for row in real):
        block: list[Row] = [
            row for row in real if (row.dtype, row.threads, row.ranks) == (dtype, threads, ranks)
        ]
        name = f"real, {dtype}, {threads_of(threads)}, {ranks} rank{'s' if ranks > 1 else ''}"
        yield name, block, partial(_real, asked, dtype, threads, ranks)


# Published models, in processes of their own.


def _real(asked: Asked, dtype: str, threads: int, ranks: int, rows: list[Row]) -> Results:
    """Yields the figures of the rows of a format, threads and ranks: all of them, measured in turn."""
    words = [f"dtype={dtype}", f"threads={threads}", f"ranks={ranks}", f"only={asked.only}"]
    words += [f"new={asked.new}", f"repeats={asked.repeats}", f"small={str(asked.small).lower()}"]
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    yield from _said([*launcher, str(REAL_PART), *words], threads)


def _said(command: list[str], threads: int) -> Results:
    """Yields the results that a process of this benchmark prints; leaves if it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}")
    yield from json.loads(done.stdout.splitlines()[-1]).items()


# Synthetic pairs, in a process of their own.


def _synthetic_apart(asked: Asked, engine: str, rows: list[Row]) -> Results:
    threads = next(row.threads for row in rows if isinstance(row, SyntheticRow))
    words = [f"part={engine}", f"only={asked.only}", f"repeats={asked.repeats}"]
    words += [f"small={str(asked.small).lower()}"]
    yield from _said([sys.executable, __file__, *words], threads)


def synthetic_results(asked: Asked) -> dict[str, Result]:
    """Returns the results of the rows with the engine that is this process's part."""
    import torch

    from llama_ssp.config import Dtype, Steps
    from llama_ssp.config.compose import composed
    from llama_ssp.distributed.comm import ALONE
    from llama_ssp.models.devices import device_of, dtype_of
    from llama_ssp.placing.this_machine import machine_for
    from llama_ssp.speculative.stats import Counts
    from llama_ssp.tasks import calibrate

    rows = [
        row
        for row in GROUPS["synthetic"]()
        if isinstance(row, SyntheticRow) and row.engine == asked.part and asked.only in row.name
    ][: 2 if asked.small else None]
    threads = rows[0].threads
    torch.set_num_threads(threads)
    if threads == 1:  # what others do disturbs the clock more than the processor's time
        calibrate.now = time.process_time
    if asked.small:
        calibrate.DEPTHS = (1, 2)
        calibrate.VOCABULARIES = (300,)
        calibrate.WIDTH = 64
        calibrate.HEAD = 8
        calibrate.WIDE = 96
    run = composed(["model=tiny", "draft=tiny_draft"])
    player = calibrate.Player(run, ALONE, calibrate.NEW)
    seen: dict[str, Counts] = {}

    def timed_ms(name: str, case: calibrate.Case) -> float:
        """Returns milliseconds a token; keeps the counts of drafted and accepted tokens."""
        spent, seen[name] = player.play(case)
        return 1000 * median(spent) * len(spent) / seen[name].committed

    cases = {}
    for row in rows:
        layers, width, vocabulary = (2, 64, 300) if asked.small else row.target
        draft = None
        if row.draft is not None:
            few, narrow = (1, 64) if asked.small else row.draft
            draft = calibrate.shape(few, narrow, vocabulary)
        target = calibrate.shape(layers, width, vocabulary)
        k = K if draft else 0
        cases[row.name] = calibrate.Case(target, draft, k, row.rows, Steps(row.engine))

    device = device_of("auto", "device")
    effort = calibrate.full_effort(device, 1 if asked.small else asked.repeats)
    works = [partial(timed_ms, name, case) for name, case in cases.items()]
    cluster, taken = calibrate.measured(run, ALONE, "here", effort, works)
    machine = machine_for(cluster)
    dtype = dtype_of(Dtype.auto, device, "dtype")
    results = {}
    for (name, case), ms in zip(cases.items(), taken, strict=True):
        acceptance = seen[name].summary()["acceptance_rate_decided"] or 0.0
        planned = calibrate.predicted(case, machine, dtype, 1).ms_per_token(acceptance, case.k)
        results[name] = {"planned": planned, "measured": ms, "k": case.k, "acceptance": acceptance}
    return results


# The table.


def show(rows: dict[str, list[Row]], results: dict[str, Result], asked: Asked) -> int:
    """Prints and writes the table; returns the exit code."""
    held = held_out()
    lines = list[str]()
    table = ["| group | row | held out | K, acceptance | planned ms | measured ms | off | |"]
    table.append("|---|---|---|---|---|---|---|---|")
    failed = False
    for group, of_group in rows.items():
        band = BANDS.get(group)  # None: for information
        offs = list[float]()
        missed = list[str]()
        for row in sorted(of_group, key=lambda one: one.name):
            result = _known(row) or results.get(row.name)
            if result is None:
                table.append(f"| {group} | {row.name} | | | | | | not measured yet |")
                continue
            off = result["planned"] / result["measured"] - 1
            offs.append(abs(off))
            is_out = band is not None and abs(off) > band
            if is_out and row.name in held:
                missed.append(row.name)
            drafted = f"{result['k']}, {result['acceptance']:.2f}" if result.get("k") else ""
            cells = (
                group,
                row.name,
                "held out" if row.name in held else "",
                drafted,
                f"{result['planned']:.2f}",
                f"{result['measured']:.2f}",
                f"{off:+.1%}",
                f"OUTSIDE {band:.0%}" if band is not None and is_out else "",
            )
            table.append(f"| {' | '.join(cells)} |")
        if offs:
            line = f"* {group}: {len(offs)} of {len(of_group)} rows, {mean(offs):.1%} off in the mean and "
            line += f"{max(offs):.1%} at worst"
            if band is None:
                line += "; for information."
            else:
                outside = sum(off > band for off in offs)
                line += f"; {outside} outside {band:.0%}, {len(missed)} of these held out"
                line += f" (at most {MOST_HELD_OUT} may be)."
            lines.append(line)
        failed = failed or len(missed) > MOST_HELD_OUT
    title = "Predicted and measured times"
    report(asked.write, title, {"model": "each row's own"}, "", *lines, "", *table)
    return int(failed)


def _known(row: Row) -> Result | None:
    """Returns what was measured before; None for a row of this machine."""
    if isinstance(row, PublishedRow | GpuRow | EngineRow):
        return {"planned": planned_ms(row), "measured": measured_ms(row)}
    return None


if __name__ == "__main__":
    sys.exit(main())
