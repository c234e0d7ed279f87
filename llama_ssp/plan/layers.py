"""The layers of a model in one forward pass, in sizes: transformers' modules and ours, line by line.

Each function mirrors the code named in its comment, with the same locals in the same order (tape.py says
why). The layers between the first and the last are like the last, and are not walked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_ssp.config import Dtype
from llama_ssp.plan.attention import FP32, INT, attend
from llama_ssp.plan.tape import Block
from llama_ssp.plan.weights import LAYER_NORM

if TYPE_CHECKING:
    from llama_ssp.plan.forward import Passes

NF4_TOKENS = 4  # up to here bitsandbytes multiplies by 4 bit directly

# What oneDNN takes at a time of a product's inputs, rows and outputs, and what it notes beside.
ONEDNN_INPUTS, ONEDNN_ROWS, ONEDNN_OUTPUTS, ONEDNN_HEAD = 512, 256, 64, 1024


class Walk:
    """The layers of one pass."""

    def __init__(self, passes: Passes, columns: int, span: int) -> None:
        self.t, self.p, self.passes = passes.tape, passes.part, passes
        self.w, self.held, self.kernels = passes.width, passes.dtype, passes.kernels
        self.rows, self.columns, self.span = passes.rows, columns, span
        self.tokens = passes.rows * columns
        self.states = self.tokens * self.p.dim

    def backbone(self, token: Block) -> Block:
        embedded = self.embedding(token)
        if self.p.family in ("gpt_neo", "opt"):
            placed = self.hidden(embedded) if self.p.family == "gpt_neo" else self._opt_positions()
            hidden = self.hidden(embedded, placed)
            angles: tuple[Block, ...] = ()
        else:
            hidden, placed = embedded, None
            angles = self.rotary()
        outputs: tuple[Block, Block | None] = hidden, None
        for last in (False, True) if self.p.layers > 1 else (True,):
            outputs = self.layer(hidden, last)  # of the layer before, until there are new ones
            hidden = outputs[0]
        result = self.norm(hidden)
        del embedded, placed, angles
        return result

    def _opt_positions(self) -> Block:
        """Looks up positions moved by two."""
        return self.hidden(self.t(self.tokens, INT))

    def hidden(self, *inputs: Block | None) -> Block:
        return self.t(self.states, self.w, *inputs)

    def embedding(self, token: Block) -> Block:
        """On several ranks each looks up its own rows (load: the embedding's hooks)."""
        if self.p.world == 1:
            return self.scaled(self.hidden(token))
        elsewhere, row = self._own_rows(token)
        self.passes.elsewhere = elsewhere
        return self.hidden(self.scaled(self.hidden(row)))

    def scaled(self, looked_up: Block) -> Block:
        return self.hidden(looked_up) if self.p.family == "gemma2" else looked_up

    def _own_rows(self, token: Block) -> tuple[Block, Block]:
        row = self.t(self.tokens, INT, token)
        elsewhere = self.t(self.tokens, 1, self.t(self.tokens, 1, row), self.t(self.tokens, 1, row))
        return elsewhere, self.t(self.tokens, INT, row, elsewhere)

    def rotary(self) -> tuple[Block, Block]:
        """LlamaRotaryEmbedding.forward"""
        t, size = self.t, self.tokens * self.p.rotary_width
        frequencies = t(size // 2, FP32, t(self.tokens, FP32))
        angle = t(size, FP32, frequencies)
        cos = t(size, FP32, t(size, FP32, angle))
        sin = t(size, FP32, t(size, FP32, angle))
        converted = self.w != FP32
        return t.same(cos, size, self.w, converted), t.same(sin, size, self.w, converted)

    def layer(self, x: Block, last: bool) -> tuple[Block, Block | None]:
        """LlamaDecoderLayer.forward, Gemma2DecoderLayer.forward"""
        own = {"gpt_neo": self.gpt_neo_layer, "gpt_neox": self.gpt_neox_layer, "opt": self.opt_layer}
        if self.p.family in own:
            return own[self.p.family](x, last)
        residual = x
        h = self.norm(x)
        h, _weights = attend(self, h, last)
        if self.p.family == "gemma2":
            h = self.norm(h)
        h = self.hidden(residual, h)
        residual = h
        h = self.norm(h)
        h = self.mlp(h)
        if self.p.family == "gemma2":
            h = self.norm(h)
        return self.hidden(residual, h), None

    def gpt_neox_layer(self, x: Block, last: bool) -> tuple[Block, Block | None]:
        """GPTNeoXLayer.forward: attention and MLP side by side"""
        attended, _weights = attend(self, self.norm(x), last)
        fed = self.mlp(self.norm(x))
        return self.hidden(self.hidden(fed, attended), x), None

    def gpt_neo_layer(self, x: Block, last: bool) -> tuple[Block, Block | None]:
        """GPTNeoBlock.forward"""
        h = self.norm(x)
        attended, weights = attend(self, h, last)
        h = self.hidden(attended, x)
        residual = h
        h = self.norm(h)
        fed = self.mlp(h)
        y = self.hidden(residual, fed)
        del attended, fed
        return y, weights

    def opt_layer(self, x: Block, last: bool) -> tuple[Block, Block | None]:
        """OPTDecoderLayer.forward"""
        h = self.norm(x)
        h, _weights = attend(self, h, last)
        h = self.hidden(x, h)
        residual = h
        h = self.norm(h)
        h = self._up(h)
        h = self.wide(h)
        h = self.summed(h, self.p.ffn, biased=True)
        return self.hidden(residual, h), None

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

    def mlp(self, x: Block) -> Block:
        """LlamaMLP.forward, Phi3MLP.forward, GPTNeoXMLP.forward, GPTNeoMLP.forward"""
        if self.p.family in LAYER_NORM:
            h = self.linear(x, self.p.dim, self.p.ffn)
            h = self._new_gelu(h) if self.p.family == "gpt_neo" else self.wide(h)
            return self.summed(h, self.p.ffn, biased=True)
        if self.p.family == "phi3":
            gate_and_up = self.linear(x, self.p.dim, 2 * self.p.ffn)
            y = self.summed(self.wide(self.wide(gate_and_up)), self.p.ffn)
            del gate_and_up
            return y
        return self.summed(self.wide(self.wide(self._up(x)), self._up(x)), self.p.ffn)

    def _up(self, x: Block) -> Block:
        return self.linear(x, self.p.dim, self.p.ffn)

    def _new_gelu(self, x: Block) -> Block:
        """0.5 x (1 + tanh(c (x + d x^3))), a step at a time"""
        step = self.wide
        return step(step(x), step(step(step(step(x, step(step(x)))))))

    def summed(self, x: Block, inputs: int, biased: bool = False) -> Block:
        """A linear layer whose inputs are cut: summed in place, and the bias added after."""
        y = self.linear(x, inputs, self.p.dim)
        return self.hidden(y) if biased and self.p.world > 1 else y

    def head(self, x: Block, positions: int) -> Block:
        """load: GatheredHead.forward; the caps on gemma2's logits"""
        part, t, w = self.p, self.t, self.w
        logits = self.product(x, positions, part.dim, part.vocab)
        if part.world > 1:
            padded = t(positions * part.widest, w, logits)
            parts = [t(positions * part.widest, w, padded) for _ in range(part.world)]
            logits, own = t(positions * part.whole_vocab, w), logits
            del padded, parts, own
        for _ in range(3 if part.family == "gemma2" else 0):
            logits = t(positions * part.whole_vocab, w, logits)
        return logits
