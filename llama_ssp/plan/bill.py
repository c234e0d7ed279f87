"""The bill of one rank: what it holds of each role, and what passes through memory, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from llama_ssp.config import Dtype
from llama_ssp.placement import Placement
from llama_ssp.plan.asked import DRAFT, TARGET, Kind, Line, Role, Workload
from llama_ssp.plan.attention import GPU, Kernels
from llama_ssp.plan.forward import CACHE, Passes
from llama_ssp.plan.laws import Laws
from llama_ssp.plan.rounds import Batch, Duties
from llama_ssp.plan.tape import Tape
from llama_ssp.plan.weights import Part, held, width

WINDOWED = {"gemma2": (False, True), "gpt_neo": (False, True), "mistral": (True,)}
GPU_UNIT = 512  # bytes: the caching allocator of a GPU rounds every request up to it


@dataclass(frozen=True)
class Share:
    """What one rank has of one role."""

    role: str
    part: Part
    dtype: Dtype
    capacity: int  # of its caches
    windowed: tuple[bool, ...]


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
        cells = work.rows * share.part.key_width * (share.capacity + 1) * width(share.dtype)
        lines.append(Line(share.role, CACHE, 2 * share.part.layers * _rounded(cells, unit), Kind.exact))
    worst = max(phases(target, draft, placement, work, rank, kernels), key=lambda peak: peak.bytes)
    role = DRAFT if worst.phase.startswith(DRAFT) else TARGET
    lines += [Line(role, f"{name} ({worst.phase})", size, Kind.exact) for name, size in worst.parts]
    return tuple(line for line in lines if line.bytes)


def phases(
    target: Role,
    draft: Role | None,
    placement: Placement,
    work: Workload,
    rank: int,
    kernels: Kernels = GPU,
) -> tuple[Peak, ...]:
    """The worst moment of each phase on this rank."""
    own = {share.role: share for share in shares(target, draft, placement, work, rank)}
    room = min(work.slots, target.model.context)
    drafting = placement.draft[0] if draft is not None and placement.draft else placement.target[0]
    duties = Duties(decides=rank == placement.target[0], drafts=rank == drafting)
    return _phases(
        own.get(TARGET), own.get(DRAFT), target.model.vocab, width(target.dtype), work, room, duties, kernels
    )


def shares(target: Role, draft: Role | None, placement: Placement, work: Workload, rank: int) -> list[Share]:
    """What this rank has of each role. A draft's cache ends where its context does."""
    room = min(work.slots, target.model.context)
    found = []
    if rank in placement.target:
        part = Part.of(target.model, len(placement.target), placement.target.index(rank))
        found.append(share_of(target, part, room))
    if draft is not None and rank in placement.draft:
        degree = placement.draft_degree
        part = Part.of(draft.model, degree, placement.draft.index(rank) if degree > 1 else 0)
        found.append(share_of(draft, part, min(room, draft.model.context)))
    return found


def share_of(role: Role, part: Part, capacity: int) -> Share:
    """The part with what else its passes depend on."""
    windowed = WINDOWED.get(part.family, (False,))
    if part.family == "mistral" and not role.model.sliding_window:
        windowed = (False,)
    return Share(role.role, part, role.dtype, capacity, windowed)


@lru_cache(maxsize=4096)
def _phases(
    target: Share | None,
    draft: Share | None,
    vocab: int,
    target_width: int,
    work: Workload,
    room: int,
    duties: Duties,
    kernels: Kernels,
) -> tuple[Peak, ...]:
    tape = Tape(_unit(kernels), apart=(CACHE,))
    target_passes, draft_passes = (
        None
        if share is None
        else Passes(
            tape, share.part, share.dtype, work.rows, share.capacity, windowed=share.windowed, kernels=kernels
        )
        for share in (target, draft)
    )
    laws = Laws(tape, work.rows, vocab)
    Batch(tape, target_passes, draft_passes, laws, duties, work.prefill_chunk).run(
        work.prompt_tokens, room, work.k
    )
    return tuple(
        Peak(phase, tuple((name, size) for name, size in parts.items() if size))
        for phase, parts in tape.peaks.items()
    )


def _unit(kernels: Kernels) -> int:
    return 1 if kernels.cpu else GPU_UNIT


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
