"""What the leader and the draft's first rank write to each other over a line: asks, and replies to them.

A line brings each frame whole, once and in order, or it is lost (draft_link.py). Asks are numbered. The draft
acknowledges each ask when it takes it up, and a reply carries the number of its ask. The leader discards a
reply to an earlier ask, which it did not wait for, and counts it.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.draft_link import Link, LinkLost

HEAD = struct.Struct("<BQQ")  # kind, number, how many integers
LOOK_S = 1.0  # how long a rank that waits for the next ask is deaf to anything else


class Dismissed(LinkLost):
    """The leader goes on without this rank."""


class MessageKind(IntEnum):
    ASK = 1
    HEARD = 2
    REPLY = 3
    ADIEU = 4  # no ask will follow: the leader goes on alone


@dataclass(frozen=True)
class Message:
    """A frame, opened. `number` is that of the ask, or of the one it answers."""

    kind: MessageKind
    number: int
    values: list[int]
    load: bytes = b""

    def frame(self) -> bytes:
        head = HEAD.pack(self.kind, self.number, len(self.values))
        return head + array("q", self.values).tobytes() + self.load

    @staticmethod
    def opened(frame: bytes) -> Message:
        kind, number, count = HEAD.unpack_from(frame)
        body = memoryview(frame)[HEAD.size :]
        values = array("q")
        values.frombytes(body[: 8 * count])
        return Message(MessageKind(kind), number, list(values), bytes(body[8 * count :]))


@dataclass
class DraftClient:
    """The leader's end. When the line is lost it says so in `lost`, and is silent from then on.

    It has `broadcast_ints` as groups of ranks have, so that decisions are told by it as by them.
    """

    link: Link
    patience_s: float
    essential: bool = False  # whether the run ends when the line is lost
    lost: str | None = None
    mourned: bool = False  # whether the loss has been told
    discarded: int = 0  # replies to earlier asks
    _number: int = 0  # of the last ask
    _heard: int = 0  # of the last ask that the draft took up
    _reply: Message | None = None

    def broadcast_ints(self, values: list[int]) -> list[int]:
        """Asks; returns at once."""
        if self.lost is None:
            self._number, self._reply = self._number + 1, None
            while self._take(0.0):  # what nobody waits for any more must not fill the line
                pass
            try:
                self.link.send(Message(MessageKind.ASK, self._number, values).frame())
            except LinkLost as lost:
                self.give_up(str(lost))
        return values

    def reply(self) -> Message | None:
        """The reply to what was asked last; None if the line is lost."""
        self._wait(lambda: self._reply is not None)
        return self._reply

    def flush(self) -> None:
        """Until everything that was told has been heard."""
        self._wait(lambda: self._heard == self._number)

    def give_up(self, why: str) -> None:
        """From now on nothing is asked, and no reply is waited for."""
        if self.lost is None:
            self.lost, self._reply = why, None
            with suppress(LinkLost):  # then it knows
                self.link.send(Message(MessageKind.ADIEU, self._number, []).frame())
            self.link.close()

    def _wait(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + self.patience_s
        while self.lost is None and not done():
            left_s = until - time.monotonic()
            if left_s <= 0:
                self.give_up(f"it has not answered for {self.patience_s:.1f} s")
            else:
                self._take(left_s)

    def _take(self, seconds: float) -> bool:
        """Whether a frame came."""
        try:
            frame = self.link.receive(seconds)
        except LinkLost as lost:
            self.give_up(str(lost))
            return False
        if frame is None:
            return False
        letter = Message.opened(frame)
        self._heard = letter.number
        if letter.kind is MessageKind.REPLY and letter.number == self._number:
            self._reply = letter
        elif letter.kind is MessageKind.REPLY:
            self.discarded += 1
        return True


@dataclass
class DraftServer:
    """The draft's end. It hears every ask once, in order."""

    link: Link
    waited_s: float = 0.0
    _number: int = 0  # of the last ask that was heard
    _ask: Message | None = None  # that has come and was not yet heard

    def come(self) -> bool:
        """Whether the next ask is there; does not wait."""
        return self._next(0.0) is not None

    def broadcast_ints(self, _values: list[int]) -> list[int]:
        """The next ask, as soon as it comes. Raises LinkLost where none will."""
        began = time.monotonic()
        while (ask := self._next(LOOK_S)) is None:
            pass
        self.waited_s += time.monotonic() - began
        self._number, self._ask = ask.number, None
        self.link.send(Message(MessageKind.HEARD, self._number, []).frame())
        return ask.values

    def answer(self, values: list[int], load: bytes) -> None:
        """The reply to the last ask."""
        self.link.send(Message(MessageKind.REPLY, self._number, values, load).frame())

    def _next(self, seconds: float) -> Message | None:
        if self._ask is None and (frame := self.link.receive(seconds)) is not None:
            letter = Message.opened(frame)
            if letter.kind is MessageKind.ADIEU:
                raise Dismissed("the leader goes on alone")
            self._ask = letter
        return self._ask


@dataclass(frozen=True)
class Relay:
    """The draft's first rank hears the leader, and the draft's other ranks hear it."""

    leader: DraftServer
    draft: Ranks

    def broadcast_ints(self, _values: list[int]) -> list[int]:
        return self.draft.broadcast_ints(self.leader.broadcast_ints([]))
