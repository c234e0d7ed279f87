"""A key/value cache of fixed size, with rows that may differ in length.

Slot t of a row always holds the token at position t: rows start at slot 0 and have no padding. A forward pass
feeds some tokens of each row (`Feed`); their keys go to the slots of their positions, and a query sees the
slots up to its own position. To roll back is to forget a length: later slots are stale, are masked, and are
overwritten when their positions come again. Positions fed as padding go to one spare slot behind the last.

transformers' models call `update`, and the methods that begin with `get`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from llama_ssp.models.transfer import sent

Row = tuple[int, int, int]  # of a row its first slot, its start and the number of its tokens but siblings


@dataclass(frozen=True)
class Sides:
    """Siblings of a row: `each` behind each of its last `drafts` tokens, in slots from `slot` on."""

    drafts: int
    each: int
    slot: int


NO_SIDES = Sides(0, 0, 0)


def placed(row: Row, sides: Sides) -> list[tuple[int, int]]:
    """Position and slot of every token of a row."""
    (first, start, count), slot, places = row, sides.slot, []
    for position in range(start, start + count):
        places.append((position, first + position))
        if position >= start + count - sides.drafts:
            places += [(position, slot + i) for i in range(sides.each)]
            slot += sides.each
    return places


@dataclass(frozen=True)
class Feed:
    """What one forward pass feeds: W columns a row, left-aligned, `count` of them real.

    `given` is the length of each row's text when it was first read, for models that scale positions by it.
    `sides`, if any row has siblings, are the drafts of each row, its last columns but these, and how many
    siblings stand behind each. Their keys go to the row's last slots. `count` is without them.
    """

    start: tuple[int, ...]
    count: tuple[int, ...]
    capacity: int
    device: torch.device
    given: tuple[int, ...] = ()
    sides: tuple[tuple[int, int], ...] = ()

    @property
    def columns(self) -> tuple[int, ...]:
        """The columns of each row, siblings included."""
        if not self.sides:
            return self.count
        return tuple(n + drafts * each for n, (drafts, each) in zip(self.count, self.sides, strict=True))

    @property
    def width(self) -> int:
        return max(self.columns)

    @property
    def span(self) -> int:
        """How many slots the pass may look at."""
        if self.sides:
            return self.capacity
        return max(s + c for s, c in zip(self.start, self.count, strict=True))

    def real(self) -> Tensor:
        """Which of the (B, W) columns are no padding."""
        return torch.arange(self.width, device=self.device) < sent(self.columns, self.device)[:, None]

    def real_places(self) -> Tensor:
        """The columns that are no padding, counted through all rows. A mask as an index has the host wait."""
        found = [row * self.width + i for row, count in enumerate(self.columns) for i in range(count)]
        return sent(found, self.device)

    def positions(self) -> Tensor:
        """The position of each column; 0 for padding, whose logits are never used."""
        if self.sides:
            return self._places[0]
        start_B1, count_B1 = (sent(numbers, self.device)[:, None] for numbers in (self.start, self.count))
        column_W = torch.arange(self.width, device=self.device)
        return torch.where(column_W < count_B1, start_B1 + column_W, 0)

    def slots(self) -> Tensor:
        """Where each column's keys go; the spare slot for padding."""
        if self.sides:
            return self._places[1]
        return torch.where(self.real(), self.positions(), self.capacity)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Positions and slots where rows have siblings."""
        rows = []
        for start, count, (drafts, each) in zip(self.start, self.count, self.sides, strict=True):
            own = placed((0, start, count), Sides(drafts, each, self.capacity - drafts * each))
            rows.append(own + [(0, self.capacity)] * (self.width - len(own)))
        position_BW, slot_BW = sent(
            [[[place[i] for place in row] for row in rows] for i in range(2)], self.device
        )
        return position_BW, slot_BW

    def beyond(self, length: int) -> Tensor:
        """Whether each column belongs to a text longer than this, as given or by now."""
        beyond_BW = self.positions() >= length
        return beyond_BW | (sent(self.given, self.device) > length)[:, None] if self.given else beyond_BW

    def visible(self, rule: Callable[[Tensor], Tensor], slot_S: Tensor) -> Tensor:
        """The slots that each column sees, (B, 1, W, S), by an architecture's rule of its position.

        A sibling sees itself, and not the draft that has its position.
        """
        position_B1W1 = self.positions()[:, None, :, None]
        visible_B1WS = rule(position_B1W1)
        if not self.sides:
            return visible_B1WS
        slot_B1W1 = self.slots()[:, None, :, None]
        aside_B1W1 = (slot_B1W1 != position_B1W1) & (slot_B1W1 < self.capacity)
        own_B1WS = aside_B1W1 & (slot_S == slot_B1W1)
        return visible_B1WS & ~(aside_B1W1 & (slot_S == position_B1W1)) | own_B1WS


@dataclass
class Tally:
    """Bytes of the caches that exist, now and at most."""

    now: int = 0
    most: int = 0

    def add(self, tensor: Tensor) -> None:
        """Counts it until it is freed."""
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._end, tensor.nbytes).atexit = False

    def _end(self, size: int) -> None:
        self.now -= size


@dataclass(eq=False)
class RaggedCache:
    """One model's keys and values, (B, heads, capacity + 1, head size) a layer.

    A layer's tensors are made at first use, on its device, and counted in the model's tally.
    """

    rows: int
    capacity: int
    tally: Tally = field(default_factory=Tally)
    _layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _slots: dict[torch.device, Tensor] = field(default_factory=dict)
    _span: int = 0

    is_compileable = False

    def expect(self, feed: Feed) -> None:
        """Announces the next pass: where its keys go."""
        self._slots, self._span = {feed.device: feed.slots()}, feed.span

    def update(
        self, key_BHWD: Tensor, value_BHWD: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the pass's keys and values; returns all that it may look at."""
        slots_BW = self._slots_on(key_BHWD.device)
        row_B1 = torch.arange(slots_BW.shape[0], device=slots_BW.device)[:, None]
        keys, values = self._layer(layer_idx, key_BHWD, value_BHWD)
        keys[row_B1, :, slots_BW] = key_BHWD.transpose(1, 2)
        values[row_B1, :, slots_BW] = value_BHWD.transpose(1, 2)
        return keys[:, :, : self._span], values[:, :, : self._span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Models ask only to guess positions, and positions are given."""
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many slots a mask is made of, and the first of them."""
        return self._span, 0

    def row(self, index: int) -> RaggedCache:
        """One row as a cache of its own, in the same memory, to fill it without the others."""
        return _Row(1, self.capacity, whole=self, index=index)

    def clear(self, row: int) -> None:
        """Zeros the row: a NaN that stayed there would reach other texts."""
        for layer in self._layers.values():
            for tensor in layer:
                tensor[row].zero_()

    def _layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if index not in self._layers:
            self._layers[index] = (self._empty(key), self._empty(value))
            for tensor in self._layers[index]:
                self.tally.add(tensor)
        return self._layers[index]

    def _empty(self, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        # Zeros, not garbage: a masked slot is multiplied by a weight of 0, and 0 * NaN is NaN.
        return like.new_zeros(self.rows, heads, self.capacity + 1, size)

    def _slots_on(self, device: torch.device) -> Tensor:
        """Where this pass's keys go, for layers of that device: copied there once a pass."""
        assert self._slots, "expect() comes before a forward pass"
        if device not in self._slots:
            self._slots[device] = next(iter(self._slots.values())).to(device)
        return self._slots[device]


@dataclass(eq=False)
class _Row(RaggedCache):
    """A row of a whole cache."""

    whole: RaggedCache = field(kw_only=True)
    index: int = field(kw_only=True)

    def _layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.whole._layer(index, key, value)
        return keys[self.index : self.index + 1], values[self.index : self.index + 1]
