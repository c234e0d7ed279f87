"""Plots. matplotlib is optional: only this module looks whether it is installed."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llama_ssp.config import home_expanded
from llama_ssp.errors import StorageError, UsageError

log = logging.getLogger(__name__)

COLOURS = {"regular": "#8a8f98", "speculative": "#1f77b4"}


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
    figure, axes = _axes(7)
    axes.step(steps, agreeing, where="post", color=COLOURS["speculative"], label="still agree")
    heights = [100 * sum(other > n for other in lengths) / len(found) for n in parted]
    axes.plot([n + 1 for n in parted], heights, "o", ms=4, color=COLOURS["regular"], label="parts here")
    axes.set_xlim(0, min(most, max(lengths) + 1))
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"of {len(found)} prompts, %")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    save(figure, path)


def plot_scores(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars with their intervals, regular next to speculative, one group for each pair and size."""
    groups = list(dict.fromkeys((row["pair"], row["prompts_per_seed"]) for row in rows))
    sizes = {size for _, size in groups}
    figure, axes = _axes(2.5 + 1.3 * len(groups))
    for side, (mode, colour) in enumerate(COLOURS.items()):
        shown = [row for row in rows if row["mode"] == mode]
        if not shown:
            continue
        places = [groups.index((row["pair"], row["prompts_per_seed"])) + 0.4 * side - 0.2 for row in shown]
        heights = [100 * row["score"] for row in shown]
        below = [100 * (row["score"] - row["score_low"]) for row in shown]
        above = [100 * (row["score_high"] - row["score"]) for row in shown]
        axes.bar(places, heights, 0.36, yerr=[below, above], capsize=4, color=colour, label=mode)
    labels = [pair if len(sizes) == 1 else f"{pair}\n{size} a seed" for pair, size in groups]
    axes.set_xticks(range(len(groups)), labels)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylabel("right products, % (95 % interval)")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    save(figure, path)


def _axes(width: float) -> tuple[Any, Any]:
    """A figure of this width, and its axes, for shares in percent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    axes = figure.subplots()
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
