"""An upper bound for what passes through memory, beside weights and caches, from shapes and config. No torch.

A forward pass and a round have a few moments at which most is there. Each moment is a sum of terms; every
term says which tensors it stands for. The largest moment is the bound. It does not follow the order in which
the code makes and drops its tensors: where two orders are possible, the larger sum is taken.

Sizes: `tokens` is rows x columns, `w` the bytes of an activation's number, `span` the slots that are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import metadata

from llama_ssp.config import Dtype
from llama_ssp.planner.weights import Part, weights, width

MASKS, HIDDEN, LOGITS, LAWS, TOKENS = "masks", "activations", "logits", "laws", "tokens"
PREFILL, DRAFT_PREFILL, DRAFT, VERIFY = "prefill", "draft prefill", "draft", "verify"

INT, FP32, FP64 = 8, 4, 8
LAG = 2  # as model_runner.py has it: columns of a draft's step behind a block that was accepted whole
GPU_ALIGNMENT = 16  # of a mask's rows in torch's memory-efficient attention
INTEGERS = 24  # int64 numbers a token: ids, positions, slots, and what they are made of
PACKED_SINCE = 5, 23  # of transformers
MIB = 2**20
ROUNDING = 2**15  # of small tensors to whole blocks
KERNEL_SCRATCH = 5 * MIB // 4  # a thread: tiles of a CPU's attention and matrix products

Parts = dict[str, int]


def packs_queries() -> bool:
    """Whether, for a single token, the queries that share a key are packed; before, keys were repeated."""
    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return False  # the larger bound
    return tuple(map(int, re.findall(r"\d+", installed)[:2])) >= PACKED_SINCE


@dataclass(frozen=True)
class Kernels:
    """The kernels that compute: a GPU's, or a CPU's with this number of threads.

    `packs` is what the installed modules of transformers do.
    """

    cpu: bool
    threads: int = 0
    packs: bool = field(default_factory=packs_queries)


GPU = Kernels(cpu=False)


@dataclass(frozen=True)
class Forward:
    """One forward pass of one rank's part of a model; `logits` is how many positions have logits."""

    part: Part
    dtype: Dtype
    windowed: tuple[bool, ...]  # of each kind of attention layer: a mask of its own
    kernels: Kernels
    rows: int
    columns: int
    span: int
    logits: int
    cells: int  # numbers in one layer's keys

    @property
    def w(self) -> int:
        return width(self.dtype)

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def eager(self) -> bool:
        return self.part.family.eager

    def masks(self) -> int:
        """A mask for each kind of layer, bool or numbers to add, and positions: kept until the next pass."""
        cells = len(self.windowed) * self.tokens * self.span * (self.w if self.eager else 1)
        return cells + INT * (INTEGERS * (self.tokens + self.rows) + self.span)

    def moments(self, before: int = 0) -> Iterator[Parts]:
        """What is there at each moment; `before` are masks that the cache keeps until there are new ones."""
        part, w, state = self.part, self.w, self.tokens * self.part.dim * self.w
        masks = self.masks()
        yield {MASKS: before + masks + self._masked()}
        # States that stay during a layer's work: embedded tokens, the layer's input, the norm's output or the
        # sum after attention; positions and their sum, or a norm more. And the cosines and sines.
        states = 3 + 2 * (part.family.position_rows is not None) + (part.family.norms > 2)
        stream = states * state + 2 * self.tokens * part.rotary_width * w
        beside = MIB + KERNEL_SCRATCH * self.kernels.threads + self._dequantised()
        worst = max(self._normed(), self._rotated(), self._attended(), state + self._fed())
        yield {MASKS: masks, HIDDEN: stream + worst + beside}
        last = (self.tokens + self.logits) * part.dim * w  # the last norm's output, and the columns wanted
        yield {MASKS: masks, HIDDEN: last + beside, LOGITS: self._head()}

    def _masked(self) -> int:
        """Bool masks while one is made: causal, windowed, both, inverted; and zeros to add."""
        return self.tokens * self.span * (3 + (self.w if self.eager else 0))

    def _normed(self) -> int:
        """A norm in fp32: the input and its square or product; then what is converted, and the output."""
        converted = 2 * self.w if self.w != FP32 else FP32
        return self.tokens * self.part.dim * (FP32 + max(FP32, converted)) + self._kept_scores()

    def _rotated(self) -> int:
        """Queries, keys and values, with what turns the queries: two products, halves and their sum."""
        part, w = self.part, self.w
        made = w * (part.query_width + 2 * part.key_width)
        turned = 4 * w * max(part.query_width, part.key_width)
        if part.family.qk_norm:
            turned = max(turned, part.query_width * (2 * FP32 + w))  # queries have a norm of their own
        if self.dtype is Dtype.int8:
            turned = max(turned, _int8(part.dim, part.query_width))
        copies = 2 if part.family.fused_qkv else 1  # the product of all three stays
        # A CPU writes 16 bit into a cache through a copy of the layer's keys in fp32.
        stored = self.cells * FP32 if self.kernels.cpu and w < FP32 else 0
        return self.tokens * copies * made + max(self.tokens * turned, stored)

    def _attended(self) -> int:
        """Attention: queries and outputs, repeated keys and values, scores or a mask of the kernel."""
        part, w = self.part, self.w
        fused = w * (part.query_width + 2 * part.key_width) if part.family.fused_qkv else 0
        made = self.tokens * (3 * w * part.query_width + FP32 * part.queries + fused)
        out = self.tokens * w * (self._sums * part.dim + 2 * part.query_width) + self._kept_scores()
        repeated = self.rows * part.query_width * self.span
        if part.family.masks_inside:  # in fp32: queries, keys, a step and the next
            wide = self.tokens * part.query_width * FP32 + repeated * FP32 * (w < FP32)
            return max(out, made + wide + self._scores(2 * FP32 + w))
        shared = 0 if part.queries == part.kvs else 1 if part.kvs == 1 else 2
        if self.eager:  # a step and the next; then a softmax in fp32, which a CPU converts for
            step = 2 * w if w >= FP32 else w + 2 * FP32 if self.kernels.cpu else 2 * w + FP32
            return max(out, made + shared * repeated * w + self._scores(step))
        packed = self.columns == 1 and self.kernels.packs
        copies = 2 * repeated * w if shared == 2 and not packed else 0  # one key head is only looked at
        bias = self.tokens * self.span * w  # the mask as numbers to add; a GPU's kernel may pad its rows
        padded = 0 if self.kernels.cpu else self.tokens * (self.span + GPU_ALIGNMENT) * w
        return max(out, made + copies + bias + padded)

    @property
    def _sums(self) -> int:
        """Outputs of a layer that is cut by inputs: a bias behind the sum over ranks makes a second one."""
        return 2 if self.part.family.layer_norm else 1

    def _kept_scores(self) -> int:
        """Scores stay until the layer's end, and GPT-Neo's a layer more."""
        return self._scores(self.w * (2 if self.part.family.masks_inside else 1))

    def _scores(self, step: int) -> int:
        """Where scores are tensors: bytes of one for each query and key, times `step`."""
        return step * self.rows * self.part.queries * self.columns * self.span if self.eager else 0

    def _fed(self) -> int:
        """The feed-forward layer, and its output."""
        part, w = self.part, self.w
        halves = 2 if part.family.fused_mlp else 1  # gate and up are one product
        inside = part.ffn * w * part.family.mlp_states
        if self.dtype is Dtype.int8:
            up = part.ffn * w + _int8(part.dim, halves * part.ffn)
            inside = max(inside, up, part.ffn * w * halves + _int8(part.ffn, part.dim))
        out = part.ffn * w * halves + self._sums * part.dim * w
        return self.tokens * max(inside, out) + self._kept_scores()

    def _dequantised(self) -> int:
        """4 bit: of a layer's largest matrix a copy in 16 bit."""
        if self.dtype is not Dtype.nf4:
            return 0
        return self.w * max(weight.count for weight in weights(self.part) if weight.linear)

    def _head(self) -> int:
        """Logits; gathered from several ranks: a part, its padded copy, all parts, the whole."""
        part, numbers = self.part, self.part.whole_vocab * (2 if self.part.family.softcap else 1)
        if part.world > 1:
            numbers = max(numbers, part.vocab + (1 + part.world) * part.widest + part.whole_vocab)
        return self.logits * numbers * self.w

    def picked(self, wanted: int) -> int:
        """The logits of all columns, and those wanted: with an index of int64, on a CPU through fp32."""
        narrow = FP32 if self.kernels.cpu and self.w < FP32 else 0
        return (self.logits * self.w + wanted * (self.w + INT + narrow)) * self.part.whole_vocab


def _int8(inputs: int, outputs: int) -> int:
    """Bytes a token of an 8-bit product: inputs in 16 and 8 bit and outliers; then int32 sums and 16 bit."""
    return max(6 * inputs, inputs + 8 * outputs)


@dataclass(frozen=True)
class Round:
    """A batch on one rank: prefill of both models, drafting, verifying. `vocab` is the target's.

    `target` and `draft` are passes whose rows, columns and spans are filled in here.
    """

    target: Forward | None
    draft: Forward | None
    vocab: int
    rows: int
    prompt: int
    room: int
    k: int
    chunk: int
    decides: bool
    drafts: bool

    def peaks(self) -> dict[str, Parts]:
        """Each phase's largest moment."""
        target, draft = self.target, self.draft
        phases: dict[str, list[Parts]] = {PREFILL: [{}]}
        kept = 0  # masks of the target's last pass, which its cache keeps while the draft model runs
        if target is not None:
            prefill = self._prefill(target, self.prompt - 1)
            phases[PREFILL] = list(prefill.moments(before=prefill.masks())) if prefill.span else [{}]
            kept = max(prefill.masks(), self._step(target, self.k + 1).masks())
        if draft is not None:
            prefill = self._prefill(draft, min(self.prompt, draft.part.context) - 1)
            moments = list(prefill.moments(before=prefill.masks())) if prefill.span else [{}]
            phases[DRAFT_PREFILL] = [_sum(moment, {MASKS: kept}) for moment in moments]
            phases[DRAFT] = [_sum(moment, {MASKS: kept}) for moment in self._drafting(draft, prefill.masks())]
        if target is not None:
            own = max(prefill.masks(), self._step(draft, LAG).masks()) if draft is not None else 0
            phases[VERIFY] = [_sum(moment, {MASKS: own}) for moment in self._verifying(target, kept)]
        tokens = {TOKENS: INT * self.rows * (self.room + 1) + ROUNDING}
        return {name: _sum(tokens, _largest(moments)) for name, moments in phases.items()}

    def _prefill(self, model: Forward, end: int) -> Forward:
        """The widest chunk with the longest span; logits of the last column only."""
        return replace(model, columns=min(self.chunk, end), span=end, logits=self.rows)

    def _step(self, model: Forward, columns: int) -> Forward:
        """A pass at the end of the text, where spans are longest; a compiled step has two columns or more."""
        if model.kernels.cpu and self.rows == 1:
            columns = max(columns, 2)
        return replace(model, columns=columns, span=self.room, logits=self.rows * columns)

    def _drafting(self, draft: Forward, before: int) -> Iterator[Parts]:
        """K steps of the draft model, then all distributions as one tensor, beside those it is made of."""
        one, wide, small = self.rows * self.vocab, max(draft.w, FP32), self._small()
        laws = self.k * one * wide if self.drafts else 0
        yield {MASKS: before}
        if self.k:
            first, later = self._step(draft, LAG), self._step(draft, 1)
            yield from first.moments(before)
            yield {MASKS: first.masks(), LOGITS: first.picked(self.rows), LAWS: small}
            for moment in later.moments():
                yield _sum(moment, {LAWS: laws + small})
        if (
            self.k and self.drafts
        ):  # logits; their distribution, and what is cumulated of it in fp64 to draw from
            logits = one * draft.w
            yield {LOGITS: logits, LAWS: laws + max(2 * FP64, wide) * one + small}
            yield {LOGITS: logits, LAWS: 2 * laws + small}
        elif self.k and self.decides:
            yield {LAWS: 2 * self.k * one * wide + small}

    def _verifying(self, target: Forward, before: int) -> Iterator[Parts]:
        """The target over K drafts and one more; then its distributions, in fp32 and, where drafts stand, in
        fp64."""
        model, wide, one = self._step(target, self.k + 1), max(target.w, FP32), self.rows * self.vocab
        own = wide if self.draft is None else max(self.draft.w, FP32)
        has_laws = self.decides or (self.drafts and self.draft is not None)
        drafted = self.k * one * own if has_laws else 0  # the distributions of the proposal
        for moment in model.moments(before):
            yield _sum(moment, {LAWS: drafted})
        if not self.decides:
            return
        logits, probs = model.picked(0), (self.k + 1) * one * wide
        if (
            self.draft is None
        ):  # looked-up tokens are certain: their distributions are made, and made like another
            yield {LAWS: 2 * drafted}
        yield {MASKS: model.masks(), LOGITS: logits, LAWS: drafted + 2 * probs + self._small()}
        # In fp64: both distributions; of the drafts what is left over, or common; four distributions of one
        # position.
        double = (2 * self.k + 1 + max(self.k + 1, 4)) * one * FP64 if self.k else 2 * one * FP64
        yield {MASKS: model.masks(), LOGITS: logits, LAWS: drafted + probs + double + self._small()}

    def _small(self) -> int:
        """Numbers a row and a position: tokens, chances, coins; the clocks of a draw by races."""
        return self.rows * ((self.k + 1) * 32 * FP64 + 4 * FP64 * (int(self.vocab**0.5) + 2))


def _sum(*parts: Parts) -> Parts:
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: sum(one.get(name, 0) for one in parts) for name in names}


def _largest(moments: list[Parts]) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()), default={})
