"""A plan: verdict, memory of every GPU, placements ranked, the speed-up of drafting. No torch."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from llama_ssp.config import Overlap, Splitting
from llama_ssp.distributed.placement import Placement
from llama_ssp.errors import DistributedError, ModelError
from llama_ssp.planner.advice import Largest, advice, largest, narrower_formats, overrides
from llama_ssp.planner.engine import launching_s
from llama_ssp.planner.fit import FitVerdict, RankMemory
from llama_ssp.planner.nodes import crossings, is_draft_far, on_one_node, over_nodes, said_of_nodes
from llama_ssp.planner.search import (
    Option,
    PlanRequest,
    Regular,
    cost_of,
    option,
    regular_sampling,
    search,
    slower_than_16_bit,
)
from llama_ssp.planner.speed import ACCEPTANCES, at_acceptance, break_even, prefill_s
from llama_ssp.planner.storage import WEIGHTS
from llama_ssp.planner.weights import CACHE
from llama_ssp.planner.workload import ALL_EAGER, DRAFT, GIB, TARGET, MemoryLine
from llama_ssp.speculative.draft_length import first_stands

MANY = 16  # ranks up to which every number of them is tried
PARTS = ("target weights", "target caches", "draft weights", "draft caches", "work", "libraries")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`chosen` is the best option, or the placement that was requested."""

    request: PlanRequest
    chosen: Option
    options: list[Option]
    regular: Regular
    prefill_ms: float
    acceptances: list[dict[str, float]]
    pays_from: float | None
    largest: Largest
    advice: list[str]
    one_node: Option | None = None  # the fastest that fits one of several nodes
    over_nodes: Option | None = None  # the fastest that takes more than one
    one_node_in: tuple[str, Option] | None = None  # formats that make it fit one node, where it does not

    @property
    def verdict(self) -> FitVerdict:
        return self.chosen.verdict

    @property
    def regular_ms(self) -> float:
        """Returns ms/token of the best regular sampling."""
        return self.regular.ms_per_token

    @property
    def eager_ms(self) -> float:
        """Returns ms/token of the chosen placement where all steps run eagerly, at its best K."""
        eagerly = replace(self.request, steps=ALL_EAGER, k=None)
        return option(eagerly, self.chosen.placement).ms_per_token

    @property
    def runs(self) -> bool:
        """Returns whether there is a speed to speak of: the chosen placement may fit."""
        return self.chosen.runs

    @property
    def drafts(self) -> bool:
        return len(self.chosen.times.verify) > 1

    @property
    def band(self) -> float:
        return self.request.band(self.chosen.placement)

    @property
    def speedup(self) -> float | None:
        """Returns the speed-up over the best regular sampling; None where the chosen one does not fit."""
        return self.speedup_of(self.chosen)

    def speedup_of(self, planned: Option) -> float | None:
        return self.regular_ms / planned.ms_per_token if planned.runs else None

    @property
    def eager(self) -> dict[str, str]:
        """Returns why steps of the chosen placement run eagerly, by role; compiled ones are left out."""
        reasons = {}
        for role in self.request.roles:
            reason = self.request.why_eager(role, self.chosen.placement)
            if reason is not None:
                reasons[role.role] = reason
        return reasons

    @property
    def slower(self) -> dict[str, float]:
        """Returns by role how many times as long a step takes as in 16 bit, where quantised is slower."""
        return slower_than_16_bit(self.request, self.chosen.placement, self.chosen.k)

    @property
    def fewest(self) -> Option | None:
        """Returns the fastest placement that fits on the fewest GPUs."""
        fitting = [planned for planned in self.options if planned.verdict is FitVerdict.fits]
        return min(fitting, key=lambda planned: planned.placement.world, default=None)

    def sentence(self) -> str:
        """Returns the answer in plain words."""
        where = self.chosen.placement.in_words()
        worst = self.chosen.worst
        speedup = self.speedup
        if speedup is None:
            changes = f"; {self.advice[0]} would make it fit" if self.advice else ""
            lacking = f"{worst.total / GIB:.1f} GiB needed where there are {worst.capacity / GIB:.1f}"
            return f"It does not fit: {lacking} ({where}){changes}."
        fit = "It fits" if self.chosen.verdict is FitVerdict.fits else "Whether it fits is uncertain"
        if not self.drafts:
            return f"{fit}, {where}: {self.regular_ms:.2f} ms/token without drafting."
        gains = self.chosen.k > 0 and speedup > 1
        gain = f": {speedup:.1f}x, K = {self.chosen.k}" if gains else " drafting does not pay"
        limit = ""
        if self.pays_from is None:
            limit = "; it pays at no acceptance"
        elif self.pays_from > 0.01:
            below = f"; below {self.pays_from:.2f} drafting does not pay"
            limit = below if speedup > 1 else f"; it pays from {self.pays_from:.2f}"
        return f"{fit}, {where}; at {self.request.acceptance_in_words}{gain}{limit}."

    def said_of_nodes(self) -> list[str]:
        """Returns what is said of several nodes, a line each: what the network costs, and one node takes."""
        return list(
            said_of_nodes(self.request, self.chosen, self.one_node, self.over_nodes, self.one_node_in)
        )

    def network(self) -> dict[str, Any] | None:
        """Returns the figures between nodes, and what the chosen placement sends there; None of one node."""
        machine = self.request.machine
        if machine.nodes == 1:
            return None
        crossing = crossings(self.request, self.chosen.placement)
        return {
            "between_us": machine.times.network * 1e6,
            "between_gb_s": machine.times.network_per_s / 1e9,
            "sums_a_pass": {one.role: one.sums for one in crossing},
            "bytes_a_token": {one.role: one.bytes_per_token for one in crossing},
            "draft_on_another_node": is_draft_far(self.request, self.chosen.placement),
            "one_node": None if self.one_node is None else self._in_short(self.one_node),
            "over_nodes": None if self.over_nodes is None else self._in_short(self.over_nodes),
        }

    def document(self) -> dict[str, Any]:
        """Returns the figures under the names of the JSON interface."""
        chosen = self.chosen
        times = chosen.times
        k = chosen.k
        best = {
            **self._in_short(chosen),
            "ms_per_token_regular": self.regular_ms if self.runs else None,
            "draft_step_ms": 1000 * times.proposal_s(1) if self.runs else None,
            "verify_ms": 1000 * times.verify[k] if self.runs else None,
            "prefill_ms": self.prefill_ms if self.runs else None,
            "band": self.band,
            "overlap": self.overlap() if self.runs else None,
            "eager_steps": self.eager,
            "slower_than_16_bit": self.slower,
        }
        return {
            "verdict": chosen.verdict.value,
            "sentence": self.sentence(),
            **subject(self.request, k),
            "per_gpu": [gpu_document(memory) for memory in chosen.ranks],
            "placements": [self._ranked(planned) for planned in self.options],
            "best": best,
            "network": self.network(),
            "by_acceptance": self.acceptances if self.runs else [],
            "break_even_acceptance": self.pays_from if self.runs else None,
            "largest": asdict(self.largest),
            "advice": self.advice,
        }

    def overlap(self) -> dict[str, Any] | None:
        """Returns the assumptions about a draft on ranks of its own; None for other placements."""
        times = self.chosen.times
        k = self.chosen.k
        acceptance = self.request.acceptance
        if times.overlap is Overlap.off:
            return None
        return {
            "asked": times.overlap.value,
            "goes_ahead": times.goes_ahead(k, acceptance),
            "guess_holds_share": times.guessed(k, acceptance),
            "ms_per_token_waiting": replace(times, overlap=Overlap.off).ms_per_token(acceptance, k),
        }

    def _ranked(self, planned: Option) -> dict[str, Any]:
        return {
            **self._in_short(planned),
            "verdict": planned.verdict.value,
            "worst_gpu_bytes": planned.worst.total,
            "margin_bytes": planned.worst.margin,
        }

    def _in_short(self, planned: Option) -> dict[str, Any]:
        """A placement that does not fit has no speed."""
        return {
            "placement": planned.placement.in_words(),
            "overrides": overrides(planned.placement),
            "ranks": planned.placement.world,
            "k": planned.k,
            "ms_per_token": planned.ms_per_token if planned.runs else None,
            "speedup": self.speedup_of(planned),
        }


def make_plan(request: PlanRequest, fixed: Placement | None = None) -> Plan:
    """Returns the plan of one placement, or of all that the cluster allows."""
    worlds = worlds_of(request.machine.world, request.machine.gpus)
    options = search(request, worlds) if fixed is None else [option(request, fixed, request.k)]
    chosen = options[0]
    request = replace(request, work=replace(request.work, prefill_chunk=chosen.prefill_chunk))

    if chosen.placement.splitting is Splitting.layers:
        regular = Regular(ms_per_token=chosen.regular_ms, ranks=1)  # by layers, too
    else:
        regular = regular_sampling(request, options, worlds)
    one: Option | None = None
    several: Option | None = None
    narrower: tuple[str, Option] | None = None
    if request.machine.nodes > 1:
        on_one = options
        if fixed is not None:  # what it could be
            on_one = search_or_none(request, worlds_of(request.machine.gpus))
        one = on_one_node(on_one)
        several = over_nodes(options)
        if one is None:
            on_first = replace(request, machine=replace(request.machine, nodes=1))
            narrower = next(iter(narrower_formats(on_first, worlds_of(request.machine.gpus))), None)

    points: list[dict[str, float]] = []
    pays_from = None
    if len(chosen.times.verify) > 1:
        # At another acceptance another placement may be the fastest, of those that fit as surely.
        every = [
            planned.times
            for planned in options
            if planned.runs and planned.verdict.rank <= chosen.verdict.rank and planned.nodes <= chosen.nodes
        ]
        every = every or [chosen.times]
        points = [at_acceptance(every, acceptance, regular.ms_per_token) for acceptance in ACCEPTANCES]
        pays_from = break_even(every, regular.ms_per_token)

    return Plan(
        request=request,
        chosen=chosen,
        options=options,
        regular=regular,
        prefill_ms=1000 * target_prefill_s(request, chosen.placement, request.work.rows),
        acceptances=points,
        pays_from=pays_from,
        largest=largest(request, chosen),
        advice=advice(request, chosen, worlds),
        one_node=one,
        over_nodes=several,
        one_node_in=narrower,
    )


def search_or_none(request: PlanRequest, worlds: list[int]) -> list[Option]:
    """Returns the placements over these numbers of ranks, sorted; none where none is possible."""
    with suppress(DistributedError, ModelError):
        return search(request, worlds)
    return []


def target_prefill_s(request: PlanRequest, placement: Placement, rows: int) -> float:
    """Returns the seconds of the target's prefill of `rows` prompts."""
    cost = cost_of(request, request.target, placement)
    work = request.work
    # Passes over prompts are never graphs.
    least_s = 0.0 if request.machine.is_cpu else launching_s(cost.layers, rows, cost.sums)
    return prefill_s(cost, request.machine.times, rows, work.prompt_tokens, work.prefill_chunk, least_s)


def worlds_of(most: int, of_node: int | None = None) -> list[int]:
    """Returns the numbers of ranks to try: all, or of many the powers of two; and those of one node."""
    if most <= MANY:
        return list(range(1, most + 1))
    many = [*(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < most), most]
    if of_node is None or of_node >= most:
        return many
    return sorted({*many, *worlds_of(of_node)})


def parts(lines: Iterable[MemoryLine]) -> dict[str, int]:
    """Returns the bytes in a few parts, for pictures: weights and caches by role, work, libraries."""
    sizes = dict.fromkeys(PARTS, 0)
    for line in lines:
        part = "libraries"
        if role := {TARGET: "target", DRAFT: "draft"}.get(line.role):
            kinds = {CACHE: f"{role} caches", **dict.fromkeys(WEIGHTS, f"{role} weights")}
            part = kinds.get(line.name, "work")
        sizes[part] += line.bytes
    return sizes


def subject(request: PlanRequest, k: int) -> dict[str, Any]:
    """Returns what is planned, under the names of the JSON interface: machine, models and work."""
    machine = request.machine
    work = request.work
    return {
        "cluster": {
            "name": machine.name,
            "gpu": machine.gpu,
            "nodes": machine.nodes,
            "gpus_per_node": machine.gpus,
            "capacity_bytes": machine.capacity,
            "constants_from": machine.constants_from,
        },
        "models": {role.role: {"name": role.model.name, "dtype": role.dtype.value} for role in request.roles},
        "workload": {
            "rows": work.rows,
            "prompt_tokens": work.prompt_tokens,
            "new_tokens": work.new_tokens,
            "prefill_chunk": work.prefill_chunk,
            "k": k,
            "acceptance": first_stands(request.acceptance),
            "acceptance_from": request.acceptance_source,
        },
    }


def gpu_document(memory: RankMemory) -> dict[str, Any]:
    """Returns a rank's memory under the names of the JSON interface, line by line."""
    return {
        "rank": memory.rank,
        "total_bytes": memory.total,
        "capacity_bytes": memory.capacity,
        "margin_bytes": memory.margin,
        "uncertainty_bytes": memory.uncertainty,
        "verdict": memory.verdict.value,
        "lines": {
            f"{line.role}: {line.name}": {"bytes": line.bytes, "kind": line.kind, "source": line.source}
            for line in memory.lines
        },
    }
