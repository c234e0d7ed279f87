"""One forward pass of one rank's part of a model, in sizes: transformers' modules and ours, line by line.

Each function mirrors the code named in its comment, with the same locals in the same order (tape.py says
why). The layers between the first and the last are like the last, and are not walked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llama_ssp.config import Dtype
from llama_ssp.plan.attention import EAGER
from llama_ssp.plan.layers import Layers
from llama_ssp.plan.tape import Block, Tape
from llama_ssp.plan.walk import GPU, INT, Kernels
from llama_ssp.plan.weights import Part, width

CACHE, MASKS, HIDDEN, LOGITS = "cache", "masks", "activations", "logits"


@dataclass
class Passes:
    """One model's forward passes: its cache, and what the cache keeps of the last pass.

    `windowed` says of each kind of attention layers whether it looks
    back but so far.
    """

    tape: Tape
    part: Part
    dtype: Dtype
    rows: int
    capacity: int
    windowed: tuple[bool, ...] = (False,)
    kernels: Kernels = GPU
    _layers: list[Block] = field(default_factory=list)
    _kept: list[Block] = field(default_factory=list)
    elsewhere: Block | None = None  # which tokens were other ranks', as the embedding keeps it

    @property
    def width(self) -> int:
        """Bytes of an activation's number."""
        return width(self.dtype)

    def run(self, columns: int, span: int, last_only: bool) -> Block:
        """engine.runner.Runner._pass"""
        with self.tape.labelled(MASKS):
            token = self._integers(columns)  # the text's, cut to the vocabulary
        return self._logits(token, columns, span, last_only)

    def _logits(self, token: Block, columns: int, span: int, last_only: bool) -> Block:
        """load.causal.CausalModel.logits, and the model of every layer beneath it"""
        t, part = self.tape, self.part
        with t.labelled(MASKS):
            masks = [self._mask(columns, span, windowed) for windowed in self.windowed]
            self._kept = [self._positions(columns), *masks]
            last = t(1, INT) if last_only else None
            position = self._positions(columns)
        with t.labelled(HIDDEN):
            walk = Layers(self, columns, span)
            whole = walk.backbone(token)
            hidden = whole if last is None else t(self.rows * part.dim, self.width, whole)
        with t.labelled(LOGITS):
            logits = walk.head(hidden, self.rows * (1 if last_only else columns))
        del whole, position
        return logits

    def _mask(self, columns: int, span: int, windowed: bool) -> Block:
        """cache.Feed.visible; load.causal.CausalModel._mask"""
        t, cells = self.tape, self.rows * columns * span
        slot = t(span, INT)
        position = self._positions(columns)
        visible = t(cells, 1, slot, position)
        if windowed:
            visible = t(cells, 1, visible, t(cells, 1, self._integers(columns)))
        del slot, position
        if self.part.family not in EAGER:
            return visible
        return t(cells, self.width, t(cells, self.width), t(cells, 1, visible))

    def _positions(self, columns: int) -> Block:
        """cache.Feed.positions, and slots alike"""
        start = self.tape(self.rows, INT)
        position = self.tape(self.rows * columns, INT, start, self.tape(columns, INT))
        real = self.tape(self.rows * columns, 1, self.tape(self.rows, INT), self.tape(columns, INT))
        return self.tape(self.rows * columns, INT, self.tape(1, INT), position, real)

    def _integers(self, columns: int) -> Block:
        return self.tape(self.rows * columns, INT)

    def store(self, layer_is_last: bool) -> None:
        """cache.RaggedCache.update: makes a layer's keys and values, where there are none yet.

        The layers that are not walked have theirs before the last one has.
        """
        if not self.tape.notices(CACHE):
            return
        made = len(self._layers) // 2
        wanted = self.part.layers if layer_is_last else 1
        with self.tape.labelled(CACHE):
            for _ in range(wanted - made):
                for _ in "kv":
                    self._layers.append(self.tape(self.cells, self.width))

    @property
    def cells(self) -> int:
        """Numbers in one layer's keys."""
        return self.rows * self.part.key_width * (self.capacity + 1)
