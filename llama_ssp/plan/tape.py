"""A run in sizes: blocks of memory that come and go as the tensors of the real run do.

What mirrors a computation is written as the computation is, with blocks for tensors. A block is freed
when Python lets go of it, as a tensor is, so locals, arguments and temporaries live as long here as
there, and the sum of what is alive is right at every moment without being stated anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Block:
    """Some bytes; its end is its end."""

    __slots__ = ("bytes", "label", "number", "tape")

    def __init__(self, tape: Tape, size: int) -> None:
        self.tape, self.bytes, self.label = tape, size, tape.label
        self.number = tape.begin(self)

    def __del__(self) -> None:
        self.tape.end(self)


class Tape:
    """What is alive, by label, and its largest sum in every phase.

    What is labelled `apart` is in no sum. `unit` is what an allocator rounds requests up to. With `record`,
    every event is kept in order, as (number of the block, bytes) and (minus that number, bytes).
    """

    def __init__(self, unit: int = 1, apart: tuple[str, ...] = (), record: bool = False) -> None:
        self._unit, self._apart = unit, apart
        self._count = 0
        self._live: dict[str, int] = {}
        self._sum = self._most = 0
        self._phase = ""
        self.label = ""
        self.peaks: dict[str, dict[str, int]] = {}
        self.events: list[tuple[int, int]] | None = [] if record else None

    def __call__(self, count: int, width: int, *_inputs: Block | None) -> Block:
        """The output of an operation on `inputs`, which live until it is made."""
        return Block(self, -(-count * width // self._unit) * self._unit)

    def same(self, block: Block, count: int, width: int, converted: bool) -> Block:
        """A conversion that gives the tensor itself where nothing is to be converted."""
        return self(count, width, block) if converted else block

    def notices(self, label: str) -> bool:
        """Whether blocks of this label make a difference to anything."""
        return self.events is not None or label not in self._apart

    def begin(self, block: Block) -> int:
        self._count += 1
        if block.label not in self._apart:
            self._live[block.label] = self._live.get(block.label, 0) + block.bytes
            self._sum += block.bytes
            if self._sum > self._most:
                self._most = self._sum
                self.peaks[self._phase] = dict(self._live)
        if self.events is not None:
            self.events.append((self._count, block.bytes))
        return self._count

    def end(self, block: Block) -> None:
        if block.label not in self._apart:
            self._live[block.label] -= block.bytes
            self._sum -= block.bytes
        if self.events is not None:
            self.events.append((-block.number, block.bytes))

    def phase(self, name: str) -> None:
        """What follows belongs to this phase, whose peak counts what is alive already."""
        self._phase, self._most = name, sum(self.peaks.get(name, {}).values())
        if self._sum >= self._most:
            self._most, self.peaks[name] = self._sum, dict(self._live)

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Blocks made inside carry the label."""
        before, self.label = self.label, label
        yield
        self.label = before
