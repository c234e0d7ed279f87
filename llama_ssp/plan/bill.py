"""The bill of one rank: what it holds of each role, and what passes through memory, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llama_ssp.config import Dtype
from llama_ssp.placement import Placement
from llama_ssp.plan.allocator import UNIT, Allocator
from llama_ssp.plan.asked import DRAFT, TARGET, Kind, Line, Role, Workload
from llama_ssp.plan.forward import CACHE, Passes
from llama_ssp.plan.laws import Laws
from llama_ssp.plan.room import Bill
from llama_ssp.plan.rounds import Batch, Duties
from llama_ssp.plan.tape import Tape
from llama_ssp.plan.walk import GPU, Kernels
from llama_ssp.plan.weights import BYTES, Part, Weight, held, tensors, weights, width

# Of the kinds of layers, which look back only so far, in families that can have a window.
WINDOWED = {
    **dict.fromkeys(("gemma2", "gpt_neo", "qwen2", "qwen3"), (False, True)),
    **dict.fromkeys(("mistral", "phi3"), (True,)),
}  # fmt: skip
ALWAYS_WINDOWED = ("gemma2", "gpt_neo")
LOADING = "load"
ALLOCATOR = "torch's caching allocator, replayed"
UNSEEN = "as on a CPU, without what a GPU's kernels take for themselves"


@dataclass(frozen=True)
class Share:
    """What one rank has of one role."""

    role: str
    part: Part
    dtype: Dtype
    capacity: int  # of its caches
    caches: int
    windowed: tuple[bool, ...]

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
        lines.append(Line(share.role, CACHE, _caches(share, work.rows, unit), Kind.exact))
    lines += worst_lines(phases(target, draft, placement, work, rank, kernels), kernels)
    return tuple(line for line in lines if line.bytes)


def worst_lines(peaks: Sequence[Peak], kernels: Kernels) -> list[Line]:
    """What is alive beside weights and caches in the phase that takes most."""
    worst = max(peaks, key=lambda peak: peak.bytes)
    role = DRAFT if worst.phase.startswith(DRAFT) else TARGET
    unseen = "" if kernels.cpu else UNSEEN
    return [Line(role, f"{name} ({worst.phase})", size, Kind.exact, unseen) for name, size in worst.parts]


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
    return _phases(_asked(target, draft, placement, work, rank, kernels))


def segments(target: Role, draft: Role | None, placement: Placement, work: Workload, rank: int) -> Line:
    """What a GPU's allocator reserves beyond the bytes of `tensor_lines`, by replaying the run.

    Weights come first, as they are loaded; then the batch, from prefill to its last round.
    """
    asked = _asked(target, draft, placement, work, rank, GPU)
    lines = tensor_lines(target, draft, placement, work, rank)
    reserved = _reserved(asked)
    excess = max(0, reserved - sum(line.bytes for line in lines))
    return Line(TARGET if asked.target else DRAFT, "segments", excess, Kind.simulated, ALLOCATOR)


@lru_cache(maxsize=1024)
def _reserved(asked: Asked) -> int:
    tape, allocator = Tape(record=True), Allocator()
    for share in (asked.target, asked.draft):
        if share is None:
            continue
        there = [(size, times) for _, size, times in tensors(share.part, share.dtype)]
        others = (share.caches - 1) * 2 * share.part.layers  # caches of other engines, made before
        for size, times in (*there, (_keys(share, asked.work.rows), others)):
            allocator.keep(size, times)
    asked.run(tape)
    allocator.replay(tape.events or [])
    return allocator.reserved


def _asked(
    target: Role, draft: Role | None, placement: Placement, work: Workload, rank: int, kernels: Kernels
) -> Asked:
    own = {share.role: share for share in shares(target, draft, placement, work, rank)}
    room = min(work.slots, target.model.context)
    drafting = placement.draft[0] if draft is not None and placement.draft else placement.target[0]
    duties = Duties(decides=rank == placement.target[0], drafts=rank == drafting)
    return Asked(own.get(TARGET), own.get(DRAFT), target.model.vocab, work, room, duties, kernels)


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
    windowed = WINDOWED.get(part.family, (False,))
    if part.family not in ALWAYS_WINDOWED and not role.model.sliding_window:
        windowed = (False,)
    return Share(role.role, part, role.dtype, capacity, caches, windowed)


@dataclass(frozen=True)
class Asked:
    """Everything that a rank's run in sizes depends on."""

    target: Share | None
    draft: Share | None
    vocab: int
    work: Workload
    room: int
    duties: Duties
    kernels: Kernels

    def run(self, tape: Tape) -> None:
        """Walks the batch, from prefill to the last round."""
        target, draft = self._passes(tape, self.target), self._passes(tape, self.draft)
        laws = Laws(tape, self.work.rows, self.vocab)
        batch = Batch(tape, target, draft, laws, self.duties, self.work.prefill_chunk)
        batch.run(self.work.prompt_tokens, self.room, self.work.k)

    def _passes(self, tape: Tape, share: Share | None) -> Passes | None:
        if share is None:
            return None
        return Passes(
            tape, share.part, share.dtype, self.work.rows, share.capacity,
            windowed=share.windowed, kernels=self.kernels,
        )  # fmt: skip


@lru_cache(maxsize=4096)
def _phases(asked: Asked) -> tuple[Peak, ...]:
    tape = Tape(_unit(asked.kernels), apart=(CACHE,))
    asked.run(tape)
    found = [
        Peak(phase, tuple((name, size) for name, size in parts.items() if size))
        for phase, parts in tape.peaks.items()
    ]
    return (*found, _loading(asked))


def _loading(asked: Asked) -> Peak:
    """A layer that is quantised is there in 16 bit, too; then there are no caches yet."""
    both = [share for share in (asked.target, asked.draft) if share is not None]
    caches = sum(_caches(share, asked.work.rows, 1) for share in both)
    largest = max(
        (2 * weight.count for share in both for weight in weights(share.part) if share.quantised(weight)),
        default=0,
    )
    return Peak(LOADING, (("a layer in 16 bit", max(0, largest - caches)),))


def _caches(share: Share, rows: int, unit: int) -> int:
    return share.caches * 2 * share.part.layers * (-(-_keys(share, rows) // unit) * unit)


def _keys(share: Share, rows: int) -> int:
    """Bytes of one layer's keys."""
    return rows * share.part.key_width * (share.capacity + 1) * width(share.dtype)


def _unit(kernels: Kernels) -> int:
    return 1 if kernels.cpu else UNIT
