"""What each task shows, made from its figures alone: on the screen, in files and in reports. No torch."""

from collections.abc import Callable, Iterator

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
MEMORY = {
    "held_bytes": "weights and caches",
    "tensor_bytes": "tensors",
    "reserved_bytes": "reserved",
    "device_bytes": "in all",
}
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


def speeds(summary: Row) -> Items:
    """Returns task=measure's tables: speeds of a pair or several, categories, where the time goes, notes."""
    if "pairs" in summary:
        return _speeds_of_pairs(summary["pairs"])
    rows = _contenders(summary)
    if not rows:
        return []
    items: Items = [Table("speeds", SPEEDS, [{"contender": name, **row} for name, row in rows])]
    if summary.get("suite"):
        items += _categories([("", summary)])
    else:
        split = [(name, parts) for name, row in rows if (parts := row["time_split_ms_per_token"])]
        body = [{"contender": name, **parts, "sum": sum(parts.values())} for name, parts in split]
        items.append(_wide("time_split", "where the time goes, ms/token", body, "(not measured)"))
    accepted = [(name, rates) for name, row in rows if (rates := row["acceptance_by_position"])]
    if body := [{"contender": name, **_by_position(rates)} for name, rates in accepted]:
        items.append(_wide("acceptance_by_position", "accepted of the drafts at each position", body))
    return [*items, "", *_notes(summary)]


def _contenders(summary: Row) -> list[tuple[str, Row]]:
    """Returns the contenders of a pair that have been measured."""
    rows = [(name, summary.get(name.replace(" ", "_")) or {}) for name in ("target alone", "draft alone")]
    rows += [(f"pair, K = {_k(row)}", row) for row in summary.get("pair", ())]
    return [(name, row) for name, row in rows if row.get("ms_per_token") is not None]


def _speeds_of_pairs(pairs: list[Row]) -> Items:
    """Returns a row for each target and for each pair at each K."""
    rows: dict[str, Row] = {}
    for pair in pairs:
        for name, row in _contenders(pair):
            if name == "target alone":
                rows.setdefault(pair["name"].partition("/")[0], row)
            elif name != "draft alone":
                rows[f"{pair['name']}{name.removeprefix('pair')}"] = row
    if not rows:
        return []
    table = Table("speeds", SPEEDS, [{"contender": name, **row} for name, row in rows.items()])
    categories = _categories([(pair["name"], pair) for pair in pairs])
    return [table, *categories, "", pairs[0]["interval"]]


def _categories(pairs: list[tuple[str, Row]]) -> Items:
    """Returns a table with a row for each pair, K and category of a suite, and a sentence about it."""
    rows = [
        {
            "contender": f"{name}{', ' * bool(name)}K = {_k(row)}",
            **category,
            **_by_position(category["acceptance_by_position"], "at_"),
        }
        for name, summary in pairs
        for row in summary.get("pair", ())
        for category in row.get("by_category", ())
    ]
    if not rows:
        return []
    longest = max(len(row["acceptance_by_position"]) for row in rows)
    places = [Column(f"at_{n}", f"at {n}", optional=n + 2) for n in range(1, longest + 1)]
    explained = "intervals of 95 % over questions; at n: drafts of position n that were accepted"
    return [Table("categories", [*CATEGORIES, *places], rows, "by category"), explained]


def _k(row: Row) -> str:
    return "adaptive" if row["k"] is None else str(row["k"])


def _by_position(rates: list[float], prefix: str = "") -> Row:
    return {f"{prefix}{n}": rate for n, rate in enumerate(rates, start=1)}


def _wide(name: str, title: str, rows: list[Row], empty: str = "") -> Table:
    """Returns a table with a column for each key of the rows; those of late positions are optional."""
    keys = list(dict.fromkeys(key for row in rows for key in row))[1:]
    columns = [Column(key, optional=int(key) - 1 if key.isdecimal() else 0) for key in keys]
    return Table(name, [FIRST, *columns], rows, title, empty)


def _notes(found: Row) -> Iterator[str]:
    best, coverage = found["best"], found["interval_coverage"]
    if best is not None:
        gain = "" if best["speedup"] > 1 else "; speculation does not pay here"
        yield f"fastest: K = {_k(best)}, {best['speedup']:.2f} times as fast as the target alone{gain}"
    if found["cost_ratio"] is not None and found["alpha"] is not None:
        held = Column("cost_ratio", is_interval=True).cell(found)
        yield (
            f"draft step over target step {found['cost_ratio']:.2f}{f' ({held})' * (held != '-')}, "
            f"acceptance of a decided draft {found['alpha']:.2f}; `predicted` is made of both"
        )
    covered = f" (coverage {coverage:.3f})" if coverage else ""
    yield f"{found['interval']}{covered}; ms and tokens/s without prefill, first token with it"


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
