"""The layers of a model in one forward pass, in sizes: transformers' modules and ours, line by line.

Each function mirrors the code named in its comment, with the same locals in the same order (tape.py says
why). The layers between the first and the last are like the last, and are not walked.
"""

from __future__ import annotations

from llama_ssp.plan.attention import attend
from llama_ssp.plan.tape import Block
from llama_ssp.plan.walk import FP32, INT, Walk
from llama_ssp.plan.weights import LAYER_NORM


class Layers(Walk):
    """The layers of one pass."""

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
