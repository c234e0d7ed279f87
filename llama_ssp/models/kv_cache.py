"""The KV cache of a batch of texts: of the decoder, of heads and of transformers' modules.

Each layer has one tensor of slots for keys and one for values, (KV heads, slots, head size), with the slots
of one row after those of the other. Of a batch with 8 slots a row:

    slot        0 1 2 3 4 5 6 7 | 8 9 ...
    row         0               | 1
    position    0 1 2 3 4 . . . | 0 1 ...         position p of row r is at slot 8 r + p

Of transformers' modules a layer is (rows, KV heads, capacity, head size), as they give and take it.

To roll back is to forget a length: slots after a row's last position are stale. They are never seen, and are
written again when their positions come again.

Suffixes of shapes: B rows of a pass, G KV heads, N all slots, W columns, D numbers of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from llama_ssp.models.attention import Attend, Places, attend_rows
from llama_ssp.models.interface import Tally
from llama_ssp.models.kernels import large_pages
from llama_ssp.models.passes import RowSpan

KeysValues = tuple[Tensor, Tensor]  # of one layer: (G, N, D) each; of a module's (rows, G, capacity, D)
Caches = list[KeysValues]
Shapes = list[tuple[int, int]]  # KV heads and head size of every layer


@dataclass(eq=False, kw_only=True)
class KVCache:
    """One model's keys and values of `rows` texts with `capacity` slots each.

    `is_masked` says that attention also reads slots that it must not see, and gives them a weight of 0. Then
    these hold numbers at all times, because 0 times NaN is NaN.
    """

    rows: int
    capacity: int
    device: torch.device  # where positions are sent; a layer may be on another one
    layers: Caches = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    is_masked: bool = False
    _places_of_layers: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(
        *, rows: int, capacity: int, shapes: Shapes, dtype: torch.dtype, device: torch.device, tally: Tally
    ) -> KVCache:
        """Returns a cache with layers of these shapes, all of them on one device."""
        cache = KVCache(rows=rows, capacity=capacity, device=device, tally=tally)
        for heads, size in shapes:
            keys_GND = cache._slots(heads, size, dtype, device)
            values_GND = cache._slots(heads, size, dtype, device)
            cache.layers.append((keys_GND, values_GND))
        return cache

    def layer(self, number: int, key_BGWD: Tensor, value_BGWD: Tensor) -> KeysValues:
        """Returns the slots of a layer whose shape only its module knows, (rows, G, capacity, D) each.

        They are made at first use, on the device where the layer's keys and values are. Rows come before
        heads here, as in what modules give and take.
        """
        place = self._places_of_layers.setdefault(number, len(self.layers))
        if place == len(self.layers):
            keys_GND, values_GND = (
                self._slots(new_BGWD.shape[1], new_BGWD.shape[3], new_BGWD.dtype, new_BGWD.device)
                for new_BGWD in (key_BGWD, value_BGWD)
            )
            by_row = self.rows, -1, self.capacity
            keys_RGCD = keys_GND.view(*by_row, keys_GND.shape[-1])
            values_RGCD = values_GND.view(*by_row, values_GND.shape[-1])
            self.layers.append((keys_RGCD, values_RGCD))
        return self.layers[place]

    def _slots(self, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns new memory, (G, N, D), and counts it."""
        shape = heads, self.rows * self.capacity, size
        if device.type == "cpu":
            slots_GND = large_pages.empty(shape, dtype)
        else:
            slots_GND = torch.empty(shape, dtype=dtype, device=device)
        if self.is_masked:
            slots_GND.zero_()
        self.tally.add(slots_GND)
        return slots_GND

    @cached_property
    def position_S(self) -> Tensor:
        """0, 1, 2, ...: the positions of a row, on the device, made once for all passes."""
        return torch.arange(self.capacity, device=self.device)

    @cached_property
    def zero_S(self) -> Tensor:
        """The first slot of row 0, for each of its positions."""
        return torch.zeros_like(self.position_S)

    def places(self, spans: Sequence[RowSpan], attend: Attend = attend_rows) -> Places:
        """Returns where the tokens of these spans stand; they attend by this function."""
        rows = [(row * self.capacity, start, count) for row, start, count in spans]
        if len(rows) > 1:
            return Places.of(rows, self.device, attend)

        # Those of one row are slices of what is on the device already.
        ((first, start, count),) = rows
        position_T = self.position_S[start : start + count]
        first_T = self.zero_S[:count]
        if first:
            first_T = torch.full_like(position_T, first)
        return Places(position_T=position_T, first_T=first_T, attend=attend, rows=tuple(rows))

    def clear(self, row: int) -> None:
        """Forgets a row's text; its slots are zeroed where a NaN would reach other texts."""
        if self.is_masked:
            for keys_RGCD, values_RGCD in self.layers:
                keys_RGCD[row].zero_()
                values_RGCD[row].zero_()

    def free(self) -> None:
        """Lets go of the slots of all layers."""
        self.layers = []
