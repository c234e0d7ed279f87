"""Draws the pictures of measure and agree, if matplotlib is installed."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ssp.config import home_expanded
from llama_ssp.errors import UsageError, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

GREY = "#8a8f98"
BLUE = "#1f77b4"
PARTS = {"draft": "#2ca02c", "verify": BLUE, "decide": "#9467bd", "communicate": "#d62728", "host": GREY}
COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"]
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "figure.titlesize": "small",
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.dpi": 200,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "llama-ssp",
    "axes.prop_cycle": f"cycler('color', {COLORS})",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
}


def check_plot(name: str | None) -> None:
    """Raises UsageError where a picture that is asked for cannot be made."""
    if name is None:
        return
    if find_spec("matplotlib") is None:
        raise UsageError("task.plot needs matplotlib", fix="pip install matplotlib, or leave out task.plot")
    if not home_expanded(name).parent.is_dir():
        raise UsageError("task.plot is in no folder", found=name, fix="make the folder, or correct the path")


def plot(summary: dict[str, Any], name: str | None, folder: Path | None) -> str | None:
    """Draws a run's picture, if it has one, in the file `name` or the folder; returns its path."""
    if name is not None:
        path = home_expanded(name)
    elif folder is not None:
        path = folder / "plot.svg"
    else:
        return None

    if find_spec("matplotlib") is None:
        log.info("no plot: matplotlib is not installed (pip install matplotlib)")
        return None
    figure = picture(summary)
    if figure is None:
        return None
    save(figure, path)
    return str(path)


def svg(summary: dict[str, Any]) -> str | None:
    """Returns the picture of a run as SVG; None where it has none, or matplotlib is not installed."""
    figure = picture(summary) if find_spec("matplotlib") else None
    if figure is None:
        return None
    file = io.StringIO()
    with styled():
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]  # without what precedes it in a file of its own


@contextmanager
def styled() -> Iterator[None]:
    """Applies the style of every picture of the project."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def save(figure: Figure, path: Path) -> None:
    """Writes the picture; its name's ending is its format, and equal figures make equal SVG files."""
    with writing("plot", path, fix="choose another place with task.plot"), styled():
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def picture(summary: dict[str, Any]) -> Figure | None:
    """Returns the figure of a run, titled by what was measured where; None if there is nothing to draw."""
    task = summary["task"]
    draw, key = PICTURES.get(task, (None, ""))
    if draw is None or not summary.get(key):
        return None
    from matplotlib.figure import Figure

    pair = [summary[role] for role in ("target", "drafter") if summary.get(role)]
    host = summary.get("host")
    machine = f"{host['processor']}, {host['cores']} cores" if host else None
    gpus = summary.get("gpus", [])[:1]
    began = (summary.get("began") or "")[:10]  # the date
    titles = [" with ".join(pair), machine, *gpus, began, summary.get("commit")]

    with styled():
        figure = Figure()
        titles.append(draw(figure, summary))
        for axes in figure.axes:
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
        figure.suptitle("; ".join(filter(None, titles)))
    return figure


def _agreements(figure: Figure, summary: dict[str, Any]) -> str:
    """Draws the share of prompts on which both models still agree after n tokens."""
    prompts = summary["prompts"]
    lengths = [prompt["agreed_tokens"] for prompt in prompts]
    share = list[float]()  # after n tokens, up to where none agrees
    for n in range(max(lengths) + 2):
        share.append(100 * sum(length >= n for length in lengths) / len(prompts))

    figure.set_size_inches(7, 4)
    axes = figure.subplots()
    axes.step(range(len(share)), share, where="post", color=BLUE)
    axes.set(xlim=(0, len(share) - 1), ylim=(0, 105))
    axes.set(xlabel="generated tokens, greedy", ylabel="share of prompts that agree so far, %")
    axes.locator_params("x", integer=True)
    return f"n = {len(prompts)} prompts"


def _speeds(figure: Figure, summary: dict[str, Any]) -> str:
    """Draws what task=measure measured: speed-up over K, acceptance by position, time by parts."""
    target = summary["target_alone"]
    rows = {"target": target, "draft": summary["draft_alone"] or {}}
    for row in summary["pair"]:
        rows["adaptive" if row["k"] is None else f"K = {row['k']}"] = row
    split = {name: parts for name, row in rows.items() if (parts := row.get("time_split_ms_per_token"))}

    figure.set_size_inches(12.9 if split else 8.6, 4.6)
    speed, acceptance, *times = figure.subplots(1, 3 if split else 2)
    _draw_speedups(speed, summary)
    acceptance.set(title="share of drafts accepted", xlabel="position in the block", ylim=(0, 1.02))
    for name, row in rows.items():
        if rates := row.get("acceptance_by_position"):
            acceptance.plot(range(1, len(rates) + 1), rates, marker="o", markersize=4, label=name)
    for axes in (speed, acceptance):
        axes.locator_params("x", integer=True)

    for axes in times:
        axes.set_title("where the time goes, ms/token")
        bottom = [0.0] * len(split)
        for part, colour in PARTS.items():
            heights = [parts[part] for parts in split.values()]
            axes.bar(list(split), heights, 0.6, bottom, color=colour, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]

    repeats = "1 repeat" if target["repeats"] == 1 else f"{target['repeats']} repeats"
    return f"n = {repeats} of {summary['prompts']} prompts"


def _draw_speedups(axes: Any, summary: dict[str, Any]) -> None:
    """Draws speed-up over K with its intervals, and what theory predicts."""
    axes.set(title="times as fast as the target alone", xlabel="K, drafts a round")
    axes.axhline(1, color="black", linewidth=0.8)
    timed = [row for row in summary["pair"] if row["k"] and row.get("speedup") is not None]
    if not timed:
        return

    ks = [row["k"] for row in timed]
    speedups = [row["speedup"] for row in timed]
    # How far each interval reaches below and above; one repeat has none.
    reach = [_reaches(timed, "speedup_low"), _reaches(timed, "speedup_high")]
    axes.errorbar(ks, speedups, reach, marker="o", capsize=4, color=BLUE, label="measured")
    if timed[0]["predicted_speedup"] is not None:
        label = f"predicted: acceptance {summary['alpha']:.2f}, cost {summary['cost_ratio']:.2f}"
        axes.plot(ks, [row["predicted_speedup"] for row in timed], "--", color=GREY, label=label)


def _reaches(rows: list[dict[str, Any]], end: str) -> list[float]:
    """Returns how far this end of each row's interval is from the speed-up; 0 where there is no interval."""
    return [abs((row[end] or row["speedup"]) - row["speedup"]) for row in rows]


# By task: the function that draws, and the key of the summary that it needs.
PICTURES = {"measure": (_speeds, "target_alone"), "agree": (_agreements, "prompts")}
