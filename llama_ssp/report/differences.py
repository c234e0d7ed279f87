"""Two runs of one task: what differs, with intervals where the runs have them. No torch."""

from __future__ import annotations

from llama_ssp.errors import UsageError
from llama_ssp.report.headline import Figure, headline
from llama_ssp.report.saved_run import SavedRun, settings_tables
from llama_ssp.report.statistics import Estimate, difference_of, median_of, ratio_of
from llama_ssp.report.tables import Column, Items, Row, Table

COLUMNS = (
    Column("name", "figure", is_text=True),
    Column("before", "first"),
    Column("before", "interval", is_interval=True, optional=2),
    Column("after", "second"),
    Column("after", "interval", is_interval=True, optional=2),
    Column("by", "compared by", is_text=True, optional=1),
    Column("change"),
    Column("change", "interval", is_interval=True),
    Column("verdict", "", is_text=True),
)
RATIO, DIFFERENCE = "second / first", "second - first"
EXPLAINED = (
    "Intervals of changes: of shares by Newcombe (1998); of ratios they hold where both runs' own intervals "
    "hold. A change without an interval may be noise."
)


def differences(first: SavedRun, second: SavedRun) -> Items:
    """What differs: settings, then figures. Raises UsageError for runs of different tasks."""
    tasks = first.summary["task"], second.summary["task"]
    if tasks[0] != tasks[1]:
        fix = "compare two runs of one task"
        raise UsageError("the two runs are of different tasks", "", " and ".join(tasks), fix=fix)
    before = {figure.name: figure for figure in headline(first.summary)}
    pairs = [(before[after.name], after) for after in headline(second.summary) if after.name in before]
    rows = [*(_row(*pair) for pair in pairs), *_paired(first, second)]
    heads = [f"first:  {first.folder}", f"second: {second.folder}"]
    table = Table("differences", COLUMNS, rows, f"Figures of task={tasks[0]}", "(no figures to compare)")
    return [*heads, settings_tables([first, second])[0], table, "", EXPLAINED]


def _row(before: Figure, after: Figure) -> Row:
    row: Row = {"name": after.name, **_cells("before", before), **_cells("after", after)}
    ends = before.estimate, after.estimate
    if after.is_share:
        found = difference_of(ends[0], ends[1]) if ends[0] and ends[1] else None
        return row | _change(DIFFERENCE, after.value - before.value, found, 0.0)
    if not before.value:
        return row | _change(RATIO, None, None, 1.0)
    found = ratio_of(ends[0], ends[1]) if ends[0] and ends[1] and ends[0].low > 0 else None
    return row | _change(RATIO, after.value / before.value, found, 1.0)


def _cells(side: str, figure: Figure) -> Row:
    return {side: figure.value, f"{side}_low": figure.low, f"{side}_high": figure.high}


def _change(by: str, value: float | None, found: Estimate | None, same: float) -> Row:
    verdict = "" if found is None else "no difference seen" if found.includes(same) else "differs"
    ends = {"change_low": found.low, "change_high": found.high} if found else {}
    return {"by": by, "change": value, **ends, "verdict": verdict}


def _paired(first: SavedRun, second: SavedRun) -> list[Row]:
    """task=agree on the same prompts: the median difference, prompt by prompt."""
    if first.summary["task"] != "agree":
        return []
    agreed = [
        {one["id"]: (one["prompt"], one["agreed_tokens"]) for one in run.summary["prompts"]}
        for run in (first, second)
    ]
    common = [name for name in agreed[0] if name in agreed[1] and agreed[0][name][0] == agreed[1][name][0]]
    if len(common) < 2:
        return []
    found = median_of([float(agreed[1][name][1] - agreed[0][name][1]) for name in common])
    name = f"tokens agreed, median difference of {len(common)} prompts"
    return [{"name": name, **_change(DIFFERENCE, found.value, found, 0.0)}]
