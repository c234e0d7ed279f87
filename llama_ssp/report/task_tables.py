"""What each task shows, made from its figures alone: on the screen, in files and in reports. No torch."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table as RichTable
from rich.text import Text

from llama_ssp.report.speed_tables import speeds
from llama_ssp.report.tables import GIB, MIB, Column, Items, Row, Table

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
    Column("target_by_target", "p target", digits=3),
    Column("target_by_draft", "p draft", digits=3),
    Column("draft", "draft takes", is_text=True),
    Column("draft_by_target", "p target", digits=3),
    Column("draft_by_draft", "p draft", digits=3),
)
COMPARISONS = (
    Column("id", "prompt", is_text=True),
    Column("regular_ms_per_token", "regular ms/token"),
    Column("speculative_ms_per_token", "speculative ms/token"),
    Column("speedup", "times as fast"),
    Column("acceptance_rate", "accepted"),
    Column("tokens_per_target_forward", "tokens/round"),
    Column("output_tokens", "tokens"),
)
CHECKS = Column("name", "check", is_text=True), Column("outcome", is_text=True), Column("says", is_text=True)
OUTCOMES = {"passed": "green", "failed": "bold red", "blind": "yellow", "skipped": "dim"}
PLACEMENTS = (
    Column("placement", is_text=True),
    Column("verdict", is_text=True),
    Column("worst_gpu_gib", "fullest GPU, GiB"),
    Column("margin_gib", "left, GiB"),
    Column("k", "K"),
    Column("ms_per_token", "ms/token"),
    Column("speedup", "times as fast"),
)
NODES = (
    Column("nodes"),
    Column("groups"),
    Column("gpus_per_group", "GPUs a group"),
    Column("tokens_per_s", "tokens/s"),
    Column("job_s", "s"),
    Column("job_price", "price"),
    Column("price_per_million_tokens", "price of a million tokens"),
    Column("limited_by", is_text=True),
)
ACCEPTANCES = (
    Column("acceptance"),
    Column("k", "K"),
    Column("tokens_per_round", "tokens a round"),
    Column("ms_per_token", "ms/token"),
    Column("speedup", "times as fast"),
)
OUTPUTS = (
    Column("id", is_text=True),
    Column("prompt_tokens"),
    Column("output_tokens"),
    Column("finish_reason", "ended by", is_text=True),
    Column("prompt", is_text=True),
    Column("text", is_text=True),
)


def files_of(summary: Row) -> dict[str, str]:
    """The tables of a run as files: a CSV file each, and all of them in tables.md."""
    items = items_of(summary)
    tables = [item for item in items if isinstance(item, Table)]
    if not tables:
        return {}
    parts = [item.markdown() if isinstance(item, Table) else item for item in items if item]
    return {**{f"{one.name}.csv": one.csv() for one in tables}, "tables.md": "\n\n".join(parts) + "\n"}


def items_of(summary: Row) -> Items:
    """The tables and sentences of a run, from its summary.json."""
    make = ITEMS.get(summary["task"])
    return make(summary) if make is not None else []


def scores(found: Row) -> Items:
    """task=eval: a row for each pair, mode and size, then a sentence for each difference."""
    return [Table("scores", SCORES, found["rows"]), *map(_difference, found["differences"])]


def _difference(one: Row) -> str:
    verdict = "holds zero" if one["includes_zero"] else "does not hold zero"
    return (
        f"{one['pair']}: speculative less regular {100 * one['difference']:+.1f} points on {one['prompts']} "
        f"prompts, 95 % interval {100 * one['difference_low']:+.1f} .. {100 * one['difference_high']:+.1f}, "
        f"which {verdict}"
    )


def agreements(found: Row) -> Items:
    """task=agree: a row for each prompt, and all together."""
    if not found["prompts"]:
        return []
    words = (
        f"{found['tokens_agreed']} tokens agreed on in {len(found['prompts'])} prompts, "
        f"{found['tokens_agreed_mean']:.1f} a prompt (median {found['tokens_agreed_median']:g}); "
        f"{found['prompts_parted']} parted; {found['target_forwards']} target forwards"
    )
    explained = (
        "p target, p draft: the probability of the token before them, by each model, where the two part"
    )
    return [Table("agreements", AGREEMENTS, list(map(_agreement, found["prompts"]))), explained, words]


def _agreement(one: Row) -> Row:
    fork = one["fork"] or {}
    return {
        **one,
        **{side: repr(token["text"]) for side, token in fork.items()},
        **{f"{side}_by_{by}": fork[side][f"{by}_probability"] for side in fork for by in ("target", "draft")},
    }


def comparisons(found: Row) -> Items:
    """task=compare: a row for each prompt."""
    rows = []
    for one in found["comparisons"]:
        regular, speculative = one[REGULAR], one[SPECULATIVE]
        before, after = regular["ms_per_token"], speculative["ms_per_token"]
        paces = {"regular_ms_per_token": before, "speculative_ms_per_token": after}
        faster = before / after if before and after else None
        rows.append({**speculative, "id": one["id"], **paces, "speedup": faster})
    return [Table("comparisons", COMPARISONS, rows)] if rows else []


def checks(found: Row) -> Items:
    """task=certify: a row for each check, and the verdict."""
    says = [found["says"]] if found["says"] else []
    return [Table("checks", CHECKS, found["checks"]), *says]


def check_row(name: str, outcome: str, says: str) -> RichTable:
    """A check of task=certify as it is found: what it says stays in its column."""
    row = RichTable.grid(padding=(0, 2, 0, 0))
    row.add_column(justify="right", width=16, no_wrap=True)
    row.add_column(width=7, no_wrap=True)
    row.add_column()
    row.add_row(Text(name), Text(outcome, OUTCOMES.get(outcome, "")), Text(says))
    return row


def plans(found: Row) -> Items:
    """task=plan: the best placements, what acceptance makes of the chosen one, and the verdict."""
    rows = [
        {**one, "verdict": one["verdict"].replace("_", " "), "worst_gpu_gib": one["worst_gpu_bytes"] / GIB,
         "margin_gib": one["margin_bytes"] / GIB}
        for one in found["placements"]
    ]  # fmt: skip
    tables: Items = [Table("placements", PLACEMENTS, rows, "Placements, the fastest first")]
    if found["by_acceptance"]:
        tables.append(Table("by_acceptance", ACCEPTANCES, found["by_acceptance"], "By acceptance"))
    if found.get("job"):
        title = f"A job of {found['job']['records']} records"
        tables.append(Table("nodes", NODES, found["job"]["nodes"], title))
    return [*tables, *found["advice"], found["sentence"]]


def outputs(found: Row) -> Items:
    """task=generate: a row for each prompt."""
    return [Table("outputs", OUTPUTS, found["outputs"])] if found["outputs"] else []


ITEMS: dict[str, Callable[[Row], Items]] = {
    "generate": outputs, "compare": comparisons, "measure": speeds, "eval": scores, "agree": agreements,
    "certify": checks, "plan": plans,
}  # fmt: skip


PLANNED = (
    Column("what", "plan against actual", is_text=True),
    Column("predicted", digits=2),
    Column("measured", digits=2),
    Column("predicted_over_measured", "predicted / measured"),
)
MEMORY = {"held_bytes": "weights and caches", "tensor_bytes": "tensors", "reserved_bytes": "reserved",
          "device_bytes": "in all"}  # fmt: skip


def plan_against_actual(summary: Row) -> Table | None:
    """The plan's predictions next to what was measured; None where there was no plan."""
    plan = summary.get("plan")
    if not plan:
        return None
    rows = [{"what": f"{way['name']}, ms/token", **way["ms_per_token"]} for way in plan["ways"]]
    for rank in plan["memory"]:
        for key, name in MEMORY.items():
            both = {part: rank[key][part] and rank[key][part] / MIB for part in ("predicted", "measured")}
            rows.append({"what": f"rank {rank['rank']}, {name}, MiB", **rank[key], **both})
    rows = [row for row in rows if row["measured"] is not None]
    return Table("plan_against_actual", PLANNED, rows) if rows else None
