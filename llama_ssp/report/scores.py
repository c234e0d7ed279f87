"""The scores of task=eval as a table that people read."""

from __future__ import annotations

from typing import Any

from llama_ssp.report.tables import aligned, figure

HEAD = ["pair", "sampling", "prompts", "right", "score", "95 % interval", "ms/token", "tokens/forward",
        "acceptance"]  # fmt: skip
WORDS = 2  # columns of words, to the left; figures stand to the right


def table(rows: list[dict[str, Any]], differences: list[dict[str, Any]]) -> list[str]:
    """A line for each row, then one for each difference."""
    texts = aligned([HEAD, *(_cells(row) for row in rows)], WORDS)
    return [*texts, *(_difference(one) for one in differences)]


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["pair"],
        row["mode"],
        str(row["prompts"]),
        str(row["correct"]),
        f"{100 * row['score']:.1f} %",
        f"{100 * row['score_low']:.1f} .. {100 * row['score_high']:.1f}",
        figure(row["ms_per_token"]),
        figure(row["tokens_per_target_forward"]),
        figure(row["acceptance_rate"]),
    ]


def _difference(one: dict[str, Any]) -> str:
    verdict = "holds zero" if one["includes_zero"] else "does not hold zero"
    return (
        f"{one['pair']}: speculative less regular {100 * one['difference']:+.1f} points on {one['prompts']} "
        f"prompts, 95 % interval {100 * one['difference_low']:+.1f} .. {100 * one['difference_high']:+.1f}, "
        f"which {verdict}"
    )
