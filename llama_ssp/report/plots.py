"""Plots. matplotlib is optional: only this module looks whether it is installed."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ssp.config import home_expanded
from llama_ssp.errors import StorageError, UsageError
from llama_ssp.report.speed_stats import predicted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

GREY, BLUE = "#8a8f98", "#1f77b4"
COLOURS = {"regular": GREY, "speculative": BLUE}
PARTS = {"draft": "#2ca02c", "verify": BLUE, "decide": "#9467bd", "communicate": "#d62728", "host": GREY}


def check_pictures(names: dict[str, str]) -> None:
    """Raises UsageError where a picture that is asked for, by key of the task, cannot be made."""
    if "plot" in names and find_spec("matplotlib") is None:
        raise UsageError("task.plot needs matplotlib", fix="pip install matplotlib, or leave out task.plot")
    for key, name in names.items():
        if not home_expanded(name).parent.is_dir():
            fix = "make the folder, or correct the path"
            raise UsageError(f"task.{key} is in no folder", found=name, fix=fix)


def plot_place(name: str | None, folder: Path | None) -> Path | None:
    """The path of the plot: the one that is asked for, or in the run folder, if there is one."""
    if name is not None:
        return home_expanded(name)
    if folder is not None and find_spec("matplotlib") is None:
        log.info("no plot: matplotlib is not installed (pip install matplotlib)")
        return None
    return folder / "plot.png" if folder is not None else None


def plot_agreements(found: list[dict[str, Any]], most: int, path: Path) -> None:
    """Over how many tokens the models agree, as a share of the prompts; a mark where they part."""
    lengths = sorted(one["agreed_tokens"] for one in found)
    parted = sorted(one["agreed_tokens"] for one in found if one["fork"] is not None)
    steps = range(max(lengths) + 2)
    agreeing = [100 * sum(length >= n for length in lengths) / len(found) for n in steps]
    figure, axes = _percentages(7)
    axes.step(steps, agreeing, where="post", color=BLUE, label="still agree")
    heights = [100 * sum(other > n for other in lengths) / len(found) for n in parted]
    axes.plot([n + 1 for n in parted], heights, "o", ms=4, color=GREY, label="parts here")
    axes.set_xlim(0, min(most, max(lengths) + 1))
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"of {len(found)} prompts, %")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    save(figure, path)


def plot_scores(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars with their intervals, regular next to speculative, one group for each pair and size."""
    groups = list(dict.fromkeys((row["pair"], row["prompts_per_seed"]) for row in rows))
    sizes = {size for _, size in groups}
    figure, axes = _percentages(2.5 + 1.3 * len(groups))
    for side, (mode, colour) in enumerate(COLOURS.items()):
        shown = [row for row in rows if row["mode"] == mode]
        places = [groups.index((row["pair"], row["prompts_per_seed"])) + 0.4 * side - 0.2 for row in shown]
        heights, reach = _with_intervals(shown, "score", 100)
        if shown:
            axes.bar(places, heights, 0.36, yerr=reach, capsize=4, color=colour, label=mode)
    labels = [pair if len(sizes) == 1 else f"{pair}\n{size} a seed" for pair, size in groups]
    axes.set_xticks(range(len(groups)), labels)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylabel("right products, % (95 % interval)")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    save(figure, path)


def plot_speeds(found: dict[str, Any], path: Path) -> None:
    """Three panels of what task=measure has measured: speed-up over K, acceptance by position, time."""
    picture = _figure(13)
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
    ks = [row["k"] for row in pair]
    values, reach = _with_intervals(pair, "speedup")
    axes.errorbar(ks, values, reach, marker="o", capsize=4, color=BLUE, label="measured")
    alpha, cost = found["alpha"], found["cost_ratio"]
    if cost is not None and alpha is not None:
        curve = [predicted(alpha, cost, k) or 0.0 for k in range(max(ks) + 1)]
        label = f"predicted: acceptance {alpha:.2f}, cost {cost:.2f}"
        axes.plot(range(len(curve)), curve, linestyle="--", color=GREY, label=label)
    axes.legend(frameon=False, fontsize=8)


def _acceptance(axes: Axes, found: dict[str, Any]) -> None:
    axes.set_title("share of drafts accepted", fontsize=10)
    axes.set_xlabel("position in the block")
    axes.set_ylim(0, 1.02)
    for row in found["pair"]:
        if rates := row.get("acceptance_by_position"):
            axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=4, label=_drafts(row))
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)


def _time(axes: Axes, found: dict[str, Any]) -> None:
    rows = [("target", found["target_alone"]), ("draft", found["draft_alone"] or {})]
    rows += [(_drafts(row), row) for row in found["pair"]]
    split = [(name, part) for name, row in rows if (part := row.get("time_split_ms_per_token"))]
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


def _drafts(row: dict[str, Any]) -> str:
    return "adaptive" if row["k"] is None else f"K = {row['k']}"


def _with_intervals(
    rows: list[dict[str, Any]], name: str, unit: float = 1
) -> tuple[list[float], list[list[float]]]:
    """A figure of each row, and how far its interval reaches below and above it: nan where there is none."""
    reach = [
        [unit * abs(row[name] - end) if (end := row[f"{name}_{side}"]) is not None else nan for row in rows]
        for side in ("low", "high")
    ]
    return [unit * row[name] for row in rows], reach


def _figure(width: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 4), layout="constrained")


def _percentages(width: float) -> tuple[Figure, Axes]:
    """A figure of this width, and its axes, for shares in percent."""
    axes = (figure := _figure(width)).subplots()
    axes.set_ylim(0, 105)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Writes the picture without frames, in the format of its name's ending. Raises StorageError."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"cannot write the plot: {error.strerror}", where=str(path)) from None
