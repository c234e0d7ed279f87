"""What task=measure shows: speeds, a suite's categories, where the time goes. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from llama_ssp.report.tables import Column, Items, Row, Table

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
    """Returns by category of a suite what each pair and K gets a round, how much faster, what is accepted."""
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
