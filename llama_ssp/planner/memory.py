"""The bill of one rank: what it holds of each role, and what passes through memory, line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llama_ssp.config import Dtype
from llama_ssp.distributed.placement import Placement
from llama_ssp.planner.activations import GPU, MIB, Forward, Kernels, Round
from llama_ssp.planner.room import Bill
from llama_ssp.planner.weights import BYTES, CACHE, Part, Weight, held, tensors, weights, width
from llama_ssp.planner.workload import DRAFT, TARGET, Kind, Line, Role, Workload

LOADING = "load"
SEGMENTS = "segments"
ALLOCATOR = "torch's caching allocator: whole segments, and blocks between that fit nothing"
FORMULA = "largest moment, by a formula from shapes"
# torch's caching allocator (c10/core/AllocatorConfig.h): requests are rounded up to 512 bytes. Those up to
# 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB, larger ones have whole 2 MiB each.
UNIT = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
LARGE, LARGE_SEGMENT, LARGE_UNIT = 10 * MIB, 20 * MIB, 2 * MIB
FRAGMENTS = 0.4  # of what passes through: blocks that one phase leaves, and that fit no other phase


@dataclass(frozen=True)
class Share:
    """What one rank has of one role."""

    role: str
    part: Part
    dtype: Dtype
    capacity: int  # of its caches
    caches: int
    windowed: tuple[bool, ...]

    def keys_bytes(self, rows: int) -> int:
        """Of one layer."""
        return self._cells(rows) * width(self.dtype)

    def caches_bytes(self, rows: int, unit: int = 1) -> int:
        """Of all layers' keys and values, each rounded up to `unit`."""
        return self.caches * 2 * self.part.layers * (-(-self.keys_bytes(rows) // unit) * unit)

    def forward(self, rows: int, kernels: Kernels) -> Forward:
        """A pass of one column; a round makes others of it."""
        return Forward(self.part, self.dtype, self.windowed, kernels, rows, 1, 1, 1, self._cells(rows))

    def _cells(self, rows: int) -> int:
        """Numbers in one layer's keys."""
        return rows * self.part.key_width * (self.capacity + 1)

    def quantised(self, weight: Weight) -> bool:
        return weight.linear and BYTES[self.dtype] < BYTES[Dtype.bf16]


@dataclass(frozen=True)
class Peak:
    """What is alive beside weights and caches at the worst moment of a phase, by what it is."""

    phase: str
    parts: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.parts)


def tensor_lines(
    target: Role,
    draft: Role | None,
    placement: Placement,
    work: Workload,
    rank: int,
    kernels: Kernels = GPU,
) -> tuple[Line, ...]:
    """Every tensor's bytes on this rank: weights, caches, and of all phases the one that takes most beside.

    The first passes of prefill run before all caches are there; they are billed as if they were.
    """
    unit = _unit(kernels)
    lines: list[Line] = []
    for share in shares(target, draft, placement, work, rank):
        lines += [
            Line(share.role, group, size, Kind.exact)
            for group, size in held(share.part, share.dtype, unit).items()
        ]
        lines.append(Line(share.role, CACHE, share.caches_bytes(work.rows, unit), Kind.exact))
    lines += worst_lines(phases(target, draft, placement, work, rank, kernels))
    return tuple(line for line in lines if line.bytes)


def worst_lines(peaks: Sequence[Peak]) -> list[Line]:
    """What is alive beside weights and caches in the phase that takes most."""
    worst = max(peaks, key=lambda peak: peak.bytes)
    role = DRAFT if worst.phase.startswith(DRAFT) else TARGET
    return [Line(role, f"{name} ({worst.phase})", size, Kind.bound, FORMULA) for name, size in worst.parts]


def rank_bill(
    target: Role,
    draft: Role | None,
    placement: Placement,
    work: Workload,
    rank: int,
    kernels: Kernels = GPU,
) -> list[Bill]:
    """The lines in three figures a role, for `require_room`."""
    bills = []
    lines = tensor_lines(target, draft, placement, work, rank, kernels)
    for role in (target, draft):
        own = [line for line in lines if role is not None and line.role == role.role]
        if role is None or not own:
            continue
        cache = sum(line.bytes for line in own if line.name == CACHE)
        passing = sum(line.bytes for line in own if line.name.endswith(")"))
        weights = sum(line.bytes for line in own) - cache - passing
        bills.append(Bill(role.role, role.model.name, weights, cache, passing))
    return bills


def phases(
    target: Role,
    draft: Role | None,
    placement: Placement,
    work: Workload,
    rank: int,
    kernels: Kernels = GPU,
) -> tuple[Peak, ...]:
    """The worst moment of each phase on this rank."""
    room = min(work.slots, target.model.context)
    drafting = placement.draft[0] if draft is not None and placement.draft else placement.target[0]
    own = tuple(shares(target, draft, placement, work, rank))
    decides = rank == placement.target[0]
    return _phases(own, target.model.vocab, work, room, decides, rank == drafting, kernels)


def segments(target: Role, draft: Role | None, placement: Placement, work: Workload, rank: int) -> Line:
    """What a GPU's allocator reserves beyond the bytes of `tensor_lines`.

    Weights and caches by their sizes; what passes through by a share.
    """
    own = shares(target, draft, placement, work, rank)
    peaks = phases(target, draft, placement, work, rank)
    passing = max(peak.bytes for peak in peaks if peak.phase != LOADING)
    found = _segments(tuple(own), work.rows) + int((1 + FRAGMENTS) * passing)
    excess = max(0, found - max(peak.bytes for peak in peaks))
    return Line(own[0].role, SEGMENTS, excess, Kind.bound, ALLOCATOR)


@lru_cache(maxsize=4096)
def _segments(own: tuple[Share, ...], rows: int) -> int:
    """Bytes of the segments of weights and caches, beyond their own."""
    kept = [(size, times) for share in own for _, size, times in tensors(share.part, share.dtype)]
    kept += [(share.keys_bytes(rows), 2 * share.caches * share.part.layers) for share in own]
    return reserved(kept) - sum(-(-size // UNIT) * UNIT * times for size, times in kept)


def reserved(tensors: list[tuple[int, int]]) -> int:
    """Bytes of the segments of tensors that stay, each (bytes, how many), in free blocks or new ones."""
    total, free = 0, {True: Counter[int](), False: Counter[int]()}
    for bytes_, times in tensors:
        size = -(-max(bytes_, 1) // UNIT) * UNIT
        small = size <= SMALL
        holes = free[small]
        segment = SMALL_SEGMENT if small else LARGE_SEGMENT
        if size >= LARGE:
            segment = -(-size // LARGE_UNIT) * LARGE_UNIT
        while times:
            block = min((hole for hole in holes if hole >= size), default=segment)
            there = holes.pop(block, 0)
            each = min(block // size, times)  # the last block may have room for more
            used = min(times // each, there or times)
            total += 0 if there else used * block
            times -= used * each
            for rest, count in ((block, there - used), (block - each * size, used)):
                if count > 0 and rest > (0 if small else SMALL):  # a smaller rest stays with the block
                    holes[rest] += count
    return total


def shares(target: Role, draft: Role | None, placement: Placement, work: Workload, rank: int) -> list[Share]:
    """What this rank has of each role. A draft's cache ends where its context does."""
    room = min(work.slots, target.model.context)
    found = []
    if rank in placement.target:
        part = Part.of(target.model, len(placement.target), placement.target.index(rank))
        found.append(share_of(target, part, room, work.target_caches))
    if draft is not None and rank in placement.draft:
        degree = placement.draft_degree
        part = Part.of(draft.model, degree, placement.draft.index(rank) if degree > 1 else 0, True)
        found.append(share_of(draft, part, min(room, draft.model.context), work.draft_caches))
    return found


def share_of(role: Role, part: Part, capacity: int, caches: int = 1) -> Share:
    """The part with what else its passes depend on."""
    windowed = part.family.windowed(role.model.sliding_window)
    return Share(role.role, part, role.dtype, capacity, caches, windowed)


@lru_cache(maxsize=4096)
def _phases(
    own: tuple[Share, ...],
    vocab: int,
    work: Workload,
    room: int,
    decides: bool,
    drafts: bool,
    kernels: Kernels,
) -> tuple[Peak, ...]:
    passes = {share.role: share.forward(work.rows, kernels) for share in own}
    batch = Round(
        passes.get(TARGET), passes.get(DRAFT), vocab, work.rows, work.prompt_tokens, room, work.k,
        work.prefill_chunk, decides, drafts,
    )  # fmt: skip
    found = [
        Peak(phase, tuple((name, size) for name, size in parts.items() if size))
        for phase, parts in batch.peaks().items()
    ]
    return (*found, _loading(own, work.rows))


def _loading(own: tuple[Share, ...], rows: int) -> Peak:
    """A layer that is quantised is there in 16 bit, too; then there are no caches yet."""
    caches = sum(share.caches_bytes(rows) for share in own)
    largest = max(
        (2 * weight.count for share in own for weight in weights(share.part) if share.quantised(weight)),
        default=0,
    )
    return Peak(LOADING, (("a layer in 16 bit", max(0, largest - caches)),))


def _unit(kernels: Kernels) -> int:
    return 1 if kernels.cpu else UNIT
