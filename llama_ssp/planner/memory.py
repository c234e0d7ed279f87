"""The memory of one rank: weights, caches, what passes through in a round, CUDA graphs. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from llama_ssp.config import Dtype
from llama_ssp.distributed.placement import Placement
from llama_ssp.models import graph_sizes
from llama_ssp.models.graph_sizes import (
    BUCKET,
    FILTERED,
    KEPT_BYTES,
    LAG,
    LARGEST,
    MOST,
    WIDEST,
    rewinds_of,
    ring_of,
    sizes_up_to,
)
from llama_ssp.planner.activations import (
    FP32,
    GPU,
    HIDDEN,
    INT,
    LOGITS,
    Kernels,
    Parts,
    activation,
    pass_bytes,
)
from llama_ssp.planner.storage import BYTES, IN_LAYERS
from llama_ssp.planner.weights import CACHE, ModelPart, RolePart, held
from llama_ssp.planner.workload import BOUND, DRAFT, MIB, TARGET, MemoryLine, Role, Workload

# Phases, of which the one that needs most counts.
PREFILL = "prefill"
DRAFT_PREFILL = "draft prefill"
DRAFT_STEPS = "draft"
VERIFY = "verify"
LOADING = "load"

# Names of what passes through, besides those of one pass.
PROBS = "laws"
TOKENS = "tokens"
STATES = "hidden states"  # that a head reads

FP64 = 8
SORTED = 32  # bytes a number: logits, probabilities, sorted ones, int64 indices, sums, what a sort takes
ROUNDING = 2**15  # of small tensors to whole blocks
SEGMENTS = "segments"
ALLOCATOR = "torch's caching allocator: whole pages, and blocks between that fit nothing"
FORMULA = "of the phase that needs most, by a formula from shapes"
PAGES = 22 * MIB  # torch's expandable segments grow by 2 MiB for small requests, and by 20 MiB for others
FRAGMENTS = 0.4  # of what passes through: blocks that one phase frees and no other phase can use

Compiled = Collection[str]  # roles with compiled steps


def widest_steps(k: int) -> dict[str, int]:
    """Returns the tokens of a row in the widest step of each role."""
    return {TARGET: k + 1, DRAFT: LAG}


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """One rank's parts of the models, and the batch that they compute.

    `vocab` is the target's, `room` its cache's capacity. The rank that `decides` verifies; the rank that
    `drafts` samples the draft tokens.
    """

    target: RolePart | None
    draft: RolePart | None
    vocab: int
    work: Workload
    room: int
    decides: bool
    drafts: bool
    kernels: Kernels

    @property
    def roles(self) -> tuple[RolePart, ...]:
        return tuple(part for part in (self.target, self.draft) if part is not None)

    def first_of_equal_size(self) -> RankWork:
        """Returns the work of the first rank whose parts are as large: it takes the same bytes."""
        target = None if self.target is None else self.target.first_of_equal_size()
        draft = None if self.draft is None else self.draft.first_of_equal_size()
        return replace(self, target=target, draft=draft)

    @property
    def row_numbers(self) -> int:
        """Returns how many numbers a distribution of each row has."""
        return self.work.rows * self.vocab

    def peaks(self) -> dict[str, Parts]:
        """Returns what passes through in each phase at most."""
        phases: dict[str, Parts] = {PREFILL: {}}
        if self.target is not None:
            phases[PREFILL] = self._prefill(self.target) | self._shown(self._chunk(self.target))
        if self.draft is not None:
            phases[DRAFT_PREFILL] = self._prefill(self.draft)
            phases[DRAFT_STEPS] = self._drafting(self.draft)
        if self.target is not None:
            phases[VERIFY] = self._verifying(self.target) | self._shown(self.work.columns)
        tokens = INT * self.work.rows * (self.room + 1) + ROUNDING
        return {phase: {TOKENS: tokens, **parts} for phase, parts in phases.items()}

    def _prefill(self, role: RolePart) -> Parts:
        """Bounds the widest chunk with the longest span, whose last column has logits.

        Short prompts are read by a compiled step, which gives logits of all their tokens.
        """
        rows = self.work.rows
        chunk = self._chunk(role)
        end = min(self.work.prompt_tokens, role.part.context) - 1
        if not end:
            return {}
        parts = pass_bytes(role, self.kernels, rows=rows, columns=chunk, span=end, logits=rows)
        if role.compiled:
            tokens = min(rows * chunk, graph_sizes.short_prompt(self.kernels.cpu))
            short = pass_bytes(role, self.kernels, rows=1, columns=tokens, span=end, logits=tokens)
            parts[LOGITS] = max(parts[LOGITS], short[LOGITS])
        return parts

    def _chunk(self, role: RolePart) -> int:
        return min(self.work.prefill_chunk, min(self.work.prompt_tokens, role.part.context) - 1)

    def _shown(self, columns: int) -> Parts:
        """Returns what a head reads of the target's pass: the states of layers, and as one tensor."""
        if self.target is None or self.draft is None or not self.draft.part.head_inputs:
            return {}
        numbers = self.work.rows * columns * self.draft.part.head_inputs
        return {STATES: 2 * numbers * activation(self.target.dtype)}

    def _step(self, role: RolePart, columns: int) -> Parts:
        """Bounds a pass at the end of the text, with logits of all columns."""
        rows = self.work.rows
        return pass_bytes(
            role, self.kernels, rows=rows, columns=columns, span=self.room, logits=rows * columns
        )

    def _drafting(self, draft: RolePart) -> Parts:
        """Bounds K steps of the draft: their distributions, the same as one tensor, sums of one to draw by.

        On ranks of its own the draft makes the next proposal while the last one is sent.
        """
        k = self.work.k
        if k == 0:
            return {}
        width = draft.part.head_block + 1 if draft.part.head_block else LAG
        probs = self._small()
        if self.drafts or self.decides:
            proposals = 3 if self.target is None else 2
            probs += proposals * k * self.row_numbers * activation(draft.dtype)
            probs += 2 * FP64 * self.row_numbers
        return {**self._step(draft, width), PROBS: probs}

    def _verifying(self, target: RolePart) -> Parts:
        """Bounds the pass over K + 1 positions, its distributions, those of the drafts, and the decision."""
        parts = self._step(target, self.work.columns)
        probs = 0
        if self.decides or (self.drafts and self.draft is not None):
            drafted = activation(target.dtype if self.draft is None else self.draft.dtype)
            copies = 2 if self.draft is None else 1  # one-hot distributions of looked-up tokens, and a copy
            probs += copies * self.work.k * self.row_numbers * drafted
        if self.decides:
            probs += self.work.columns * self.row_numbers * activation(target.dtype)
            probs += self.deciding() + self._small()
        return {**parts, PROBS: probs}

    def deciding(self) -> int:
        """Returns the bytes of a decision in fp64.

        These are the distributions of K drafts and K + 1 positions; the residual, or the minimum at the
        drafts; and four distributions of one position.
        """
        k = self.work.k
        distributions = 2 * k + 1 + max(k + 1, 4) if k else 2
        return distributions * self.row_numbers * FP64

    def _small(self) -> int:
        """Counts numbers a row and a position: tokens, probabilities, uniforms; the clocks of a race."""
        return self.work.rows * ((self.work.k + 1) * 32 * FP64 + 4 * FP64 * (int(self.vocab**0.5) + 2))

    def graphs(self, role: RolePart) -> tuple[int, ...]:
        """Returns the tokens of each CUDA graph of a role's steps, in each cache; none for a head.

        There is one for every number of tokens that may come up: rows that have ended or draft less make a
        step shorter, and loading a model runs steps of one and two tokens. One more serves short prompts.
        """
        if not role.spare:
            return ()
        tokens = max(self.work.rows * widest_steps(self.work.k)[role.role], 2)
        prompt = min(WIDEST, role.capacity)
        if role.part.linear_layers:  # a step has no more tokens of a row than its ring has states
            prompt = min(prompt, ring_of(role.rewinds))
        return role.caches * sizes_up_to(tokens, prompt)

    def outputs_of_graphs(self, role: RolePart) -> int:
        """Returns what a role's graphs keep: the logits of the largest, and the states that a head reads.

        Smaller graphs share this memory, except those of the first steps, of one and two tokens.
        """
        sizes = self.graphs(role)
        if not sizes:
            return 0
        tokens = max(sizes) + 1 + 2
        shown = 0
        if role is self.target and self.draft is not None:
            shown = self.draft.part.head_inputs
        return tokens * (role.part.whole_vocab + shown) * activation(role.dtype)

    def scratch_of_graphs(self, role: RolePart) -> int:
        """Returns what a role's graphs share: the bytes of the largest step, or of filters or a decision."""
        if not role.spare:
            return 0
        columns = self.work.columns if role is self.target else LAG
        rows = max(1, min(self.work.rows, MOST // columns))
        largest = 0
        for row_count, width in ((rows, columns), (1, WIDEST)):
            step = pass_bytes(
                role,
                self.kernels,
                rows=row_count,
                columns=width,
                span=1,
                logits=row_count * width,
                graph=True,
            )
            largest = max(largest, step[HIDDEN] + step[LOGITS])

        filtered = SORTED * min(self.row_numbers * columns, FILTERED)
        given = self.row_numbers * (2 * self.work.k + 1)
        decided = self.deciding() if role is self.target and self.decides and given <= LARGEST else 0
        return max(largest, filtered, decided)

    def kept_by_graphs(self) -> int:
        """Returns the bytes that graphs read and give that filter, draw and decide.

        All read the same memory. A decision reads most: K + 1 distributions and K of drafts. Filters give
        K + 1 distributions, and in rounds of every smaller K fewer: 1 + 2 + ... + (K + 1) in all; or they
        give that of a draft.
        """
        columns = self.work.columns
        given = 2 * self.work.k + 1
        distributions = given + columns * (columns + 1) // 2 + 1
        return min(KEPT_BYTES, distributions * self.row_numbers * FP32)


def rank_work(
    target: Role, draft: Role | None, placement: Placement, work: Workload, rank: int, kernels: Kernels = GPU,
    compiled: Compiled = (),
) -> RankWork:  # fmt: skip
    """Returns the parts of both roles on this rank. A draft's cache ends where its context does.

    `compiled`: the roles with compiled steps.
    """
    room = min(work.slots, target.model.context)
    target_part = draft_part = None
    if rank in placement.target:
        part = ModelPart.of(target.model, len(placement.target), placement.target.index(rank))
        target_part = RolePart.of(target, part, room, work.target_caches, target.role in compiled)
        target_part = replace(target_part, rewinds=rewinds_of(work.k, ahead=False))
    if draft is not None and rank in placement.draft:
        draft_part = _part_of_draft(target, draft, placement, work, rank)
        draft_part = replace(
            draft_part,
            compiled=draft.role in compiled,
            rewinds=rewinds_of(work.k, ahead=placement.draft_apart),
        )
    leader_of_draft = placement.target[0]
    if draft is not None and placement.draft:
        leader_of_draft = placement.draft[0]
    return RankWork(
        target=_with_spare_slots(target_part, work.rows, kernels),
        draft=_with_spare_slots(draft_part, work.rows, kernels),
        vocab=target.model.vocab,
        work=work,
        room=room,
        decides=rank == placement.target[0],
        drafts=rank == leader_of_draft,
        kernels=kernels,
    )


def _part_of_draft(target: Role, draft: Role, placement: Placement, work: Workload, rank: int) -> RolePart:
    """Returns a rank's part of the draft. A head may read the target's tables, and keeps states for later."""
    degree = placement.draft_degree
    index = placement.draft.index(rank) if degree > 1 else 0
    part = ModelPart.of(draft.model, degree, index, leader_looks_up=True)
    if draft.model.is_head and draft.model.tied and len(placement.target) == 1:
        borrows_head = draft.model.head_block > 0 and draft.model.head_vocab == draft.model.vocab
        part = replace(part, borrows_embedding=True, borrows_head=borrows_head)

    block = part.head_block + 1 if part.head_block else 0
    room = min(min(work.slots, target.model.context) + block, draft.model.context)
    role_part = RolePart.of(draft, part, room, work.draft_caches)
    if draft.model.head_shares_cache:
        return replace(role_part, waiting=0 if index else WIDEST)  # of the rank that draws
    if draft.model.is_head and not block:
        return replace(role_part, waiting=max(work.prefill_chunk, WIDEST))
    return role_part


def _with_spare_slots(role: RolePart | None, rows: int, kernels: Kernels) -> RolePart | None:
    """Adds slots to whole buckets where a cache has graphs; a head has none."""
    if role is None or not role.compiled or kernels.cpu or role.part.head_inputs:
        return role
    return replace(role, spare=1 + -(rows * role.capacity + 1) % BUCKET)


@lru_cache(maxsize=4096)
def tensor_lines(work: RankWork) -> tuple[MemoryLine, ...]:
    """Returns every tensor's bytes on this rank: weights, caches, and what passes through at most.

    The first passes of prefill run before all caches exist; they are counted as if they existed.
    """
    lines: list[MemoryLine] = []
    for role in work.roles:
        store = role.store(work.kernels.cpu)
        caches = role.caches_bytes(work.work.rows, store.unit)
        groups = {**held(role.part, role.dtype, store), CACHE: caches}
        lines += [MemoryLine(role.role, group, size) for group, size in groups.items()]
    return tuple(line for line in (*lines, *_peak_lines(peaks(work))) if line.bytes)


def _peak_lines(phases: dict[str, Parts]) -> Iterator[MemoryLine]:
    """Yields what passes through in the phase that needs most."""
    worst = max(phases, key=lambda phase: sum(phases[phase].values()))
    role = DRAFT if worst.startswith(DRAFT) else TARGET
    for name, size in phases[worst].items():
        yield MemoryLine(role, f"{name} ({worst})", size, BOUND, FORMULA)


@lru_cache(maxsize=4096)
def peaks(work: RankWork) -> dict[str, Parts]:
    """Returns what passes through in each phase; last that of loading, before there are caches."""
    largest = max(map(loading_bytes, work.roles), default=0)
    caches = sum(role.caches_bytes(work.work.rows) for role in work.roles)
    return {**work.peaks(), LOADING: {"a layer more": max(0, largest - caches)}}


def loading_bytes(role: RolePart) -> int:
    """Returns the bytes on top of the weights while they are loaded: a layer, or a matrix to quantise."""
    if role.dtype is Dtype.packed:
        groups = held(role.part, role.dtype)
        return sum(groups.get(group, 0) for group in IN_LAYERS) // role.part.layers
    return 2 * role.part.largest_matrix if BYTES[role.dtype] < BYTES[Dtype.bf16] else 0


def segments(work: RankWork) -> MemoryLine:
    """Returns what a GPU's allocator reserves besides: pages, and a share of what passes through."""
    sizes = {phase: sum(parts.values()) for phase, parts in peaks(work).items()}
    passing = max(size for phase, size in sizes.items() if phase != LOADING)
    excess = max(0, PAGES + int((1 + FRAGMENTS) * passing) - max(sizes.values()))
    return MemoryLine(work.roles[0].role, SEGMENTS, excess, BOUND, ALLOCATOR)
