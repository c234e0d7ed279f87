"""Does it fit: the memory estimate of every rank against the capacity of its device. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from llama_ssp.config import Splitting
from llama_ssp.distributed.placement import LEADER, Placement
from llama_ssp.errors import DistributedError
from llama_ssp.planner.activations import RankWork
from llama_ssp.planner.hardware import Machine
from llama_ssp.planner.layers import layers_lines
from llama_ssp.planner.memory import Compiled, rank_work, segments, tensor_lines
from llama_ssp.planner.storage import IN_LAYERS
from llama_ssp.planner.weights import ModelPart, RolePart, held
from llama_ssp.planner.workload import BOUND, CONSTANT, GIB, MIB, MemoryLine, Role, Workload

LIBRARIES = "libraries"  # the role of lines that belong to no model
OUTPUTS, SCRATCH = "outputs of CUDA graphs", "scratch of CUDA graphs"
# How far off an estimate may be: what is constant here differs by driver and version.
UNCERTAIN_SHARE, UNCERTAIN_BYTES = 0.03, 300 * MIB


class FitVerdict(Enum):
    """`uncertain`: the margin is smaller than the estimate's uncertainty."""

    fits = "fits"
    uncertain = "uncertain"
    does_not_fit = "does_not_fit"

    @property
    def rank(self) -> int:
        return list(FitVerdict).index(self)


@dataclass(frozen=True)
class RankMemory:
    """What one rank, or with placement=layers one GPU, will hold, line by line; and its capacity in bytes."""

    rank: int
    lines: tuple[MemoryLine, ...]
    capacity: int

    @property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def uncertainty(self) -> int:
        return max(int(UNCERTAIN_SHARE * self.total), UNCERTAIN_BYTES)

    @property
    def margin(self) -> int:
        """The capacity left; negative where it does not fit."""
        return self.capacity - self.total

    @property
    def verdict(self) -> FitVerdict:
        if self.margin >= self.uncertainty:
            return FitVerdict.fits
        return FitVerdict.uncertain if self.margin >= -self.uncertainty else FitVerdict.does_not_fit


def rank_memories(
    machine: Machine, target: Role, draft: Role | None, place: Placement, work: Workload, compiled: Compiled
) -> tuple[RankMemory, ...]:
    """The memory of every rank, or with placement=layers of every GPU; `compiled`: as of `rank_work`."""
    capacity, kernels = machine.capacity_of(place.world), machine.kernels
    if place.splitting is Splitting.layers:
        every = layers_lines(target, draft, work, 1 if machine.is_cpu else machine.gpus, kernels)
        constant = library_lines(machine, place, LEADER)
        # The draft, which alone may have graphs, is on the first.
        first = graph_lines(machine, rank_work(target, draft, place, work, LEADER, kernels, compiled))
        return tuple(
            RankMemory(gpu, (*lines, *constant, *first * (gpu == 0)), capacity)
            for gpu, lines in enumerate(every)
        )
    found = []
    for rank in range(place.world):
        own = rank_work(target, draft, place, work, rank, kernels, compiled)
        reserved = () if machine.is_cpu else (segments(own),)
        constant = library_lines(machine, place, rank)
        lines = (*tensor_lines(own), *reserved, *constant, *graph_lines(machine, own))
        found.append(RankMemory(rank, lines, capacity))
    return tuple(found)


def worst(ranks: Sequence[RankMemory]) -> RankMemory:
    """The rank with the smallest margin: it decides whether the placement fits."""
    return min(ranks, key=lambda one: one.margin)


def library_lines(machine: Machine, placement: Placement, rank: int) -> tuple[MemoryLine, ...]:
    """Constants of the cluster: the context, and workspaces of what the rank takes part in."""
    taken, source = machine.taken, f"cluster {machine.name}"
    if machine.is_cpu:
        return (MemoryLine(LIBRARIES, "process", taken["context"], CONSTANT, source),)
    groups = communicators(placement, rank)
    sizes = {
        "context and kernels": taken["context"],
        "cuBLAS workspaces": taken["cublas"],
        f"NCCL, {groups} group{'s' * (groups != 1)}": taken["nccl"] * groups,
    }
    return tuple(MemoryLine(LIBRARIES, name, size, CONSTANT, source) for name, size in sizes.items() if size)


def graph_lines(machine: Machine, own: RankWork) -> tuple[MemoryLine, ...]:
    """CUDA graphs of compiled steps: a constant of the cluster for each, and the outputs that they keep."""
    count = sum(len(own.graphs(role)) for role in own.roles)
    name, size = f"{count} CUDA graphs", count * machine.taken["graph"]
    kept = [MemoryLine(one.role, OUTPUTS, own.outputs_of_graphs(one), BOUND) for one in own.roles]
    kept += [MemoryLine(one.role, SCRATCH, own.scratch_of_graphs(one), BOUND) for one in own.roles]
    inputs = own.kept_by_graphs() if count else 0
    read = MemoryLine(LIBRARIES, "graphs that filter, draw and decide", inputs, BOUND)
    lines = (*kept, read, MemoryLine(LIBRARIES, name, size, CONSTANT, f"cluster {machine.name}"))
    return tuple(line for line in lines if line.bytes)


def communicators(placement: Placement, rank: int) -> int:
    """How many communicators of NCCL the rank has: one for each group of ranks that a model is split over."""
    groups = {placement.target}
    if placement.draft_degree > 1:
        groups.add(placement.draft)
    return sum(len(group) > 1 and rank in group for group in groups)


def require_capacity(
    roles: Sequence[tuple[Role, int]], rows: int, slots: int, device: str, capacity: int, reserve: float
) -> None:
    """For runs without a plan: refuses weights and caches that exceed the device's capacity.

    Of each role the layers and caches are divided by a number. int8 and nf4 keep embedding and head in 16
    bit, and caches are 16 bit.
    """
    needed, words = 0, dict[str, None]()
    for role, ranks in roles:
        own = RolePart.of(role, ModelPart.of(role.model), slots)
        groups, cache = held(own.part, role.dtype), own.caches_bytes(rows) // ranks
        weights = sum(size // (ranks if group in IN_LAYERS else 1) for group, size in groups.items())
        needed += weights + cache
        sizes = f"weights {weights / GIB:.1f} GiB, cache {cache / GIB:.1f} GiB"
        words[f"{role.role} {role.model.name}: {sizes}"] = None
    usable = int(capacity * (1 - reserve))
    if needed > usable:
        what, found = f"the models do not fit on {device}", f"{needed / GIB:.1f} GiB needed"
        allowed = f"{usable / GIB:.1f} GiB ({capacity / GIB:.1f} GiB less {reserve:.0%} reserve)"
        smaller = "take a smaller model, a smaller dtype (model.dtype=int8), fewer rows (task.batch_size)"
        fix = f"{smaller} or shorter texts (task.max_new_tokens)"
        raise DistributedError(what, "; ".join(words), found, allowed, fix)
