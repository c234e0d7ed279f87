"""Does it fit: the memory estimate of every rank against the capacity of its device. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from llama_ssp.config import Splitting
from llama_ssp.distributed.placement import LEADER, Placement
from llama_ssp.errors import MemoryFull
from llama_ssp.models.tensor_row import EMBEDDING, EXPERTS, HEAD, LAYERS, POSITIONS
from llama_ssp.planner.hardware import Machine
from llama_ssp.planner.memory import PROBS, Compiled, RankWork, rank_work, segments, tensor_lines
from llama_ssp.planner.storage import IN_LAYERS, SCALES
from llama_ssp.planner.weights import CACHE, ModelPart, RolePart, held
from llama_ssp.planner.workload import BOUND, CONSTANT, GIB, MIB, TARGET, MemoryLine, Role, Workload

LIBRARIES = "libraries"  # the role of lines that belong to no model
OUTPUTS = "outputs of CUDA graphs"
SCRATCH = "scratch of CUDA graphs"
OF_DECISIONS = "graphs that filter, draw and decide"
EXTRA_LAYERS = 1.25  # that accelerate lets a GPU take beyond its even share
# How far off an estimate may be: what is constant here differs by driver and version.
UNCERTAIN_SHARE = 0.03
UNCERTAIN_BYTES = 300 * MIB
# With placement=layers: what each GPU has a share of.
SPREAD = (LAYERS, EXPERTS, SCALES, CACHE)


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

    @cached_property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def uncertainty(self) -> int:
        return max(int(UNCERTAIN_SHARE * self.total), UNCERTAIN_BYTES)

    @property
    def margin(self) -> int:
        """Returns the capacity left; negative where it does not fit."""
        return self.capacity - self.total

    @property
    def verdict(self) -> FitVerdict:
        if self.margin >= self.uncertainty:
            return FitVerdict.fits
        return FitVerdict.uncertain if self.margin >= -self.uncertainty else FitVerdict.does_not_fit


def worst(ranks: Sequence[RankMemory]) -> RankMemory:
    """Returns the rank with the smallest margin: it decides whether the placement fits."""
    return min(ranks, key=lambda memory: memory.margin)


def rank_memories(
    machine: Machine, target: Role, draft: Role | None, place: Placement, work: Workload, compiled: Compiled
) -> tuple[RankMemory, ...]:
    """Returns the memory of every rank, or with placement=layers of every GPU.

    `compiled`: the roles with compiled steps.
    """
    if place.splitting is Splitting.layers:
        return tuple(_by_layers(machine, target, draft, place, work, compiled))
    memories = []
    known: dict[RankWork, tuple[MemoryLine, ...]] = {}  # most ranks hold as much as another
    for rank in range(place.world):
        rank_share = rank_work(target, draft, place, work, rank, machine.kernels, compiled)
        of_size = rank_share.first_of_equal_size()
        if of_size not in known:
            libraries = library_lines(machine, place, rank)
            known[of_size] = (*device_lines(of_size), *libraries, *graph_lines(machine, of_size))
        memories.append(RankMemory(rank, known[of_size], machine.capacity_of(place.world, rank)))
    return tuple(memories)


def _by_layers(
    machine: Machine, target: Role, draft: Role | None, place: Placement, work: Workload, compiled: Compiled
) -> Iterator[RankMemory]:
    """Plans one process that spreads the target's layers over its GPUs.

    The embedding is on the first and the head on the last. The draft, which alone may have graphs, is on the
    first, where texts go in and distributions come out.
    """
    gpus = 1 if machine.is_cpu else machine.gpus
    missing = {0: set[str](), gpus - 1: set[str]()}  # groups of weights
    if gpus > 1 and not target.model.tied:
        missing = {0: {HEAD}, gpus - 1: {EMBEDDING, POSITIONS}}
    capacity = machine.capacity_of(place.world)
    for gpu in range(gpus):
        share = most_layers(target, gpus, gpu == 0) / target.model.n_layers
        on_gpu = rank_work(target, None if gpu else draft, place, work, LEADER, machine.kernels, compiled)
        lines = []
        for line in device_lines(on_gpu):
            if line.role != TARGET:
                lines.append(line)
            elif line.name in SPREAD:
                lines.append(replace(line, bytes=int(share * line.bytes)))
            elif line.name not in missing.get(gpu, {EMBEDDING, POSITIONS, HEAD}):
                lines.append(line)
        if gpu:
            lines = [line for line in lines if not line.name.startswith(PROBS)]
        else:
            lines += graph_lines(machine, on_gpu)
        yield RankMemory(gpu, (*lines, *library_lines(machine, place, LEADER)), capacity)


def most_layers(target: Role, gpus: int, is_first: bool) -> int:
    """Returns how many layers accelerate gives a GPU at most.

    Each is filled in order up to its even share of the model's bytes and a layer and a quarter more. So GPUs
    that hold no embedding have more layers than n / gpus. The last takes what is left, which is no more.
    """
    layers = target.model.n_layers
    sizes = held(ModelPart.of(target.model), target.dtype)
    layer = sum(sizes.get(group, 0) for group in (LAYERS, EXPERTS)) / layers
    embedding = sizes[EMBEDDING] + sizes.get(POSITIONS, 0)
    limit = (layers * layer + embedding + sizes.get(HEAD, 0)) / gpus + EXTRA_LAYERS * layer
    if is_first:
        limit -= embedding
    return min(layers, max(0, int(limit / layer)))


def device_lines(work: RankWork) -> tuple[MemoryLine, ...]:
    """Returns a rank's tensors and, on a GPU, what the allocator reserves for them."""
    lines = tensor_lines(work)
    return lines if work.kernels.cpu else (*lines, segments(work))


def library_lines(machine: Machine, placement: Placement, rank: int) -> tuple[MemoryLine, ...]:
    """Returns constants of the cluster: the context, and workspaces of what the rank takes part in."""
    taken = machine.taken
    source = f"cluster {machine.name}"
    if machine.is_cpu:
        return (MemoryLine(LIBRARIES, "process", taken["context"], CONSTANT, source),)
    groups = communicators(placement, rank)
    sizes = {
        "context and kernels": taken["context"],
        "cuBLAS workspaces": taken["cublas"],
        f"NCCL, {groups} group{'' if groups == 1 else 's'}": taken["nccl"] * groups,
    }
    return tuple(MemoryLine(LIBRARIES, name, size, CONSTANT, source) for name, size in sizes.items() if size)


def graph_lines(machine: Machine, work: RankWork) -> tuple[MemoryLine, ...]:
    """Returns what CUDA graphs take: a constant of the cluster for each, outputs, inputs, scratch."""
    count = sum(len(work.graphs(role)) for role in work.roles)
    lines = [MemoryLine(role.role, OUTPUTS, work.outputs_of_graphs(role), BOUND) for role in work.roles]
    lines += [MemoryLine(role.role, SCRATCH, work.scratch_of_graphs(role), BOUND) for role in work.roles]
    if count:
        lines.append(MemoryLine(LIBRARIES, OF_DECISIONS, work.kept_by_graphs(), BOUND))
    constant = count * machine.taken["graph"]
    lines.append(MemoryLine(LIBRARIES, f"{count} CUDA graphs", constant, CONSTANT, f"cluster {machine.name}"))
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
    needed = 0
    words = dict[str, None]()
    for role, ranks in roles:
        part = RolePart.of(role, ModelPart.of(role.model), slots)
        cache = part.caches_bytes(rows) // ranks
        weights = 0
        for group, size in held(part.part, role.dtype).items():
            weights += size // (ranks if group in IN_LAYERS else 1)
        needed += weights + cache
        sizes = f"weights {weights / GIB:.1f} GiB, cache {cache / GIB:.1f} GiB"
        words[f"{role.role} {role.model.name}: {sizes}"] = None

    usable = int(capacity * (1 - reserve))
    if needed > usable:
        smaller = "take a smaller model, a smaller dtype (model.dtype=int8), fewer rows (task.batch_size)"
        raise MemoryFull(
            f"the models do not fit on {device}",
            where="; ".join(words),
            found=f"{needed / GIB:.1f} GiB needed",
            allowed=f"{usable / GIB:.1f} GiB ({capacity / GIB:.1f} GiB less {reserve:.0%} reserve)",
            fix=f"{smaller} or shorter texts (task.max_new_tokens)",
        )
