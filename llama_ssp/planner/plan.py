"""A plan: verdict, memory of every GPU, placements ranked, the speed-up of drafting. No torch."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from llama_ssp.config import Overlap, Splitting
from llama_ssp.distributed.placement import Placement
from llama_ssp.planner.advice import Largest, advice, largest, overrides
from llama_ssp.planner.engine import launching_s
from llama_ssp.planner.fit import FitVerdict, RankMemory
from llama_ssp.planner.search import (
    Option,
    PlanRequest,
    cost_of,
    option,
    regular_ms,
    search,
    slower_than_16_bit,
)
from llama_ssp.planner.speed import ACCEPTANCES, at_acceptance, break_even, prefill_s
from llama_ssp.planner.storage import WEIGHTS
from llama_ssp.planner.weights import CACHE
from llama_ssp.planner.workload import DRAFT, GIB, TARGET, MemoryLine

MANY = 16  # ranks up to which every number of them is tried
PARTS = ("target weights", "target caches", "draft weights", "draft caches", "work", "libraries")


@dataclass(frozen=True)
class Plan:
    """`chosen` is the best option, or the placement that was requested."""

    request: PlanRequest
    chosen: Option
    options: list[Option]
    regular_ms: float
    prefill_ms: float
    acceptances: list[dict[str, float]]
    pays_from: float | None
    largest: Largest
    advice: list[str]

    @property
    def runs(self) -> bool:
        """Whether there is a speed to speak of: the chosen placement may fit."""
        return self.chosen.runs

    @property
    def drafts(self) -> bool:
        return len(self.chosen.times.verify) > 1

    @property
    def band(self) -> float:
        return self.request.band(self.chosen.placement)

    @property
    def speedup(self) -> float | None:
        """Over the best regular sampling; None where the chosen placement does not fit."""
        return self.speedup_of(self.chosen)

    def speedup_of(self, one: Option) -> float | None:
        return self.regular_ms / one.ms_per_token if one.runs else None

    @property
    def eager(self) -> dict[str, str]:
        """Why steps of the chosen placement run eagerly, by role. Roles with compiled steps are left out."""
        reasons = {one.role: self.request.why_eager(one, self.chosen.placement) for one in self.request.roles}
        return {role: reason for role, reason in reasons.items() if reason is not None}

    @property
    def slower(self) -> dict[str, float]:
        """By role how many times as long a step takes as in 16 bit, where being quantised makes it slower."""
        return slower_than_16_bit(self.request, self.chosen.placement, self.chosen.k)

    @property
    def fewest(self) -> Option | None:
        """The fastest placement that fits on the fewest GPUs."""
        fitting = [one for one in self.options if one.verdict is FitVerdict.fits]
        return min(fitting, key=lambda one: one.placement.world, default=None)

    def sentence(self) -> str:
        """The answer in plain words."""
        where, worst, speedup = self.chosen.placement.in_words(), self.chosen.worst, self.speedup
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
        return f"{fit}, {where}; at acceptance {self.request.acceptance:.2f}{gain}{limit}."

    def document(self) -> dict[str, Any]:
        """The figures under the names of the JSON interface."""
        machine, work, chosen = self.request.machine, self.request.work, self.chosen
        times, k = chosen.times, chosen.k
        cluster = {
            "name": machine.name,
            "gpu": machine.gpu,
            "nodes": machine.nodes,
            "gpus_per_node": machine.gpus,
            "capacity_bytes": machine.capacity,
            "constants_from": machine.times.source,
        }
        names = "rows", "prompt_tokens", "new_tokens", "prefill_chunk"
        sizes = {name: getattr(work, name) for name in names}
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
            "cluster": cluster,
            "models": {
                role.role: {"name": role.model.name, "dtype": role.dtype.value} for role in self.request.roles
            },
            "workload": {**sizes, "k": k, "acceptance": self.request.acceptance},
            "per_gpu": [_gpu(one) for one in chosen.ranks],
            "placements": [self._ranked(one) for one in self.options],
            "best": best,
            "by_acceptance": self.acceptances if self.runs else [],
            "break_even_acceptance": self.pays_from if self.runs else None,
            "largest": asdict(self.largest),
            "advice": self.advice,
        }

    def overlap(self) -> dict[str, Any] | None:
        """The assumptions about a draft on ranks of its own; None for other placements."""
        times, k, acceptance = self.chosen.times, self.chosen.k, self.request.acceptance
        if times.overlap is Overlap.off:
            return None
        return {
            "asked": times.overlap.value,
            "goes_ahead": times.goes_ahead(k, acceptance),
            "guess_holds_share": times.guessed(k, acceptance),
            "ms_per_token_waiting": replace(times, overlap=Overlap.off).ms_per_token(acceptance, k),
        }

    def _ranked(self, one: Option) -> dict[str, Any]:
        margin = {"worst_gpu_bytes": one.worst.total, "margin_bytes": one.worst.margin}
        return {**self._in_short(one), "verdict": one.verdict.value, **margin}

    def _in_short(self, one: Option) -> dict[str, Any]:
        """A placement that does not fit has no speed."""
        return {
            "placement": one.placement.in_words(),
            "overrides": overrides(one.placement),
            "ranks": one.placement.world,
            "k": one.k,
            "ms_per_token": one.ms_per_token if one.runs else None,
            "speedup": self.speedup_of(one),
        }


def make_plan(request: PlanRequest, fixed: Placement | None = None) -> Plan:
    """The plan of one placement, or of all that the cluster allows."""
    worlds, work = worlds_of(request.machine.world), request.work
    options = search(request, worlds) if fixed is None else [option(request, fixed, request.k)]
    chosen = options[0]
    request = replace(request, work=replace(work, prefill_chunk=chosen.prefill_chunk))
    by_layers = chosen.placement.splitting is Splitting.layers  # then regular sampling is by layers, too
    regular = chosen.regular_ms if by_layers else regular_ms(request, options, worlds)
    drafts = len(chosen.times.verify) > 1
    prefill = target_prefill_s(request, chosen.placement, work.rows)
    points = [at_acceptance(chosen.times, a, regular) for a in ACCEPTANCES] if drafts else []
    pays_from = break_even(chosen.times, regular) if drafts else None
    most, changes = largest(request, chosen), advice(request, chosen, worlds)
    return Plan(request, chosen, options, regular, 1000 * prefill, points, pays_from, most, changes)


def target_prefill_s(request: PlanRequest, placement: Placement, rows: int) -> float:
    """Seconds of the target's prefill of `rows` prompts."""
    cost, work = cost_of(request, request.target, placement), request.work
    # Passes over prompts are never graphs.
    least_s = 0.0 if request.machine.is_cpu else launching_s(cost.layers, rows, cost.sums)
    return prefill_s(cost, request.machine.times, rows, work.prompt_tokens, work.prefill_chunk, least_s)


def worlds_of(most: int) -> list[int]:
    """The numbers of ranks to try: all, or of many the powers of two."""
    if most <= MANY:
        return list(range(1, most + 1))
    return [*(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < most), most]


def parts(lines: Iterable[MemoryLine]) -> dict[str, int]:
    """Bytes in a few parts, for pictures: weights and caches by role, activations, libraries."""
    found = dict.fromkeys(PARTS, 0)
    for line in lines:
        part = "libraries"
        if role := {TARGET: "target", DRAFT: "draft"}.get(line.role):
            kinds = {CACHE: f"{role} caches", **dict.fromkeys(WEIGHTS, f"{role} weights")}
            part = kinds.get(line.name, "work")
        found[part] += line.bytes
    return found


def _gpu(one: RankMemory) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "total_bytes": one.total,
        "capacity_bytes": one.capacity,
        "margin_bytes": one.margin,
        "uncertainty_bytes": one.uncertainty,
        "verdict": one.verdict.value,
        "lines": {
            f"{line.role}: {line.name}": {"bytes": line.bytes, "kind": line.kind, "source": line.source}
            for line in one.lines
        },
    }
