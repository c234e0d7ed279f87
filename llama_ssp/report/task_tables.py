"""What each task shows, made from its figures alone: on the screen, in files and in reports. No torch."""

from __future__ import annotations

from collections.abc import Callable

from llama_ssp.report.speed_tables import speeds
from llama_ssp.report.tables import MIB, Column, Items, Row, Table

SCORES = (
    Column("pair", is_text=True),
    Column("mode", "sampling", is_text=True),
    Column("prompts"),
    Column("correct", "right"),
    Column("score", digits=1, is_percent=True),
    Column("score", "95 % interval", digits=1, is_interval=True, is_percent=True),
    Column("ms_per_token", "ms/token"),
    Column("tokens_per_target_forward", "tokens/forward", optional=1),
    Column("acceptance_rate", "acceptance", optional=2),
)
REGULAR, SPECULATIVE = "regular", "speculative"  # the two ways of sampling, as JSON documents name them
AGREEMENTS = (
    Column("id", "prompt", is_text=True),
    Column("agreed_tokens", "agreed"),
    Column("finish_reason", "ended by", is_text=True),
    Column("target", "target takes", is_text=True),
    Column("draft", "draft takes", is_text=True),
)
CHECKS = Column("name", "check", is_text=True), Column("outcome", is_text=True), Column("says", is_text=True)
STYLES = {"passed": "green", "failed": "bold red", "blind": "yellow"}  # of an outcome
OUTPUTS = (
    Column("id", is_text=True),
    Column("prompt_tokens"),
    Column("output_tokens"),
    Column("finish_reason", "ended by", is_text=True),
    Column("prompt", is_text=True),
    Column("text", is_text=True),
)
PLANNED = (
    Column("what", "plan against actual", is_text=True),
    Column("predicted"),
    Column("measured"),
    Column("predicted_over_measured", "predicted / measured"),
)
MEMORY = {"held_bytes": "weights and caches", "tensor_bytes": "tensors", "reserved_bytes": "reserved",
          "device_bytes": "in all"}  # fmt: skip


def items_of(summary: Row) -> Items:
    """Returns the tables and sentences of a run, from its summary.json."""
    make = ITEMS.get(summary["task"])
    return make(summary) if make is not None else []


def scores(summary: Row) -> Items:
    """Returns task=eval's row for each pair, mode and size, then a sentence for each difference."""
    items: Items = [Table("scores", SCORES, summary["rows"])]
    for row in summary["differences"]:
        value, low, high = (100 * row[f"difference{end}"] for end in ("", "_low", "_high"))
        items.append(
            f"{row['pair']}: speculative less regular {value:+.1f} points on {row['prompts']} prompts, "
            f"95 % interval {low:+.1f} .. {high:+.1f}, "
            f"which {'holds' if row['includes_zero'] else 'does not hold'} zero"
        )
    return items


def agreements(summary: Row) -> Items:
    """Returns task=agree's row for each prompt, and a sentence about all of them."""
    prompts = summary["prompts"]
    if not prompts:
        return []
    rows = [
        {**prompt, **{side: repr(token["text"]) for side, token in (prompt["fork"] or {}).items()}}
        for prompt in prompts
    ]
    return [
        Table("agreements", AGREEMENTS, rows),
        f"{summary['tokens_agreed']} tokens agreed on in {len(prompts)} prompts, "
        f"{summary['tokens_agreed_mean']:.1f} a prompt (median {summary['tokens_agreed_median']:g}); "
        f"{summary['prompts_parted']} parted; {summary['target_forwards']} target forwards",
    ]


ITEMS: dict[str, Callable[[Row], Items]] = {
    "generate": lambda summary: [Table("outputs", OUTPUTS, rows)] if (rows := summary["outputs"]) else [],
    "measure": speeds,
    "eval": scores,
    "agree": agreements,
    "certify": lambda summary: [Table("checks", CHECKS, summary["checks"]), *filter(None, [summary["says"]])],
    "plan": lambda summary: [summary["sentence"], *summary["advice"]],  # the JSON has the plan itself
}


def plan_against_actual(summary: Row) -> Table | None:
    """Returns the plan's predictions next to what was measured; None where there was no plan."""
    plan = summary.get("plan")
    if not plan:
        return None
    rows = [{"what": f"{way['name']}, ms/token", **way["ms_per_token"]} for way in plan["ways"]]
    for rank in plan["memory"]:
        for key, name in MEMORY.items():
            mib = {part: rank[key][part] and rank[key][part] / MIB for part in ("predicted", "measured")}
            rows.append({"what": f"rank {rank['rank']}, {name}, MiB", **rank[key], **mib})
    rows = [row for row in rows if row["measured"] is not None]
    return Table("plan_against_actual", PLANNED, rows) if rows else None
