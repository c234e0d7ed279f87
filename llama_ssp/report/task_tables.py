"""What each task shows, made from its figures alone: on the screen, in files and in reports. No torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator

from rich.table import Table as RichTable
from rich.text import Text

from llama_ssp.report.speed_stats import Record
from llama_ssp.report.tables import Column, Row, Table

MIB = 2**20
Items = list[Table | str]

FIRST = Column("contender", "", is_text=True)
SPEEDS = (
    FIRST,
    Column("ms_per_token", "ms/token"),
    Column("ms_per_token", "interval", is_interval=True, optional=2),
    Column("tokens_per_s", "tokens/s", digits=1),
    Column("time_to_first_token_ms", "first token", optional=3),
    *(Column(f"inter_token_ms_p{one}", f"p{one}", optional=4) for one in (50, 90, 99)),
    Column("speedup", "faster"),
    Column("speedup", "interval", is_interval=True),
    Column("predicted_speedup", "predicted", optional=1),
    Column("acceptance_rate", "accepted"),
    Column("tokens_per_target_forward", "tokens/forward"),
)
CATEGORIES = (
    FIRST,
    Column("category", is_text=True),
    Column("questions"),
    Column("tokens_per_round", "tokens/round"),
    Column("tokens_per_round", "interval", is_interval=True, optional=1),
    Column("speedup", "faster"),
    Column("speedup", "interval", is_interval=True),
    Column("acceptance_rate", "accepted", optional=2),
)
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
    Column("worst_gpu_bytes", "bytes of the fullest GPU"),
    Column("margin_bytes", "bytes left"),
    Column("k", "K"),
    Column("ms_per_token", "ms/token"),
    Column("speedup", "times as fast"),
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


def speeds(found: Row) -> Items:
    """task=measure: the speeds of a pair or of several, a suite's categories, where the time goes, notes."""
    if "pairs" in found:
        return _speeds_of_pairs(found["pairs"], found["peak_memory"])
    rows = _contenders(found)
    if not rows:
        return []
    items: Items = [Table("speeds", SPEEDS, [{"contender": name, **row} for name, row in rows])]
    if found.get("suite"):
        items += _categories([("", found)])
    else:
        items.append(_split(rows))
    items.append(_positions(rows))
    for name, row in rows:
        if (apart := row["overlap"]) is not None:
            items += ["", f"{name}: {_apart(apart, row['tokens_committed'])}"]
    return [*items, "", *_notes(found), *_memory(found["peak_memory"])]


def _contenders(found: Row) -> list[tuple[str, Row]]:
    """The contenders of a pair that have been measured."""
    rows = [(name, found.get(name.replace(" ", "_")) or {}) for name in ("target alone", "draft alone")]
    rows += [(f"pair, K = {_k(one)}", one) for one in found.get("pair", ())]
    return [(name, row) for name, row in rows if row.get("ms_per_token") is not None]


def _speeds_of_pairs(pairs: list[Row], memory: list[Row]) -> Items:
    """A row for each target and for each pair at each K."""
    shown: dict[str, Row] = {}
    for one in pairs:
        target = one["name"].partition("/")[0]
        for name, row in _contenders(one):
            if name != "draft alone":
                pair = target if name == "target alone" else f"{one['name']}{name.removeprefix('pair')}"
                shown.setdefault(pair, row)
    if not shown:
        return []
    rows = [{"contender": name, **row} for name, row in shown.items()]
    categories = _categories([(one["name"], one) for one in pairs])
    return [Table("speeds", SPEEDS, rows), *categories, "", pairs[0]["interval"], *_memory(memory)]


def _categories(pairs: list[tuple[str, Row]]) -> Items:
    """A suite's categories: of each pair and K, what it gets a round, how much faster, what is accepted."""
    rows = [
        {"contender": f"{name}{', ' * bool(name)}K = {_k(row)}", **one,
         **{f"at_{n}": rate for n, rate in enumerate(one["acceptance_by_position"], start=1)}}
        for name, found in pairs
        for row in found.get("pair", ())
        for one in row.get("by_category", ())
    ]  # fmt: skip
    most = max((len(row["acceptance_by_position"]) for row in rows), default=0)
    places = [Column(f"at_{n}", f"at {n}", optional=n + 2) for n in range(1, most + 1)]
    explained = "intervals of 95 % over questions; at n: drafts of position n that were accepted"
    return [Table("categories", [*CATEGORIES, *places], rows, "by category"), explained] if rows else []


def repeats_csv(records: list[tuple[str, Record]]) -> str:
    """A line for each pair, contender and repeat of task=measure, for other statistics."""
    rows = [
        {"pair": pair, "contender": record.name, "k": record.k, "repeat": repeat, **sample.row()}
        for pair, record in records
        for repeat, sample in enumerate(record.samples)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _k(row: Row) -> str:
    return "adaptive" if row["k"] is None else str(row["k"])


def _split(rows: list[tuple[str, Row]]) -> Table:
    split = [(name, own) for name, row in rows if (own := row["time_split_ms_per_token"])]
    parts = [Column(part) for part in split[0][1]] if split else []
    body = [{"contender": name, **own, "sum": sum(own.values())} for name, own in split]
    title = "where the time goes, ms/token"
    return Table("time_split", [FIRST, *parts, Column("sum")], body, title, "(not measured)")


def _positions(rows: list[tuple[str, Row]]) -> Table:
    drafted = [(name, rates) for name, row in rows if (rates := row["acceptance_by_position"])]
    most = max((len(rates) for _, rates in drafted), default=0)
    columns = [Column(str(n), optional=n - 1) for n in range(1, most + 1)]
    body = [
        {"contender": name, **{str(n): rate for n, rate in enumerate(rates, start=1)}}
        for name, rates in drafted
    ]
    title = "accepted of the drafts at each position"
    return Table("acceptance_by_position", [FIRST, *columns], body, title, "(nothing was drafted)")


def _apart(apart: Row, tokens: int) -> str:
    """What came of a draft on ranks of its own."""
    ready = "-" if apart["ready_share"] is None else f"{apart['ready_share']:.0%}"
    return (
        f"drafts were ready in {ready} of rounds; of {apart['tokens_drafted_ahead']} drafted ahead "
        f"{apart['tokens_drafted_ahead_wasted']} unused; "
        f"the target waited {apart['leader_waited_ms'] / tokens:.2f} ms/token, "
        f"the draft {apart['draft_waited_ms'] / tokens:.2f}"
    )


def _notes(found: Row) -> Iterator[str]:
    best, coverage = found["best"], found["interval_coverage"]
    if best is not None:
        gain = "" if best["speedup"] > 1 else "; speculation does not pay here"
        yield f"fastest: K = {_k(best)}, {best['speedup']:.2f} times as fast as the target alone{gain}"
    if found["cost_ratio"] is not None and found["alpha"] is not None:
        held = Column("cost_ratio", is_interval=True).cell(found)
        yield (
            f"draft step over target step {found['cost_ratio']:.2f}{f' ({held})' * (held != '-')}, "
            f"acceptance of a decided draft {found['alpha']:.2f}: what `predicted` rests on"
        )
    covered = f" (coverage {coverage:.3f})" if coverage else ""
    yield f"{found['interval']}{covered}; ms and tokens/s without prefill, first token with it"


def _memory(ranks: list[Row]) -> Iterator[str]:
    for rank in ranks:
        device = f", device {rank['device_bytes'] / MIB:.0f} MiB" if rank["device_bytes"] else ""
        process = f"process {rank['process_bytes'] / MIB:.0f} MiB"
        yield f"peak memory, rank {rank['rank']}: {process}{device}"


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
        regular, speculative = one["regular"], one["speculative"]
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
    tables: Items = [Table("placements", PLACEMENTS, found["placements"], "Placements, the fastest first")]
    if found["by_acceptance"]:
        tables.append(Table("by_acceptance", ACCEPTANCES, found["by_acceptance"], "By acceptance"))
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
