"""What a plan says: a verdict, a bill a GPU, placements ranked, what drafting brings. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from llama_ssp.config import Overlap, Splitting
from llama_ssp.distributed.placement import Placement
from llama_ssp.planner.advice import Largest, advice, largest, overrides
from llama_ssp.planner.fit import FitVerdict, GpuBill
from llama_ssp.planner.room import GIB
from llama_ssp.planner.search import Asked, Option, option, regular_ms, search
from llama_ssp.planner.speed import ACCEPTANCES, Chance, break_even, chance, prefill_s, share_of
from llama_ssp.planner.weights import CACHE, HELD
from llama_ssp.planner.workload import DRAFT, TARGET, Line, Role

MANY = 16  # ranks up to which every number of them is tried


@dataclass(frozen=True)
class Plan:
    """A plan, worked out. `chosen` is the best option, or the one that was asked for."""

    asked: Asked
    chosen: Option
    options: list[Option]
    regular_ms: float
    prefill_ms: float
    chances: list[Chance]
    pays_from: float | None
    room: Largest
    advice: list[str]

    @property
    def drafts(self) -> bool:
        return len(self.chosen.pace.verify) > 1

    @property
    def speedup(self) -> float:
        return self.regular_ms / self.chosen.ms_per_token

    @property
    def fewest(self) -> Option | None:
        """The fastest placement that fits on the fewest GPUs."""
        fitting = [one for one in self.options if one.verdict is FitVerdict.fits]
        return min(fitting, key=lambda one: one.placement.world, default=None)

    def sentence(self) -> str:
        """The answer in plain words."""
        if self.chosen.verdict is FitVerdict.does_not_fit:
            worst = self.chosen.worst
            changes = f"; {self.advice[0]} would make it fit" if self.advice else ""
            return (
                f"It does not fit: {worst.total / GIB:.1f} GiB needed where there are "
                f"{worst.capacity / GIB:.1f} ({self.chosen.placement.in_words()}){changes}."
            )
        fit = "It fits" if self.chosen.verdict is FitVerdict.fits else "Whether it fits is uncertain"
        where = self.chosen.placement.in_words()
        if not self.drafts:
            return f"{fit}, {where}: {self.regular_ms:.2f} ms/token without drafting."
        at = f"at acceptance {self.asked.acceptance:.2f}"
        if self.chosen.k == 0 or self.speedup <= 1:
            pays = f"{at} drafting does not pay"
        else:
            pays = f"{at}: {self.speedup:.1f}x, K = {self.chosen.k}"
        if self.pays_from is None:
            pays += "; it pays at no acceptance"
        elif self.pays_from > 0.01:
            pays += f"; below {self.pays_from:.2f} drafting does not pay" if self.speedup > 1 else (
                f"; it pays from {self.pays_from:.2f}"
            )  # fmt: skip
        return f"{fit}, {where}; {pays}."

    def document(self) -> dict[str, Any]:
        """The figures under the names of the JSON interface."""
        machine, work, chosen = self.asked.machine, self.asked.work, self.chosen
        return {
            "verdict": chosen.verdict.value,
            "sentence": self.sentence(),
            "cluster": {
                "name": machine.name, "gpu": machine.gpu, "nodes": machine.nodes,
                "gpus_per_node": machine.gpus, "capacity_bytes": machine.capacity,
                "constants_from": machine.times.source,
            },
            "models": {role.role: _model(role) for role in self.asked.roles},
            "workload": {
                "rows": work.rows, "prompt_tokens": work.prompt_tokens, "new_tokens": work.new_tokens,
                "prefill_chunk": work.prefill_chunk, "k": chosen.k, "acceptance": self.asked.acceptance,
            },
            "per_gpu": [_gpu(bill) for bill in chosen.bills],
            "placements": [self._ranked(one) for one in self.options],
            "best": {
                "placement": chosen.placement.in_words(), "overrides": overrides(chosen.placement),
                "ranks": chosen.placement.world, "k": chosen.k, "ms_per_token": chosen.ms_per_token,
                "ms_per_token_regular": self.regular_ms, "speedup": self.speedup,
                "draft_step_ms": 1000 * chosen.pace.draft, "verify_ms": 1000 * chosen.pace.verify[chosen.k],
                "prefill_ms": self.prefill_ms, "band": self.asked.band, "overlap": self.overlap(),
            },
            "by_acceptance": [asdict(one) for one in self.chances],
            "break_even_acceptance": self.pays_from,
            "largest": {
                "context_tokens": self.room.context, "rows": self.room.rows, "k": self.room.k,
            },
            "advice": self.advice,
        }  # fmt: skip

    def overlap(self) -> dict[str, Any] | None:
        """What is taken for granted of a draft that has ranks of its own; None where it has not."""
        chosen, acceptance = self.chosen, self.asked.acceptance
        if chosen.pace.overlap is Overlap.off:
            return None
        waiting = replace(chosen.pace, overlap=Overlap.off)
        return {
            "asked": chosen.pace.overlap.value,
            "goes_ahead": chosen.pace.goes_ahead(chosen.k, acceptance),
            "guess_holds_share": chosen.pace.guessed(chosen.k, acceptance),
            "ms_per_token_waiting": waiting.ms_per_token(acceptance, chosen.k),
        }

    def _ranked(self, one: Option) -> dict[str, Any]:
        return {
            "placement": one.placement.in_words(),
            "overrides": overrides(one.placement),
            "ranks": one.placement.world,
            "verdict": one.verdict.value,
            "worst_gpu_bytes": one.worst.total,
            "margin_bytes": one.worst.margin,
            "k": one.k,
            "ms_per_token": one.ms_per_token,
            "speedup": self.regular_ms / one.ms_per_token,
        }


def outcome(asked: Asked, fixed: Placement | None = None) -> Plan:
    """The whole plan: of one placement, or of all that the cluster allows."""
    worlds = worlds_of(asked.machine.world)
    options = search(asked, worlds) if fixed is None else [option(asked, fixed)]
    chosen = options[0]
    by_layers = chosen.placement.splitting is Splitting.layers  # whoever wants that, wants it for both
    regular = chosen.regular_ms if by_layers else regular_ms(asked, options, worlds)
    drafts = len(chosen.pace.verify) > 1
    share = share_of(asked.target, len(chosen.placement.target))
    work = asked.work
    return Plan(
        asked=asked,
        chosen=chosen,
        options=options,
        regular_ms=regular,
        prefill_ms=1000
        * prefill_s(share, asked.machine.times, work.rows, work.prompt_tokens, work.prefill_chunk),
        chances=[chance(chosen.pace, a, regular) for a in ACCEPTANCES] if drafts else [],
        pays_from=break_even(chosen.pace, regular) if drafts else None,
        room=largest(asked, chosen),
        advice=advice(asked, chosen, worlds),
    )


def worlds_of(most: int) -> list[int]:
    """The numbers of ranks to try: all, or of many the powers of two."""
    if most <= MANY:
        return list(range(1, most + 1))
    return [*(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < most), most]


PARTS = ("target weights", "target caches", "draft weights", "draft caches", "work", "libraries")


def parts(lines: Iterable[Line]) -> dict[str, int]:
    """A bill in few parts, for pictures: weights and caches by role, what passes, what libraries take."""
    found = dict.fromkeys(PARTS, 0)
    for line in lines:
        role = {TARGET: "target", DRAFT: "draft"}.get(line.role)
        if role is None:
            found["libraries"] += line.bytes
        elif line.name == CACHE:
            found[f"{role} caches"] += line.bytes
        else:
            found[f"{role} weights" if line.name in HELD else "work"] += line.bytes
    return found


def _gpu(bill: GpuBill) -> dict[str, Any]:
    return {
        "rank": bill.rank,
        "total_bytes": bill.total,
        "capacity_bytes": bill.capacity,
        "margin_bytes": bill.margin,
        "uncertainty_bytes": bill.uncertainty,
        "verdict": bill.verdict.value,
        "lines": {
            f"{line.role}: {line.name}": {
                "bytes": line.bytes, "kind": line.kind.value, "source": line.source,
            }
            for line in bill.lines
        },
    }  # fmt: skip


def _model(role: Role) -> dict[str, Any]:
    return {"name": role.model.name, "dtype": role.dtype.value}
