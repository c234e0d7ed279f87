"""What a rank makes of the others' signs of life, and how all wait while the leader waits for a person."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from llama_ssp.distributed import failures, identity
from llama_ssp.distributed.board import FolderBoard, beat_text
from llama_ssp.distributed.comm import ALONE, Place
from llama_ssp.distributed.failures import Watch
from llama_ssp.distributed.identity import own_identity
from llama_ssp.distributed.signals import GUARD
from llama_ssp.errors import DistributedError, LostPeer
from llama_ssp.tasks import interactive as asking
from llama_ssp.tasks.interactive import while_others_wait
from tests.distributed.threads import ThreadRank, ranks_of, together

PATIENCE_S = 0.05


BEAT = beat_text(1, "verify, round 3", own_identity())


@pytest.fixture
def board(tmp_path: Path) -> FolderBoard:
    """Rank 1, which is this process, too, wrote one beat and beats no more."""
    board = FolderBoard(tmp_path / "board")
    board.write("rank/1", BEAT)
    return board


@pytest.fixture
def watch(board: FolderBoard, monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(GUARD, "on_signal", [])
    monkeypatch.setattr(GUARD, "on_pause", [])
    return Watch(board, 0, 2, PATIENCE_S)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The processes that a watch would kill, with the signal."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    return killed


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has rank 1 end."""
    return lambda: monkeypatch.setattr(identity, "_stat", lambda _: ["Z", *["0"] * 30])


@pytest.mark.parametrize("closing", [False, True], ids=["running", "closing"])
def test_a_rank_that_stands_still_is_killed(
    closing: bool, watch: Watch, killed: list[tuple[int, int]]
) -> None:
    """On its way out, too, while this rank waits for it."""
    watch.closing = closing
    assert watch._look() is None
    time.sleep(2 * PATIENCE_S)
    cause = watch._look()
    assert cause and "last heard of in verify, round 3" in cause.line and cause.by == 0
    assert cause.line.startswith("rank 1 has not answered for 0.")
    assert killed == [(os.getpid(), signal.SIGKILL)]
    assert watch._look() == cause


def test_a_rank_that_is_gone_is_the_cause(
    watch: Watch, gone: Callable[[], None], killed: list[tuple[int, int]]
) -> None:
    assert watch._look() is None
    gone()
    time.sleep(2 * PATIENCE_S)
    cause = watch._look()
    assert cause and "last heard of in verify, round 3" in cause.line and cause.by == 0
    assert cause.line.startswith("rank 1 is gone")
    assert killed == []
    assert watch._look() == cause


def test_a_rank_that_left_in_good_order_is_no_fault(
    watch: Watch, gone: Callable[[], None], killed: list[tuple[int, int]]
) -> None:
    watch.closing = True
    assert watch._look() is None
    gone()
    time.sleep(2 * PATIENCE_S)
    assert watch._look() is None and killed == []


def test_a_rank_that_is_excused_may_be_late(watch: Watch) -> None:
    watch.spare = frozenset({1})
    time.sleep(2 * PATIENCE_S)
    assert watch._look() is None, "rank 1 is late, and may be"


def test_a_script_s_own_interrupt_is_named(watch: Watch) -> None:
    """Without the guard, which the command line starts, it has no number."""
    watch.place = Place("verify", 2)
    cause = watch._own(KeyboardInterrupt())
    assert cause.code == 130 and cause.line == "rank 0 was stopped by SIGINT during verify, round 2"


class Clock:
    """Stands in for the module `time` of the watch: it moves only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Returns the clock of a watch that neither ends this process nor sends it a signal."""
    clock = Clock()
    monkeypatch.setattr(failures, "time", clock)
    monkeypatch.setattr(failures, "leave_within", lambda *_: None)
    monkeypatch.setattr(os, "kill", lambda *_: None)
    monkeypatch.setattr(GUARD, "on_signal", [])
    monkeypatch.setattr(GUARD, "on_pause", [])
    monkeypatch.setattr(GUARD, "ending", False)
    return clock


def break_connection(watch: Watch) -> None:
    """The main thread meets a sum that another rank does not take part in any more."""
    with pytest.raises(LostPeer), watch.during("summing"):
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("broken", "silent_s", "is_late"),
    [(False, 59, False), (False, 61, True), (True, 2, False), (True, 4, True)],
    ids=["within its time", "beyond its time", "just after a break", "seconds after a break"],
)
def test_a_silent_rank_has_its_time_or_after_a_broken_connection_seconds(
    broken: bool, silent_s: int, is_late: bool, board: FolderBoard, clock: Clock
) -> None:
    watch = Watch(board, 0, 2, 60.0)
    assert watch._look() is None
    if broken:
        break_connection(watch)
    clock.now += silent_s
    cause = watch._look()
    assert (cause is not None) == is_late
    assert cause is None or cause.line.startswith(f"rank 1 has not answered for {silent_s}.0 s")


class TimedBoard(FolderBoard):
    """Moves the clock by one of `gaps` between two looks of the watch; sets `over` at the last look."""

    def __init__(self, folder: Path, clock: Clock, gaps: list[float]) -> None:
        super().__init__(folder)
        self.write("rank/1", BEAT)
        self._clock = clock
        self._gaps = list(gaps)
        self.over = threading.Event()

    def read(self, keys: list[str]) -> list[bytes]:
        if self._gaps:
            self._clock.now += self._gaps.pop(0)
            for wake in GUARD.on_signal:  # the next look comes at once
                wake()
        else:
            self.over.set()
        return super().read(keys)


@pytest.mark.parametrize(
    ("gaps", "blamed"),
    [([3600.0], False), ([1.0] * 61, True)],
    ids=["this rank was stopped", "this rank ran"],
)
def test_only_silence_while_this_rank_runs_is_a_fault(
    gaps: list[float], blamed: bool, clock: Clock, tmp_path: Path
) -> None:
    """After Ctrl-Z, and fg an hour later, each rank has its time anew: none sent signs of life meanwhile."""
    board = TimedBoard(tmp_path / "board", clock, gaps)
    watch = Watch(board, 0, 2, 60.0)
    watch.start()
    assert board.over.wait(30)
    watch.stop()
    assert (board.first_cause() is not None) == blamed


def test_on_the_way_out_a_rank_that_is_gone_is_named_where_a_connection_broke(
    board: FolderBoard, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it has gone in good order. This rank waits for it in vain."""
    watch = Watch(board, 0, 2, 60.0)
    watch.closing = True
    assert watch._look() is None
    monkeypatch.setattr(identity, "_stat", lambda _: ["Z", *["0"] * 30])
    assert watch._look() is None
    break_connection(watch)
    cause = watch._look()
    assert cause is not None and cause.line.startswith("rank 1 is gone")


def asked(ranks: list[ThreadRank], work: Callable[[], list[int]]) -> list[list[int]]:

    def nothing() -> list[int]:
        raise AssertionError("only the leader works")

    jobs = [partial(while_others_wait, rank, work if rank.is_leader else nothing) for rank in ranks]
    return together(jobs, ranks)


def test_every_rank_gets_what_the_leader_found() -> None:
    ranks = ranks_of(3)
    assert asked(ranks, lambda: [7, 0, 8]) == [[7, 0, 8]] * 3
    assert asked(ranks, lambda: []) == [[]] * 3
    assert while_others_wait(ALONE, lambda: [1]) == [1]


def test_the_others_are_told_that_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work takes as long as three messages do: without them it would not end."""
    monkeypatch.setattr(asking, "EVERY_S", 0.001)
    ranks = ranks_of(2)
    told, enough = ranks[0].broadcast_ints, threading.Event()

    def counted(values: list[int]) -> list[int]:
        found = told(values)
        if ranks[0].counts["messages"] >= 3:
            enough.set()
        return found

    monkeypatch.setattr(ranks[0], "broadcast_ints", counted)

    def work() -> list[int]:
        assert enough.wait(30)
        return [5]

    assert asked(ranks, work) == [[5], [5]]
    assert ranks[1].counts["messages"] == ranks[0].counts["messages"] >= 4


def test_a_rank_that_is_lost_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person may never press Enter; that the others have gone must not wait for it."""
    monkeypatch.setattr(asking, "EVERY_S", 0.001)
    (leader, _), interrupted = ranks_of(2), threading.Event()

    def lost(_: list[int]) -> list[int]:
        raise DistributedError("another rank has gone")

    monkeypatch.setattr(leader, "broadcast_ints", lost)
    monkeypatch.setattr(asking._thread, "interrupt_main", interrupted.set)

    def typing() -> list[int]:
        assert interrupted.wait(30)
        raise KeyboardInterrupt

    with pytest.raises(DistributedError, match="another rank has gone"):
        while_others_wait(leader, typing)


def test_a_stop_that_is_announced_is_no_loss(board: FolderBoard, clock: Clock) -> None:
    """However long it takes; the same silence without a word, or after it went on, is one."""
    watch, other = Watch(board, 0, 2, 60.0), Watch(board, 1, 2, 60.0)
    other.beat()
    assert watch._look() is None
    other._announce(True)
    other.beat()  # of its thread, just before it is stopped
    assert watch._look() is None
    clock.now += 10_000
    assert watch._look() is None
    other._announce(False)
    assert watch._look() is None
    clock.now += 61
    cause = watch._look()
    assert cause is not None and "rank 1 has not answered" in cause.line


def test_a_turn_is_waited_for(board: FolderBoard) -> None:
    """Each by its number, and not the tenth by the ninth; a rank that is lost ends the wait."""
    leader, other = Watch(board, 0, 2, 60.0), Watch(board, 1, 2, 60.0)
    came = list[int]()

    def follow() -> None:
        for number in range(12):
            other.await_turn(leads=False)
            came.append(number)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    for number in range(11):
        assert len(came) <= number
        leader.await_turn(leads=True)
        until = time.monotonic() + 10
        while len(came) <= number and time.monotonic() < until:
            time.sleep(0.005)
    time.sleep(0.2)
    assert came == list(range(11)) and thread.is_alive()
    leader.await_turn(leads=True)
    thread.join(10)
    assert len(came) == 12
    other._found.set()
    with pytest.raises(LostPeer):
        other.await_turn(leads=False)
