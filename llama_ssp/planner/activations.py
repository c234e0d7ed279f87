"""An upper bound for the tensors of a round beyond weights and caches, from shapes and config. No torch.

A forward pass and a round have a few moments at which memory peaks. Each moment is a sum of terms; every term
says which tensors it stands for. The largest moment is the bound. It does not follow the order in which the
code makes and frees its tensors: where two orders are possible, the larger sum is taken.

Sizes: `tokens` is rows x columns, `w` the bytes of an activation, `span` the cache slots that are read.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from llama_ssp.config import OWN_CODES, Dtype
from llama_ssp.models import graph_sizes
from llama_ssp.models.graph_sizes import FILTERED, KEPT_BYTES, LAG, LARGEST, MOST, sizes_up_to
from llama_ssp.models.kernels.kernel_sizes import (
    DECODED,
    FEW_ROWS,
    MANY_ROWS,
    SLICE,
    attended_parts,
    parts_of,
)
from llama_ssp.models.layout import EXPERTS
from llama_ssp.planner.storage import width
from llama_ssp.planner.weights import ModelPart, RolePart, weights
from llama_ssp.planner.workload import DRAFT, MIB, TARGET, Workload

MASKS, HIDDEN, LOGITS, PROBS, TOKENS = "masks", "activations", "logits", "laws", "tokens"
STATES = "hidden states"  # that a head reads
PREFILL, DRAFT_PREFILL, DRAFT_STEPS, VERIFY = "prefill", "draft prefill", "draft", "verify"

INT, FP32, FP64 = 8, 4, 8
GPU_ALIGNMENT = 16  # of a mask's rows in torch's memory-efficient attention
INTEGERS = 24  # int64 numbers a token: ids, positions, slots, and what they are made of
ROUNDING = 2**15  # of small tensors to whole blocks
SORTED = 32  # bytes a number: logits, probabilities, sorted ones, int64 indices, sums, what a sort takes
KERNEL_SCRATCH = 5 * MIB // 4  # a thread: tiles of a CPU's attention and matrix products

Parts = dict[str, int]


def widest_steps(k: int) -> dict[str, int]:
    """Tokens of a row in the widest step of each role."""
    return {TARGET: k + 1, DRAFT: LAG}


@dataclass(frozen=True)
class Kernels:
    """A GPU's kernels, or a CPU's with this number of threads."""

    cpu: bool
    threads: int = 0


GPU = Kernels(cpu=False)


@dataclass(frozen=True)
class Forward:
    """One forward pass of one rank's part of a model; `logits` is how many positions have logits."""

    own: RolePart
    kernels: Kernels
    rows: int
    columns: int = 1
    span: int = 1
    logits: int = 1

    @property
    def part(self) -> ModelPart:
        return self.own.part

    @property
    def w(self) -> int:
        return width(self.own.dtype)

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    def moments(self) -> Iterator[Parts]:
        """The tensors at each moment."""
        part, w, numbers = self.part, self.w, self.tokens * self.part.dim
        # A mask a row for each kind of layer, kept until the pass ends; positions. One is made of two more.
        cells = self.columns * self.span
        masks = 0 if self._by_kernel else (self.own.masks * self.rows + 2) * cells
        masks += INT * (INTEGERS * self.tokens + 2 * self.span)
        # Cosines and sines in fp32, of half of the rotated numbers each, for each kind of positions.
        turns = 2 * part.family.rotary_kinds * self.tokens * part.rotary_width // 2 * FP32
        # States that live while a layer computes: its input and the sum, in fp32; the norm's output, that of
        # attention, and the next norm's; the norms after attention and after the MLP have one each.
        wide = max(w, FP32)
        stream = numbers * (2 * wide + (3 + max(part.norms - 2, 0)) * w) + turns
        if part.head_inputs:  # g, its norm, the embedding's, and both as one; the target's states, normed
            stream += 5 * numbers * w + 2 * self.tokens * part.head_inputs * w
        scratch = MIB + KERNEL_SCRATCH * self.kernels.threads + self._dequantised()
        worst = max(self._normed(self.tokens), self._rotated(), self._attended(), self._fed())
        yield {MASKS: masks, HIDDEN: stream + worst + scratch}
        # What the last layer gives, and what is read of it.
        selected = (numbers + self.logits * part.dim) * wide
        yield {MASKS: masks, HIDDEN: selected + self._normed(self.logits) + turns + scratch}
        yield {MASKS: masks, HIDDEN: selected + turns + scratch, LOGITS: self._head()}

    def _normed(self, tokens: int) -> int:
        """A norm in fp32: the input and its square or product; then the product and the output."""
        return tokens * self.part.dim * (2 * FP32 + (self.w if self.w < FP32 else 0))

    def _rotated(self) -> int:
        """Queries, keys and values; norms and rotation of queries: products of halves, and their sums."""
        part, w = self.part, self.w
        made = w * (part.query_width + 2 * part.key_width)
        turned = part.query_width * (2 * FP32 + w)
        if part.family.qk_norm:
            made += w * (part.query_width + part.key_width)
        if self.own.dtype is Dtype.int8:
            turned = max(turned, _int8(part.dim, part.query_width + 2 * part.key_width))
        return self.tokens * (made + turned)

    def _attended(self) -> int:
        """Attention of one row after the other: its queries, the mask for a group of heads, the output.

        Queries, keys and values are still there, before and after their rotation.
        """
        part, w = self.part, self.w
        copies = 1 + part.family.qk_norm
        made = self.tokens * w * (2 * part.query_width + 3 * part.key_width) * copies
        outputs = self.tokens * w * part.query_width
        cells = self.columns * self.span * (part.queries // part.kvs)
        row = self.columns * (3 * w * part.query_width + FP32 * part.queries)
        if self._by_kernel:  # sums of parts, of all rows at once
            parts = attended_parts(self.tokens, part.kvs)
            sums = FP32 * parts * (part.query_width + 2 * part.queries)
            row = 2 * w * self.tokens * part.query_width + sums
        elif part.family.softcap or part.family.names.sinks:  # scores in fp32: a step, the next and a third
            row += cells * (1 + 3 * FP32 * part.kvs)
        else:  # the mask as bool, then to be added; a GPU's kernel may pad its rows
            padded = 0 if self.kernels.cpu else self.columns * GPU_ALIGNMENT * w
            row += cells * (1 + w * (1 if self.kernels.cpu else 2)) + padded * (part.queries // part.kvs)
        # With a bias some kernels make the output twice.
        out = self.tokens * w * part.dim * (1 + part.family.layer_norm)
        return made + outputs + max(row, outputs + out)

    @property
    def _by_kernel(self) -> bool:
        """Whether a GPU attends by our kernel in prompts, too, without masks and a matrix of scores."""
        scored = self.part.family.softcap or self.part.family.names.sinks
        return bool(scored) and self.own.compiled and not self.kernels.cpu

    def _fed(self) -> int:
        """The feed-forward layer, and its output."""
        part = self.part
        dense = self._dense() if part.expert_layers < part.layers else 0
        return self.tokens * max(dense, self._routed())

    def _dense(self) -> int:
        """An MLP, a token."""
        part, w = self.part, self.w
        halves = 1 if part.family.mlp_states == 2 or part.family.layer_norm else 2  # gate and up: one product
        inside = part.ffn * w * (part.family.mlp_states + halves - 1)
        if self.own.dtype is Dtype.int8:
            up = part.ffn * w + _int8(part.dim, halves * part.ffn)
            inside = max(inside, up, part.ffn * w * halves + _int8(part.ffn, part.dim))
        out = part.ffn * w * halves + part.dim * w * (1 + part.family.layer_norm)
        return max(inside, out)

    def _routed(self) -> int:
        """Experts, a token, if all choose the same one: its inputs, what it makes of them, and the sum."""
        part, w = self.part, self.w
        if not part.expert_layers:
            return 0
        choice = part.experts * (FP32 + w) + part.experts_per_token * (2 * FP32 + 3 * INT)
        alike = w * (3 * part.dim + 5 * part.expert_ffn)
        # On a GPU they run for all pairs of a token and an expert at once.
        pairs = 0 if self.kernels.cpu else w * part.experts_per_token * (4 * part.dim + 6 * part.expert_ffn)
        return choice + max(alike, pairs)

    @property
    def _decodes_experts(self) -> bool:
        """Returns whether steps on a GPU decode chosen experts: the kernel does not read all their codes."""
        if self.kernels.cpu or self.own.dtype is not Dtype.packed:
            return False
        store, every = self.own.store(cpu=False), weights(self.part, packed=True)
        coded = (weight for weight in every if weight.group == EXPERTS and weight.linear)
        return not all(store.reads(weight.kept(Dtype.packed), weight.inputs) for weight in coded)

    def _dequantised(self) -> int:
        """4 bit, and codes without a kernel: a layer's largest matrix, in 16 bit; of experts a few."""
        part = self.part
        numbers = part.largest_matrix if self.own.dtype in (Dtype.nf4, *OWN_CODES) else 0
        if self._decodes_experts:
            one = 2 * part.expert_ffn * part.dim
            numbers = max(numbers, min(max(one, DECODED), one * self.tokens * part.experts_per_token))
        return max(self.w * numbers, self._by_codes())

    def _by_codes(self) -> int:
        """The kernel for codes of a GPU: of many tokens a matrix that is decoded, of fewer sums of parts."""
        made = (Dtype.int8, Dtype.nf4) if self.own.compiled else ()
        is_coded = self.own.dtype in (*OWN_CODES, *made)
        if self.kernels.cpu or not is_coded or self.tokens <= FEW_ROWS:
            return 0
        if self.tokens > MANY_ROWS:
            return self.w * min(self.part.largest_matrix, DECODED)
        matrices = [weight for weight in weights(self.part) if weight.linear]
        parts = [(parts_of(each.outputs, each.inputs), each.outputs) for each in matrices]
        return FP32 * self.tokens * max((count * outputs for count, outputs in parts if count > 1), default=0)

    def _head(self) -> int:
        """Logits; over several ranks: a part, its padded copy, all gathered parts, the whole.

        Those of a head also by the target's ids, in fp32, for rows that draft and for all.

        Of rows that differ in length the logits are copied to where padding leaves room.
        """
        steps = 3 if self.part.family.softcap else 2 if self.rows > 1 or self.part.family.multipliers else 1
        part, numbers = self.part, self.part.whole_vocab * steps
        if part.world > 1:
            numbers = max(numbers, part.vocab + (1 + part.world) * part.widest_vocab + part.whole_vocab)
        wide, sliced = max(self.w, FP32), 0
        if self.kernels.cpu and self.w < FP32:  # parts of the product, and a slice of the matrix
            sliced = (self.logits * part.vocab + max(SLICE, part.dim)) * FP32
        if part.head_inputs:
            return self.logits * (part.vocab * wide + 2 * part.whole_vocab * FP32) + sliced
        return self.logits * numbers * wide + sliced

    def selected(self, wanted: int) -> int:
        """The logits of all columns, and those selected: an index of int64."""
        wide = max(self.w, FP32)
        return (self.logits * wide + wanted * (wide + INT)) * self.part.whole_vocab


def _int8(inputs: int, outputs: int) -> int:
    """Bytes a token of an 8-bit product: inputs in 16 and 8 bit, outliers; then int32 sums and 16 bit."""
    return max(6 * inputs, inputs + 8 * outputs)


@dataclass(frozen=True)
class RankWork:
    """One rank's parts of the models, and the batch that they compute: prefill, drafting, verification.

    `target` and `draft` are the rank's parts. `vocab` is the target's, `room` its cache's capacity. The rank
    that `decides` verifies; the rank that `drafts` samples the draft tokens.
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
        return tuple(own for own in (self.target, self.draft) if own is not None)

    def peaks(self) -> dict[str, Parts]:
        """The largest moment of each phase."""
        target, draft = self.target, self.draft
        phases: dict[str, Parts] = {PREFILL: {}}
        if target is not None:
            phases[PREFILL] = _sum(_largest(self._prefill(target)), self._shown(self._chunk(target)))
        if draft is not None:
            phases[DRAFT_PREFILL] = _largest(self._prefill(draft))
            phases[DRAFT_STEPS] = _largest(self._drafting(draft))
        if target is not None:
            phases[VERIFY] = _sum(_largest(self._verifying(target)), self._shown(self.work.columns))
        tokens = {TOKENS: INT * self.work.rows * (self.room + 1) + ROUNDING}
        return {phase: _sum(tokens, parts) for phase, parts in phases.items()}

    def graphs(self, own: RolePart) -> tuple[int, ...]:
        """Tokens of each CUDA graph of a role's steps, in each cache; none for a head.

        There is one for every number of tokens that may come up: rows that have ended or draft less make a
        step shorter, and loading a model runs steps of one and two tokens. One more serves short prompts.
        """
        if not own.spare:
            return ()
        tokens = max(self.work.rows * widest_steps(self.work.k)[own.role], 2)
        return own.caches * sizes_up_to(tokens, min(graph_sizes.WIDEST, own.capacity))

    def outputs_of_graphs(self, own: RolePart) -> int:
        """Bytes that a role's graphs keep: the logits of their tokens, and the states that a head reads."""
        shown = self.draft.part.head_inputs if own is self.target and self.draft is not None else 0
        return sum(self.graphs(own)) * (own.part.whole_vocab + shown) * max(width(own.dtype), FP32)

    def scratch_of_graphs(self, own: RolePart) -> int:
        """Bytes that a role's graphs share: those of the largest step, or of filters or a decision."""
        if not own.spare:
            return 0
        columns = self.work.columns if own is self.target else LAG
        rows = max(1, min(self.work.rows, MOST // columns))
        step = Forward(own, self.kernels, rows, columns, 1, rows * columns)
        prompt = Forward(own, self.kernels, 1, graph_sizes.WIDEST, 1, graph_sizes.WIDEST)
        given = self.work.rows * self.vocab * (2 * self.work.k + 1)
        decides = own is self.target and self.decides and given <= LARGEST
        moments = (*step.moments(), *prompt.moments())
        steps = [moment[HIDDEN] + moment.get(LOGITS, 0) for moment in moments]
        decoded = 0 if step._decodes_experts else step._dequantised()  # kernels of graphs read other codes
        filtering = SORTED * min(self.work.rows * columns * self.vocab, FILTERED)
        return max(self._deciding() * decides, filtering, max(steps) - decoded)

    def kept_by_graphs(self) -> int:
        """Returns the bytes that graphs read and give that filter, draw and decide.

        A decision reads K + 1 distributions and K of drafts. Rounds of every smaller K have graphs of their
        own: 1 + 3 + ... + (2 K + 1) = (K + 1)^2. Filters read logits and give these K + 1 distributions, or
        that of a draft.
        """
        columns = self.work.columns
        distributions = columns**2 + 1 + 2 * (columns * (columns + 1) // 2 + 1)
        return min(KEPT_BYTES, distributions * self.work.rows * self.vocab * FP32)

    def _prefill(self, own: RolePart) -> Iterator[Parts]:
        """The moments of the widest chunk with the longest span: the last column has logits.

        Short prompts are read by a compiled step, which gives logits of all their tokens.
        """
        rows, end = self.work.rows, min(self.work.prompt_tokens, own.part.context) - 1
        yield {}
        if end:
            short = graph_sizes.short_prompt(self.kernels.cpu) if own.compiled else 0
            tokens = min(rows * self._chunk(own), short)
            yield from Forward(own, self.kernels, rows, self._chunk(own), end, rows).moments()
            yield from Forward(own, self.kernels, 1, tokens, end, tokens).moments()

    def _chunk(self, own: RolePart) -> int:
        return min(self.work.prefill_chunk, min(self.work.prompt_tokens, own.part.context) - 1)

    def _shown(self, columns: int) -> Parts:
        """What a head reads of the target's pass: the states of layers, and as one tensor."""
        if self.target is None or self.draft is None or not self.draft.part.head_inputs:
            return {}
        numbers = self.work.rows * columns * self.draft.part.head_inputs
        return {STATES: 2 * numbers * max(width(self.target.dtype), FP32)}

    def _step(self, own: RolePart, columns: int) -> Forward:
        """A pass at the end of the text, with the longest span."""
        rows = self.work.rows
        return Forward(own, self.kernels, rows, columns, self.room, rows * columns)

    def _drafting(self, draft: RolePart) -> Iterator[Parts]:
        """K steps of the draft model; then all distributions as one tensor, and those it is made of."""
        k, rows, small = self.work.k, self.work.rows, self._small()
        one, wide = rows * self.vocab, max(width(draft.dtype), FP32)
        probs = k * one * wide if self.drafts else 0
        yield {}
        if k == 0:
            return
        widest = draft.part.head_block + 1 if draft.part.head_block else LAG
        first, later = self._step(draft, widest), self._step(draft, 1)
        yield from first.moments()
        yield {LOGITS: first.selected(rows), PROBS: small}
        for moment in later.moments():
            yield _sum(moment, {PROBS: probs + small})
        if self.drafts:  # logits; their distribution, and its cumulative sums in fp64 to sample from
            yield {LOGITS: one * wide, PROBS: probs + max(2 * FP64, wide) * one + small}
            ahead = probs if self.target is None else 0  # on ranks of its own the next drafts are made
            yield {LOGITS: one * wide, PROBS: 2 * probs + ahead + small}
        elif self.decides:
            yield {PROBS: 2 * k * one * wide + small}

    def _verifying(self, target: RolePart) -> Iterator[Parts]:
        """The target over K + 1 positions; then its distributions, in fp32 and, with drafts, in fp64."""
        k, one, small = self.work.k, self.work.rows * self.vocab, self._small()
        model, wide = self._step(target, self.work.columns), max(width(target.dtype), FP32)
        own = wide if self.draft is None else max(width(self.draft.dtype), FP32)
        has_probs = self.decides or (self.drafts and self.draft is not None)
        drafted = k * one * own if has_probs else 0  # the distributions of the proposal
        for moment in model.moments():
            yield _sum(moment, {PROBS: drafted})
        if not self.decides:
            return
        logits, probs = model.selected(0), model.columns * one * wide
        if self.draft is None:  # one-hot distributions of looked-up tokens, and a copy
            yield {PROBS: 2 * drafted}
        yield {LOGITS: logits, PROBS: drafted + 2 * probs + small}
        yield {LOGITS: logits, PROBS: drafted + probs + self._deciding() + small}

    def _deciding(self) -> int:
        """Bytes of a decision in fp64: both distributions; the residual or the minimum at the drafts; four
        distributions of one position."""
        k = self.work.k
        laws = 2 * k + 1 + max(k + 1, 4) if k else 2
        return laws * self.work.rows * self.vocab * FP64

    def _small(self) -> int:
        """Numbers a row and a position: tokens, probabilities, uniforms; the clocks of a race."""
        return self.work.rows * ((self.work.k + 1) * 32 * FP64 + 4 * FP64 * (int(self.vocab**0.5) + 2))


def total(parts: Parts) -> int:
    return sum(parts.values())


def _largest(moments: Iterable[Parts]) -> Parts:
    return max(moments, key=total)


def _sum(*parts: Parts) -> Parts:
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: sum(one.get(name, 0) for one in parts) for name in names}
