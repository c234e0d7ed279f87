"""A plan for a terminal: tables and bars. No torch."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from rich.table import Table
from rich.text import Text

from llama_ssp.config import MAX_K, MOST_ROWS
from llama_ssp.distributed.placement import spans
from llama_ssp.planner.fit import FitVerdict, RankMemory, worst
from llama_ssp.planner.plan import PARTS, Plan, parts
from llama_ssp.planner.search import Option, PlanRequest, warnings_of_codes
from llama_ssp.planner.weights import parameters
from llama_ssp.planner.workload import GIB

WIDTH = 104
CELLS = 50  # of a bar, at most and at least
MIN_CELLS = 20
BESIDE = 42  # columns of a bar's line that are words
LEGEND_MARGIN = " " * 9
COLOURS = "blue", "cyan", "green", "bright_green", "yellow", "bright_black"
COLOUR = dict(zip(PARTS, COLOURS, strict=True))
FILL = dict(zip(PARTS, "█▓▒░+:", strict=True))
MARK = {FitVerdict.fits: "green", FitVerdict.uncertain: "yellow", FitVerdict.does_not_fit: "red"}


def drawing(plan: Plan, width: int = WIDTH) -> Iterator[Text | Table | str]:
    """Yields the whole plan, piece by piece: tables, bars that fit the width, and words."""
    fits = plan.runs
    yield Text(heading(plan.request), style="bold")
    yield _placements(plan)
    yield from _bars(plan.chosen.ranks, "CPU" if plan.request.machine.is_cpu else "GPU", width)
    yield ""
    if plan.acceptances and fits:
        yield _acceptances(plan)
        yield ""
    yield from _words(plan) if fits else _changes(plan)
    yield Text(plan.sentence(), style=f"bold {MARK[plan.chosen.verdict]}")


def heading(request: PlanRequest, numbers: Mapping[str, int] = MappingProxyType({})) -> str:
    """Returns what is planned: models, machine, workload. `numbers` of weights, by role, are known ones."""
    work = request.work
    sizes = [(role, _count(numbers.get(role.role) or parameters(role.model))) for role in request.roles]
    models = " + ".join(f"{role.model.name} {role.dtype.value} ({size})" for role, size in sizes)
    rows = f"{work.rows} row{'s' if work.rows > 1 else ''} of {work.prompt_tokens} + {work.new_tokens} tokens"
    return f"{models} on {request.machine.in_words()}\n{rows}, {request.acceptance_in_words}"


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
    for number, option in shown:
        fullest_rank = option.worst
        speedup = plan.speedup_of(option)  # what cannot run has no speed
        table.add_row(
            str(number),
            option.placement.in_words(),
            f"{fullest_rank.total / GIB:.1f} of {fullest_rank.capacity / GIB:.1f}",
            Text(option.verdict.value.replace("_", " "), style=MARK[option.verdict]),
            str(option.k) if plan.drafts and speedup else "",
            f"{option.ms_per_token:.2f}" if speedup else "",
            f"{speedup:.2f}x" if speedup else "",
        )
    if len(plan.options) > len(shown):
        table.add_row("", f"and {len(plan.options) - len(shown)} more in the JSON", *[""] * 5)
    return table


def notable(plan: Plan) -> list[tuple[int, Option]]:
    """Returns the best of each kind of placement, and the fewest ranks that fit, with their numbers."""
    kinds: dict[object, int] = {}
    fewest = plan.fewest
    for number, option in enumerate(plan.options):
        place = option.placement
        kinds.setdefault((place.draft_apart, place.copies, min(place.draft_degree, 2)), number)
        if option is fewest:
            kinds["fewest"] = number
    return [(number + 1, plan.options[number]) for number in sorted(set(kinds.values()))]


def _bars(ranks: tuple[RankMemory, ...], device: str, width: int) -> Iterator[Text]:
    """Yields a bar for each kind of GPU; equal bars are drawn once."""
    count = max(MIN_CELLS, min(CELLS, width - BESIDE))
    kinds: dict[object, list[RankMemory]] = {}
    for memory in ranks:
        kinds.setdefault((tuple(_cells(memory, count).items()), memory.verdict), []).append(memory)
    for equal in kinds.values():
        yield _bar(equal, device, count)
    names = [name for name in FILL if any(parts(memory.lines)[name] for memory in ranks)]
    yield from _legend(names, width)


def _legend(names: list[str], width: int) -> Iterator[Text]:
    """Yields what the bars' characters mean; an entry is not broken."""
    line = Text(LEGEND_MARGIN)
    for name in names:
        entry = f"{FILL[name]} {name}"
        if len(line) + len(entry) > width:
            yield line
            line = Text(LEGEND_MARGIN)
        line.append(f"{entry}  ", style=COLOUR[name])
    yield line


def _cells(memory: RankMemory, count: int) -> dict[str, int]:
    """Returns how many of the bar's cells each part fills."""
    scale = count / max(memory.capacity, memory.total, 1)
    cells = {}
    filled = 0
    so_far = 0
    for name, size in parts(memory.lines).items():
        so_far += size
        cells[name] = round(so_far * scale) - filled
        filled += cells[name]
    return cells


def _bar(equal: list[RankMemory], device: str, count: int) -> Text:
    fullest = worst(equal)
    ranks = spans([memory.rank for memory in equal])
    cells = _cells(fullest, count)
    line = Text(f"{device} {ranks:<4} ")
    for name, filled in cells.items():
        line.append(FILL[name] * filled, style=COLOUR[name])
    line.append("·" * (count - sum(cells.values())), style="bright_black")
    line.append(f" {fullest.total / GIB:.1f} of {fullest.capacity / GIB:.1f} GiB, ")
    margin = fullest.margin / GIB
    line.append(f"{margin:.1f} left" if margin >= 0 else f"{-margin:.1f} too much", MARK[fullest.verdict])
    return line


def _acceptances(plan: Plan) -> Table:
    table = _empty_table()
    points = plan.acceptances
    table.add_column("acceptance")
    for point in points:
        table.add_column(f"{point['acceptance']:g}", justify="right")
    table.add_row("K", *(str(point["k"]) for point in points))
    table.add_row("tokens a round", *(f"{point['tokens_per_round']:.2f}" for point in points))
    table.add_row("ms/token", *(f"{point['ms_per_token']:.2f}" for point in points))
    table.add_row("speed-up", *(f"{point['speedup']:.2f}x" for point in points))
    return table


def _words(plan: Plan) -> Iterator[str]:
    """Yields what is not in the tables, a line each."""
    room = plan.largest
    times = plan.chosen.times
    fewest = plan.fewest
    if plan.chosen.verdict is FitVerdict.fits:
        rows = _at_least(room.rows, MOST_ROWS)
        limit = " (the model's own limit)" if room.is_model_limit else ""
        drafts = f", or K = {_at_least(room.k, MAX_K)}" if plan.drafts else ""
        yield f"largest that fits here: context {room.context_tokens}{limit}, or {rows} rows{drafts}"
    else:
        yield from _changes(plan)
    if fewest is not None and fewest.placement.world < plan.chosen.placement.world:
        where = f"{fewest.placement.world} ({fewest.placement.in_words()})"
        yield f"fewest GPUs that it fits on: {where}, {fewest.ms_per_token:.2f} ms/token"
    on = "ranks" if plan.request.machine.is_cpu else "GPUs"
    ranks = plan.regular.ranks
    regular = (
        f"regular {plan.regular_ms:.2f} ms/token on {ranks} {on.removesuffix('s') if ranks == 1 else on}"
    )
    steps = f"{regular}, prompt {plan.prefill_ms:.0f} ms"
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
    request = plan.request
    place = plan.chosen.placement
    degree = max(len(place.target), place.draft_degree)
    if not plan.eager and request.steps.needs_trial and degree > 1:
        line = "the first start tries CUDA graphs over several GPUs; if that fails, steps run eagerly"
        yield f"{line}, at about {plan.eager_ms:.0f} ms/token"
    yield from warnings_of_codes(plan.request, plan.chosen.placement, plan.chosen.k)
    machine = plan.request.machine
    yield f"times within {plan.band:.0%}, constants of {machine.constants_from}"
    yield from plan.said_of_nodes()
    if machine.is_borrowed:
        yield "a run measures this machine when it ends, and llama-ssp calibrate does so more exactly"
    if plan.drafts and request.is_acceptance_assumed:
        yield f"{request.acceptance_in_words} is assumed; llama-ssp measure finds your pair's"
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
    """Yields the changes that make it fit."""
    for number, change in enumerate(plan.advice):
        yield f"{'to make it fit: ' if number == 0 else '            or: '}{change}"
    if not plan.advice:
        yield "no change was found that makes it fit"


def _at_least(number: int, tried: int) -> str:
    return f"{number} or more" if number == tried else f"{number}"
