"""One forward pass in sizes: who walks through it, and the products and norms that layers are made of.

Layers (layers.py) and attention (attention.py) are walked by these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import metadata
from typing import Protocol

from llama_ssp.config import Dtype
from llama_ssp.plan.tape import Block, Tape
from llama_ssp.plan.weights import LAYER_NORM, Part

INT, FP32 = 8, 4
NF4_TOKENS = 4  # up to here bitsandbytes multiplies by 4 bit directly

# What oneDNN takes at a time of a product's inputs, rows and outputs, and what it notes beside.
ONEDNN_INPUTS, ONEDNN_ROWS, ONEDNN_OUTPUTS, ONEDNN_HEAD = 512, 256, 64, 1024


PACKED_SINCE = 5, 23  # of transformers


def packs_queries() -> bool:
    """Whether, for a single token, the queries that share a key are packed; before, keys were repeated."""
    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return False  # the dearer way
    return tuple(map(int, re.findall(r"\d+", installed)[:2])) >= PACKED_SINCE


@dataclass(frozen=True)
class Kernels:
    """Whose kernels compute: a GPU's, or a CPU's with so many threads' scratch (0: as a trace sees it).

    `packs` is what the modules of transformers do that is installed here.
    """

    cpu: bool
    threads: int = 0
    packs: bool = field(default_factory=packs_queries)


GPU, TRACED = Kernels(cpu=False), Kernels(cpu=True)


class AnyPasses(Protocol):
    """What a walk asks of the passes that it is one of (forward.Passes)."""

    tape: Tape
    part: Part
    dtype: Dtype
    rows: int
    kernels: Kernels
    elsewhere: Block | None

    @property
    def width(self) -> int: ...

    @property
    def cells(self) -> int: ...

    def store(self, layer_is_last: bool) -> None: ...


class Walk:
    """One pass, and what its modules are made of."""

    def __init__(self, passes: AnyPasses, columns: int, span: int) -> None:
        self.t, self.p, self.passes = passes.tape, passes.part, passes
        self.w, self.held, self.kernels = passes.width, passes.dtype, passes.kernels
        self.rows, self.columns, self.span = passes.rows, columns, span
        self.tokens = passes.rows * columns
        self.states = self.tokens * self.p.dim

    def hidden(self, *inputs: Block | None) -> Block:
        return self.t(self.states, self.w, *inputs)

    def norm(self, x: Block) -> Block:
        if self.p.family in LAYER_NORM:
            return self._layer_norm(x)
        return self.rms_norm(x, self.tokens, self.p.dim)

    def _layer_norm(self, x: Block) -> Block:
        y = self.hidden(x)
        statistics = self.w if self.kernels.cpu else FP32
        _mean, _spread = self.t(self.tokens, statistics), self.t(self.tokens, statistics)
        return y

    def rms_norm(self, x: Block, vectors: int, size: int) -> Block:
        """LlamaRMSNorm.forward; Gemma2RMSNorm.forward"""
        t, n = self.t, vectors * size
        converted = self.w != FP32
        if self.p.family == "gemma2":
            y = self._gemma_norm(t.same(x, n, FP32, converted), vectors, n)
            y = t(n, FP32, y, t(size, FP32, t.same(x, size, FP32, converted)))
            return t.same(y, n, self.w, converted)
        h = t.same(x, n, FP32, converted)
        variance = t(vectors, FP32, t(n, FP32, h))
        h = t(n, FP32, h, t(vectors, FP32, t(vectors, FP32, variance)))
        return t(n, self.w, t.same(h, n, self.w, converted))

    def _gemma_norm(self, x: Block, vectors: int, n: int) -> Block:
        t = self.t
        return t(n, FP32, x, t(vectors, FP32, t(vectors, FP32, t(vectors, FP32, t(n, FP32, x)))))

    def linear(self, x: Block, inputs: int, outputs: int) -> Block:
        """A linear layer, as its weights are held: bitsandbytes computes in 16 bit around 8 or 4."""
        t, m, n = self.t, self.tokens, self.tokens * outputs
        if self.held is Dtype.int8:
            return self._int8_linear(x, m * inputs, n)
        if self.held is Dtype.nf4 and m > NF4_TOKENS:  # many tokens: by a dequantised copy of the weight
            return t(n, self.w, x, t(inputs * outputs, self.w))
        return self.product(x, m, inputs, outputs)

    def product(self, x: Block, m: int, inputs: int, outputs: int) -> Block:
        """A matrix product; on a CPU oneDNN copies portions in bf16 (seen with AVX512 and one thread)."""
        y = self.t(m * outputs, self.w, x)
        if self.kernels.threads and self.held is Dtype.bf16:
            taken, made = min(-(-inputs // 32) * 32, ONEDNN_INPUTS), min(m, ONEDNN_ROWS)
            scratch = self.t(ONEDNN_OUTPUTS * (taken * self.w + made * FP32) + ONEDNN_HEAD, 1)
            del scratch
        return y

    def _int8_linear(self, x: Block, taken: int, made: int) -> Block:
        """MatMul8bitLt.forward, with some outliers"""
        t, w = self.t, self.w
        half = t(taken, 2, x)
        scales, small = t(self.tokens, FP32), t(taken, 1)
        outliers = t(taken, 1, t(taken, 2, half))
        del half, outliers
        whole = t(made, 4, small)
        y = t(made, w, t(made, 2, whole), whole)
        del whole
        y = t(made, w, y)
        del scales, small
        return y

    def wide(self, *inputs: Block) -> Block:
        return self.t(self.tokens * self.p.ffn, self.w, *inputs)

    def summed(self, x: Block, inputs: int, biased: bool = False) -> Block:
        """A linear layer whose inputs are cut: summed in place, and the bias added after."""
        y = self.linear(x, inputs, self.p.dim)
        return self.hidden(y) if biased and self.p.world > 1 else y
