"""Plots. matplotlib is optional: only this module looks whether it is installed."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
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
PARTS = {
    "draft": ("#2ca02c", "draft"),
    "verify": (BLUE, "verify (alone: forward passes)"),
    "decide": ("#9467bd", "decide"),
    "communicate": ("#d62728", "communicate"),
    "host": (GREY, "host"),
}
STYLE: dict[str, Any] = {
    "font.size": 9, "axes.titlesize": 10, "legend.fontsize": 8, "legend.frameon": False,
    "axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.3, "axes.axisbelow": True,
    "savefig.dpi": 200, "svg.fonttype": "none", "svg.hashsalt": "llama-ssp", "pdf.fonttype": 42,
    "text.parse_math": False,  # in names a dollar sign is one
    "axes.prop_cycle": "cycler('color', ['#0072b2', '#e69f00', '#009e73', '#cc79a7', '#56b4e9', '#d55e00'])",
}  # fmt: skip


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
    return folder / "plot.svg" if folder is not None else None


def plot(summary: dict[str, Any], path: Path) -> None:
    """Draws the picture of a run from its summary, if it has one. Raises StorageError."""
    figure = picture(summary)
    if figure is not None:
        save(figure, path)


def svg(summary: dict[str, Any]) -> str | None:
    """The picture of a run as SVG; None where it has none, or matplotlib is not installed."""
    figure = picture(summary) if find_spec("matplotlib") else None
    if figure is None:
        return None
    _write(figure, text := io.StringIO(), "svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def picture(summary: dict[str, Any]) -> Figure | None:
    """The figure of a run, with a title that says what was measured where; None where there is nothing."""
    make = PICTURES.get(summary["task"])
    with styled():
        figure = make(summary) if make is not None else None
        if figure is not None:
            figure.suptitle(caption(summary), fontsize="small")
    return figure


def caption(summary: dict[str, Any]) -> str:
    """Pair, hardware, date, commit and number of prompts of a run, as far as its summary has them."""
    host, drafter = summary.get("host") or {}, summary.get("drafter")
    if summary["task"] == "plan":  # of other machines
        host = {}
    pair = summary.get("target") if summary["task"] != "eval" else None
    words = [f"{pair} with {drafter}" if pair and drafter else pair]
    words += [f"{host['processor']}, {host['cores']} cores" if host else None, *summary.get("gpus", [])[:1]]
    words += [(summary.get("began") or "")[:10], summary.get("commit"), _number(summary)]
    return "; ".join(word for word in words if word)


def _number(summary: dict[str, Any]) -> str:
    if summary["task"] == "measure":
        repeats = (summary.get("target_alone") or {}).get("repeats", 0)
        return f"n = {repeats} repeat{'s' * (repeats != 1)} of {summary.get('prompts')} prompts"
    if summary["task"] == "eval":
        return f"n = {max((row['prompts'] for row in summary['rows']), default=0)} prompts"
    if summary["task"] == "plan":
        return f"planned for {summary['cluster']['name']}, {summary['job']['records']} records"
    return f"n = {len(summary['prompts'])} prompts"


def _agreements(summary: dict[str, Any]) -> Figure | None:
    """Over how many tokens the models agree, as a share of the prompts; a mark where they part."""
    found = summary["prompts"]
    if not found:
        return None
    lengths = sorted(one["agreed_tokens"] for one in found)
    parted = sorted(one["agreed_tokens"] for one in found if one["fork"] is not None)
    steps = range(max(lengths) + 2)
    agreeing = [100 * sum(length >= n for length in lengths) / len(found) for n in steps]
    figure, axes = _percentages(7)
    axes.step(steps, agreeing, where="post", color=BLUE, label="models agree so far")
    heights = [100 * sum(other > n for other in lengths) / len(found) for n in parted]
    axes.plot([n + 1 for n in parted], heights, "o", ms=4, color=GREY, label="first mismatch", clip_on=False)
    axes.set_xlim(0, max(lengths) + 1)
    _whole_ticks(axes)
    axes.set_xlabel("generated tokens, greedy")
    axes.set_ylabel("share of prompts, %")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _scores(summary: dict[str, Any]) -> Figure | None:
    """Bars with their intervals, regular next to speculative, one group for each pair and size."""
    rows = summary["rows"]
    if not rows:
        return None
    groups = list(dict.fromkeys((row["pair"], row["prompts_per_seed"]) for row in rows))
    figure, axes = _percentages(3.5 + 1.3 * len(groups))
    for side, (mode, colour) in enumerate(COLOURS.items()):
        shown = [row for row in rows if row["mode"] == mode]
        places = [groups.index((row["pair"], row["prompts_per_seed"])) + 0.4 * side - 0.2 for row in shown]
        heights, reach = _with_intervals(shown, "score", 100)
        if shown:
            axes.bar(places, heights, 0.36, yerr=reach, capsize=4, color=colour, label=mode)
    differences = {(one["pair"], one["prompts_per_seed"]): one for one in summary.get("differences", ())}
    labels = [_score_label(*group, differences.get(group)) for group in groups]
    axes.set_xticks(range(len(groups)), labels)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylabel("right products, % (95 % interval)")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _score_label(pair: str, size: int, difference: dict[str, Any] | None) -> str:
    """The pair, and its difference with the interval: what the picture is about."""
    if difference is None:
        return f"{pair}\n{size} a seed"
    figures = (100 * difference[f"difference{end}"] for end in ("", "_low", "_high"))
    return f"{pair}\n{size} a seed\ndifference " + "{:+.1f} ({:+.1f}..{:+.1f})".format(*figures)


def _speeds(summary: dict[str, Any]) -> Figure | None:
    """Panels of what task=measure has measured: speed-up over K, acceptance by position, time by parts."""
    if not summary.get("target_alone"):
        return None
    split = _splits(summary)
    widths = [1.2, 1.0, 1.2] if split else [1.2, 1.0]
    figure = _figure(3.8 * sum(widths), 4.6)
    speed, acceptance, *time = figure.subplots(1, len(widths), width_ratios=widths)
    _speedups(speed, summary)
    _acceptance(acceptance, summary)
    for axes in time:
        _time(axes, split)
    return figure


def _speedups(axes: Axes, found: dict[str, Any]) -> None:
    pair = [row for row in found["pair"] if row["k"] and row.get("speedup") is not None]
    axes.set_title("times as fast as the target alone")
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
    _whole_ticks(axes)
    _legend_below(axes)


def _acceptance(axes: Axes, found: dict[str, Any]) -> None:
    axes.set_title("share of drafts accepted")
    axes.set_xlabel("position in the block")
    axes.set_ylim(0, 1.02)
    for row in found["pair"]:
        if rates := row.get("acceptance_by_position"):
            axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=4, label=_drafts(row))
    _whole_ticks(axes)
    _legend_below(axes)


def _splits(found: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Each contender's time by parts; none of a suite."""
    rows = [("target", found["target_alone"]), ("draft", found["draft_alone"] or {})]
    rows += [(_drafts(row), row) for row in found["pair"]]
    return [(name, part) for name, row in rows if (part := row.get("time_split_ms_per_token"))]


def _time(axes: Axes, split: list[tuple[str, dict[str, float]]]) -> None:
    axes.set_title("where the time goes, ms/token")
    bottom = [0.0] * len(split)
    for part, (colour, label) in PARTS.items():
        heights = [own[part] for _, own in split]
        if any(heights):
            axes.bar(range(len(split)), heights, 0.6, bottom=bottom, color=colour, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(split)), [name for name, _ in split], fontsize="small")
    _legend_below(axes)


def _nodes(summary: dict[str, Any]) -> Figure | None:
    """A planned job over nodes: tokens a second, time, price; a colour for each width of groups."""
    rows = (summary.get("job") or {}).get("nodes")
    if not rows:
        return None
    figure = _figure(10, 3.6)
    units = {"tokens_per_s": ("tokens/s", 1), "job_s": ("hours", 3600)}
    if rows[0]["price_per_million_tokens"] is not None:
        units["price_per_million_tokens"] = "price of a million tokens", 1
    for axes, (key, (title, unit)) in zip(figure.subplots(1, len(units)), units.items(), strict=True):
        axes.set_xscale("log", base=2)
        axes.plot(
            [row["nodes"] for row in rows], [row[key] / unit for row in rows], color=GREY, linewidth=0.8
        )
        for gpus in sorted({row["gpus_per_group"] for row in rows}):
            own = [(row["nodes"], row[key] / unit) for row in rows if row["gpus_per_group"] == gpus]
            axes.plot(*zip(*own, strict=True), "o", label=f"{gpus} GPU{'s' * (gpus > 1)} a group")
        axes.set_title(title)
        axes.set_xlabel("nodes")
        axes.set_xticks([row["nodes"] for row in rows], [str(row["nodes"]) for row in rows])
        axes.set_ylim(bottom=0)
        axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


PICTURES = {"measure": _speeds, "eval": _scores, "agree": _agreements, "plan": _nodes}


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


@contextmanager
def styled() -> Iterator[None]:
    """The style of every picture of the project."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def _figure(width: float, height: float = 4) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _percentages(width: float) -> tuple[Figure, Axes]:
    """A figure of this width, and its axes, for shares in percent."""
    axes = (figure := _figure(width)).subplots()
    axes.set_ylim(0, 105)
    return figure, axes


def _whole_ticks(axes: Axes) -> None:
    """The axis counts: ticks at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _legend_below(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def save(figure: Figure, path: Path) -> None:
    """Writes the picture in the format of its name's ending. Raises StorageError."""
    try:
        _write(figure, path, None)
    except OSError as error:
        fix = "choose another place with task.plot"
        raise StorageError(f"cannot write the plot: {error.strerror}", path, fix=fix) from None


def _write(figure: Figure, place: Any, kind: str | None) -> None:
    """Without frames; an SVG without its date, so that equal figures make equal files."""
    import matplotlib

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    is_svg = kind == "svg" or getattr(place, "suffix", "") == ".svg"
    with matplotlib.rc_context(STYLE):
        figure.savefig(place, format=kind, metadata={"Date": None} if is_svg else None)
