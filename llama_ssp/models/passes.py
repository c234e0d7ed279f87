"""Describes one forward pass of a batch: which tokens of each row it feeds, and whose logits are wanted.

A row is a text, and its tokens have the positions 0, 1, 2, ... A pass feeds W columns a row, left-aligned:

    row 0, cached 5 tokens, is fed 3        position   5  6  7
    row 1, cached 2 tokens, is fed 1        position   2  .  .      the rest of a short row is padding

A query sees its own row up to its own position. To roll back is to forget a length: what is cached at later
positions is stale, is not seen, and is overwritten when these positions come again (kv_cache.py).

Suffixes of shapes: B rows of the pass, W columns, T all tokens without the padding, one row after the other.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Devices to which the host queues a copy from pinned memory, and goes on (tests/far.py adds one).
QUEUES = {"cuda"}


class RowSpan(NamedTuple):
    """Some tokens of one row that stand together: the row, the first position, and how many tokens."""

    row: int
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one forward pass is fed.

    A span says what is fed of a row. Spans are of all rows, in order, or of one row; those of a head may be
    of any rows. A span of no tokens keeps a row's place in the (B, W) columns.

    `given` is the length of each row's text when it was first read, for models that scale positions by it.
    With `last_only` the logits of each row's last token are wanted: the pass is fed for its keys. Else those
    of all columns are wanted, and `Model.parts` yields the logits of `part_width` columns at a time.
    """

    spans: tuple[RowSpan, ...]
    device: torch.device
    given: tuple[int, ...] = ()
    last_only: bool = False
    part_width: int | None = None

    @property
    def width(self) -> int:
        return max(span.tokens for span in self.spans)

    @property
    def longest(self) -> int:
        """Returns the length of the longest text, with what the pass feeds."""
        return max(span.start + span.tokens for span in self.spans)

    @property
    def has_padding(self) -> bool:
        return min(span.tokens for span in self.spans) < self.width

    @cached_property
    def position_BW(self) -> Tensor:
        """The position of each column; 0 for padding, whose logits are never used."""
        width = self.width
        rows = [[*range(start, start + count), *[0] * (width - count)] for _, start, count in self.spans]
        return sent(rows, self.device)

    @cached_property
    def column_T(self) -> Tensor:
        """The place of each token among the (B, W) columns, counted through all rows."""
        width = self.width
        places = [line * width + i for line, span in enumerate(self.spans) for i in range(span.tokens)]
        return sent(places, self.device)

    def last_tokens(self) -> Tensor:
        """Returns the place of each row's last token among all T; a row that is fed nothing has none."""
        ends = accumulate(span.tokens for span in self.spans if span.tokens)
        return sent([end - 1 for end in ends], self.device)

    def beyond(self, length: int) -> Tensor:
        """Returns whether each column belongs to a text longer than this, as given or by now, (B, W)."""
        beyond_BW = self.position_BW >= length
        if not self.given:
            return beyond_BW
        given_B = sent(self.given, self.device)
        return beyond_BW | (given_B > length)[:, None]

    def visible(self, rule: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns which positions each column sees, (B, 1, W, S), by an architecture's rule of its own."""
        return rule(self.position_BW[:, None, :, None])


def all_rows(starts: Iterable[int], tokens: Iterable[int]) -> tuple[RowSpan, ...]:
    """Returns the spans of rows 0, 1, 2, ..., by their first positions and their numbers of tokens."""
    return tuple(
        RowSpan(row=row, start=start, tokens=count)
        for row, (start, count) in enumerate(zip(starts, tokens, strict=True))
    )


def sent(numbers: Any, device: torch.device) -> Tensor:
    """A host tensor, or (nested) lists of numbers, as a tensor on the device, without waiting for it.

    A copy from ordinary memory blocks the host until the device has finished earlier work. A copy from pinned
    memory is queued, and torch keeps that memory until it is read. So the host waits for a GPU once a round:
    for what was decided (tests/far.py).
    """
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)
    if device.type in QUEUES and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


def fetched(large: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both tensors on the host, which waits for their device once.

    Both are of one device, and so of one stream: when the last has come, the large one has come. It comes
    into pinned memory, which torch keeps for the next one, without a copy in between.
    """
    queued = large.to("cpu", non_blocking=large.device.type != "cpu")
    return queued, last.cpu()
