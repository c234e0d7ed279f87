"""What ranks write for each other into the run's store: where they are, heartbeats, why they end."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from llama_ssp.distributed.placement import LEADER
from llama_ssp.errors import DISTRIBUTED

CAUSE = "cause"
READ, EXCUSED = "read", "excused"  # the rank has read the cause; the others go on without the rank
LOOK_S = 0.02
LEADER_S = 5.0  # for the leader to fail alike, or to read the cause
LINGER_S = 2.0  # for the others to read the cause from a store that ends with this process
END = "end"  # the phase of a rank that leaves in good order


@dataclass(frozen=True)
class Place:
    """What a rank is doing. An engine counts its rounds from 1; 0 is outside of them."""

    phase: str
    round: int = 0

    def __str__(self) -> str:
        return f"{self.phase}, round {self.round}" if self.round else self.phase


@dataclass(frozen=True)
class Cause:
    """Why all ranks end: in one line, with one exit code."""

    line: str
    code: int = DISTRIBUTED
    silent: tuple[int, ...] = ()  # ranks that are gone, or do not answer
    said: bool = False  # the rank that failed says the line itself

    def speaker(self, world: int) -> int:
        """The rank that says it: the leader, or the lowest that is left; -1 if none has to."""
        return -1 if self.said else min(set(range(world)) - set(self.silent), default=-1)


@dataclass(frozen=True)
class View:
    """The store at one moment."""

    places: list[Place]
    beats: list[str]
    cause: Cause | None


class Store:
    """One connection to the store. Each thread has its own: a call that waits blocks the connection."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.tcp, self._rank, self._world = store, rank, world

    def open(self) -> None:
        """Writes what others read without waiting."""
        if self._rank == LEADER:
            self.tcp.compare_set(CAUSE, "", "")  # a rank that failed before may have set it
        self.beat(0)
        self.move(Place("start"))

    def clone(self) -> Store:
        return Store(self.tcp.clone(), self._rank, self._world)

    def beat(self, number: int) -> None:
        self.tcp.set(f"beat/{self._rank}", str(number))

    def move(self, place: Place) -> None:
        self.tcp.set(f"place/{self._rank}", json.dumps(asdict(place)))

    def read(self) -> View:
        every = range(self._world)
        keys = [CAUSE, *(f"place/{rank}" for rank in every), *(f"beat/{rank}" for rank in every)]
        cause, *rest = (value.decode() for value in self.tcp.multi_get(keys))
        places = [Place(**json.loads(text)) for text in rest[: self._world]]
        return View(places, rest[self._world :], _cause(cause))

    def blame(self, cause: Cause) -> Cause:
        """Records the cause; returns the one recorded first, this or an earlier one."""
        first = self.tcp.compare_set(CAUSE, "", json.dumps(asdict(cause))).decode()
        return _cause(first) or cause

    def cause(self) -> Cause | None:
        return _cause(self.tcp.get(CAUSE).decode()) if self.tcp.check([CAUSE]) else None

    def settle(self, own: Cause, stopped: bool) -> tuple[Cause, bool]:
        """Records why this rank ends before all ranks have met.

        Returns the cause this rank ends with, and whether it says the line: of ranks with the same line,
        the leader does, or the first if the leader is late. A rank that was `stopped` ends with the cause of
        another rank where there is one.
        """
        own = replace(own, said=True)
        first = self.blame(own)
        if stopped and first != own:
            return first, False
        until = time.monotonic() + LEADER_S
        while self._rank != LEADER and not self.has(READ, LEADER) and time.monotonic() < until:
            time.sleep(LOOK_S)
        key = hashlib.sha256(own.line.encode(errors="surrogatepass")).hexdigest()
        return own, self.tcp.add(f"said/{key}", 1) == 1

    def mark(self, what: str, rank: int) -> None:
        """Records a fact about a rank: READ or EXCUSED."""
        self.tcp.set(f"{what}/{rank}", "")

    def has(self, what: str, rank: int) -> bool:
        return bool(self.tcp.check([f"{what}/{rank}"]))

    def linger(self, silent: tuple[int, ...] = (), seconds: float = LINGER_S) -> None:
        """Waits until the other ranks have read the cause, for a limited time; not for `silent` ones."""
        until = time.monotonic() + seconds
        others = set(range(self._world)) - {self._rank, *silent}
        with suppress(RuntimeError):
            while time.monotonic() < until and not all(self.has(READ, rank) for rank in others):
                time.sleep(LOOK_S)


def interrupted(rank: int, stop: BaseException, place: Place) -> Cause:
    """A KeyboardInterrupt: the guard's has the signal's number, Python's own, in a script, has none."""
    return stopped(rank, stop.args[0] if stop.args else signal.SIGINT, place)


def stopped(rank: int, number: int, place: Place) -> Cause:
    """A signal, which comes from outside."""
    return Cause(f"rank {rank} was stopped by {signal.Signals(number).name} during {place}", 128 + number)


def _cause(text: str) -> Cause | None:
    values = json.loads(text) if text else None
    return Cause(**{**values, "silent": tuple(values["silent"])}) if values else None
