"""What each task shows, made from its figures alone: on the screen, in files and in reports. No torch."""

from collections.abc import Callable, Iterator

from llama_ssp.report.tables import MIB, NONE, Column, Items, Row, Table

SCORES = (
    Column(key="pair", is_text=True),
    Column(key="mode", title="sampling", is_text=True),
    Column(key="prompts"),
    Column(key="correct", title="right"),
    Column(key="score", digits=1, is_percent=True),
    Column(key="score", title="95 % interval", digits=1, is_interval=True, is_percent=True),
    Column(key="ms_per_token", title="ms/token"),
    Column(key="tokens_per_target_forward", title="tokens/forward", optional=1),
    Column(key="acceptance_rate", title="acceptance", optional=2),
)
# The two ways of sampling, as JSON documents name them.
REGULAR = "regular"
SPECULATIVE = "speculative"
AGREEMENTS = (
    Column(key="id", title="prompt", is_text=True),
    Column(key="agreed_tokens", title="agreed"),
    Column(key="finish_reason", title="ended by", is_text=True),
    Column(key="target", title="target takes", is_text=True),
    Column(key="draft", title="draft takes", is_text=True),
)
CHECKS = (
    Column(key="name", title="check", is_text=True),
    Column(key="outcome", is_text=True),
    Column(key="says", is_text=True),
)
# What the checks of task=certify show, for a reader of the page; docs/certify.md has more.
CHECK_MEANINGS = {
    "law": "What verification commits has the target's distribution: the rule's own, summed exactly, is the "
    "one that it was given, and the logits that it was given are those of regular passes, within rounding.",
    "filters": "The probabilities that verification used are those that a second, simple implementation of "
    "the sampling settings makes of the same logits.",
    "decisions": "Each round, decided again with its random numbers made anew, is decided as it was.",
    "two samples": "Speculative and regular texts differ no more than two samples of one distribution do.",
    "negative control": "The same test finds a rule that is wrong on purpose. If not, nothing is proved.",
    "greedy": "Greedy texts with drafts are those without them, except where two tokens are equally likely "
    "within rounding.",
}
STYLES = {"passed": "green", "failed": "bold red", "blind": "yellow"}  # of an outcome
OUTPUTS = (
    Column(key="id", is_text=True),
    Column(key="prompt_tokens"),
    Column(key="output_tokens"),
    Column(key="finish_reason", title="ended by", is_text=True),
    Column(key="prompt", is_text=True),
    Column(key="text", is_text=True),
)
PLANNED = (
    Column(key="what", title="plan against actual", is_text=True),
    Column(key="predicted"),
    Column(key="measured"),
    Column(key="predicted_over_measured", title="predicted / measured"),
)
MACHINE = (
    Column(key="subject", title="checked", is_text=True),
    Column(key="verdict", title="", is_text=True),
    Column(key="found", is_text=True),
)
MEMORY = {
    "held_bytes": "weights and caches",
    "tensor_bytes": "tensors",
    "reserved_bytes": "reserved",
    "device_bytes": "in all",
}
FIRST = Column(key="contender", title="", is_text=True)
SPEEDS = (
    FIRST,
    Column(key="ms_per_token", title="ms/token"),
    Column(key="ms_per_token", title="interval", is_interval=True, optional=2),
    Column(key="tokens_per_s", title="tokens/s", digits=1),
    Column(key="time_to_first_token_ms", title="first token", optional=3),
    Column(key="inter_token_ms_p50", title="p50", optional=4),
    Column(key="inter_token_ms_p90", title="p90", optional=4),
    Column(key="inter_token_ms_p99", title="p99", optional=4),
    Column(key="speedup", title="faster"),
    Column(key="speedup", title="interval", is_interval=True),
    Column(key="predicted_speedup", title="predicted", optional=1),
    Column(key="acceptance_rate", title="accepted"),
    Column(key="tokens_per_target_forward", title="tokens/forward"),
)
CATEGORIES = (
    FIRST,
    Column(key="category", is_text=True),
    Column(key="questions"),
    Column(key="tokens_per_round", title="tokens/round"),
    Column(key="tokens_per_round", title="interval", is_interval=True, optional=1),
    Column(key="speedup", title="faster"),
    Column(key="speedup", title="interval", is_interval=True),
    Column(key="acceptance_rate", title="accepted", optional=2),
)

REPLAYED = (
    Column(key="drafter", is_text=True),
    Column(key="k", title="K"),
    Column(key="tokens_per_round", title="tokens/round"),
    Column(key="tokens_per_round", title="95 % interval", is_interval=True),
    Column(key="other", title="by the other rule", optional=1),
)
RANKED = (
    Column(key="cluster", title="planned on", is_text=True),
    Column(key="drafter", is_text=True),
    Column(key="k", title="best K"),
    Column(key="ms_per_token", title="ms/token"),
    Column(key="speedup", title="faster"),
    Column(key="placement", is_text=True, optional=1),
)


def items_of(summary: Row) -> Items:
    """Returns the tables and sentences of a run, from its summary.json."""
    make = ITEMS.get(summary["task"])
    return make(summary) if make is not None else []


def scores(summary: Row) -> Items:
    """Returns task=eval's row for each pair, mode and size, then a sentence for each difference."""
    items: Items = [Table("scores", SCORES, summary["rows"])]
    for row in summary["differences"]:
        value = 100 * row["difference"]
        low = 100 * row["difference_low"]
        high = 100 * row["difference_high"]
        holds = "holds" if row["includes_zero"] else "does not hold"
        items.append(
            f"{row['pair']}: speculative less regular {value:+.1f} points on {row['prompts']} prompts, "
            f"95 % interval {low:+.1f} .. {high:+.1f}, which {holds} zero"
        )
    return items


def agreements(summary: Row) -> Items:
    """Returns task=agree's row for each prompt, and a sentence about all of them."""
    prompts = summary["prompts"]
    if not prompts:
        return []

    rows: list[Row] = []
    for prompt in prompts:
        fork = prompt["fork"] or {}  # what each side takes where they part
        rows.append({**prompt, **{side: repr(token["text"]) for side, token in fork.items()}})
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
    contenders = _contenders(summary)
    if not contenders:
        return []
    items: Items = [Table("speeds", SPEEDS, [{"contender": name, **row} for name, row in contenders])]

    if summary.get("suite"):
        items += _categories([("", summary)])
    else:
        split: list[Row] = []
        for name, row in contenders:
            if parts := row["time_split_ms_per_token"]:
                split.append({"contender": name, **parts, "sum": sum(parts.values())})
        items.append(_wide("time_split", "where the time goes, ms/token", split, "(not measured)"))

    accepted: list[Row] = []
    for name, row in contenders:
        if rates := row["acceptance_by_position"]:
            accepted.append({"contender": name, **_by_position(rates)})
    if accepted:
        items.append(_wide("acceptance_by_position", "accepted of the drafts at each position", accepted))
    return [*items, "", *_notes(summary)]


def measured(summary: Row) -> Items:
    """Returns what task=measure shows: of runs that it made, or of texts that it replayed."""
    return replayed(summary) if "replay" in summary else speeds(summary)


def replayed(summary: Row) -> Items:
    """Returns a row for each drafter and K, acceptance by position, drafters ranked by plans, and notes."""
    rule = summary["rule"]
    entries = [entry for entry in summary["acceptance"] if entry["rule"] == rule]
    if not entries:
        return []
    others = {entry["drafter"]: entry for entry in summary["acceptance"] if entry["rule"] != rule}
    rows: list[Row] = []
    places: list[Row] = []
    for entry in entries:
        name = entry["drafter"]
        for point, other in zip(entry["curve"], others[name]["curve"], strict=True):
            if point["k"] in summary["ks"]:
                rows.append({"drafter": name, "other": other["tokens_per_round"], **point})
        longest = entry["curve"][-1]
        for end, title in (("", name), ("_low", f"{name}, from"), ("_high", f"{name}, to")):
            places.append({"contender": title, **_by_position(longest[f"acceptance_by_position{end}"])})

    items: Items = [
        Table("replayed", REPLAYED, rows, f"tokens a round, by the rule {rule}"),
        _wide("acceptance_by_position", "accepted of the drafts at each position, largest K", places),
    ]
    if summary["ranking"]:
        items.append(Table("ranking", RANKED, summary["ranking"], "by the plan, with these tokens a round"))
    return [*items, "", *_replay_notes(summary)]


DOUBTFUL_ERRORS = 3.0  # standard errors that one of 400 sets of texts of the target exceeds


def _replay_notes(summary: Row) -> Iterator[str]:
    """Yields the sentences below the tables of a replay."""
    about = summary["replay"]
    origin = "whose they are was not checked, as they give their log-probabilities"
    if about["drawn_from_target"] is not None:
        errors = (
            f"their log-probability is {about['standard_errors']:+.1f} standard errors from what is expected"
        )
        if not about["drawn_from_target"]:
            origin = f"they are NOT this target's under these settings, and neither are the figures: {errors}"
        elif abs(about["standard_errors"]) > DOUBTFUL_ERRORS:
            origin = f"they may be of another model or of other settings: {errors}"
        else:
            origin = f"no sign of another model: {errors}"
    yield f"{about['texts']} texts of {about['tokens']} tokens; {origin}; intervals are over texts"
    seconds = [f"{entry['drafter']} {entry['seconds']:.1f}" for entry in summary["acceptance"][::2]]
    yield f"seconds: target {about['seconds_of_target']:.1f}, {', '.join(seconds)}"
    sources = dict.fromkeys(f"{row['cluster']}: {row['constants_from']}" for row in summary["ranking"])
    for source in sources:
        yield f"constants of {source}"


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
    rows: list[Row] = []
    for name, summary in pairs:
        prefix = f"{name}, " if name else ""
        for row in summary.get("pair", ()):
            contender = {"contender": f"{prefix}K = {_k(row)}"}
            for category in row.get("by_category", ()):
                by_position = _by_position(category["acceptance_by_position"], "at_")
                rows.append({**contender, **category, **by_position})
    if not rows:
        return []

    longest = max(len(row["acceptance_by_position"]) for row in rows)
    places = [Column(key=f"at_{n}", title=f"at {n}", optional=n + 2) for n in range(1, longest + 1)]
    explained = "intervals of 95 % over questions; at n: drafts of position n that were accepted"
    return [Table("categories", [*CATEGORIES, *places], rows, "by category"), explained]


def _k(row: Row) -> str:
    return "adaptive" if row["k"] is None else str(row["k"])


def _by_position(rates: list[float], prefix: str = "") -> Row:
    return {f"{prefix}{n}": rate for n, rate in enumerate(rates, start=1)}


def _wide(name: str, title: str, rows: list[Row], empty: str = "") -> Table:
    """Returns a table with a column for each key of the rows; those of late positions are optional."""
    keys = list(dict.fromkeys(key for row in rows for key in row))[1:]  # the first is FIRST's
    columns = [Column(key=key, optional=int(key) - 1 if key.isdecimal() else 0) for key in keys]
    return Table(name, [FIRST, *columns], rows, title, empty)


def _notes(summary: Row) -> Iterator[str]:
    """Yields the sentences below the tables of one pair."""
    best = summary["best"]
    if best is not None:
        gain = "" if best["speedup"] > 1 else "; speculation does not pay here"
        yield f"fastest: K = {_k(best)}, {best['speedup']:.2f} times as fast as the target alone{gain}"

    if summary["cost_ratio"] is not None and summary["alpha"] is not None:
        interval = Column(key="cost_ratio", is_interval=True).cell(summary)
        ends = "" if interval == NONE else f" ({interval})"
        yield (
            f"draft step over target step {summary['cost_ratio']:.2f}{ends}, "
            f"acceptance of a decided draft {summary['alpha']:.2f}; `predicted` is made of both"
        )

    coverage = summary["interval_coverage"]
    covered = f" (coverage {coverage:.3f})" if coverage else ""
    yield f"{summary['interval']}{covered}; ms and tokens/s without prefill, first token with it"


def outputs(summary: Row) -> Items:
    """Returns task=generate's row for each text."""
    rows = summary["outputs"]
    return [Table("outputs", OUTPUTS, rows)] if rows else []


def checks(summary: Row) -> Items:
    """Returns task=certify's row for each check, and its sentence once there is a verdict."""
    table = Table("checks", CHECKS, summary["checks"])
    return [table, summary["says"]] if summary["says"] else [table]


def advice(summary: Row) -> Items:
    """Returns task=plan's sentences; the JSON has the plan itself."""
    return [summary["sentence"], *summary["advice"]]


def machine(summary: Row) -> Items:
    """Returns what task=calibrate found on the machine; of an interrupted check nothing."""
    return machine_rows(summary["machine"]) if summary.get("machine") else []


def machine_rows(check: Row) -> Items:
    """Returns a row for each thing that was checked, what to do where it is not well, and a sentence."""
    rows = [{**row, "subject": row["name"].replace("_", " ")} for row in check["checks"]]
    advice = [f"{row['subject']}: {row['fix']}" for row in rows if row["fix"]]
    items: Items = [Table("machine", MACHINE, rows)]
    if advice:
        items += ["", "what to do", *dict.fromkeys(advice)]
    return [*items, "", f"this machine is {check['says']} (checked in {check['seconds']:.0f} s)"]


ITEMS: dict[str, Callable[[Row], Items]] = {
    "generate": outputs,
    "measure": measured,
    "eval": scores,
    "agree": agreements,
    "certify": checks,
    "calibrate": machine,
    "plan": advice,
}


def plan_against_actual(summary: Row) -> Table | None:
    """Returns the plan's predictions next to what was measured; None where there was no plan."""
    plan = summary.get("plan")
    if not plan:
        return None

    rows: list[Row] = [{"what": f"{way['name']}, ms/token", **way["ms_per_token"]} for way in plan["ways"]]
    for rank in plan["memory"]:
        for key, name in MEMORY.items():
            bytes_of = rank[key]
            mib = {part: bytes_of[part] and bytes_of[part] / MIB for part in ("predicted", "measured")}
            rows.append({"what": f"rank {rank['rank']}, {name}, MiB", **bytes_of, **mib})

    rows = [row for row in rows if row["measured"] is not None]
    return Table("plan_against_actual", PLANNED, rows) if rows else None
