"""A key/value cache of fixed size: for each layer one tensor of slots, row after row of the batch.

Row r begins at slot r * capacity, and its position p is at slot r * capacity + p. To roll back is to forget a
length: slots behind a row's last position are never read (attention.py), and are written again when their
positions come again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from llama_ssp.models.attention import Attend, Pass
from llama_ssp.models.feed import Row
from llama_ssp.models.interface import Tally
from llama_ssp.models.kernels import large_pages

Shapes = list[tuple[int, int]]  # KV heads and head size of every layer


@dataclass(eq=False)
class SlotCache:
    """One model's keys and values, (KV heads, rows * capacity, head size) a layer."""

    rows: int
    capacity: int
    layers: list[tuple[Tensor, Tensor]]
    first: int = 0  # the first row's first slot; of a row that is used alone, its own
    tally: Tally = field(default_factory=Tally)

    @staticmethod
    def of(
        rows: int, capacity: int, shapes: Shapes, dtype: torch.dtype, device: torch.device, tally: Tally
    ) -> SlotCache:
        layers = []
        for heads, size in shapes:
            shape = heads, rows * capacity, size
            on_cpu = device.type == "cpu"
            keys, values = (
                large_pages.empty(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=device)
                for _ in "kv"
            )
            tally.add(keys)
            tally.add(values)
            layers.append((keys, values))
        return SlotCache(rows, capacity, layers, tally=tally)

    @cached_property
    def position_S(self) -> Tensor:
        """0, 1, 2, ...: the positions of a row, on the device, made once for all its passes."""
        return torch.arange(self.capacity, device=self.layers[0][0].device)

    @cached_property
    def first_S(self) -> Tensor:
        """The first row's first slot, for each of its positions."""
        return torch.full_like(self.position_S, self.first)

    def feed(self, rows: list[Row], attend: Attend) -> Pass:
        """Where the tokens of these rows stand. Of the first row alone they are slices of what is there."""
        if len(rows) > 1 or rows[0][0] != self.first:
            return Pass.of(rows, self.layers[0][0].device, attend)
        _, start, count = rows[0]
        own = slice(start, start + count)
        return Pass(
            position_T=self.position_S[own], first_T=self.first_S[:count], attend=attend, rows=tuple(rows)
        )

    def first_of(self, row: int) -> int:
        """Returns the row's first slot."""
        return self.first + row * self.capacity

    def row(self, index: int) -> SlotCache:
        """One row as a cache of its own, in the same memory."""
        return SlotCache(1, self.capacity, self.layers, self.first_of(index), self.tally)

    def clear(self, row: int) -> None:
        """Nothing has to be cleared: what is stale is never read."""
