"""A plan for a terminal: tables and bars. No torch."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from llama_ssp.config import MAX_K, MOST_ROWS
from llama_ssp.distributed.placement import spans
from llama_ssp.planner.fit import FitVerdict, RankMemory, worst
from llama_ssp.planner.groups import JobPlan
from llama_ssp.planner.plan import PARTS, Plan, parts
from llama_ssp.planner.search import Option, warnings_of_codes
from llama_ssp.planner.speed import BAND
from llama_ssp.planner.weights import parameters
from llama_ssp.planner.workload import GIB

WIDTH, CELLS, MIN_CELLS = 104, 50, 20
BESIDE = 42  # columns of a bar's line that are words
LEGEND_MARGIN = " " * 9
COLOURS = "blue", "cyan", "green", "bright_green", "yellow", "bright_black"
FILL, COLOUR = dict(zip(PARTS, "█▓▒░+:", strict=True)), dict(zip(PARTS, COLOURS, strict=True))
BETWEEN_NODES = (
    "sums over ranks are timed as within a node: between nodes they are slower, and so will this be"
)
MARK = {FitVerdict.fits: "green", FitVerdict.uncertain: "yellow", FitVerdict.does_not_fit: "red"}


def drawing(plan: Plan, width: int = WIDTH) -> Iterator[Text | Table | str]:
    """The whole plan, piece by piece: tables, bars that fit the width, and words."""
    fits = plan.runs
    yield Text(heading(plan), style="bold")
    yield _placements(plan)
    yield from _bars(plan.chosen.ranks, "CPU" if plan.request.machine.is_cpu else "GPU", width)
    yield ""
    if plan.acceptances and fits:
        yield _acceptances(plan)
        yield ""
    yield from _words(plan) if fits else _changes(plan)
    yield Text(plan.sentence(), style=f"bold {MARK[plan.chosen.verdict]}")


def job_drawing(job: JobPlan) -> Iterator[Table | str]:
    """A job over several nodes: a table of groups, one of nodes, and words."""
    size, work, price = job.size, job.request.work, job.price_per_gpu_hour
    yield ""
    rows = f"groups of {work.rows} row{'s' * (work.rows > 1)}"
    yield f"a job of {size.records} records in {size.shards} shards, shared by {rows}, loading left out"
    groups = _right_table("GPUs a group", "verdict", "ms/token", "tokens/s a GPU", "time goes to")
    for one in job.groups:
        cells = [str(one.gpus), one.option.verdict.value.replace("_", " ")]
        if one.option.runs:
            cells += [f"{one.option.ms_per_token:.2f}", f"{work.new_tokens / one.record_s / one.gpus:.1f}"]
            cells.append(", ".join(f"{name} {share:.0%}" for name, share in one.shares()[:3]))
        groups.add_row(*cells)
    yield groups
    yield ""
    if not job.nodes:
        yield "it fits on none of these numbers of nodes"
        return
    prices = ("price", "a million tokens") if price is not None else ()
    nodes = _right_table("nodes", "GPUs", "groups", "tokens/s", "time", *prices, "limited by")
    for row in job.nodes:
        costs = [f"{row[name]:.2f}" for name in ("job_price", "price_per_million_tokens")] if prices else []
        groups_ = f"{row['groups']} x {row['gpus_per_group']}"
        spent = row["job_s"] / 3600
        time = f"{spent:.1f} h" if spent >= 2 else f"{60 * spent:.1f} min"
        first = str(row["nodes"]), str(row["gpus"]), groups_, f"{row['tokens_per_s']:.0f}", time
        nodes.add_row(*first, *costs, row["limited_by"])
    yield nodes
    yield from job.sentences()
    machine = job.request.machine
    if not machine.is_cpu and job.nodes[-1]["gpus_per_group"] > machine.gpus:
        yield BETWEEN_NODES


def _right_table(*names: str) -> Table:
    """A table of numbers, with words in its last column."""
    table = _empty_table()
    for name in names:
        is_last = name == names[-1]  # words, which may be broken
        table.add_column(name, justify="left" if is_last else "right", no_wrap=not is_last)
    return table


def heading(plan: Plan) -> str:
    """What is planned: models, machine, workload."""
    request, work = plan.request, plan.request.work
    sizes = [(role, _count(parameters(role.model))) for role in request.roles]
    models = " + ".join(f"{role.model.name} {role.dtype.value} ({size})" for role, size in sizes)
    rows = f"{work.rows} row{'s' * (work.rows > 1)} of {work.prompt_tokens} + {work.new_tokens} tokens"
    return f"{models} on {request.machine.in_words()}\n{rows}, acceptance {request.acceptance:.2f}"


def _count(number: int) -> str:
    return f"{number / 1e9:.3g}B" if number >= 1e9 else f"{number / 1e6:.3g}M"


def _empty_table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))


def _placements(plan: Plan) -> Table:
    table = _empty_table()
    fullest = "memory, GiB" if plan.request.machine.is_cpu else "fullest, GiB"
    for name in ("", "placement", fullest, "verdict", "K", "ms/token", "speed-up"):
        is_text = name in ("", "placement", "verdict")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "placement")
    shown = notable(plan)
    for number, one in shown:
        worst, speedup = one.worst, plan.speedup_of(one)  # what cannot run has no speed
        table.add_row(
            str(number),
            one.placement.in_words(),
            f"{worst.total / GIB:.1f} of {worst.capacity / GIB:.1f}",
            Text(one.verdict.value.replace("_", " "), style=MARK[one.verdict]),
            str(one.k) if plan.drafts and speedup else "",
            f"{one.ms_per_token:.2f}" if speedup else "",
            f"{speedup:.2f}x" if speedup else "",
        )
    if len(plan.options) > len(shown):
        table.add_row("", f"and {len(plan.options) - len(shown)} more in the JSON", *[""] * 5)
    return table


def notable(plan: Plan) -> list[tuple[int, Option]]:
    """The best of each kind of placement, and the fewest ranks that fit, each with its number in the list."""
    kinds: dict[object, int] = {}
    fewest = plan.fewest
    for number, one in enumerate(plan.options):
        place = one.placement
        kinds.setdefault((place.draft_apart, place.copies, min(place.draft_degree, 2)), number)
        if one is fewest:
            kinds["fewest"] = number
    return [(number + 1, plan.options[number]) for number in sorted(set(kinds.values()))]


def _bars(ranks: tuple[RankMemory, ...], device: str, width: int) -> Iterator[Text]:
    """A bar for each kind of GPU; equal bars are drawn once."""
    count = max(MIN_CELLS, min(CELLS, width - BESIDE))
    kinds: dict[object, list[RankMemory]] = {}
    for one in ranks:
        kinds.setdefault((tuple(_cells(one, count).items()), one.verdict), []).append(one)
    for alike in kinds.values():
        yield _bar(alike, device, count)
    yield from _legend([name for name in FILL if any(parts(one.lines)[name] for one in ranks)], width)


def _legend(names: list[str], width: int) -> Iterator[Text]:
    """What the bars' characters mean; an entry is not broken."""
    line = Text(LEGEND_MARGIN)
    for name in names:
        entry = f"{FILL[name]} {name}"
        if len(line) + len(entry) > width:
            yield line
            line = Text(LEGEND_MARGIN)
        line.append(f"{entry}  ", style=COLOUR[name])
    yield line


def _cells(memory: RankMemory, count: int) -> dict[str, int]:
    """How many of the bar's cells each part fills."""
    scale = count / max(memory.capacity, memory.total, 1)
    cells, filled, so_far = {}, 0, 0
    for name, size in parts(memory.lines).items():
        so_far += size
        cells[name] = round(so_far * scale) - filled
        filled += cells[name]
    return cells


def _bar(alike: list[RankMemory], device: str, count: int) -> Text:
    fullest = worst(alike)
    ranks, cells = spans([one.rank for one in alike]), _cells(fullest, count)
    line = Text(f"{device} {ranks:<4} ")
    for name, filled in cells.items():
        line.append(FILL[name] * filled, style=COLOUR[name])
    line.append("·" * (count - sum(cells.values())), style="bright_black")
    line.append(f" {fullest.total / GIB:.1f} of {fullest.capacity / GIB:.1f} GiB, ")
    margin = fullest.margin / GIB
    line.append(f"{margin:.1f} left" if margin >= 0 else f"{-margin:.1f} too much", MARK[fullest.verdict])
    return line


def _acceptances(plan: Plan) -> Table:
    table, points = _empty_table(), plan.acceptances
    table.add_column("acceptance")
    for one in points:
        table.add_column(f"{one['acceptance']:g}", justify="right")
    table.add_row("K", *(str(one["k"]) for one in points))
    table.add_row("tokens a round", *(f"{one['tokens_per_round']:.2f}" for one in points))
    table.add_row("ms/token", *(f"{one['ms_per_token']:.2f}" for one in points))
    table.add_row("speed-up", *(f"{one['speedup']:.2f}x" for one in points))
    return table


def _words(plan: Plan) -> Iterator[str]:
    """What is not in the tables, a line each."""
    room, times, fewest = plan.largest, plan.chosen.times, plan.fewest
    if plan.chosen.verdict is FitVerdict.fits:
        rows = _at_least(room.rows, MOST_ROWS)
        limit = " (the model's own limit)" if room.is_model_limit else ""
        most = f"largest that fits here: context {room.context_tokens}{limit}, or {rows} rows"
        yield most + (f", or K = {_at_least(room.k, MAX_K)}" if plan.drafts else "")
    else:
        yield from _changes(plan)
    if fewest is not None and fewest.placement.world < plan.chosen.placement.world:
        where = f"{fewest.placement.world} ({fewest.placement.in_words()})"
        yield f"fewest GPUs that it fits on: {where}, {fewest.ms_per_token:.2f} ms/token"
    steps = f"regular {plan.regular_ms:.2f} ms/token, prompt {plan.prefill_ms:.0f} ms"
    if plan.drafts:
        verify_ms = 1000 * times.verify[plan.chosen.k]
        steps += f", a draft step {1000 * times.proposal_s(1):.2f} ms, verifying {verify_ms:.2f} ms"
    yield steps
    if (overlap := plan.overlap()) is not None and overlap["goes_ahead"]:
        guess = f"the draft runs ahead, and its guess holds in {overlap['guess_holds_share']:.0%} of rounds"
        yield f"{guess}; waiting instead takes {overlap['ms_per_token_waiting']:.2f} ms/token"
    if plan.eager:
        reasons = dict.fromkeys(plan.eager.values())  # often one for both roles
        roles = {why: " and ".join(role for role in plan.eager if plan.eager[role] == why) for why in reasons}
        yield f"steps run eagerly: {'; '.join(f'{who}, {why}' for why, who in roles.items())}"
    request, place = plan.request, plan.chosen.placement
    degree = max(len(place.target), place.draft_degree)
    if not plan.eager and request.steps.needs_trial and degree > 1:
        yield "the first start tries CUDA graphs over several GPUs; if that fails, steps run eagerly"
    yield from warnings_of_codes(plan.request, plan.chosen.placement, plan.chosen.k)
    machine = plan.request.machine
    yield f"times within {plan.band:.0%}, constants of {machine.times.source}"
    if machine.nodes > 1 and not machine.is_cpu and plan.chosen.placement.world > machine.gpus:
        yield BETWEEN_NODES
    if machine.is_cpu and machine.times.band > BAND:
        yield "task=calibrate measures this machine's own"
    if plan.drafts and request.is_acceptance_assumed:
        yield f"acceptance {request.acceptance:.2f} is assumed; llama-ssp measure finds your pair's"
    if licences := _licences(plan):
        yield licences


def _licences(plan: Plan) -> str:
    """Returns whose terms the models come under; empty where no preset says it."""
    names: dict[str, list[str]] = {}
    for role in plan.request.roles:
        if role.model.licence:
            names.setdefault(role.model.licence, []).append(role.model.name)
    licences = [f"{' and '.join(models)}: {licence}" for licence, models in names.items()]
    return f"licences: {'; '.join(licences)}" if licences else ""


def _changes(plan: Plan) -> Iterator[str]:
    """The changes that make it fit."""
    for number, change in enumerate(plan.advice):
        yield f"{'to make it fit: ' if number == 0 else '            or: '}{change}"
    if not plan.advice:
        yield "no change was found that makes it fit"


def _at_least(number: int, tried: int) -> str:
    return f"{number} or more" if number == tried else f"{number}"
