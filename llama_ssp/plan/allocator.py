"""torch's caching allocator on a GPU, replayed: what requests make of segments (c10/core/AllocatorConfig.h).

Requests are rounded up to 512 bytes. Those up to 1 MiB share segments of 2 MiB, those below 10 MiB segments
of 20 MiB; larger ones get a segment of their own size, rounded up to 2 MiB. The smallest free block that is
large enough is taken, and split unless what would be left is too little: a large one's rest of exactly
1 MiB stays with it. Freed blocks join their free neighbours; segments are never returned.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

UNIT = 512
MIB = 2**20
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
LARGE, LARGE_SEGMENT, LARGE_UNIT = 10 * MIB, 20 * MIB, 2 * MIB


class _Piece:
    """A block of a segment, with its neighbours."""

    __slots__ = ("after", "before", "free", "place", "size", "small")

    def __init__(self, place: int, size: int, small: bool) -> None:
        self.place, self.size, self.small, self.free = place, size, small, False
        self.before: _Piece | None = None
        self.after: _Piece | None = None


class Allocator:
    """Bytes reserved, and bytes requested (in whole units), now and at most."""

    def __init__(self) -> None:
        self.reserved = self.requested = self.most_requested = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._at: dict[int, _Piece] = {}
        self._held: dict[int, tuple[_Piece, int]] = {}
        self._kept = 0  # their names are negative

    def allocate(self, name: int, size: int) -> None:
        size = -(-max(size, 1) // UNIT) * UNIT
        small = size <= SMALL
        piece = self._fitting(size, small) or self._segment(size, small)
        piece.free = False
        rest = piece.size - size
        if rest >= UNIT if small else rest > SMALL:
            self._split(piece, size)
        self._held[name] = piece, size
        self.requested += size
        self.most_requested = max(self.most_requested, self.requested)

    def keep(self, size: int, times: int) -> None:
        """So many blocks that are never freed. Large ones that find nothing free are but a sum."""
        size = -(-max(size, 1) // UNIT) * UNIT
        whole = -(-size // LARGE_UNIT) * LARGE_UNIT
        if size >= LARGE and whole - size <= SMALL and not self._offered(size):
            self.reserved += times * whole
            self.requested += times * size
            self.most_requested = max(self.most_requested, self.requested)
            return
        for _ in range(times):
            self._kept -= 1
            self.allocate(self._kept, size)

    def free(self, name: int) -> None:
        piece, size = self._held.pop(name)
        self.requested -= size
        for other in (piece.before, piece.after):
            if other is not None and other.free:
                self._forget(other)
                piece = self._joined(*((other, piece) if other is piece.before else (piece, other)))
        self._offer(piece)

    def replay(self, events: Iterable[tuple[int, int]]) -> None:
        """Events as a tape records them: (number, bytes), and (minus number, bytes) at the end."""
        for number, size in events:
            if number > 0:
                self.allocate(number, size)
            else:
                self.free(-number)

    def _fitting(self, size: int, small: bool) -> _Piece | None:
        offers = self._free[small]
        place = bisect_left(offers, (size, 0))
        return self._at[offers.pop(place)[1]] if place < len(offers) else None

    def _offered(self, size: int) -> bool:
        """Whether there is a free large block of this size."""
        offers = self._free[False]
        return bool(offers) and offers[-1][0] >= size

    def _segment(self, size: int, small: bool) -> _Piece:
        if small:
            whole = SMALL_SEGMENT
        else:
            whole = LARGE_SEGMENT if size < LARGE else -(-size // LARGE_UNIT) * LARGE_UNIT
        piece = _Piece(self.reserved, whole, small)
        self._at[piece.place] = piece
        self.reserved += whole
        return piece

    def _split(self, piece: _Piece, size: int) -> None:
        rest = _Piece(piece.place + size, piece.size - size, piece.small)
        rest.before, rest.after, piece.after, piece.size = piece, piece.after, rest, size
        if rest.after is not None:
            rest.after.before = rest
        self._at[rest.place] = rest
        self._offer(rest)

    def _joined(self, low: _Piece, high: _Piece) -> _Piece:
        low.size += high.size
        low.after = high.after
        if high.after is not None:
            high.after.before = low
        del self._at[high.place]
        return low

    def _offer(self, piece: _Piece) -> None:
        piece.free = True
        insort(self._free[piece.small], (piece.size, piece.place))

    def _forget(self, piece: _Piece) -> None:
        offers = self._free[piece.small]
        del offers[bisect_left(offers, (piece.size, piece.place))]
