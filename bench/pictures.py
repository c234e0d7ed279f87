"""The files next to a benchmark's table: the same figures as JSON, and a plot."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from surroundings import commit

from llama_ssp.report.machine import host
from llama_ssp.report.plots import save, styled

OURS, THEIRS, BOUND = "#1f77b4", "#8a8f98", "#d62728"


def write_json(report: str, found: dict[str, Any]) -> None:
    """Writes it next to the report, under its name."""
    place = Path(report).with_suffix(".json")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def caption(what: str, turns: int) -> str:
    """The title of a plot: what, where, when, of which commit, and the number of turns."""
    place = f"{host()['processor']}, {host()['cores']} cores"
    return f"{what}; {place}; {time.strftime('%Y-%m-%d')}; {commit()}; n = {turns} turns"


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
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_xlabel("ms/token")
    figure.legend(loc="outside lower center", ncols=2)
    figure.suptitle(title, fontsize="small")
    save(figure, Path(report).with_suffix(".svg"))
