"""What the leader and the draft's first rank send each other over a link: requests and replies.

A link delivers each frame whole, once and in order, or the link is lost (draft_link.py). Requests are
numbered. The draft acknowledges each request when it reads it, and a reply has the number of its request. The
leader discards and counts replies to earlier requests, for which it did not wait.

A reply may be sent before its request, by a draft that guesses it. It begins with tags, which say what it is
for. When the request comes, both sides know the tags that its reply has to have: if they are those of what
was sent, that is the reply, and no other is sent; if not, the draft replies as usual. Nobody has to be told.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from llama_ssp.distributed.comm import LeaderChannel, Ranks
from llama_ssp.distributed.draft_link import Link
from llama_ssp.errors import LostPeer

# Kind, number, how many integers. Each takes 8 bytes, so that a payload may hold numbers of any size.
HEAD = struct.Struct("<QQQ")
NO_BYTES = torch.empty(0, dtype=torch.uint8)
LOOK_S = 1.0  # how long one wait for the next request lasts: signals interrupt between two


class MessageKind(IntEnum):
    REQUEST = 1
    ACK = 2
    REPLY = 3
    DISMISS = 4  # no request will follow: the leader goes on alone
    EARLY = 5  # a reply to the next request, sent before it


@dataclass(frozen=True, eq=False)
class Message:
    """A frame's content. `number` is the request's, also in what answers it.

    A frame is | kind | number | count | integers | payload |, and the payload is bytes on the host. One that
    was received is a view of its frame.
    """

    kind: MessageKind
    number: int
    values: list[int]
    payload: Tensor = NO_BYTES

    def head(self) -> bytes:
        """Returns the frame up to the payload."""
        integers = struct.pack(f"<{len(self.values)}q", *self.values)
        return HEAD.pack(self.kind, self.number, len(self.values)) + integers

    @staticmethod
    def unpack(frame_N: Tensor) -> Message:
        frame = frame_N.numpy().data
        kind, number, count = HEAD.unpack_from(frame)
        values = struct.unpack_from(f"<{count}q", frame, HEAD.size)
        payload_N = frame_N[HEAD.size + 8 * count :]
        return Message(MessageKind(kind), number, list(values), payload_N)


@dataclass(kw_only=True)
class DraftClient(LeaderChannel):
    """Sends the leader's requests. When the link is lost, `lost` says why, and nothing more is sent.

    Its `broadcast_ints` is that of Ranks, so the leader sends decisions to both with one call.
    """

    link: Link
    patience_s: float
    essential: bool = False  # whether the run ends when the link is lost
    lost: str | None = None
    loss_logged: bool = False
    discarded: int = 0  # replies to earlier requests
    early: int = 0  # replies that were sent before their requests, and used
    _number: int = 0  # of the last request
    _acknowledged: int = 0  # the last request that the draft took up
    _reply: Message | None = None
    _early: Message | None = None  # the last one that was sent before its request

    def broadcast_ints(self, values: list[int]) -> list[int]:
        """Sends a request; returns at once."""
        if self.lost is None:
            self._number = self._number + 1
            self._reply = None
            while self._take(0.0):  # replies that are no longer needed must not fill the link
                pass
            try:
                self.link.send(Message(MessageKind.REQUEST, self._number, values).head())
            except LostPeer as lost:
                self.give_up(str(lost))
        return values

    def reply(self, tags: Sequence[int] = (), pinned: bool = False) -> Message | None:
        """Waits for the reply to the last request; None if the link is lost.

        `tags` are those that it has to have, and `pinned` says that the payload is for a GPU.
        """
        self._wait(lambda: self._reply is not None or self._came_early(tags), pinned)
        if self.lost is None and self._came_early(tags):
            self.early += 1
            self._reply = self._early
            self._early = None
        return self._reply

    def _came_early(self, tags: Sequence[int]) -> bool:
        """Returns whether the last request needs no further reply (`DraftServer.has_replied`)."""
        early = self._early
        return early is not None and early.number == self._number and early.values[: len(tags)] == [*tags]

    def flush(self) -> None:
        """Waits until the draft has taken up every request."""
        self._wait(lambda: self._acknowledged == self._number)

    def give_up(self, why: str) -> None:
        """Sends nothing and waits for nothing from now on."""
        if self.lost is None:
            self.lost = why
            self._reply = None
            self.link.close(Message(MessageKind.DISMISS, self._number, []).head())

    def _wait(self, done: Callable[[], bool], pinned: bool = False) -> None:
        until = time.monotonic() + self.patience_s
        while self.lost is None and not done():
            left_s = until - time.monotonic()
            if left_s <= 0:
                self.give_up(f"it has not answered for {self.patience_s:.1f} s")
            else:
                self._take(left_s, pinned)

    def _take(self, seconds: float, pinned: bool = False) -> bool:
        """Receives and records one frame, if it comes within `seconds`; returns whether it came."""
        try:
            frame = self.link.receive(seconds, pinned=pinned)
        except LostPeer as lost:
            self.give_up(str(lost))
            return False
        if frame is None:
            return False
        message = Message.unpack(frame)
        if message.kind is MessageKind.EARLY:
            self._early = message
            return True
        self._acknowledged = message.number
        if message.kind is MessageKind.REPLY and message.number == self._number:
            self._reply = message
        elif message.kind is MessageKind.REPLY:
            self.discarded += 1
        return True


@dataclass
class DraftServer(LeaderChannel):
    """Receives each request once, in order, on the first rank of the draft.

    It passes each request through `group` to the other ranks that hold the draft.
    """

    link: Link
    group: Ranks
    waited_s: float = 0.0
    _number: int = 0  # of the last request
    _early: tuple[int, list[int]] | None = None  # of what was sent before its request: its number, and tags

    def has_request(self) -> bool:
        """Returns whether the next request has come, or none will; does not wait."""
        return self.link.has_frame()

    def broadcast_ints(self, _values: list[int]) -> list[int]:
        """Waits for the next request, passes it to `group`, returns it. Raises LostPeer if none will come."""
        began = time.monotonic()
        while (frame := self.link.receive(LOOK_S)) is None:
            pass
        self.waited_s += time.monotonic() - began
        request = Message.unpack(frame)
        if request.kind is MessageKind.DISMISS:
            raise LostPeer("the leader goes on alone")
        self._number = request.number
        self.link.send(Message(MessageKind.ACK, self._number, []).head())
        return self.group.broadcast_ints(request.values)

    def send_reply(self, values: list[int], payload: Tensor = NO_BYTES) -> None:
        """Sends the reply to the last request. The payload is bytes on the host."""
        reply = Message(MessageKind.REPLY, self._number, values, payload)
        self.link.send(reply.head(), reply.payload)

    def send_early(self, tags: list[int], values: list[int], payload: Tensor) -> None:
        """Sends what is the reply to the next request if that is for these tags."""
        self._early = self._number + 1, tags
        early = Message(MessageKind.EARLY, self._number + 1, [*tags, *values], payload)
        self.link.send(early.head(), early.payload)

    def has_replied(self, tags: list[int]) -> bool:
        """Returns whether the last request, which is for these tags, was replied to before it came."""
        return self._early == (self._number, tags)
