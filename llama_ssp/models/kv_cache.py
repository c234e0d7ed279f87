"""The cache of a batch of texts: of the decoder, of heads and of transformers' modules.

A layer with attention has one tensor of slots for keys and one for values, (KV heads, slots, head size), with
the slots of one row after those of the other. Of a batch with 8 slots a row:

    slot        0 1 2 3 4 5 6 7 | 8 9 ...
    row         0               | 1
    position    0 1 2 3 4 . . . | 0 1 ...         position p of row r is at slot 8 r + p

Of transformers' modules a layer is (rows, KV heads, capacity, head size), as they give and take it.

A layer with linear attention keeps, of each row, the states after its last positions, as many as a roll back
may go back, and the inputs of its convolution. Both are rings, which later positions write over. Of a row
with a ring of 4 states that was fed 6 tokens:

    place       0 1 2 3
    position    4 5 2 3         the state after position p is at place p mod 4

To roll back is to forget a length: slots after a row's last position are stale. They are never seen, and are
written again when their positions come again. So are states: a pass that begins at position s goes on from
the state after position s - 1, whatever was fed after it. Nothing is copied, and nothing computed again.

Suffixes of shapes: B rows of a pass, G KV heads, N all slots, W columns, D numbers of a head. Of states: M
inputs of the convolution and C channels, S states of H heads, (D, E) each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from llama_ssp.errors import ModelError
from llama_ssp.models.attention import Attend, Places, attend_rows
from llama_ssp.models.cache_layout import CacheShape, DeltaShape
from llama_ssp.models.graph_sizes import ring_of
from llama_ssp.models.interface import Tally
from llama_ssp.models.kernels import large_pages
from llama_ssp.models.passes import RowSpan, sent

# Of one layer. Keys and values: (G, N, D) each; of a module's (rows, G, capacity, D). Or inputs of the
# convolution, (M, C); states, (S, H, D, E); and what compiled steps need to find them, `place_3`.
LayerCache = tuple[Tensor, ...]
Caches = list[LayerCache]


@dataclass(eq=False, kw_only=True)
class KVCache:
    """One model's keys and values, or states, of `rows` texts with `capacity` slots each.

    `is_masked` says that attention also reads slots that it must not see, and gives them a weight of 0. Then
    these hold numbers at all times, because 0 times NaN is NaN. `ring` is how many states a row has; 0: none.
    """

    rows: int
    capacity: int
    device: torch.device  # where positions are sent; a layer may be on another one
    layers: Caches = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    is_masked: bool = False
    ring: int = 0
    _places_of_layers: dict[int, int] = field(default_factory=dict)
    _states: list[tuple[int, int]] = field(init=False)  # a row has those after `first` to `last` tokens

    def __post_init__(self) -> None:
        self._states = [(1, 0)] * self.rows

    @staticmethod
    def of(
        *,
        rows: int,
        capacity: int,
        shapes: Sequence[CacheShape],
        dtype: torch.dtype,
        device: torch.device,
        tally: Tally,
        rewinds: int = 0,
        spare: int = 0,
    ) -> KVCache:
        """Returns a cache with layers of these shapes, all of them on one device.

        A row may be rolled back by `rewinds` tokens. `spare` slots are for pads of graphs, which then have
        states of their own, too.
        """
        has_states = any(isinstance(shape, DeltaShape) for shape in shapes)
        ring = ring_of(rewinds) if has_states else 0
        cache = KVCache(rows=rows, capacity=capacity, device=device, tally=tally, ring=ring)
        slots = rows * capacity + spare
        texts = rows + 1 if spare else rows
        place_3 = cache.new(3, dtype=torch.int64) if has_states else torch.empty(0)
        wide = torch.promote_types(dtype, torch.float32)
        for shape in shapes:
            if isinstance(shape, DeltaShape):
                inputs_MC = cache.new(texts * (ring + shape.tail), shape.channels, dtype=dtype)
                sizes = shape.heads, shape.key_dim, shape.value_dim
                states_SHDE = cache.new(texts * ring, *sizes, dtype=wide)
                cache.layers.append((inputs_MC, states_SHDE, place_3))
            else:
                heads, size = shape
                keys_GND = cache.new(heads, slots, size, dtype=dtype)
                values_GND = cache.new(heads, slots, size, dtype=dtype)
                cache.layers.append((keys_GND, values_GND))
        cache.take()
        return cache

    @torch.inference_mode()  # the memory may have been made in it
    def take(self) -> None:
        """Says in the layers' memory where this cache's rows are; another cache may have had the memory."""
        place_3 = next((layer[2] for layer in self.layers if has_states(layer)), None)
        if place_3 is not None:
            place_3.copy_(sent([self.capacity, self.ring, self.rows], self.device))

    def layer(self, number: int, key_BGWD: Tensor, value_BGWD: Tensor) -> LayerCache:
        """Returns the slots of a layer whose shape only its module knows, (rows, G, capacity, D) each.

        They are made at first use, on the device where the layer's keys and values are. Rows come before
        heads here, as in what modules give and take.
        """
        place = self._places_of_layers.setdefault(number, len(self.layers))
        if place == len(self.layers):
            keys_GND, values_GND = (
                self.new(
                    new_BGWD.shape[1],
                    self.rows * self.capacity,
                    new_BGWD.shape[3],
                    dtype=new_BGWD.dtype,
                    device=new_BGWD.device,
                )
                for new_BGWD in (key_BGWD, value_BGWD)
            )
            by_row = self.rows, -1, self.capacity
            keys_RGCD = keys_GND.view(*by_row, keys_GND.shape[-1])
            values_RGCD = values_GND.view(*by_row, values_GND.shape[-1])
            self.layers.append((keys_RGCD, values_RGCD))
        return self.layers[place]

    def new(self, *shape: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Returns new memory, and counts it; by default on the device of the positions."""
        device = device or self.device
        if device.type == "cpu":
            memory = large_pages.empty(shape, dtype)
        else:
            memory = torch.empty(shape, dtype=dtype, device=device)
        if self.is_masked:
            memory.zero_()
        self.tally.add(memory)
        return memory

    @cached_property
    def position_S(self) -> Tensor:
        """0, 1, 2, ...: the positions of a row, on the device, made once for all passes."""
        return torch.arange(self.capacity, device=self.device)

    @cached_property
    def zero_S(self) -> Tensor:
        """The first slot of row 0, for each of its positions."""
        return torch.zeros_like(self.position_S)

    def places(self, spans: Sequence[RowSpan], attend: Attend = attend_rows) -> Places:
        """Returns where the tokens of these spans stand, which are fed now; they attend by this function."""
        if self.ring:
            self.feed(spans)
        rows = [(row * self.capacity, start, count) for row, start, count in spans]
        if len(rows) > 1:
            places = Places.of(rows, self.device, attend)
        else:  # those of one row are slices of what is on the device already
            ((first, start, count),) = rows
            position_T = self.position_S[start : start + count]
            first_T = self.zero_S[:count]
            if first:
                first_T = torch.full_like(position_T, first)
            places = Places(position_T=position_T, first_T=first_T, attend=attend, rows=tuple(rows))
        places.capacity = self.capacity
        places.ring = self.ring
        return places

    def resumable(self, row: int, length: int) -> int:
        """Returns from which of a row's first `length` tokens on a pass can go on: `length`, or else 0.

        Keys and values are there for all tokens. Of states there may be none after so many tokens: then the
        text is read anew.
        """
        if not self.ring:
            return length
        first, last = self._states[row]
        return length if first <= length <= last else 0

    def feed(self, spans: Sequence[RowSpan]) -> None:
        """Notes which states there are after this pass. Raises ModelError for a state that is gone."""
        for row, start, count in spans:
            if not count:
                continue
            first, last = self._states[row]
            if start and not first <= start <= last:
                raise ModelError(
                    "a text cannot go on from a state that is not kept",
                    where=f"row {row}",
                    found=f"{start} tokens",
                    allowed=f"0, {first}..{last} tokens",
                    fix="report it",
                )
            end = start + count
            self._states[row] = max(first if start else 1, end + 1 - self.ring), end

    def clear(self, row: int) -> None:
        """Forgets a row's text; its slots are zeroed where a NaN would reach other texts."""
        self._states[row] = (1, 0)
        if self.is_masked:
            for keys_RGCD, values_RGCD in self.layers:
                keys_RGCD[row].zero_()
                values_RGCD[row].zero_()

    def free(self) -> None:
        """Lets go of the slots of all layers."""
        self.layers = []


def has_states(layer: LayerCache) -> bool:
    """Returns whether a layer keeps states, and not keys and values."""
    return len(layer) == 3


def growing(layer: LayerCache) -> list[tuple[Tensor, int, str]]:
    """Returns a layer's tensors whose sizes differ between caches, with the dimension and the size's name."""
    if has_states(layer):
        inputs_MC, states_SHDE, _ = layer
        return [(inputs_MC, 0, "M"), (states_SHDE, 0, "S")]
    return [(slots_GND, 1, "N") for slots_GND in layer]


def in_ring(row: int, first: int, count: int, size: int, device: torch.device) -> slice | Tensor:
    """Returns the places of positions `first` to `first + count - 1` of a row, in rings of this size."""
    at = first % size
    if at + count <= size:
        return slice(row * size + at, row * size + at + count)
    return sent([row * size + (first + i) % size for i in range(count)], device)
