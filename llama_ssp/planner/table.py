"""A plan as a person reads it in ten seconds: tables and bars for a terminal. No torch."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llama_ssp.planner.advice import MOST_K, MOST_ROWS
from llama_ssp.planner.fit import FitVerdict, GpuBill
from llama_ssp.planner.outcome import Plan, parts
from llama_ssp.planner.room import GIB, parameters
from llama_ssp.planner.search import Option
from llama_ssp.planner.speed import BAND

WIDTH, CELLS = 104, 50
FILL = dict(zip(parts([]), "█▓▒░+:", strict=True))
COLOUR = dict(
    zip(parts([]), ("blue", "cyan", "green", "bright_green", "yellow", "bright_black"), strict=True)
)
MARK = {FitVerdict.fits: "green", FitVerdict.uncertain: "yellow", FitVerdict.does_not_fit: "red"}


def rendered(plan: Plan, colour: bool) -> str:
    """The whole plan as text, with colours for a terminal."""
    console = Console(
        file=io.StringIO(), width=WIDTH, force_terminal=colour, highlight=False, soft_wrap=True,
        color_system="standard" if colour else None, legacy_windows=False,
    )  # fmt: skip
    console.print(Text(heading(plan), style="bold"))
    console.print(_placements(plan))
    for line in _bars(plan.chosen.bills, "CPU" if plan.asked.machine.is_cpu else "GPU"):
        console.print(line)
    console.print()
    fits = plan.chosen.verdict is not FitVerdict.does_not_fit
    if plan.chances and fits:
        console.print(_acceptances(plan))
        console.print()
    for words in _words(plan) if fits else _changes(plan):
        console.print(Text(words))
    console.print(Text(plan.sentence(), style=f"bold {MARK[plan.chosen.verdict]}"))
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def heading(plan: Plan) -> str:
    """What the plan is about."""
    models = " + ".join(
        f"{role.model.name} {role.dtype.value} ({_count(parameters(role.model))})"
        for role in plan.asked.roles
    )
    work = plan.asked.work
    rows = f"{work.rows} row{'s' * (work.rows > 1)}"
    return (
        f"{models} on {plan.asked.machine.in_words()}\n"
        f"{rows} of {work.prompt_tokens} + {work.new_tokens} tokens, acceptance {plan.asked.acceptance:.2f}"
    )


def _count(number: int) -> str:
    return f"{number / 1e9:.3g}B" if number >= 1e9 else f"{number / 1e6:.3g}M"


def _placements(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    fullest = "memory" if plan.asked.machine.is_cpu else "fullest GPU"
    for name in ("", "placement", fullest, "verdict", "K", "ms/token", "speed-up"):
        table.add_column(name, justify="left" if name in ("", "placement", "verdict") else "right")
    shown = notable(plan.options)
    for number, one in shown:
        worst = one.worst
        table.add_row(
            str(number),
            one.placement.in_words(),
            f"{worst.total / GIB:.1f} of {worst.capacity / GIB:.1f} GiB",
            Text(one.verdict.value.replace("_", " "), style=MARK[one.verdict]),
            str(one.k) if plan.drafts else "",
            f"{one.ms_per_token:.2f}",
            f"{plan.regular_ms / one.ms_per_token:.2f}x",
        )
    if len(plan.options) > len(shown):
        table.add_row("", f"and {len(plan.options) - len(shown)} more in the JSON", *[""] * 5)
    return table


def notable(options: list[Option]) -> list[tuple[int, Option]]:
    """The best of each kind of placement, and the fewest ranks that fit; with places in the ranking."""
    kinds: dict[object, tuple[int, Option]] = {}
    for number, one in enumerate(options, start=1):
        place = one.placement
        kinds.setdefault((place.draft_apart, place.copies, min(place.draft_degree, 2)), (number, one))
    fitting = [entry for entry in enumerate(options, start=1) if entry[1].verdict is FitVerdict.fits]
    if fitting:
        fewest = min(fitting, key=lambda entry: entry[1].placement.world)
        kinds.setdefault(fewest[1].placement.world, fewest)
    return sorted({number: one for number, one in kinds.values()}.items())


def _bars(bills: tuple[GpuBill, ...], device: str) -> Iterator[Text]:
    """A bar for each kind of GPU; those whose bars look alike share one."""
    kinds: dict[object, list[GpuBill]] = {}
    for bill in bills:
        kinds.setdefault((tuple(_cells(bill).items()), bill.verdict), []).append(bill)
    used = [name for name in FILL if any(parts(bill.lines)[name] for bill in bills)]
    for alike in kinds.values():
        yield _bar(alike, device)
    legend = Text(" " * 9)
    for name in used:
        legend.append(f"{FILL[name]} {name}  ", style=COLOUR[name])
    yield legend


def _cells(bill: GpuBill) -> dict[str, int]:
    """How many cells of the bar each part fills."""
    scale = CELLS / max(bill.capacity, bill.total, 1)
    cells, filled, so_far = {}, 0, 0
    for name, size in parts(bill.lines).items():
        so_far += size
        cells[name] = round(so_far * scale) - filled
        filled += cells[name]
    return cells


def _bar(alike: list[GpuBill], device: str) -> Text:
    bill = min(alike, key=lambda one: one.margin)
    ranks, cells = _spans([one.rank for one in alike]), _cells(bill)
    line = Text(f"{device} {ranks:<4} ")
    for name, count in cells.items():
        line.append(FILL[name] * count, style=COLOUR[name])
    line.append("·" * (CELLS - sum(cells.values())), style="bright_black")
    line.append(f" {bill.total / GIB:.1f} of {bill.capacity / GIB:.1f} GiB, ")
    left = f"{bill.margin / GIB:.1f} left" if bill.margin >= 0 else f"{-bill.margin / GIB:.1f} too much"
    line.append(left, style=MARK[bill.verdict])
    return line


def _spans(ranks: list[int]) -> str:
    """0-2,5 for 0, 1, 2, 5."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)


def _acceptances(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("acceptance")
    for one in plan.chances:
        table.add_column(f"{one.acceptance:g}", justify="right")
    table.add_row("K", *(str(one.k) for one in plan.chances))
    table.add_row("tokens a round", *(f"{one.tokens_per_round:.2f}" for one in plan.chances))
    table.add_row("ms/token", *(f"{one.ms_per_token:.2f}" for one in plan.chances))
    table.add_row("speed-up", *(f"{one.speedup:.2f}x" for one in plan.chances))
    return table


def _words(plan: Plan) -> Iterator[str]:
    """What the tables leave out, a line each."""
    room, pace, fewest = plan.room, plan.chosen.pace, plan.fewest
    if plan.chosen.verdict is FitVerdict.fits:
        most = f"largest that fits here: context {room.context}, or {_at_least(room.rows, MOST_ROWS)} rows"
        yield most + (f", or K = {_at_least(room.k, MOST_K)}" if plan.drafts else "")
    else:
        yield from _changes(plan)
    if fewest is not None and fewest.placement.world < plan.chosen.placement.world:
        yield (
            f"fewest GPUs that it fits on: {fewest.placement.world} ({fewest.placement.in_words()}), "
            f"{fewest.ms_per_token:.2f} ms/token"
        )
    steps = f"regular {plan.regular_ms:.2f} ms/token, prompt {plan.prefill_ms:.0f} ms"
    if plan.drafts:
        checked = 1000 * pace.verify[plan.chosen.k]
        steps += f", a draft step {1000 * pace.draft:.2f} ms, verifying {checked:.2f} ms"
    yield steps
    if (overlap := plan.overlap()) is not None and overlap["goes_ahead"]:
        yield (
            f"the draft runs ahead, and its guess holds in {overlap['guess_holds_share']:.0%} of rounds; "
            f"waiting instead takes {overlap['ms_per_token_waiting']:.2f} ms/token"
        )
    source = plan.asked.machine.times.source
    yield f"times within {plan.asked.band:.0%}, constants of {source}"
    machine = plan.asked.machine
    if machine.nodes > 1 and not machine.is_cpu and plan.chosen.placement.world > machine.gpus:
        yield "sums over ranks are timed as within a node: between nodes they are slower, and so will this be"
    if machine.is_cpu and machine.times.band > BAND:
        yield "task=calibrate measures this machine's own"


def _changes(plan: Plan) -> Iterator[str]:
    """What would make it fit."""
    for number, change in enumerate(plan.advice):
        yield f"{'to make it fit: ' if number == 0 else '            or: '}{change}"
    if not plan.advice:
        yield "no single change was found that makes it fit"


def _at_least(number: int, tried: int) -> str:
    return f"{number} or more" if number == tried else f"{number}"
