"""Makes all pictures of docs anew: python bench/pictures.py, on a machine that does nothing else.

Also, for the other benchmarks, the files next to a table: the same figures as JSON, and a plot.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llama_ssp.report.machine import SOURCES, commit, host
from llama_ssp.report.plots import save, styled

RUN = "launch/run.py"
OVERLAP = "bench/results/overlap_epyc-2-cores_202611.md"
PICTURES = {  # each by its command
    "docs/compare.svg": f"{RUN} task=compare 'task.prompts=[\"class Stack:\"]' speculation.k=2 seed=1 "
    "sampling.temperature=0.5 task.max_new_tokens=96 plot=docs/compare.svg",
    "docs/measure.svg": f"{RUN} task=measure seed=1 task.max_new_tokens=24 task.plot=docs/measure.svg",
    "docs/agree.svg": f"{RUN} task=agree seed=1 task.plot=docs/agree.svg",
    "docs/overlap.svg": f"bench/overlap.py repeats=3 new=64 picture=docs/overlap.svg write={OVERLAP}",
}
BUSY = 0.25  # of the cores, on average over a minute: then times are not this machine's

OURS, THEIRS, BOUND = "#1f77b4", "#8a8f98", "#d62728"


def write_json(report: str, found: dict[str, Any]) -> None:
    """Writes it next to the report, under its name."""
    place = Path(report).with_suffix(".json")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@styled()
def plot_contenders(report: str, rows: list[dict[str, Any]], title: str) -> None:
    """A bar for each contender with its least and most; its bounds as marks, where there are any."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 0.35 * len(rows)), layout="constrained")
    axes, places = figure.subplots(), range(len(rows))
    middle = [row["ms_per_token"] for row in rows]
    below = [row["ms_per_token"] - min(row["turns_ms_per_token"]) for row in rows]
    above = [max(row["turns_ms_per_token"]) - row["ms_per_token"] for row in rows]
    colours = [OURS if row["contender"].startswith("ours") else THEIRS for row in rows]
    axes.barh(places, middle, 0.7, xerr=[below, above], color=colours, capsize=3, ecolor="black")
    for key, mark, label in (
        ("bytes_bound_ms_per_token", "|", "its passes' bytes over the bandwidth"),
        ("steps_bound_ms_per_token", "x", "its steps alone"),
    ):
        known = [(place, row[key]) for place, row in enumerate(rows) if row[key] is not None]
        axes.plot(
            [ms for _, ms in known], [place for place, _ in known], mark, color=BOUND, ms=9, label=label
        )
    axes.set_yticks(places, [row["contender"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms/token")
    figure.legend(loc="outside lower center", ncols=2)
    figure.suptitle(title, fontsize="small")
    save(figure, Path(report).with_suffix(".svg"))


@styled()
def plot_growth(report: str, axes_of: dict[str, dict[str, list[tuple[int, float]]]], title: str) -> None:
    """A panel for each quantity, both axes logarithmic, a line for each engine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(axes_of), 3.4), layout="constrained")
    for axes, (name, lines) in zip(figure.subplots(1, len(axes_of)), axes_of.items(), strict=True):
        for engine, points in lines.items():
            axes.plot([x for x, _ in points], [ms for _, ms in points], marker="o", label=engine)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xscale("symlog" if 0 in ticks else "log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) if tick < 2**13 else f"{tick // 2**10}k" for tick in ticks])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_xlabel(name)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.supylabel("ms/token")
    figure.suptitle(title, fontsize="small")
    save(figure, Path(report).with_suffix(".svg"))


def main() -> int:
    """Runs the commands one after the other; the exit code of the first that fails."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores and "anyway" not in sys.argv[1:]:
        print(f"error: the machine is busy; load {load:.2f} on {cores} cores; wait, or give the word anyway")
        return 1
    for picture, words in PICTURES.items():
        print(f"{picture}: python {words}", flush=True)
        command = [sys.executable, *shlex.split(words)]
        if code := subprocess.run(command, cwd=SOURCES, stdout=subprocess.DEVNULL).returncode:
            return code
    print(f"made at commit {commit()} on {host()['processor']}, {host()['cores']} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
