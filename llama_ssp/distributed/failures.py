"""How ranks meet, and how each watches the others: the first cause ends all, with one line and one code."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from llama_ssp.config.environment import rank_environment
from llama_ssp.distributed.board import (
    LOOK_S,
    MEETINGS,
    NOBODY,
    Beat,
    Board,
    BoardLost,
    Cause,
    beat_text,
    open_board,
    read_beat,
)
from llama_ssp.distributed.comm import Place
from llama_ssp.distributed.identity import Identity, own_identity
from llama_ssp.distributed.nodes import choose_interface, is_first_here
from llama_ssp.distributed.placement import LEADER
from llama_ssp.distributed.signals import GUARD, leave_within
from llama_ssp.errors import (
    DISTRIBUTED,
    INPUT_OUTPUT,
    OK,
    DistributedError,
    JointError,
    LostPeer,
    RunError,
    first_line,
    machine_error,
)

log = logging.getLogger(__name__)
BEAT_S = 1.0
QUIET_S = 3.0  # without a beat, after a connection was lost: that rank is gone
FIND_S = QUIET_S + 2 * BEAT_S  # for the thread to find which rank is gone
LEAVE_S = 3.0  # for a rank to end in good order once the cause is known
PAUSED_S = 3.0  # a beat this late: this process itself was stopped
APPEAR_S = 300.0  # for all ranks to come, by default
LOADING_S = 1800.0  # while ranks load: how long none of them may stand still, by default
TELL_S = 45.0  # of waiting, after which the leader says for whom it waits
WAITING = "waiting for others"  # in place of what a rank does
MAX_NAMED = 3  # ranks that a line names
PAUSED = "stopped by Ctrl-Z"  # in place of what a rank does
LOOPBACK = "lo"
EXCUSED = "excused"
TURN = "turn"  # how often the leader has said that it goes on
# Until when a rank may do something; what is said, and called before, when that is over.
Deadline = tuple[float, str, Callable[[], None]]
NEVER: Deadline = (math.inf, "", lambda: None)


def meet(patience_s: float, appear_s: float = APPEAR_S, loading_s: float = LOADING_S) -> tuple[Board, Watch]:
    """Waits until every rank has come, `appear_s` at most; returns the board and the watch, which runs."""
    here = rank_environment()
    has_loopback = LOOPBACK in {name for _, name in socket.if_nameindex()}
    if here.nodes > 1:
        choose_interface()
    elif os.environ.get("LOCAL_WORLD_SIZE") == str(here.world) and has_loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    board = open_board(patience_s)
    began = time.monotonic()
    is_told = False
    try:
        watch = Watch(board, here.rank, here.world, patience_s, loading_s)
        watch.beat()
        while absent := watch.absent():
            if cause := board.first_cause():  # of a rank that does not come
                raise JointError(cause.line, code=cause.code, speaks=False)
            waited_s = time.monotonic() - began
            if waited_s > appear_s:
                raise DistributedError(
                    "not all ranks have come",
                    where=f"rank {here.rank} of {here.world}",
                    found=f"no rank {', '.join(map(str, absent))} after {appear_s:g} s",
                    fix="look at these ranks' machines, or raise placement.appear_s",
                )
            if here.is_leader and waited_s > TELL_S and not is_told:
                is_told = True
                named = ", ".join(map(str, absent[:MAX_NAMED])) + (" ..." if absent[MAX_NAMED:] else "")
                said = (
                    "%d of %d ranks have not come after %.0f s (rank %s); placement.appear_s=%g is the limit"
                )
                log.warning(said, len(absent), here.world, waited_s, named, appear_s)
            time.sleep(LOOK_S)
        MEETINGS.append(board)
        watch.start()
        return board, watch
    except BoardLost as lost:
        error = DistributedError(str(lost), where=f"rank {here.rank} of {here.world}", fix="start again")
        error.speaks = is_first_here()  # the others cannot be told
        raise error from lost


class Watch(threading.Thread):
    """One rank's watch over the others.

    The thread sends heartbeats, finds ranks that are gone or silent, and ends this process when there is a
    cause. The main thread records what it does (`place`), and asks why it has to end (`cause_of`).
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world: int,
        patience_s: float,
        loading_s: float = LOADING_S,
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.rank = rank
        self.world = world
        self.patience_s = patience_s
        self.loading_s = loading_s
        self.place = Place("start")
        self.folder: Path | None = None  # for records of errors
        self.spare: frozenset[int] = frozenset()  # the others do not end with these ranks
        self.closing = False  # from here on, ranks that go are no fault
        self.keys = [f"rank/{number}" for number in range(world)]
        self._board = board
        self._thread_board = board.another()
        # Of the beats, and this process.
        self._numbers = itertools.count(1)
        self._beating = threading.Lock()
        self._is_paused = False  # by a person, who lets it go on
        self._process = own_identity()
        self._beats: dict[int, Beat] = {}  # the last of each rank
        self._processes: dict[int, Identity] = {}  # by each rank's first beat: none becomes another
        self._heard = dict.fromkeys(range(world), time.monotonic())  # when each rank's last beat came
        self._moved = dict(self._heard)  # when each rank last said that it does something else
        self._cause: Cause | None = None
        self._deadline = NEVER  # of what the main thread does
        self._waits_since: float | None = None  # when the main thread began to wait for others that load
        self._told_of: float | None = None  # the last such wait of which the leader has said for whom
        self._turns = 0
        self._found = threading.Event()
        self._stopped = threading.Event()
        self._broken = threading.Event()  # a connection broke: a rank is gone
        self._wake = threading.Event()
        GUARD.on_signal.append(self._wake.set)  # the others learn of a signal at once
        GUARD.on_pause.append(self._announce)

    # The main thread.

    def enter(self, place: Place) -> None:
        """Records what this rank does next. The others know at once where it is, in rounds each second."""
        in_rounds = bool(place.round and self.place.round)
        self.place = place
        if not in_rounds:
            with suppress(BoardLost):  # the thread finds that, too
                self.beat(self._board)

    def await_turn(self, leads: bool) -> None:
        """Waits until the leader calls it as often. It looks at the board: no connection stands idle.

        Raises LostPeer when a rank is gone.
        """
        self._turns += 1
        what = "waiting for a message"
        try:
            if leads:
                self._board.write(TURN, str(self._turns))
                return
            while not _is_at(self._board.read([TURN])[0], self._turns):
                if self._found.wait(LOOK_S):
                    raise self._lost_peer(RuntimeError("a rank is gone"), what)
        except BoardLost as lost:
            raise self._lost_peer(lost, what) from lost

    def absent(self) -> list[int]:
        """Returns the ranks that have not come yet."""
        contents = self._board.read(self.keys)
        return [rank for rank, content in enumerate(contents) if read_beat(content) is None]

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

    @contextmanager
    def within(self, seconds: float, what: str, on_timeout: Callable[[], None]) -> Iterator[None]:
        """Ends all ranks if this takes longer, whatever the main thread waits for."""
        outer = self._deadline
        until = time.monotonic() + seconds
        self._deadline = until, f"{what}: no end after {seconds:g} s", on_timeout
        try:
            yield
        finally:
            self._deadline = outer

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Waits for ranks that may load for long, as long as one of them gets on.

        All ranks end when none has done so for `loading_s`.
        """
        place = self.place
        self.place = replace(place, doing=WAITING)
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None
            self.place = place

    def _lost_peer(self, error: BaseException, what: str) -> LostPeer:
        GUARD.ending = True
        self._broken.set()
        where = f"rank {self.rank}, {self.place}, {what}"
        found = str(error)[-160:]
        fix = "look for the first error of the other ranks"
        return LostPeer("another rank has gone or does not answer", where=where, found=found, fix=fix)

    def excuse(self, ranks: tuple[int, ...]) -> None:
        """Tells these ranks that the others go on without them: they leave with code 0."""
        with suppress(BoardLost):  # the thread finds that
            for rank in ranks:
                self._board.write(f"excused/{rank}", EXCUSED)

    def release(self, ranks: tuple[int, ...]) -> None:
        """Lets excused ranks of this machine run if they were stopped: torchrun waits until they leave."""
        for rank in ranks:
            if rank in self._processes:
                self._processes[rank].signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends the thread. Were it inside the store's C++ when Python ends, Python would abort."""
        self._stopped.set()
        self._wake.set()
        self.join(LEAVE_S)

    def cause_of(self, error: BaseException) -> JointError:
        """Returns what all ranks end with: the first cause in the store, which may be this error.

        A rank that may be lost ends by itself, and with code 0: a launcher would take another for the run's.
        """
        GUARD.ending = True
        if _is_broken_collective(error):
            error = self._lost_peer(error, "exchanging")
        if elsewhere := isinstance(error, LostPeer | KeyboardInterrupt):  # the thread may find the cause
            self._wake.set()
            self._found.wait(FIND_S if self.is_alive() else 0.0)
        cause = self._cause if elsewhere else None
        if cause is None and self.rank in self.spare and not isinstance(error, KeyboardInterrupt):
            cause = Cause(self._own(error).line, OK, NOBODY if elsewhere else self.rank)
        elif cause is None:
            cause = self._own(error)
            with suppress(BoardLost):
                cause = self._board.first_cause(cause) or cause
        self._keep(error, cause)
        self.stop()
        return JointError(cause.line, code=cause.code, speaks=cause.by == self.rank)

    def _own(self, error: BaseException) -> Cause:
        """Returns this rank's error as a cause."""
        match error if isinstance(error, RunError) else machine_error(error) or error:
            case KeyboardInterrupt(args=args):  # the guard's has the signal's number, Python's own has none
                return self._signal(args[0] if args else signal.SIGINT)
            case LostPeer():  # ranks out of step show
                places = (f"rank {rank}: {self._place_of(rank)}" for rank in range(self.world))
                return self._cause_here(f"rank {self.rank} gets no answer; {error}; {', '.join(places)}")
            case RunError() as known:
                said = str(known)
                code = known.code
            case BoardLost():
                said = str(error)
                code = DISTRIBUTED
            case OSError():
                said = f"{type(error).__name__}: {error}"
                code = INPUT_OUTPUT
            case _:
                said = f"{type(error).__name__}: {error}"
                code = DISTRIBUTED
        return self._cause_here(f"rank {self.rank} failed during {self.place}: {said}", code)

    def _signal(self, number: int) -> Cause:
        line = f"rank {self.rank} was stopped by {signal.Signals(number).name} during {self.place}"
        return self._cause_here(line, 128 + number)

    def _cause_here(self, line: str, code: int = DISTRIBUTED) -> Cause:
        return Cause(line, code, self.rank)

    def _keep(self, error: BaseException, cause: Cause) -> None:
        """Writes this rank's record, into the run folder if this machine has it."""
        if self.folder is None or not self.folder.is_dir():
            return
        record = {
            "time": datetime.now(UTC).isoformat(),
            "rank": self.rank,
            **asdict(self.place),
            "exception": f"{type(error).__name__}: {error}",
            "cause": cause.line,
            "exit_code": cause.code,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        with suppress(OSError):  # a full disk must not hide the cause
            path = self.folder / f"error.rank{self.rank}.json"
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    # The thread.

    def run(self) -> None:
        beat_s = min(BEAT_S, self.patience_s / 4)
        before = time.monotonic()
        while not self._stopped.is_set():
            now = time.monotonic()
            if now - before > beat_s + PAUSED_S:  # this process was stopped: all others look late
                self._heard = dict.fromkeys(self._heard, now)
                self._moved = dict.fromkeys(self._moved, now)
            before = now
            # Read before the look: if torchrun stops this rank because another has gone, the look finds that.
            number = GUARD.signalled
            try:
                cause = self._look()
                if number and not cause:
                    cause = self._thread_board.first_cause(self._signal(number))
            except BoardLost as lost:
                line = f"{lost}; rank {self.rank}, {self.place}"
                cause = Cause(line, by=self.rank if is_first_here() else NOBODY)
            except Exception as error:  # a rank that nobody watches would wait for the others without end
                cause = self._cause_here(f"rank {self.rank} cannot watch the others: {first_line(error)}")
            if cause and not self._stopped.is_set():
                self._cause = cause
                leave_within(LEAVE_S, cause.code, cause.line if cause.by == self.rank else "")
                self._found.set()
                return
            self._wake.wait(beat_s)
            self._wake.clear()

    def beat(self, board: Board | None = None) -> None:
        """Writes what the others read: a new number, what this rank does, and its process."""
        with self._beating:
            place = PAUSED if self._is_paused else str(self.place)
            text = beat_text(next(self._numbers), place, self._process)
            (board or self._thread_board).write(self.keys[self.rank], text)

    def _announce(self, pauses: bool) -> None:
        """Tells the others that this process is about to be stopped, or that it goes on."""
        self._is_paused = pauses
        with suppress(BoardLost):  # the thread finds that
            self.beat()

    def _place_of(self, rank: int) -> str:
        """Returns where a rank was at its last beat."""
        return self._beats[rank].place if rank in self._beats else "start"

    def _is_dead(self, rank: int) -> bool:
        return rank in self._processes and self._processes[rank].lives is False

    def _listen(self, now: float) -> None:
        """Reads the ranks' beats, which count as heard `now`. What is no beat is as if nothing had come."""
        for rank, content in enumerate(self._thread_board.read(self.keys)):
            beat = read_beat(content)
            last = self._beats.get(rank)
            if beat is None or beat == last:
                continue
            if last is None or beat.place != last.place:
                self._moved[rank] = now
            self._beats[rank] = beat
            self._heard[rank] = now
            self._processes.setdefault(rank, beat.process)

    def _look(self) -> Cause | None:
        """Sends a heartbeat, reads the others'; returns the cause if there is one, or a rank is missing."""
        others = set(range(self.world)) - {self.rank} - self.spare
        dead = {rank for rank in others if self._is_dead(rank)}
        self.beat()
        now = time.monotonic()  # before the others are read: this process may be stopped while it reads
        self._listen(now)
        if cause := self._thread_board.first_cause():  # also of a rank that has died since
            return cause
        until, late_line, on_timeout = self._deadline
        if now > until:
            on_timeout()
            line = f"rank {self.rank}: {late_line}, in {self.place}"
            return self._thread_board.first_cause(self._cause_here(line))
        if line := self._stalled(now, others):
            return self._thread_board.first_cause(self._cause_here(line))
        if self.rank in self.spare and any(self._thread_board.read([f"excused/{self.rank}"])):
            leave_within(LEAVE_S, OK)  # the main thread may be stuck
            self._stopped.set()
            self._found.set()
            return None
        limit_s = QUIET_S if self._broken.is_set() else self.patience_s
        late = {rank for rank in others - dead if now - self._heard[rank] > limit_s}
        late = {rank for rank in late if self._place_of(rank) != PAUSED}
        gone = dead if self._broken.is_set() or not self.closing else set()
        if not gone | late:
            return None
        first = min(gone or late)
        how = "is gone (killed by a signal, or it exited without a word)"
        if not gone:
            how = f"has not answered for {now - self._heard[first]:.1f} s (stopped, or cut off)"
        for rank in late:
            if rank in self._processes:
                self._processes[rank].signal(signal.SIGKILL)
        line = f"rank {first} {how}; last heard of in {self._place_of(first)}"
        return self._thread_board.first_cause(self._cause_here(line))

    def _stalled(self, now: float, others: set[int]) -> str:
        """Returns why all end where this rank waits for others, of which none gets on any more; else "".

        The leader says once in each wait for whom it waits.
        """
        since = self._waits_since
        if since is None:
            return ""
        slow = [rank for rank in sorted(others) if not self._place_of(rank).endswith(WAITING)]
        moved = max([since, *(self._moved[rank] for rank in slow)])
        if now - moved > self.loading_s:
            if not slow:
                return f"all ranks have waited for each other for {now - moved:.0f} s, in {self.place}"
            first = slow[0]
            return (
                f"rank {first} has not got on for {now - moved:.0f} s (placement.loading_s), and the others "
                f"wait for it; last heard of in {self._place_of(first)}"
            )
        if slow and self.rank == LEADER and now - since > TELL_S and self._told_of != since:
            self._told_of = since
            named = "; ".join(f"rank {rank}: {self._place_of(rank)}" for rank in slow[:MAX_NAMED])
            log.warning(
                "waiting for %d of %d ranks (%s). If weights come slowly, have them on that machine's disk.",
                len(slow),
                self.world,
                named,
            )
        return ""


def _is_at(content: bytes, number: int) -> bool:
    """Returns whether what stands on the board is this number or a later one."""
    return content.isdigit() and len(content) < 20 and int(content) >= number


def _is_broken_collective(error: BaseException) -> bool:
    """Whether gloo or NCCL raised it, where no `during` was: a graph's sum fails when its result is read.

    What gloo says of a device is about this machine's own network.
    """
    from_torch = type(error).__module__ == "torch.distributed" and isinstance(error, RuntimeError)
    by_gloo = type(error) is RuntimeError and "/gloo/" in str(error) and "/tcp/device.cc" not in str(error)
    return from_torch or by_gloo
