"""Does it fit: the bill of every GPU against what that GPU has, with what the bill cannot know. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from llama_ssp.config import Splitting
from llama_ssp.distributed.placement import LEADER, Placement
from llama_ssp.models.sharding import head_ranges, mlp_share, vocab_share
from llama_ssp.planner.constants import constant_lines
from llama_ssp.planner.hardware import MIB, Machine
from llama_ssp.planner.memory import segments, tensor_lines
from llama_ssp.planner.stages import stage_lines
from llama_ssp.planner.workload import Line, Role, Workload

# How far a whole GPU's bill may be off: what is constant here differs by driver and version.
UNCERTAIN_SHARE, UNCERTAIN_BYTES = 0.03, 300 * MIB


class FitVerdict(Enum):
    """`uncertain`: whether it fits hangs on what the bill cannot know."""

    fits = "fits"
    uncertain = "uncertain"
    does_not_fit = "does_not_fit"

    @property
    def rank(self) -> int:
        return list(FitVerdict).index(self)


@dataclass(frozen=True)
class GpuBill:
    """What one rank's GPU has to hold, and what it can."""

    rank: int
    lines: tuple[Line, ...]
    capacity: int

    @property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def uncertainty(self) -> int:
        return max(int(UNCERTAIN_SHARE * self.total), UNCERTAIN_BYTES)

    @property
    def margin(self) -> int:
        """What is left, were the bill exact; negative where it does not fit."""
        return self.capacity - self.total

    @property
    def verdict(self) -> FitVerdict:
        if self.margin >= self.uncertainty:
            return FitVerdict.fits
        return FitVerdict.uncertain if self.margin >= -self.uncertainty else FitVerdict.does_not_fit


def bill_of(
    machine: Machine, target: Role, draft: Role | None, placement: Placement, work: Workload
) -> tuple[GpuBill, ...]:
    """The bill of every rank, or by layers of every GPU; ranks that hold alike have it made once."""
    made: dict[object, tuple[Line, ...]] = {}
    capacity = machine.capacity_of(placement.world)
    found = []
    if placement.splitting is Splitting.layers:
        gpus = 1 if machine.is_cpu else machine.gpus
        every = stage_lines(target, draft, work, gpus, machine.kernels)
        taken = constant_lines(machine, placement, LEADER)
        return tuple(GpuBill(gpu, (*lines, *taken), capacity) for gpu, lines in enumerate(every))
    for rank in range(placement.world):
        kind = [rank == LEADER, _part(target, placement.target, rank, len(placement.target))]
        if draft is not None:
            kind.append(_part(draft, placement.draft, rank, placement.draft_degree))
        if tuple(kind) not in made:
            made[tuple(kind)] = (
                *tensor_lines(target, draft, placement, work, rank, machine.kernels),
                *(() if machine.is_cpu else (segments(target, draft, placement, work, rank),)),
                *constant_lines(machine, placement, rank),
            )
        found.append(GpuBill(rank, made[tuple(kind)], capacity))
    return tuple(found)


def worst(bills: tuple[GpuBill, ...]) -> GpuBill:
    """The GPU that decides: the fullest."""
    return min(bills, key=lambda bill: bill.margin)


def _part(role: Role, ranks: tuple[int, ...], rank: int, degree: int) -> object:
    """How much of the role the rank holds, in a form that can be compared."""
    if rank not in ranks:
        return None
    index, model = ranks.index(rank) if degree > 1 else 0, role.model
    heads = head_ranges(model.n_heads, model.n_kv_heads, degree, index)
    spans = (mlp_share(model.ffn, degree, index), vocab_share(model.vocab, degree, index))
    return (index == 0, heads.queries, heads.kvs, *(last - first for first, last in spans))
