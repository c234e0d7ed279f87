"""What ranks pin up for each other in the run's store: where they are, that they live, why they end."""

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
LOOK_S = 0.02
LEADER_S = 5.0  # for the leader to fail alike, or to know the cause
LINGER_S = 2.0  # for the others to hear the cause from a store that ends with this process
END = "end"  # the phase of a rank that leaves in good order


@dataclass(frozen=True)
class Place:
    """What a rank is doing. An engine counts its rounds from 1; 0 is before the first."""

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

    def voice(self, world: int) -> int:
        """Who says it: the leader, or else the lowest rank that is left. -1 where no other rank has to."""
        return -1 if self.said else min(set(range(world)) - set(self.silent), default=-1)


@dataclass(frozen=True)
class View:
    """The board at one moment."""

    places: list[Place]
    beats: list[str]
    cause: Cause | None


class Store:
    """One connection to the store; a thread has its own, as one that waits blocks the others."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world

    def open(self) -> None:
        """Pins up what others read without waiting."""
        if self._rank == 0:
            self._store.compare_set(CAUSE, "", "")  # a rank that failed before may have set it
        self.beat(0)
        self.move(Place("start"))

    def clone(self) -> Store:
        return Store(self._store.clone(), self._rank, self._world)

    def beat(self, number: int) -> None:
        self._store.set(f"beat/{self._rank}", str(number))

    def move(self, place: Place) -> None:
        self._store.set(f"place/{self._rank}", json.dumps(asdict(place)))

    def read(self) -> View:
        every = range(self._world)
        keys = [CAUSE, *(f"place/{rank}" for rank in every), *(f"beat/{rank}" for rank in every)]
        cause, *rest = (value.decode() for value in self._store.multi_get(keys))
        places = [Place(**json.loads(text)) for text in rest[: self._world]]
        return View(places, rest[self._world :], _cause(cause))

    def blame(self, cause: Cause) -> Cause:
        """The cause that was pinned up first: this one, or an earlier one."""
        first = self._store.compare_set(CAUSE, "", json.dumps(asdict(cause))).decode()
        return _cause(first) or cause

    def cause(self) -> Cause | None:
        """The cause that a rank has pinned up, if there is one."""
        return _cause(self._store.get(CAUSE).decode()) if self._store.check([CAUSE]) else None

    def settle(self, own: Cause, stopped: bool) -> tuple[Cause, bool]:
        """Pins up why this rank ends before all ranks have met.

        Returns the cause this rank ends with, and whether it says the line: of ranks with the same line,
        the leader does, or the first if the leader is late. A rank that was `stopped` ends with the cause of
        another rank where there is one.
        """
        own = replace(own, said=True)
        first = self.blame(own)
        if stopped and first != own:
            return first, False
        until = time.monotonic() + LEADER_S
        while self._rank != LEADER and not self.has_heard(LEADER) and time.monotonic() < until:
            time.sleep(LOOK_S)
        key = hashlib.sha256(own.line.encode(errors="surrogatepass")).hexdigest()
        return own, self._store.add(f"said/{key}", 1) == 1

    def excuse(self, rank: int) -> None:
        """Says that the others go on without this rank."""
        self._store.set(f"excused/{rank}", "")

    def is_excused(self, rank: int) -> bool:
        return bool(self._store.check([f"excused/{rank}"]))

    def heard(self) -> None:
        """Says that this rank knows the cause."""
        self._store.set(f"heard/{self._rank}", "")

    def has_heard(self, rank: int) -> bool:
        return bool(self._store.check([f"heard/{rank}"]))

    def linger(self, silent: tuple[int, ...] = (), seconds: float = LINGER_S) -> None:
        """Waits until the other ranks know the cause, so long at most; `silent` ones are not waited for."""
        until = time.monotonic() + seconds
        others = set(range(self._world)) - {self._rank, *silent}
        with suppress(RuntimeError):
            while time.monotonic() < until and not all(map(self.has_heard, others)):
                time.sleep(LOOK_S)


def stopped(rank: int, number: int, place: Place) -> Cause:
    """A signal, which comes from outside."""
    return Cause(f"rank {rank} was stopped by {signal.Signals(number).name} during {place}", 128 + number)


def _cause(text: str) -> Cause | None:
    if not text:
        return None
    values = json.loads(text)
    return Cause(values["line"], values["code"], tuple(values["silent"]), values["said"])
