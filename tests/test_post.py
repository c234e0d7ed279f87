"""Asks and replies come through, whatever happens to frames; a line over TCP carries them."""

from __future__ import annotations

import heapq
import random
import threading
from dataclasses import dataclass, field

import pytest

from llama_ssp.errors import DistributedError
from llama_ssp.ranks.link import Calling, LinkLost, Listener, call
from llama_ssp.ranks.post import Answerer, Asker, Dismissed, Kind, Letter


@dataclass
class World:
    """Frames on their way, and a clock that moves while somebody waits."""

    chance: random.Random
    drop: float = 0.0
    double: float = 0.0
    damage: float = 0.0
    late: float = 0.0
    now: float = 0.0
    mail: dict[str, list[tuple[float, int, bytes]]] = field(
        default_factory=lambda: {"asks": [], "replies": []}
    )
    sent: int = 0

    def post(self, box: str, frame: bytes) -> None:
        for _ in range(2 if self.chance.random() < self.double else 1):
            self.sent += 1
            way = self.chance.random() * (30.0 if self.chance.random() < self.late else 1.0)
            if self.chance.random() < self.damage:
                place = self.chance.randrange(len(frame))
                frame = (
                    frame[:place] + bytes([frame[place] ^ 1 << self.chance.randrange(8)]) + frame[place + 1 :]
                )
            if self.chance.random() >= self.drop:
                heapq.heappush(self.mail[box], (self.now + way, self.sent, frame))

    def take(self, box: str) -> bytes | None:
        mail = self.mail[box]
        return heapq.heappop(mail)[2] if mail and mail[0][0] <= self.now else None


def flipped(frame: bytes, bit: int) -> bytes:
    place = bit // 8
    return frame[:place] + bytes([frame[place] ^ 1 << bit % 8]) + frame[place + 1 :]


@dataclass
class DraftsEnd:
    """Looks, and never waits."""

    world: World

    def send(self, frame: bytes) -> None:
        self.world.post("replies", frame)

    def receive(self, seconds: float) -> bytes | None:
        assert seconds == 0
        return self.world.take("asks")

    def close(self) -> None:
        pass


@dataclass
class LeadersEnd:
    """While the leader waits, the draft works and time passes."""

    world: World
    answerer: Answerer
    heard: list[list[int]] = field(default_factory=list)

    def send(self, frame: bytes) -> None:
        self.world.post("asks", frame)

    def receive(self, seconds: float) -> bytes | None:
        until = self.world.now + seconds
        while True:
            self._draft()
            if (frame := self.world.take("replies")) is not None:
                return frame
            due = [mail[0][0] for mail in self.world.mail.values() if mail]
            if min(due, default=until + 1) > until:
                self.world.now = until + 1e-6  # clocks do not stand still
                return None
            self.world.now = max(self.world.now, min(due))

    def close(self) -> None:
        pass

    def _draft(self) -> None:
        while self.answerer.come():
            ask = self.answerer.broadcast_ints([])
            self.heard.append(ask)
            if ask[0]:  # something is to be drafted
                self.answerer.answer([ask[1], -ask[1]], bytes(ask[0]))


def pair(world: World, patience_s: float = 1e9) -> tuple[Asker, LeadersEnd]:
    far = LeadersEnd(world, Answerer(DraftsEnd(world)))
    return Asker(far, patience_s, again_s=2.0, clock=lambda: world.now), far


def rounds(asker: Asker, far: LeadersEnd, count: int, chance: random.Random) -> None:
    """Each round's reply is its own, and every ask is heard once, in order."""
    asked = []
    for number in range(count):
        wanted = chance.randrange(4)
        asked.append([wanted, number])
        asker.broadcast_ints(asked[-1])
        if wanted:
            reply = asker.reply()
            assert reply is not None and (reply.values, reply.load) == ([number, -number], bytes(wanted))
    asker.flush()
    assert far.heard == asked and asker.lost is None


def test_a_quiet_line_repeats_and_discards_nothing():
    world = World(random.Random(0))
    asker, far = pair(world)
    rounds(asker, far, 200, random.Random(1))
    assert asker.discarded == 0


@pytest.mark.parametrize("fault", ["drop", "double", "damage", "late"])
def test_each_fault_alone_is_healed(fault: str):
    world = World(random.Random(2), **{fault: 0.3})
    asker, far = pair(world)
    rounds(asker, far, 300, random.Random(3))
    assert asker.discarded > 0 or fault == "drop"


@pytest.mark.slow
def test_a_hundred_thousand_rounds_of_every_fault():
    world = World(random.Random(4), drop=0.1, double=0.1, damage=0.05, late=0.1)
    asker, far = pair(world)
    rounds(asker, far, 100_000, random.Random(5))
    assert asker.discarded > 10_000


def test_a_dead_line_is_given_up_once_and_costs_no_more_waiting():
    world = World(random.Random(6), drop=1.0)
    asker, _ = pair(world, patience_s=20.0)
    asker.broadcast_ints([1, 1])
    assert asker.reply() is None and asker.lost == "it has not answered for 20.0 s"
    spent = world.now
    asker.broadcast_ints([1, 2])
    asker.flush()
    assert asker.reply() is None and world.now == spent


def test_letters_survive_their_frames():
    for letter in (Letter(Kind.ASKS, 0, []), Letter(Kind.REPLY, 2**40, [-1, 2**62], b"\0laws")):
        frame = letter.frame()
        assert Letter.opened(frame) == letter
        for place in range(len(frame)):
            assert Letter.opened(flipped(frame, 8 * place + 2)) is None
        assert Letter.opened(frame[:-1]) is None


def line():
    """Two ends of a line over TCP."""
    listener, ends = Listener(), []
    thread = threading.Thread(target=lambda: ends.append(listener.accept(10.0)))
    thread.start()
    stranger = call(Calling(listener.calling.host, listener.calling.port, b"another run's..."), 5.0)
    near = call(listener.calling, 5.0)
    thread.join()
    stranger.close()
    return near, ends[0]


def test_frames_go_over_tcp_in_order_and_whole():
    near, far = line()
    frames = [b"", b"one", bytes(range(256)) * 40_000]
    sender = threading.Thread(target=lambda: [near.send(frame) for frame in frames])
    sender.start()
    assert [far.receive(5.0) for _ in frames] == frames
    sender.join()
    assert far.receive(0) is None
    near.close()
    with pytest.raises(LinkLost):
        far.receive(5.0)


def test_a_draft_that_is_given_up_hears_so():
    near, far = line()
    asker, answerer = Asker(near, 0.05), Answerer(far)
    asker.broadcast_ints([4])
    assert asker.reply() is None and asker.lost
    with pytest.raises(Dismissed):
        answerer.broadcast_ints([])
        answerer.broadcast_ints([])


def test_a_draft_that_went_is_noticed_at_once():
    near, far = line()
    asker = Asker(near, 60.0)
    far.close()
    asker.broadcast_ints([4])
    assert asker.reply() is None and asker.lost


def test_where_nobody_listens_nobody_waits_long():
    with pytest.raises(DistributedError, match="cannot talk"):
        call(Calling("127.0.0.1", 1), 5.0)
