"""A rank's watch over the others, in a thread: who is gone or silent, and that this rank ends with them."""

from __future__ import annotations

import threading
import time

from llama_ssp.distributed.peers import Peers
from llama_ssp.distributed.placement import LEADER
from llama_ssp.distributed.signals import GUARD, PAUSED_S
from llama_ssp.distributed.store import END, Cause, Place, Store, View, stopped
from llama_ssp.errors import DISTRIBUTED

BEAT_S = 1.0
QUIET_S = 3.0  # without a beat, after a connection was lost: that rank is gone
LEAVE_S = 3.0  # for a rank to end in good order once the cause is known
SETTLE_S = 0.05  # until what a rank said before it went has come to the store


class Heartbeat(threading.Thread):
    """Finds the cause, or hears it from the board; then sees to it that this process ends."""

    def __init__(self, board: Store, peers: Peers, rank: int, world: int, patience_s: float, hosted: bool):
        """`hosted`: the leader's own process keeps the store, not torchrun."""
        super().__init__(name="watch", daemon=True)
        self.found = threading.Event()
        self.lost = threading.Event()  # a connection broke: somebody is gone
        self.cause = Cause("another rank has gone or does not answer")
        self.place = Place("start")
        self.view: View | None = None  # as last read
        self.spare: frozenset[int] = frozenset()  # ranks that may be lost
        self._board, self._peers = board, peers
        self._rank, self._world, self._hosted = rank, world, hosted
        self._patience_s, self._beat_s = patience_s, min(BEAT_S, patience_s / 4)
        self._parted = threading.Event()
        self._changed = dict.fromkeys(range(world), time.monotonic())
        GUARD.on_signal.append(peers.call)  # the others are to know at once

    def run(self) -> None:
        beat = 0
        before = time.monotonic()
        while not self._parted.is_set():
            beat += 1
            gone = self._peers.wait(self._beat_s)
            if gone:
                time.sleep(SETTLE_S)
            now = time.monotonic()
            if now - before > self._beat_s + PAUSED_S:  # this process was stopped: all others look late
                self._changed = dict.fromkeys(self._changed, now)
            before = now
            GUARD.arm("store", self._patience_s, DISTRIBUTED, self._stuck(), self._end_keeper)
            try:
                cause = self._look(beat, gone)
            except RuntimeError:  # the store is gone, and with it who kept it
                cause = self._without_store()
            GUARD.disarm("store")
            if cause and not self._parted.is_set():
                self._end(cause)
                return

    def ask(self, seconds: float) -> Cause | None:
        """The cause, as soon as it is found."""
        self._peers.call()
        return self.cause if self.found.wait(seconds) else None

    def part(self) -> None:
        """The run is over, and ranks may go."""
        self._parted.set()
        self.rest(LEAVE_S)
        GUARD.disarm("store")

    def rest(self, seconds: float) -> None:
        """Until the thread has ended: were it inside the store's C++ when Python ends, it would abort all."""
        self._peers.call()
        self.join(seconds)

    def dismiss(self, ranks: tuple[int, ...]) -> None:
        """Wakes those of this machine, and ends those that do not go."""
        for rank in ranks:
            self._peers.wake(rank)
        self._outlive(set(ranks), LEAVE_S)

    def see_off(self) -> None:
        """On the first rank of each machine: until the others have gone, or have had the time to."""
        others = self._peers.here
        if self._rank < min(others, default=0):
            self._outlive(others, max(self._patience_s, 2 * LEAVE_S))

    def _outlive(self, ranks: set[int], seconds: float) -> None:
        """Waits until they have gone, and ends those that do not go."""
        until = time.monotonic() + seconds
        try:
            while ranks & self._peers.living() and time.monotonic() < until:
                time.sleep(SETTLE_S)
        finally:  # also when a signal ends the wait
            for rank in ranks & self._peers.living():
                self._peers.kill(rank)

    def speaks(self, cause: Cause) -> bool:
        return cause.voice(self._world) == self._rank

    def _look(self, beat: int, gone: set[int]) -> Cause | None:
        self._board.beat(beat)
        before, self.view = self.view, self._board.read()
        now = time.monotonic()
        for rank in range(self._world):
            if before is None or before.beats[rank] != self.view.beats[rank]:
                self._changed[rank] = now
        if self.view.cause:
            return self.view.cause
        staying = {rank for rank in range(self._world) if self.view.places[rank].phase != END}
        limit = QUIET_S if self.lost.is_set() else self._patience_s
        late = {rank for rank in staying if now - self._changed[rank] > limit}
        leaving = set(range(self._world)) - staying - gone  # for whom this rank waits; one may be stopped
        late |= {rank for rank in leaving if now - self._changed[rank] > self._patience_s}
        late -= {self._rank}
        missing = sorted(((gone & staying) | late) - self.spare)
        if not missing:  # only now: torchrun stops the others when one has gone
            own = GUARD.signalled and stopped(self._rank, GUARD.signalled, self.place)
            return self._board.blame(own) if own else None
        first = next((rank for rank in missing if rank in gone), missing[0])
        how = "is gone (killed by a signal, or it exited without a word)"
        if first not in gone:
            how = f"has not answered for {now - self._changed[first]:.1f} s (stopped, or cut off)"
        cause = Cause(f"rank {first} {how} during {self.view.places[first]}", silent=tuple(missing))
        for rank in late - gone - self.spare:
            self._peers.kill(rank)
        return self._board.blame(cause)

    def _end(self, cause: Cause) -> None:
        self.cause = cause
        GUARD.arm("cause", LEAVE_S, cause.code, cause.line if self.speaks(cause) else "")
        self.found.set()
        try:
            self._board.heard()
        except RuntimeError:
            return  # the store's keeper is gone, and needs no answer

    def _without_store(self) -> Cause:
        gone = self._peers.wait(SETTLE_S)
        if not self._hosted:
            return Cause("the launcher that keeps the ranks' store is gone", silent=tuple(gone))
        place = self.view.places[LEADER] if self.view else Place("start")
        return Cause(f"rank {LEADER} is gone; last heard of in {place}", silent=(LEADER, *(gone - {LEADER})))

    def _stuck(self) -> str:
        """What is said when the store does not answer at all."""
        if not self._hosted:
            return "the launcher that keeps the ranks' store does not answer" if self._rank == LEADER else ""
        place = self.view.places[LEADER] if self.view else Place("start")
        line = f"rank {LEADER} does not answer (stopped, or cut off); last heard of in {place}"
        return line if self._rank == LEADER + 1 else ""

    def _end_keeper(self) -> None:
        if self._hosted:
            self._peers.kill(LEADER)
