"""Why a rank ends: the first cause in the store ends all ranks, with one line and one exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from llama_ssp.distributed.draft_link import LinkLost
from llama_ssp.distributed.draft_messages import Dismissed
from llama_ssp.distributed.peers import Peers
from llama_ssp.distributed.placement import LEADER
from llama_ssp.distributed.signals import GUARD, PAUSED_S
from llama_ssp.distributed.store import END, EXCUSED, READ, Cause, Place, Store, View, interrupted, stopped
from llama_ssp.errors import (
    DISTRIBUTED,
    INPUT_OUTPUT,
    OK,
    DistributedError,
    JointError,
    RunError,
    machine_error,
)

BEAT_S = 1.0
QUIET_S = 3.0  # without a beat, after a connection was lost: that rank is gone
FIND_S = QUIET_S + 2 * BEAT_S  # for the thread to find which rank is gone
LEAVE_S = 3.0  # for a rank to end in good order once the cause is known
SETTLE_S = 0.05  # until what a rank wrote before it went has come to the store


class LostPeer(DistributedError):
    """Another rank has ended, or is stuck: the cause is there, not here."""


class Watch(threading.Thread):
    """One rank's watch over the others.

    The thread sends heartbeats, finds ranks that are gone or silent, and ends this process when there is a
    cause. The main thread records what it does (`enter`), and asks why it has to end (`cause_of`).
    """

    def __init__(self, store: Store, peers: Peers, rank: int, world: int, patience_s: float, hosted: bool):
        """`hosted`: the leader's own process keeps the store, not torchrun."""
        super().__init__(name="watch", daemon=True)
        self.rank, self.world = rank, world
        self.place = Place("start")
        self.folder: Path | None = None  # for records of errors
        self.spare: frozenset[int] = frozenset()  # the others do not end with these ranks
        self._store, self._thread_store, self._peers = store, store.clone(), peers
        self._hosted, self.patience_s, self._beat_s = hosted, patience_s, min(BEAT_S, patience_s / 4)
        self._cause: Cause | None = None
        self._found, self._stopped = threading.Event(), threading.Event()
        self._broken = threading.Event()  # a connection broke: a rank is gone
        self._view: View | None = None  # as last read
        self._changed = dict.fromkeys(range(world), time.monotonic())  # when each heartbeat last came
        GUARD.on_signal.append(peers.wake)  # the others learn of a signal at once

    # The main thread.

    def enter(self, phase: str, number: int = 0) -> None:
        self.place = Place(phase, number)
        with suppress(RuntimeError):  # the store is gone: the thread finds that
            self._store.move(self.place)

    @contextmanager
    def during(self, what: str, computes: bool = False) -> Iterator[None]:
        """Raises LostPeer for torch's error when another rank is gone, or late beyond its time.

        A GPU's own error is raised as what it is, and where the code `computes` also any other of its own.
        """
        try:
            yield
        except RuntimeError as error:
            if own := machine_error(error, what):
                raise own from error
            if computes and not _is_broken_collective(error):
                raise
            raise self._lost_peer(error, what) from error

    def _lost_peer(self, error: BaseException, what: str) -> LostPeer:
        GUARD.end()
        self._broken.set()
        where, found = f"rank {self.rank}, {self.place}, {what}", str(error)[-160:]
        fix = "look for the first error of the other ranks"
        return LostPeer("another rank has gone or does not answer", where, found, fix=fix)

    def stop(self) -> None:
        """Ends the thread: the run is over."""
        self._stopped.set()
        self._rest(LEAVE_S)
        GUARD.disarm("store")

    def excuse(self, ranks: tuple[int, ...]) -> None:
        """Tells these ranks that the others go on without them."""
        with suppress(RuntimeError):
            for rank in ranks:
                self._store.mark(EXCUSED, rank)

    def dismiss(self, ranks: tuple[int, ...]) -> None:
        """Lets stopped ranks of this machine run, so that they leave, and ends those that do not."""
        for rank in ranks:
            self._peers.signal(rank, signal.SIGCONT)
        self._outlive(set(ranks), LEAVE_S)

    def see_off(self) -> None:
        """The first rank of a machine leaves last: it ends a rank that is stopped on its way out."""
        others = self._peers.here
        if self.rank < min(others, default=0):
            self._outlive(others, max(self.patience_s, 2 * LEAVE_S))
        GUARD.end(parted=True)

    def cause_of(self, error: BaseException) -> JointError:
        """What all ranks end with: the first cause in the store, which may be this error.

        A rank that may be lost ends by itself, and with code 0: a launcher would take another for the run's.
        """
        GUARD.end()
        if _is_broken_collective(error):
            error = self._lost_peer(error, "exchanging")
        if self.rank in self.spare and not isinstance(error, KeyboardInterrupt):
            left_alone = isinstance(error, LinkLost | LostPeer)
            if not left_alone or self._is_excused(error) or not self._find(FIND_S):
                return self._lost(error, not left_alone)
        elsewhere = isinstance(error, LostPeer | LinkLost | KeyboardInterrupt)
        cause = self._find(FIND_S if elsewhere else 0.0)
        if cause is None:
            cause = self._own(error)
            with suppress(RuntimeError):
                cause = self._store.blame(cause)
        speaks = self._arm(cause)
        self._keep(error, cause)
        if self._hosted and self.rank == LEADER:
            self._store.linger(cause.silent)
        self._rest(BEAT_S)
        return JointError(cause.line, cause.code, speaks)

    def _find(self, seconds: float) -> Cause | None:
        """The cause, as soon as the thread has it."""
        self._peers.wake()
        return self._cause if self._found.wait(seconds) else None

    def _rest(self, seconds: float) -> None:
        """Until the thread has ended: were it inside the store's C++ when Python ends, Python would abort."""
        self._peers.wake()
        self.join(seconds)

    def _outlive(self, ranks: set[int], seconds: float) -> None:
        """Waits until they have gone, and ends those that do not go."""
        until = time.monotonic() + seconds
        try:
            while ranks & self._peers.living() and time.monotonic() < until:
                time.sleep(SETTLE_S)
        finally:  # also when a signal ends the wait
            for rank in ranks & self._peers.living():
                self._peers.signal(rank, signal.SIGKILL)

    def _is_excused(self, error: BaseException) -> bool:
        """Whether the others go on: then there is no cause to find."""
        with suppress(RuntimeError):
            return isinstance(error, Dismissed) or self._store.has(EXCUSED, self.rank)
        return False

    def _lost(self, error: BaseException, speaks: bool) -> JointError:
        cause = replace(self._own(error), code=OK)
        GUARD.arm("cause", LEAVE_S, OK)
        self._keep(error, cause)
        self.enter(END)
        self.stop()
        return JointError(cause.line, OK, speaks)

    def _own(self, error: BaseException) -> Cause:
        """This rank's error as a cause."""
        where = f"rank {self.rank} failed during {self.place}"
        if isinstance(error, KeyboardInterrupt):
            return interrupted(self.rank, error, self.place)
        if isinstance(error, LostPeer | LinkLost):
            places = self._view.places if self._view else []  # ranks out of step show
            where = ", ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            return Cause(f"rank {self.rank} gets no answer; {error}; {where}")
        if isinstance(error, RunError):
            return Cause(f"{where}: {error}", error.code)
        if known := machine_error(error):
            return Cause(f"{where}: {known}", known.code)
        code = INPUT_OUTPUT if isinstance(error, OSError) else DISTRIBUTED
        return Cause(f"{where}: {type(error).__name__}: {error}", code)

    def _keep(self, error: BaseException, cause: Cause) -> None:
        """Writes this rank's record, into the run folder if this machine has it."""
        if self.folder is None or not self.folder.is_dir():
            return
        record = {"time": datetime.now(UTC).isoformat(), "rank": self.rank, **asdict(self.place)}
        record |= {"exception": f"{type(error).__name__}: {error}", "cause": cause.line}
        record |= {"exit_code": cause.code, "host": socket.gethostname(), "pid": os.getpid()}
        with suppress(OSError):  # a full disk must not hide the cause
            path = self.folder / f"error.rank{self.rank}.json"
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    # The thread.

    def run(self) -> None:
        beat, before = 0, time.monotonic()
        while not self._stopped.is_set():
            beat += 1
            # Read before the wait: if torchrun stops this rank because another has gone, `gone` has it.
            number = GUARD.signalled
            gone = self._peers.wait(0.0 if number else self._beat_s)
            if gone:
                time.sleep(SETTLE_S)
            now = time.monotonic()
            if now - before > self._beat_s + PAUSED_S:  # this process was stopped: all others look late
                self._changed = dict.fromkeys(self._changed, now)
            before = now
            line = self._keeper("does not answer (stopped, or cut off)")
            speaks = self.rank == (LEADER + 1 if self._hosted else LEADER)
            GUARD.arm("store", self.patience_s, DISTRIBUTED, line if speaks else "", self._kill_keeper)
            try:
                cause = self._look(beat, gone)
                if cause is None and number:
                    cause = self._thread_store.blame(stopped(self.rank, number, self.place))
            except RuntimeError:
                silent = self._peers.wait(SETTLE_S) | ({LEADER} if self._hosted else set())
                cause = Cause(self._keeper("is gone"), silent=tuple(silent))
            GUARD.disarm("store")
            if cause and not self._stopped.is_set():
                self._cause = cause
                self._arm(cause)
                self._found.set()
                with suppress(RuntimeError):  # the rank that kept the store is gone
                    self._thread_store.mark(READ, self.rank)
                return

    def _arm(self, cause: Cause) -> bool:
        """This process ends soon, by itself if it has to; whether it says the cause."""
        speaks = cause.speaker(self.world) == self.rank
        GUARD.arm("cause", LEAVE_S, cause.code, cause.line if speaks else "")
        return speaks

    def _look(self, beat: int, gone: set[int]) -> Cause | None:
        """Sends a heartbeat, reads those of the others, and records the cause if a rank is missing."""
        self._thread_store.beat(beat)
        before, view = self._view, self._thread_store.read()
        self._view, now = view, time.monotonic()
        for rank in range(self.world):
            if before is None or before.beats[rank] != view.beats[rank]:
                self._changed[rank] = now
        if view.cause:
            return view.cause
        late_s = {rank: now - changed for rank, changed in self._changed.items() if rank != self.rank}
        staying = {rank for rank in range(self.world) if view.places[rank].phase != END}
        limit = QUIET_S if self._broken.is_set() else self.patience_s
        late = {rank for rank in late_s.keys() & staying if late_s[rank] > limit}
        # This rank waits also for those that leave; one may be stopped.
        late |= {rank for rank in late_s.keys() - staying - gone if late_s[rank] > self.patience_s}
        missing = sorted(((gone & staying) | late) - self.spare)
        if not missing:
            return None
        first = next((rank for rank in missing if rank in gone), missing[0])
        how = "is gone (killed by a signal, or it exited without a word)"
        if first not in gone:
            how = f"has not answered for {late_s[first]:.1f} s (stopped, or cut off)"
        cause = Cause(f"rank {first} {how} during {view.places[first]}", silent=tuple(missing))
        for rank in late - gone - self.spare:
            self._peers.signal(rank, signal.SIGKILL)
        return self._thread_store.blame(cause)

    def _keeper(self, how: str) -> str:
        """What is said of the process that keeps the store."""
        if not self._hosted:
            return f"the launcher that keeps the ranks' store {how}"
        place = self._view.places[LEADER] if self._view else Place("start")
        return f"rank {LEADER} {how}; last heard of in {place}"

    def _kill_keeper(self) -> None:
        if self._hosted:
            self._peers.signal(LEADER, signal.SIGKILL)


def _is_broken_collective(error: BaseException) -> bool:
    """Whether gloo or NCCL raised it, where no `during` was: a graph's sum fails when its result is read.

    What gloo says of a device is about this machine's own network.
    """
    from_torch = type(error).__module__ == "torch.distributed" and isinstance(error, RuntimeError)
    by_gloo = type(error) is RuntimeError and "/gloo/" in str(error) and "/tcp/device.cc" not in str(error)
    return from_torch or by_gloo
