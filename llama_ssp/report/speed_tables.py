"""What task=measure shows: speeds, a suite's categories, where the time goes. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from llama_ssp.report.speed_stats import Record
from llama_ssp.report.tables import MIB, Column, Items, Row, Table

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
    items += [_positions(rows), *_siblings(rows)]
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
    return Table("repeats", [Column(key) for key in rows[0]], rows).csv()


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


def _siblings(rows: list[tuple[str, Row]]) -> Iterator[Table]:
    """How often each sibling stood, of those that were drawn; nothing without siblings."""
    body, most = list[Row](), 0
    for name, row in rows:
        drawn = row.get("siblings_drafted_by_position", [])  # earlier summaries lack it
        stood = row.get("siblings_accepted_by_position", [])
        most = max(most, len(drawn))
        for j in range(max(map(len, drawn), default=0)):
            shares = {
                str(at): kept[j] / made[j]
                for at, (kept, made) in enumerate(zip(stood, drawn, strict=True), start=1)
                if j < len(made)
            }
            body.append({"contender": name, "sibling": j + 1, **shares})
    if body:
        columns = [Column(str(n), optional=n - 1) for n in range(1, most + 1)]
        title = "siblings that stood, of those drawn with the draft at each position"
        yield Table("siblings_by_position", [FIRST, Column("sibling"), *columns], body, title)


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
            f"acceptance of a decided draft {found['alpha']:.2f}; `predicted` is made of both"
        )
    covered = f" (coverage {coverage:.3f})" if coverage else ""
    yield f"{found['interval']}{covered}; ms and tokens/s without prefill, first token with it"


def _memory(ranks: list[Row]) -> Iterator[str]:
    for rank in ranks:
        device = f", device {rank['device_bytes'] / MIB:.0f} MiB" if rank["device_bytes"] else ""
        process = f"process {rank['process_bytes'] / MIB:.0f} MiB"
        yield f"peak memory, rank {rank['rank']}: {process}{device}"
