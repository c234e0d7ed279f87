"""An upper bound for the tensors of a round beyond weights and caches, from shapes and config. No torch.

A forward pass and a round have a few moments at which memory peaks. Each moment is a sum of terms; every term
says which tensors it stands for. The largest moment is the bound. It does not follow the order in which the
code makes and frees its tensors: where two orders are possible, the larger sum is taken.

Sizes: `tokens` is rows x columns, `w` the bytes of an activation, `span` the cache slots that are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata

from llama_ssp.config import Dtype
from llama_ssp.planner.weights import Part, RolePart, width
from llama_ssp.planner.workload import MIB, Workload

MASKS, HIDDEN, LOGITS, PROBS, TOKENS = "masks", "activations", "logits", "laws", "tokens"
PREFILL, DRAFT_PREFILL, DRAFT_STEPS, VERIFY = "prefill", "draft prefill", "draft", "verify"

INT, FP32, FP64 = 8, 4, 8
LAG = 2  # model_runner.LAG: columns of a draft step after a fully accepted block
GPU_ALIGNMENT = 16  # of a mask's rows in torch's memory-efficient attention
INTEGERS = 24  # int64 numbers a token: ids, positions, slots, and what they are made of
PACKED_SINCE = 5, 23  # of transformers
ROUNDING = 2**15  # of small tensors to whole blocks
KERNEL_SCRATCH = 5 * MIB // 4  # a thread: tiles of a CPU's attention and matrix products

Parts = dict[str, int]


def packs_queries() -> bool:
    """Whether transformers packs a single token's queries that share a key, instead of repeating keys."""
    with suppress(metadata.PackageNotFoundError):
        numbers = re.findall(r"\d+", metadata.version("transformers"))
        return tuple(map(int, numbers[:2])) >= PACKED_SINCE
    return False  # the larger bound


@dataclass(frozen=True)
class Kernels:
    """A GPU's kernels, or a CPU's with this number of threads; `packs` as in `packs_queries`."""

    cpu: bool
    threads: int = 0
    packs: bool = field(default_factory=packs_queries)


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
    def part(self) -> Part:
        return self.own.part

    @property
    def w(self) -> int:
        return width(self.own.dtype)

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    def masks(self) -> int:
        """A mask for each kind of layer, bool or to be added, and positions: kept until the next pass."""
        cells = self.own.masks * self.tokens * self.span * (self.w if self.part.family.eager else 1)
        return cells + INT * (INTEGERS * (self.tokens + self.rows) + self.span)

    def moments(self, before: int = 0) -> Iterator[Parts]:
        """The tensors at each moment; `before` is the masks of the last pass, which the cache still holds."""
        part, w, state = self.part, self.w, self.tokens * self.part.dim * self.w
        masks = self.masks()
        # While a mask is made: causal, windowed, both, inverted (bool), and zeros to add.
        cells = self.tokens * self.span * (3 + (w if part.family.eager else 0))
        yield {MASKS: before + masks + cells}
        # States that live while a layer computes: embedded tokens, its input, the norm's output or the sum
        # after attention; positions and their sum, or another norm. And the cosines and sines.
        states = 3 + 2 * (part.family.position_rows is not None) + (part.family.norms > 2)
        stream = states * state + 2 * self.tokens * part.rotary_width * w
        scratch = MIB + KERNEL_SCRATCH * self.kernels.threads + self._dequantised()
        worst = max(self._normed(), self._rotated(), self._attended(), state + self._fed())
        yield {MASKS: masks, HIDDEN: stream + worst + scratch}
        last = (self.tokens + self.logits) * part.dim * w  # the last norm's output, and the selected columns
        yield {MASKS: masks, HIDDEN: last + scratch, LOGITS: self._head()}

    def _normed(self) -> int:
        """A norm in fp32: the input and its square or product; then the converted input and the output."""
        converted = 2 * self.w if self.w != FP32 else FP32
        return self.tokens * self.part.dim * (FP32 + max(FP32, converted)) + self._kept_scores()

    def _rotated(self) -> int:
        """Queries, keys and values, and the rotation of queries: two products, halves and their sum."""
        part, w = self.part, self.w
        made = w * (part.query_width + 2 * part.key_width)
        turned = 4 * w * max(part.query_width, part.key_width)
        if part.family.qk_norm:
            turned = max(turned, part.query_width * (2 * FP32 + w))  # queries have a norm of their own
        if self.own.dtype is Dtype.int8:
            turned = max(turned, _int8(part.dim, part.query_width))
        copies = 2 if part.family.fused_qkv else 1  # the product of all three stays
        # A CPU writes 16 bit into a cache through a copy of the layer's keys in fp32.
        stored = self.own.keys(self.rows) * FP32 if self.kernels.cpu and w < FP32 else 0
        return self.tokens * copies * made + max(self.tokens * turned, stored)

    def _attended(self) -> int:
        """Attention: queries and outputs, repeated keys and values, scores or the kernel's mask."""
        part, w = self.part, self.w
        fused = w * (part.query_width + 2 * part.key_width) if part.family.fused_qkv else 0
        made = self.tokens * (3 * w * part.query_width + FP32 * part.queries + fused)
        out = self.tokens * w * (self._sums() * part.dim + 2 * part.query_width) + self._kept_scores()
        repeated = self.rows * part.query_width * self.span
        if part.family.masks_inside:  # in fp32: queries, keys, a step and the next
            wide = self.tokens * part.query_width * FP32 + repeated * FP32 * (w < FP32)
            return max(out, made + wide + self._scores(2 * FP32 + w))
        shared = 0 if part.queries == part.kvs else 1 if part.kvs == 1 else 2
        if part.family.eager:  # a step and the next; then a softmax in fp32, for which a CPU converts
            step = 2 * w if w >= FP32 else w + 2 * FP32 if self.kernels.cpu else 2 * w + FP32
            return max(out, made + shared * repeated * w + self._scores(step))
        packed = self.columns == 1 and self.kernels.packs
        copies = 2 * repeated * w if shared == 2 and not packed else 0  # one key head is a view
        bias = self.tokens * self.span * w  # the mask to be added; a GPU's kernel may pad its rows
        padded = 0 if self.kernels.cpu else self.tokens * (self.span + GPU_ALIGNMENT) * w
        return max(out, made + copies + bias + padded)

    def _sums(self) -> int:
        """Outputs of a row-split layer: a bias after the all-reduce makes a second one."""
        return 2 if self.part.family.layer_norm else 1

    def _kept_scores(self) -> int:
        """Scores stay until the layer's end, and GPT-Neo's a layer more."""
        return self._scores(self.w * (2 if self.part.family.masks_inside else 1))

    def _scores(self, step: int) -> int:
        """Scores where they are tensors: one for each query and key, of `step` bytes."""
        if not self.part.family.eager:
            return 0
        return step * self.part.queries * self.tokens * self.span

    def _fed(self) -> int:
        """The feed-forward layer, and its output."""
        part = self.part
        dense = self._dense() if part.expert_layers < part.layers else 0
        return self.tokens * max(dense, self._routed()) + self._kept_scores()

    def _dense(self) -> int:
        """An MLP, a token."""
        part, w = self.part, self.w
        halves = 2 if part.family.fused_mlp else 1  # gate and up are one product
        inside = part.ffn * w * part.family.mlp_states
        if self.own.dtype is Dtype.int8:
            up = part.ffn * w + _int8(part.dim, halves * part.ffn)
            inside = max(inside, up, part.ffn * w * halves + _int8(part.ffn, part.dim))
        out = part.ffn * w * halves + self._sums() * part.dim * w
        return max(inside, out)

    def _routed(self) -> int:
        """Experts, a token, if all choose the same one: its inputs, what it makes of them, and the sum."""
        part, w = self.part, self.w
        if not part.expert_layers:
            return 0
        choice = part.experts * (FP32 + w) + part.experts_per_token * (2 * FP32 + 3 * INT)
        return choice + w * (3 * part.dim + 5 * part.expert_ffn)

    def _dequantised(self) -> int:
        """4 bit: a layer's largest matrix, in 16 bit."""
        return self.w * self.part.largest_matrix if self.own.dtype is Dtype.nf4 else 0

    def _head(self) -> int:
        """Logits; over several ranks: a part, its padded copy, all gathered parts, the whole."""
        part, numbers = self.part, self.part.whole_vocab * (2 if self.part.family.softcap else 1)
        if part.world > 1:
            numbers = max(numbers, part.vocab + (1 + part.world) * part.widest + part.whole_vocab)
        return self.logits * numbers * self.w

    def selected(self, wanted: int) -> int:
        """The logits of all columns, and those selected: an index of int64; on a CPU through fp32."""
        narrow = FP32 if self.kernels.cpu and self.w < FP32 else 0
        return (self.logits * self.w + wanted * (self.w + INT + narrow)) * self.part.whole_vocab


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
        """The largest moment of each phase.

        While one model runs, the other's cache still holds the masks of its last pass.
        """
        target, draft = self.target, self.draft
        phases: dict[str, Parts] = {PREFILL: {}}
        of_target = of_draft = 0  # bytes of those masks
        if target is not None:
            moments, masks = self._prefill(target)
            of_target = max(masks, self._step(target, self.work.k + 1).masks())
            phases[PREFILL] = _largest(moments)
        if draft is not None:
            moments, masks = self._prefill(draft)
            of_draft = max(masks, self._step(draft, LAG).masks())
            phases[DRAFT_PREFILL] = _largest(moments, of_target)
            phases[DRAFT_STEPS] = _largest(self._drafting(draft, masks), of_target)
        if target is not None:
            phases[VERIFY] = _largest(self._verifying(target, of_target), of_draft)
        tokens = {TOKENS: INT * self.work.rows * (self.room + 1) + ROUNDING}
        return {phase: _sum(tokens, parts) for phase, parts in phases.items()}

    def _prefill(self, own: RolePart) -> tuple[Iterable[Parts], int]:
        """The moments and the masks of the widest chunk with the longest span; the last column has logits."""
        rows, end = self.work.rows, min(self.work.prompt_tokens, own.part.context) - 1
        widest = Forward(own, self.kernels, rows, min(self.work.prefill_chunk, end), end, rows)
        masks = widest.masks()
        return widest.moments(before=masks) if end else [{}], masks

    def _step(self, own: RolePart, columns: int) -> Forward:
        """A pass at the end of the text, with the longest span; a compiled step has two columns or more."""
        rows = self.work.rows
        if self.kernels.cpu and rows == 1:
            columns = max(columns, 2)
        return Forward(own, self.kernels, rows, columns, self.room, rows * columns)

    def _drafting(self, draft: RolePart, before: int) -> Iterator[Parts]:
        """K steps of the draft model; then all distributions as one tensor, and those it is made of."""
        k, rows, small = self.work.k, self.work.rows, self._small()
        one, w = rows * self.vocab, width(draft.dtype)
        wide = max(w, FP32)
        probs = k * one * wide if self.drafts else 0
        yield {MASKS: before}
        if k == 0:
            return
        first, later = self._step(draft, LAG), self._step(draft, 1)
        yield from first.moments(before)
        yield {MASKS: first.masks(), LOGITS: first.selected(rows), PROBS: small}
        for moment in later.moments():
            yield _sum(moment, {PROBS: probs + small})
        if self.drafts:  # logits; their distribution, and its cumulative sums in fp64 to sample from
            yield {LOGITS: one * w, PROBS: probs + max(2 * FP64, wide) * one + small}
            yield {LOGITS: one * w, PROBS: 2 * probs + small}
        elif self.decides:
            yield {PROBS: 2 * k * one * wide + small}

    def _verifying(self, target: RolePart, before: int) -> Iterator[Parts]:
        """The target over K + 1 positions; then its distributions, in fp32 and, with drafts, in fp64."""
        k, one, small = self.work.k, self.work.rows * self.vocab, self._small()
        model, wide = self._step(target, k + 1), max(width(target.dtype), FP32)
        own = wide if self.draft is None else max(width(self.draft.dtype), FP32)
        has_probs = self.decides or (self.drafts and self.draft is not None)
        drafted = k * one * own if has_probs else 0  # the distributions of the proposal
        for moment in model.moments(before):
            yield _sum(moment, {PROBS: drafted})
        if not self.decides:
            return
        logits, probs = model.selected(0), (k + 1) * one * wide
        if self.draft is None:  # one-hot distributions of looked-up tokens, and a copy
            yield {PROBS: 2 * drafted}
        yield {MASKS: model.masks(), LOGITS: logits, PROBS: drafted + 2 * probs + small}
        # In fp64: both distributions; the residual or the minimum at the drafts; four distributions of one
        # position.
        double = (2 * k + 1 + max(k + 1, 4)) * one * FP64 if k else 2 * one * FP64
        yield {MASKS: model.masks(), LOGITS: logits, PROBS: drafted + probs + double + small}

    def _small(self) -> int:
        """Numbers a row and a position: tokens, probabilities, uniforms; the clocks of a race."""
        return self.work.rows * ((self.work.k + 1) * 32 * FP64 + 4 * FP64 * (int(self.vocab**0.5) + 2))


def total(parts: Parts) -> int:
    return sum(parts.values())


def _largest(moments: Iterable[Parts], masks: int = 0) -> Parts:
    """The largest moment, with the masks of the other model."""
    return _sum(max(moments, key=total), {MASKS: masks})


def _sum(*parts: Parts) -> Parts:
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: sum(one.get(name, 0) for one in parts) for name in names}
