"""The picture of task=measure: speed-up over K, acceptance by position, where the time goes. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ssp.report.plots import save
from llama_ssp.report.speed_stats import predicted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURED, THEORY = "#1f77b4", "#8a8f98"
PARTS = {
    "draft": "#2ca02c", "verify": "#1f77b4", "decide": "#9467bd", "communicate": "#d62728", "host": "#8a8f98",
}  # fmt: skip


def plot_speeds(found: dict[str, Any], path: Path) -> None:
    """Draws three panels of what has been measured."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(13, 4), layout="constrained")
    speed, acceptance, time = picture.subplots(1, 3, width_ratios=[1.2, 1, 1.2])
    _speedups(speed, found)
    _acceptance(acceptance, found)
    _time(time, found)
    save(picture, path)


def _speedups(axes: Axes, found: dict[str, Any]) -> None:
    pair = [row for row in found["pair"] if row["k"] and row["speedup"] is not None]
    axes.set_title("times as fast as the target alone", fontsize=10)
    axes.set_xlabel("K, drafts a round")
    axes.axhline(1, color="black", linewidth=0.8)
    if not pair:
        return
    ks, values = [row["k"] for row in pair], [row["speedup"] for row in pair]
    below = [row["speedup"] - row["speedup_low"] for row in pair]
    above = [row["speedup_high"] - row["speedup"] for row in pair]
    axes.errorbar(ks, values, [below, above], marker="o", capsize=4, color=MEASURED, label="measured")
    if found["cost_ratio"] is not None and found["alpha"] is not None:
        every = range(max(ks) + 1)
        curve = [predicted(found["alpha"], found["cost_ratio"], k) or 0.0 for k in every]
        label = f"predicted: acceptance {found['alpha']:.2f}, cost {found['cost_ratio']:.2f}"
        axes.plot(list(every), curve, linestyle="--", color=THEORY, label=label)
    axes.legend(frameon=False, fontsize=8)


def _acceptance(axes: Axes, found: dict[str, Any]) -> None:
    axes.set_title("share of drafts accepted", fontsize=10)
    axes.set_xlabel("position in the block")
    axes.set_ylim(0, 1.02)
    for row in found["pair"]:
        rates = row.get("acceptance_by_position")
        if rates:
            label = "adaptive" if row["k"] is None else f"K = {row['k']}"
            axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=4, label=label)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)


def _time(axes: Axes, found: dict[str, Any]) -> None:
    rows = [("target", found["target_alone"]), ("draft", found["draft_alone"] or {})]
    rows += [("adaptive" if row["k"] is None else f"K = {row['k']}", row) for row in found["pair"]]
    split = [
        (name, row["time_split_ms_per_token"]) for name, row in rows if row.get("time_split_ms_per_token")
    ]
    axes.set_title("where the time goes, ms/token", fontsize=10)
    bottom = [0.0] * len(split)
    for part, colour in PARTS.items():
        heights = [own[part] for _, own in split]
        if any(heights):
            axes.bar(range(len(split)), heights, 0.6, bottom=bottom, color=colour, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(split)), [name for name, _ in split], fontsize=8)
    if any(bottom):
        axes.set_ylim(0, 1.25 * max(bottom))
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
