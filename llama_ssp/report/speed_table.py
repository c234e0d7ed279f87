"""The figures of task=measure as tables that people read, and as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from llama_ssp.report.speed_stats import Record
from llama_ssp.report.tables import aligned, figure

HEAD = ["", "ms/token", "interval", "tokens/s", "first token", "p50", "p90", "p99", "faster", "interval",
        "predicted", "accepted", "tokens/forward"]  # fmt: skip
WORDS = 1
MIB = 2**20


def table(found: dict[str, Any]) -> list[str]:
    """Speeds, where the time goes, acceptance by position, drafts on ranks of their own, and notes."""
    rows = [("target alone", found["target_alone"]), ("draft alone", found["draft_alone"] or {})]
    rows += [(f"pair, K = {'adaptive' if one['k'] is None else one['k']}", one) for one in found["pair"]]
    rows = [(name, row) for name, row in rows if row.get("ms_per_token") is not None]
    lines = aligned([HEAD, *([name, *_speed(row)] for name, row in rows)], WORDS)
    lines += ["", "where the time goes, ms/token", *_split(rows)]
    lines += ["", "accepted of the drafts at each position", *_positions(rows)]
    for name, row in rows:
        if (apart := row["overlap"]) is not None:
            lines += ["", f"{name}: {_apart(apart, row['tokens_committed'])}"]
    return [*lines, "", *_notes(found)]


def csv_text(records: list[Record]) -> str:
    """A line for each contender and repeat, for other statistics."""
    rows = [
        {"contender": record.name, "k": record.k, "repeat": repeat, **sample.row()}
        for record in records
        for repeat, sample in enumerate(record.samples)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _speed(row: dict[str, Any]) -> list[str]:
    milliseconds = ("time_to_first_token_ms", *(f"inter_token_ms_p{one}" for one in (50, 90, 99)))
    ratios = ("predicted_speedup", "acceptance_rate", "tokens_per_target_forward")
    return [
        figure(row["ms_per_token"]), _interval(row, "ms_per_token"), figure(row["tokens_per_s"], 1),
        *(figure(row[name]) for name in milliseconds),
        figure(row.get("speedup")), _interval(row, "speedup"), *(figure(row.get(name)) for name in ratios),
    ]  # fmt: skip


def _interval(row: dict[str, Any], name: str) -> str:
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return "-" if low is None or high is None else f"{low:.2f}..{high:.2f}"


def _split(rows: list[tuple[str, dict[str, Any]]]) -> list[str]:
    split = [(name, row["time_split_ms_per_token"]) for name, row in rows if row["time_split_ms_per_token"]]
    if not split:
        return ["(not measured)"]
    parts = list(split[0][1])
    body = [[name, *(figure(own[part]) for part in parts), figure(sum(own.values()))] for name, own in split]
    return aligned([["", *parts, "sum"], *body], WORDS)


def _positions(rows: list[tuple[str, dict[str, Any]]]) -> list[str]:
    drafted = [(name, row["acceptance_by_position"]) for name, row in rows if row["acceptance_by_position"]]
    if not drafted:
        return ["(nothing was drafted)"]
    most = max(len(rates) for _, rates in drafted)
    head = ["", *(str(position) for position in range(1, most + 1))]
    padded = [[name, *map(figure, [*rates, *[None] * (most - len(rates))])] for name, rates in drafted]
    return aligned([head, *padded], WORDS)


def _apart(apart: dict[str, Any], tokens: int) -> str:
    """What came of a draft on ranks of its own."""
    ahead, wasted = apart["tokens_drafted_ahead"], apart["tokens_drafted_ahead_wasted"]
    ready = "-" if apart["ready_share"] is None else f"{apart['ready_share']:.0%}"
    return (
        f"drafts were ready in {ready} of rounds; of {ahead} drafted ahead {wasted} "
        f"in vain; the target waited {apart['leader_waited_ms'] / tokens:.2f} ms/token, "
        f"the draft {apart['draft_waited_ms'] / tokens:.2f}"
    )


def _notes(found: dict[str, Any]) -> list[str]:
    best, cost = found["best"], found["cost_ratio"]
    lines = []
    if best is not None:
        k = "adaptive" if best["k"] is None else best["k"]
        gain = "" if best["speedup"] > 1 else "; speculation does not pay here"
        lines.append(f"fastest: K = {k}, {best['speedup']:.2f} times as fast as the target alone{gain}")
    if cost is not None and found["alpha"] is not None:
        lines.append(
            f"draft step over target step {cost:.2f} ({_interval(found, 'cost_ratio')}), "
            f"acceptance of a decided draft {found['alpha']:.2f}: what `predicted` rests on"
        )
    coverage = found["interval_coverage"]
    lines.append(
        f"{found['interval']}{f' (coverage {coverage:.3f})' if coverage else ''}; "
        "ms and tokens/s without prefill, first token with it"
    )
    for rank in found["peak_memory"]:
        device = f", device {rank['device_bytes'] / MIB:.0f} MiB" if rank["device_bytes"] else ""
        lines.append(
            f"peak memory, rank {rank['rank']}: process {rank['process_bytes'] / MIB:.0f} MiB{device}"
        )
    return lines
