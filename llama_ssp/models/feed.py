"""Describes one forward pass of a batch: which tokens of each row it feeds, at which positions and slots.

Slot t of a row holds the token at position t: rows start at slot 0 and have no padding. A query sees the
slots up to its own position. To roll back is to forget a length: later slots are stale, are masked, and are
overwritten when their positions come again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Row = tuple[int, int, int]  # first slot, first position, number of tokens


@dataclass(frozen=True)
class Feed:
    """What one forward pass feeds: W columns a row, left-aligned; the rest of a short row is padding.

    `count` is the number of tokens of each row. `given` is the length of each row's text when it was first
    read, for models that scale positions by it.
    """

    start: tuple[int, ...]
    count: tuple[int, ...]
    capacity: int
    device: torch.device
    given: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return max(self.count)

    @property
    def span(self) -> int:
        """Returns how many slots the pass may look at."""
        return max(s + c for s, c in zip(self.start, self.count, strict=True))

    def token_places(self) -> Tensor:
        """Returns the columns that are no padding, counted through all rows."""
        places = [row * self.width + i for row, count in enumerate(self.count) for i in range(count)]
        return sent(places, self.device)

    def positions(self) -> Tensor:
        """Returns the position of each column, (B, W); 0 for padding, whose logits are never used."""
        return self._places[0]

    def slots(self) -> Tensor:
        """Returns the slot of each column's keys, (B, W); for padding a spare one after the row's last."""
        return self._places[1]

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        rows = [range(start, start + count) for start, count in zip(self.start, self.count, strict=True)]
        # Padding has position 0, and the slot behind the last one.
        padded = [
            [[*row, *[filler] * (self.width - len(row))] for row in rows] for filler in (0, self.capacity)
        ]
        position_BW, slot_BW = sent(padded, self.device)
        return position_BW, slot_BW

    def beyond(self, length: int) -> Tensor:
        """Returns whether each column belongs to a text longer than this, as given or by now."""
        beyond_BW = self.positions() >= length
        if not self.given:
            return beyond_BW
        given_B = sent(self.given, self.device)
        return beyond_BW | (given_B > length)[:, None]

    def visible(self, rule: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns which slots each column sees, (B, 1, W, S), by an architecture's rule of its position."""
        return rule(self.positions()[:, None, :, None])


def sent(numbers: Any, device: torch.device) -> Tensor:
    """A host tensor, or (nested) lists of numbers, as a tensor on the device, without waiting for it.

    A copy from ordinary memory blocks the host until the device has finished earlier work. A copy from pinned
    memory is queued, and torch keeps that memory until it is read. So the host waits for a GPU once a round:
    for what was decided (tests/far.py).
    """
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")
