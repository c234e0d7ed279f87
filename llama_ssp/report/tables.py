"""Tables that people read, as lines of text; and the figures of task=measure as CSV. No torch."""

from __future__ import annotations

import csv
import io
from typing import Any

from llama_ssp.report.speed_stats import Record

SCORES_HEAD = ["pair", "sampling", "prompts", "right", "score", "95 % interval", "ms/token",
               "tokens/forward", "acceptance"]  # fmt: skip
SPEEDS_HEAD = ["", "ms/token", "interval", "tokens/s", "first token", "p50", "p90", "p99", "faster",
               "interval", "predicted", "accepted", "tokens/forward"]  # fmt: skip
MIB = 2**20
Row = dict[str, Any]


def aligned(lines: list[list[str]], words: int) -> list[str]:
    """Columns of one width each: the first `words` columns to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    to_the_left = [column < words for column in range(len(widths))]
    return [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, to_the_left, strict=True)
        ).rstrip()
        for line in lines
    ]


def figure(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def scores_table(rows: list[Row], differences: list[Row]) -> list[str]:
    """task=eval: a line for each row, then one for each difference."""
    figures = ("ms_per_token", "tokens_per_target_forward", "acceptance_rate")
    cells = [
        [
            row["pair"], row["mode"], str(row["prompts"]), str(row["correct"]), f"{100 * row['score']:.1f} %",
            f"{100 * row['score_low']:.1f} .. {100 * row['score_high']:.1f}",
            *(figure(row[name]) for name in figures),
        ]
        for row in rows
    ]  # fmt: skip
    return [*aligned([SCORES_HEAD, *cells], 2), *map(_difference, differences)]


def _difference(one: Row) -> str:
    verdict = "holds zero" if one["includes_zero"] else "does not hold zero"
    return (
        f"{one['pair']}: speculative less regular {100 * one['difference']:+.1f} points on {one['prompts']} "
        f"prompts, 95 % interval {100 * one['difference_low']:+.1f} .. {100 * one['difference_high']:+.1f}, "
        f"which {verdict}"
    )


def speeds_table(found: Row) -> list[str]:
    """task=measure: speeds, where the time goes, acceptance by position, drafts apart, and notes."""
    rows = [("target alone", found["target_alone"]), ("draft alone", found["draft_alone"] or {})]
    rows += [(f"pair, K = {'adaptive' if one['k'] is None else one['k']}", one) for one in found["pair"]]
    rows = [(name, row) for name, row in rows if row.get("ms_per_token") is not None]
    lines = aligned([SPEEDS_HEAD, *([name, *_speed(row)] for name, row in rows)], 1)
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


def _speed(row: Row) -> list[str]:
    milliseconds = ("time_to_first_token_ms", *(f"inter_token_ms_p{one}" for one in (50, 90, 99)))
    ratios = ("predicted_speedup", "acceptance_rate", "tokens_per_target_forward")
    return [
        figure(row["ms_per_token"]), _interval(row, "ms_per_token"), figure(row["tokens_per_s"], 1),
        *(figure(row[name]) for name in milliseconds),
        figure(row.get("speedup")), _interval(row, "speedup"), *(figure(row.get(name)) for name in ratios),
    ]  # fmt: skip


def _interval(row: Row, name: str) -> str:
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return "-" if low is None or high is None else f"{low:.2f}..{high:.2f}"


def _split(rows: list[tuple[str, Row]]) -> list[str]:
    split = [(name, own) for name, row in rows if (own := row["time_split_ms_per_token"])]
    if not split:
        return ["(not measured)"]
    body = [[name, *map(figure, own.values()), figure(sum(own.values()))] for name, own in split]
    return aligned([["", *split[0][1], "sum"], *body], 1)


def _positions(rows: list[tuple[str, Row]]) -> list[str]:
    drafted = [(name, rates) for name, row in rows if (rates := row["acceptance_by_position"])]
    if not drafted:
        return ["(nothing was drafted)"]
    most = max(len(rates) for _, rates in drafted)
    padded = [[name, *map(figure, rates + [None] * (most - len(rates)))] for name, rates in drafted]
    return aligned([["", *map(str, range(1, most + 1))], *padded], 1)


def _apart(apart: Row, tokens: int) -> str:
    """What came of a draft on ranks of its own."""
    ready = "-" if apart["ready_share"] is None else f"{apart['ready_share']:.0%}"
    return (
        f"drafts were ready in {ready} of rounds; of {apart['tokens_drafted_ahead']} drafted ahead "
        f"{apart['tokens_drafted_ahead_wasted']} unused; "
        f"the target waited {apart['leader_waited_ms'] / tokens:.2f} ms/token, "
        f"the draft {apart['draft_waited_ms'] / tokens:.2f}"
    )


def _notes(found: Row) -> list[str]:
    best, coverage, lines = found["best"], found["interval_coverage"], list[str]()
    if best is not None:
        k = "adaptive" if best["k"] is None else best["k"]
        gain = "" if best["speedup"] > 1 else "; speculation does not pay here"
        lines.append(f"fastest: K = {k}, {best['speedup']:.2f} times as fast as the target alone{gain}")
    if found["cost_ratio"] is not None and found["alpha"] is not None:
        lines.append(
            f"draft step over target step {found['cost_ratio']:.2f} ({_interval(found, 'cost_ratio')}), "
            f"acceptance of a decided draft {found['alpha']:.2f}: what `predicted` rests on"
        )
    covered = f" (coverage {coverage:.3f})" if coverage else ""
    lines.append(f"{found['interval']}{covered}; ms and tokens/s without prefill, first token with it")
    for rank in found["peak_memory"]:
        device = f", device {rank['device_bytes'] / MIB:.0f} MiB" if rank["device_bytes"] else ""
        process = f"process {rank['process_bytes'] / MIB:.0f} MiB"
        lines.append(f"peak memory, rank {rank['rank']}: {process}{device}")
    return lines
