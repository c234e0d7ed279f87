"""The memory of one rank: weights, caches, the largest moment of a round, allocator segments. No torch."""

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

from llama_ssp.config import Dtype
from llama_ssp.distributed.placement import Placement
from llama_ssp.models.graph_sizes import BUCKET, WIDEST
from llama_ssp.planner.activations import GPU, Kernels, Parts, RankWork, total
from llama_ssp.planner.storage import BYTES, IN_LAYERS
from llama_ssp.planner.weights import CACHE, ModelPart, RolePart, held
from llama_ssp.planner.workload import BOUND, DRAFT, MIB, TARGET, MemoryLine, Role, Workload

LOADING = "load"
SEGMENTS = "segments"
ALLOCATOR = "torch's caching allocator: whole pages, and blocks between that fit nothing"
FORMULA = "largest moment, by a formula from shapes"
PAGES = 22 * MIB  # torch's expandable segments grow by 2 MiB for small requests, and by 20 MiB for others
Compiled = Collection[str]  # roles with compiled steps
FRAGMENTS = 0.4  # of a round's activations: blocks that one phase frees and no other phase can use


def rank_work(
    target: Role, draft: Role | None, placement: Placement, work: Workload, rank: int, kernels: Kernels = GPU,
    compiled: Compiled = (),
) -> RankWork:  # fmt: skip
    """The parts of both roles on this rank. A draft's cache ends where its context does.

    `compiled`: the roles with compiled steps.
    """
    room = min(work.slots, target.model.context)
    own = drafted = None
    if rank in placement.target:
        part = ModelPart.of(target.model, len(placement.target), placement.target.index(rank))
        own = RolePart.of(target, part, room, work.target_caches, target.role in compiled)
    if draft is not None and rank in placement.draft:
        degree = placement.draft_degree
        part = ModelPart.of(draft.model, degree, placement.draft.index(rank) if degree > 1 else 0, True)
        if draft.model.is_head and draft.model.tied and len(placement.target) == 1:
            # It reads the target's tables.
            borrows_head = draft.model.head_block > 0 and draft.model.head_vocab == draft.model.vocab
            part = replace(part, borrows_embedding=True, borrows_head=borrows_head)
        block = part.head_block + 1 if part.head_block else 0
        room_of_draft = min(room + block, draft.model.context)
        drafted = RolePart.of(draft, part, room_of_draft, work.draft_caches, draft.role in compiled)
        if draft.model.is_head and not block:
            drafted = replace(drafted, waiting=max(work.prefill_chunk, WIDEST))
    drafts = rank == (placement.draft[0] if draft is not None and placement.draft else placement.target[0])
    decides = rank == placement.target[0]
    roles = [own, drafted]
    for at, role in enumerate(roles):
        if role and role.compiled and not kernels.cpu and not role.part.head_inputs:  # it has graphs
            roles[at] = replace(role, spare=1 + -(work.rows * role.capacity + 1) % BUCKET)
    return RankWork(roles[0], roles[1], target.model.vocab, work, room, decides, drafts, kernels)


@lru_cache(maxsize=4096)
def tensor_lines(own: RankWork) -> tuple[MemoryLine, ...]:
    """Every tensor's bytes on this rank: weights, caches, and the largest moment of all phases.

    The first passes of prefill run before all caches exist; they are counted as if they existed.
    """
    lines: list[MemoryLine] = []
    for role in own.roles:
        store = role.store(own.kernels.cpu)
        caches = role.caches_bytes(own.work.rows, store.unit)
        groups = {**held(role.part, role.dtype, store), CACHE: caches}
        lines += [MemoryLine(role.role, group, size) for group, size in groups.items()]
    return tuple(line for line in (*lines, *peak_lines(peaks(own))) if line.bytes)


def peak_lines(found: dict[str, Parts]) -> list[MemoryLine]:
    """The tensors beyond weights and caches in the phase that needs most."""
    worst = max(found, key=lambda phase: total(found[phase]))
    role = DRAFT if worst.startswith(DRAFT) else TARGET
    parts = found[worst].items()
    return [MemoryLine(role, f"{name} ({worst})", size, BOUND, FORMULA) for name, size in parts]


@lru_cache(maxsize=4096)
def peaks(own: RankWork) -> dict[str, Parts]:
    """The largest moment of each phase on this rank; last that of loading, before there are caches."""
    largest = max(map(loading_bytes, own.roles), default=0)
    caches = sum(role.caches_bytes(own.work.rows) for role in own.roles)
    return {**own.peaks(), LOADING: {"a layer more": max(0, largest - caches)}}


def loading_bytes(role: RolePart) -> int:
    """Bytes on top of the weights while they are loaded: a layer, or the matrix that is to be quantised."""
    if role.dtype is Dtype.packed:
        groups = held(role.part, role.dtype)
        return sum(groups.get(group, 0) for group in IN_LAYERS) // role.part.layers
    return 2 * role.part.largest_matrix if BYTES[role.dtype] < BYTES[Dtype.bf16] else 0


def segments(own: RankWork) -> MemoryLine:
    """What a GPU's allocator reserves beyond `tensor_lines`: pages, and a share of what passes through."""
    found = {phase: total(parts) for phase, parts in peaks(own).items()}
    passing = max(size for phase, size in found.items() if phase != LOADING)
    excess = max(0, PAGES + int((1 + FRAGMENTS) * passing) - max(found.values()))
    return MemoryLine(own.roles[0].role, SEGMENTS, excess, BOUND, ALLOCATOR)
