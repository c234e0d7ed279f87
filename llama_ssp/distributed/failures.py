"""Why a rank ends: the first one that fails leaves its reason, and all end with it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from llama_ssp.distributed.draft_link import LinkLost
from llama_ssp.distributed.draft_messages import Dismissed
from llama_ssp.distributed.heartbeat import BEAT_S, LEAVE_S, QUIET_S, Heartbeat
from llama_ssp.distributed.peers import Peers
from llama_ssp.distributed.rendezvous import Rendezvous
from llama_ssp.distributed.signals import GUARD
from llama_ssp.distributed.store import END, Cause, Place, Store, stopped
from llama_ssp.errors import DISTRIBUTED, INPUT_OUTPUT, OK, DistributedError, JointError, RunError

FIND_S = QUIET_S + 2 * BEAT_S  # for the watch to find whose fault it is


class LostPeer(DistributedError):
    """Another rank has ended, or is stuck: the cause is there, not here."""


class Report:
    """One rank's account of what it is doing, and of what ended it."""

    def __init__(self, meeting: Rendezvous, patience_s: float) -> None:
        address = meeting.address
        self.rank, self.world = address.rank, address.world
        self.place = Place("start")
        self.folder: Path | None = None  # where records are kept
        self._keeps_store = address.hosts
        self._board = Store(meeting.store, self.rank, self.world)
        peers = Peers(meeting.everyone, self.rank)
        self._watch = Heartbeat(
            self._board.clone(), peers, self.rank, self.world, patience_s, not address.launched
        )
        self._watch.start()

    def enter(self, phase: str, number: int = 0) -> None:
        self.place = self._watch.place = Place(phase, number)
        with suppress(RuntimeError):  # who keeps the store is gone: the watch knows
            self._board.move(self.place)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """A peer that is gone, or late beyond its time, ends this rank with one line."""
        try:
            yield
        except RuntimeError as error:
            GUARD.ending = True
            self._watch.lost.set()
            raise LostPeer(
                "another rank has gone or does not answer", where=f"rank {self.rank}, {self.place}, {what}",
                found=str(error)[-160:], fix="look for the first error of the other ranks",
            ) from error  # fmt: skip

    def leave(self) -> None:
        """From here on, ranks that go are no fault."""
        self.enter(END)

    def part(self) -> None:
        self._watch.part()

    def may_lose(self, ranks: frozenset[int]) -> None:
        """Should one of these go, or fall silent, the others do not end with it."""
        self._watch.spare = ranks

    @property
    def spare(self) -> frozenset[int]:
        return self._watch.spare

    def excuse(self, ranks: tuple[int, ...]) -> None:
        """The others go on without them."""
        with suppress(RuntimeError):  # the store is gone: the watch knows
            for rank in ranks:
                self._board.excuse(rank)

    def dismiss(self, ranks: tuple[int, ...]) -> None:
        """Lost ranks of this machine that only stand still are woken, so that they leave; or else ended."""
        self._watch.dismiss(ranks)

    def see_off(self) -> None:
        """The first rank of a machine leaves last: nobody else ends one that is stopped on its way out."""
        self._watch.see_off()
        GUARD.parted = True

    def cause_of(self, error: BaseException) -> JointError:
        """What all ranks end with: the first cause on the board, which may be this error.

        A rank that may be lost ends by itself, and with code 0: a launcher would take another for the run's.
        """
        GUARD.ending = True
        if self.rank in self.spare and not isinstance(error, KeyboardInterrupt):
            left_alone = isinstance(error, LinkLost | LostPeer)
            if not left_alone or self._is_excused(error) or not self._watch.ask(FIND_S):
                return self._lost(error, not left_alone)
        cause = self._cause(error)
        speaks = self._watch.speaks(cause)
        GUARD.arm("cause", LEAVE_S, cause.code, cause.line if speaks else "")
        self._keep(error, cause)
        if self._keeps_store:
            self._board.linger(cause.silent)
        self._watch.rest(BEAT_S)
        return JointError(cause.line, cause.code, speaks)

    def _cause(self, error: BaseException) -> Cause:
        elsewhere = isinstance(error, LostPeer | LinkLost | KeyboardInterrupt)
        if found := self._watch.ask(FIND_S if elsewhere else 0.0):
            return found
        with suppress(RuntimeError):
            return self._board.blame(self._own(error))
        return self._own(error)

    def _is_excused(self, error: BaseException) -> bool:
        """Whether the others go on: then there is no cause to be found."""
        with suppress(RuntimeError):
            return isinstance(error, Dismissed) or self._board.is_excused(self.rank)
        return False

    def _lost(self, error: BaseException, speaks: bool) -> JointError:
        cause = replace(self._own(error), code=OK)
        GUARD.arm("cause", LEAVE_S, OK)
        self._keep(error, cause)
        self.leave()
        self.part()
        return JointError(cause.line, OK, speaks)

    def _own(self, error: BaseException) -> Cause:
        where = f"rank {self.rank} failed during {self.place}"
        if isinstance(error, KeyboardInterrupt):
            return stopped(self.rank, error.args[0], self.place)
        if isinstance(error, LostPeer | LinkLost):
            return Cause(f"rank {self.rank} waits in vain; {error}; {self._places()}")
        if isinstance(error, RunError):
            return Cause(f"{where}: {error}", error.code)
        code = INPUT_OUTPUT if isinstance(error, OSError) else DISTRIBUTED
        return Cause(f"{where}: {type(error).__name__}: {error}", code)

    def _places(self) -> str:
        """Where all ranks are: those out of step show."""
        view = self._watch.view
        return ", ".join(f"rank {rank}: {place}" for rank, place in enumerate(view.places)) if view else ""

    def _keep(self, error: BaseException, cause: Cause) -> None:
        """This rank's record, in the run folder where this machine has it."""
        if self.folder is None or not self.folder.is_dir():
            return
        record = {
            "time": datetime.now(UTC).isoformat(), "rank": self.rank, "phase": self.place.phase,
            "round": self.place.round, "exception": f"{type(error).__name__}: {error}", "cause": cause.line,
            "exit_code": cause.code, "host": socket.gethostname(), "pid": os.getpid(),
        }  # fmt: skip
        with suppress(OSError):  # a full disk must not hide the cause
            path = self.folder / f"error.rank{self.rank}.json"
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
