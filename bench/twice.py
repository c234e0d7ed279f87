"""Is task=measure repeatable? Runs it twice and checks whether the intervals overlap.

    python bench/twice.py [the overrides of task=measure] [write=FILE.md]

The exit code is 1 if the two intervals of a figure do not overlap. Times of a machine that others use may
drift between the runs; speed-ups and the cost ratio, which are computed within repeats, should not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surroundings import surroundings, write  # noqa: E402

from llama_ssp.report.speed_tables import speeds  # noqa: E402
from llama_ssp.report.tables import aligned, text_of  # noqa: E402

Figure = tuple[float, float, float]


def main() -> None:
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("write=")]
    place = next((a.removeprefix("write=") for a in sys.argv[1:] if a.startswith("write=")), "")
    runs = [measured(overrides) for _ in range(2)]
    first, second = map(figures, runs)
    lines = compared(first, second)
    apart = [name for name in first if not meet(first[name], second[name])]
    counted = counts(runs[0]) == counts(runs[1])
    said = f"{len(first) - len(apart)} of {len(first)} figures agree within their intervals"
    said += f"; apart: {', '.join(apart)}" if apart else ""
    said += f"; the counters of both runs {'are the same' if counted else 'DIFFER'}"
    text = "\n".join(
        [
            "# task=measure, run twice", "", *surroundings(runs[0]["devices"]),
            f"Seed {runs[0]['seed']}; {runs[0]['prompts']} prompts; {said}.", "", *fenced(lines),
            "", "The first run:", "", *fenced(text_of(speeds(runs[0]))), "", "The second run:", "",
            *fenced(text_of(speeds(runs[1]))), "",
        ]
    )  # fmt: skip
    print(text)
    if place:
        write(place, text)
    sys.exit(1 if apart or not counted else 0)


def measured(overrides: list[str]) -> dict[str, Any]:
    """The JSON document of a run."""
    command = [sys.executable, str(ROOT / "launch" / "run.py"), "task=measure", "seed=1", "out=null"]
    done = subprocess.run(
        [*command, "output=json", *overrides], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def figures(found: dict[str, Any]) -> dict[str, Figure]:
    """Every figure that has an interval: value, low, high."""
    rows = [("target alone", found["target_alone"]), ("draft alone", found["draft_alone"] or {})]
    rows += [(f"pair, K = {row['k']}", row) for row in found["pair"]] + [("draft over target", found)]
    names = ("ms_per_token", "time_to_first_token_ms", "speedup", "cost_ratio")
    return {
        f"{of}: {name}": (row[name], row[f"{name}_low"], row[f"{name}_high"])
        for of, row in rows
        for name in names
        if row.get(f"{name}_low") is not None
    }


def counts(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures that depend on the seed alone."""
    kept = ("tokens_committed", "tokens_drafted", "tokens_accepted", "blocks_by_accepted")
    return [{name: row[name] for name in kept} for row in (found["target_alone"], *found["pair"])]


def meet(one: Figure, other: Figure) -> bool:
    return one[1] <= other[2] and other[1] <= one[2]


def compared(first: dict[str, Figure], second: dict[str, Figure]) -> list[str]:
    head = ["figure", "first", "interval", "second", "interval", "agree"]
    rows = [
        [name, *shown(first[name]), *shown(second[name]), "yes" if meet(first[name], second[name]) else "NO"]
        for name in first
    ]
    return aligned([head, *rows], 1)


def shown(figure: Figure) -> list[str]:
    return [f"{figure[0]:.2f}", f"{figure[1]:.2f}..{figure[2]:.2f}"]


def fenced(lines: list[str]) -> list[str]:
    return ["```", *lines, "```"]


if __name__ == "__main__":
    main()
