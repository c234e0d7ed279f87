"""What the leader and the draft's first rank write to each other over a line: asks, and replies to them.

Asks are numbered. A frame holds every ask that is not known to have come, and is sent again while a reply
is waited for; whoever hears takes each number once, in order, and answers a repeated question as before. So
frames may be lost, doubled, late, out of order or damaged, and every ask is still heard exactly once. A reply
that is not the one waited for is discarded, and counted. (TCP does none of this to a frame. The rules cost
nothing there, and make a stale reply harmless by construction.)
"""

from __future__ import annotations

import struct
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum

from llama_ssp.ranks.link import Link, LinkLost
from llama_ssp.ranks.protocol import Ranks

HEAD = struct.Struct("<BQQ")  # kind, number, how many integers; a checksum of it all comes first
SUM = struct.Struct("<I")
AGAIN_S = 1.0  # until an ask is repeated the first time; twice as long each time after
LOOK_S = 1.0  # how long a rank that waits for the next ask is deaf to anything else


class Dismissed(LinkLost):
    """The leader goes on without this rank."""


class Kind(IntEnum):
    ASKS = 1
    HEARD = 2
    REPLY = 3
    ADIEU = 4  # no ask will follow: the leader goes on alone


@dataclass(frozen=True)
class Letter:
    """A frame, opened. `number` is that of the last ask in it, or of the one it answers."""

    kind: Kind
    number: int
    values: list[int]
    load: bytes = b""

    def frame(self) -> bytes:
        head = HEAD.pack(self.kind, self.number, len(self.values))
        whole = head + array("q", self.values).tobytes() + self.load
        return SUM.pack(zlib.crc32(whole)) + whole

    @staticmethod
    def opened(frame: bytes) -> Letter | None:
        """None if it was damaged on its way."""
        whole = memoryview(frame)[SUM.size :]
        if len(whole) < HEAD.size or SUM.unpack_from(frame) != (zlib.crc32(whole),):
            return None
        kind, number, count = HEAD.unpack_from(whole)
        body = whole[HEAD.size :]
        values = array("q")
        values.frombytes(body[: 8 * count])
        return Letter(Kind(kind), number, list(values), bytes(body[8 * count :]))


@dataclass
class Asker:
    """The leader's end. When the line is lost it says so in `lost`, and is silent from then on.

    It has `broadcast_ints` as groups of ranks have, so that decisions are told by it as by them.
    """

    link: Link
    patience_s: float
    again_s: float = AGAIN_S
    essential: bool = False  # whether the run ends when the line is lost
    lost: str | None = None
    mourned: bool = False  # whether the loss has been told
    discarded: int = 0  # replies that were stale, foreign or damaged
    clock: Callable[[], float] = time.monotonic
    _number: int = 0
    _unheard: list[tuple[int, list[int]]] = field(default_factory=list)
    _reply: Letter | None = None

    def broadcast_ints(self, values: list[int]) -> list[int]:
        """Asks; returns at once."""
        if self.lost is None:
            self._number, self._reply = self._number + 1, None
            self._unheard.append((self._number, values))
            while self._take(0.0):  # what nobody waits for any more must not fill the line
                pass
            self._send()
        return values

    def reply(self) -> Letter | None:
        """The reply to what was asked last; None if the line is lost."""
        self._wait(lambda: self._reply is not None)
        return self._reply

    def refuse(self) -> None:
        """The reply was not about what was asked: it is discarded, and asked for again."""
        self.discarded += 1
        self._reply = None

    def flush(self) -> None:
        """Until everything that was told has been heard."""
        self._wait(lambda: not self._unheard)

    def give_up(self, why: str) -> None:
        """From now on nothing is asked, and no reply is waited for."""
        if self.lost is None:
            self.lost, self._reply = why, None
            with suppress(LinkLost):  # then it knows
                self.link.send(Letter(Kind.ADIEU, self._number, []).frame())
            self.link.close()

    def _wait(self, done: Callable[[], bool]) -> None:
        began = asked = self.clock()
        again_s = self.again_s
        while self.lost is None and not done():
            now = self.clock()
            if now - began >= self.patience_s:
                self.give_up(f"it has not answered for {now - began:.1f} s")
                break
            if now - asked >= again_s:
                again_s, asked = 2 * again_s, now
                self._send()
            self._take(min(asked + again_s, began + self.patience_s) - now)

    def _take(self, seconds: float) -> bool:
        """Whether a frame came."""
        try:
            frame = self.link.receive(seconds)
        except LinkLost as lost:
            self.give_up(str(lost))
            return False
        if frame is None:
            return False
        letter = Letter.opened(frame)
        if letter is None or letter.kind not in (Kind.HEARD, Kind.REPLY) or letter.number > self._number:
            self.discarded += 1
            return True
        self._unheard = [(number, values) for number, values in self._unheard if number > letter.number]
        if letter.kind is Kind.REPLY and letter.number < self._number:
            self.discarded += 1
        elif letter.kind is Kind.REPLY:
            self._reply = letter
        return True

    def _send(self) -> None:
        """All that may not have come; without any, the number alone asks again for its reply."""
        values = [value for number, ask in self._unheard for value in (number, len(ask), *ask)]
        try:
            self.link.send(Letter(Kind.ASKS, self._number, values).frame())
        except LinkLost as lost:
            self.give_up(str(lost))


@dataclass
class Answerer:
    """The draft's end. It hears every ask once, in order."""

    link: Link
    waited_s: float = 0.0
    _number: int = 0  # of the last ask that was heard
    _asks: dict[int, list[int]] = field(default_factory=dict)  # that have come and were not yet heard
    _answer: Letter | None = None  # to the last ask

    def come(self) -> bool:
        """Whether the next ask is there; does not wait."""
        while not self._is_here and self._take(0.0):
            pass
        return self._is_here

    def broadcast_ints(self, _values: list[int]) -> list[int]:
        """The next ask, as soon as it comes. Raises LinkLost where none will."""
        began = time.monotonic()
        while not self._is_here:
            self._take(LOOK_S)
        self.waited_s += time.monotonic() - began
        self._number, self._answer = self._number + 1, None
        self.link.send(Letter(Kind.HEARD, self._number, []).frame())
        return self._asks.pop(self._number)

    def answer(self, values: list[int], load: bytes) -> None:
        """The reply to the last ask."""
        self._answer = Letter(Kind.REPLY, self._number, values, load)
        self.link.send(self._answer.frame())

    @property
    def _is_here(self) -> bool:
        return self._number + 1 in self._asks

    def _take(self, seconds: float) -> bool:
        frame = self.link.receive(seconds)
        if frame is None:
            return False
        letter = Letter.opened(frame)
        if letter is not None and letter.kind is Kind.ADIEU:
            raise Dismissed("the leader goes on alone")
        if letter is not None and letter.kind is Kind.ASKS:
            self._asks |= {number: ask for number, ask in _asks(letter) if number > self._number}
            if letter.number == self._number:  # it is asked again
                again = self._answer or Letter(Kind.HEARD, self._number, [])
                self.link.send(again.frame())
        return True


@dataclass(frozen=True)
class Relay:
    """The draft's first rank hears the leader, and the draft's other ranks hear it."""

    leader: Answerer
    draft: Ranks

    def broadcast_ints(self, _values: list[int]) -> list[int]:
        return self.draft.broadcast_ints(self.leader.broadcast_ints([]))


def _asks(letter: Letter) -> Iterator[tuple[int, list[int]]]:
    values = iter(letter.values)
    for number in values:
        length = next(values)
        yield number, [next(values) for _ in range(length)]
