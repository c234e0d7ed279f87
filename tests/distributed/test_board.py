"""What ranks read of each other is checked: torchrun's store is a port, open to every user of the machine."""

import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from llama_ssp.distributed import failures
from llama_ssp.distributed.board import Board, BoardLost, Cause, FolderBoard, StoreBoard, beat_text
from llama_ssp.distributed.failures import Watch
from llama_ssp.distributed.identity import Identity, own_identity
from llama_ssp.distributed.signals import GUARD
from llama_ssp.errors import DISTRIBUTED, MODEL
from tests.distributed.faults import RUN
from tests.processes import wait_for
from tests.warm import Started, launcher_store

stores: Any = dist
WAIT_S = 30.0
PATIENCE_S = 0.3  # of a watch: without a beat for so long a rank is late
BEAT = beat_text(1, "verify, round 3", own_identity())
FORGED = "the ranks' store holds something that no rank wrote, in place of why they end"


def connected(server: Any) -> Any:
    return stores.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


@pytest.fixture(scope="module")
def server() -> Any:
    return launcher_store()


@pytest.fixture
def at() -> str:
    """Where the ranks' keys are: anybody can list all keys of the store."""
    return f"llama_ssp/{uuid.uuid4().hex}/0"


@pytest.fixture(scope="module")
def stranger(server: Any) -> Any:
    """Another process's connection: it needs no password."""
    return connected(server)


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    return connected(server)


@pytest.fixture(params=["folder", "store"])
def board(request: pytest.FixtureRequest, tmp_path: Path, at: str) -> Board:
    if request.param == "folder":
        return FolderBoard(tmp_path / "0" / "0")
    return StoreBoard(stores.PrefixStore(at, request.getfixturevalue("client")), WAIT_S)


class Watched:
    """Rank 0's watch over 2 ranks, running; `ended` is what the process would have ended with."""

    def __init__(self, board: Board, rank: int = 0) -> None:
        self.board, self.ended = board, list[tuple[int, str]]()
        self.killed: list[int] = []
        board.write(f"rank/{1 - rank}", BEAT)
        self.watch = Watch(board, rank, 2, PATIENCE_S)

    def end(self) -> list[tuple[int, str]]:
        self.watch.join(WAIT_S)
        assert not self.watch.is_alive()
        return self.ended


@pytest.fixture
def watched(client: Any, at: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(rank: int = 0) -> Watched:
        result = Watched(StoreBoard(stores.PrefixStore(at, client), WAIT_S), rank)
        made.append(result)
        monkeypatch.setattr(GUARD, "on_signal", [])
        monkeypatch.setattr(os, "kill", lambda pid, number: result.killed.append(pid) if number else None)
        end = result.ended
        monkeypatch.setattr(failures, "leave_within", lambda _, code, line="": end.append((code, line)))
        return result

    yield make
    for each in made:
        each.watch.stop()


def cause(**changes: Any) -> bytes:
    return json.dumps({"line": "all is well", "code": 5, "by": 0} | changes).encode()


NO_CAUSES = {
    "code-zero": cause(code=0),
    "code-unknown": cause(code=77),
    "code-text": cause(code="5"),
    "code-float": cause(code=5.0),
    "code-true": cause(code=True),
    "rank-unknown": cause(by=-2),
    "rank-text": cause(by="0"),
    "line-empty": cause(line=" "),
    "line-number": cause(line=5),
    "line-huge": cause(line="x" * 2**20),
    "much-space": cause() + b" " * 2**17,
    "another-field": cause(evil=1),
    "other-fields": b'{"evil": 1}',
    "list": b"[1, 2]",
    "nothing": b"null",
    "no-json": b"\xff\x00 garbage",
    "nested": b"[" * 60000,
}


@pytest.mark.parametrize("content", NO_CAUSES.values(), ids=NO_CAUSES)
def test_what_no_rank_wrote_in_place_of_the_cause_ends_the_run_as_that(
    content: bytes, stranger: Any, at: str, watched: Callable[..., Watched]
) -> None:
    run = watched()
    stranger.set(f"{at}/cause", content)
    run.watch.start()
    assert run.end() == [(DISTRIBUTED, FORGED)]


def test_one_rank_alone_says_that_the_cause_was_forged(
    stranger: Any, at: str, watched: Callable[..., Watched]
) -> None:
    run = watched(rank=1)
    stranger.set(f"{at}/cause", b"garbage")
    run.watch.start()
    assert run.end() == [(DISTRIBUTED, "")]


def test_a_watch_that_fails_ends_the_run(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a fault of its own, of whatever kind: ranks that nobody watches would wait without end."""
    run = watched()

    def fail(_: bytes) -> None:
        raise TypeError("no such thing")

    monkeypatch.setattr(failures, "read_beat", fail)
    run.watch.start()
    assert run.end() == [(DISTRIBUTED, "rank 0 cannot watch the others: TypeError: no such thing")]


def test_groups_wait_as_long_as_their_meeting_says(client: Any, at: str):
    """A later meeting, of another pair, has the connection of the first."""
    first = StoreBoard(stores.PrefixStore(at, client), WAIT_S)
    waited = client.timeout
    try:
        assert first.again(f"{at}1", WAIT_S).groups_store(7.0).timeout == timedelta(seconds=7)
    finally:
        client.set_timeout(waited)


def beat(place: int, value: Any) -> bytes:
    """Rank 1's next beat, with another value in this place."""
    parts = json.loads(beat_text(2, "draft, round 4", own_identity()))
    parts[place] = value
    return json.dumps(parts).encode()


NO_BEATS = {
    "number-text": beat(0, "2"),
    "number-true": beat(0, True),
    "place-number": beat(1, 3),
    "place-huge": beat(1, "x" * 900),
    "place-larger": beat(1, "x" * 2**20),
    "machine-missing": beat(2, None),
    "process-text": beat(3, "1"),
    "process-all": beat(3, -1),
    "process-first": beat(3, 1),
    "start-number": beat(4, 5),
    "another-field": json.dumps([*json.loads(beat(0, 2)), 1]).encode(),
    "much-space": beat(0, 2) + b" " * 2**16,
    "fewer-fields": b"[1]",
    "object": b'{"evil": 1}',
    "no-json": b"\xff\x00 garbage",
    "empty": b"",
}


@pytest.mark.parametrize("content", NO_BEATS.values(), ids=NO_BEATS)
def test_what_no_rank_wrote_in_place_of_a_beat_is_as_if_nothing_had_come(
    content: bytes, stranger: Any, at: str, watched: Callable[..., Watched]
) -> None:
    """The rank is late, and named with what its own last beat said; the watch goes on until then."""
    run = watched()
    run.watch.start()
    wait_for(lambda: run.watch._beats.get(1))
    stranger.set(f"{at}/rank/1", content)
    ((code, line),) = run.end()
    assert code == DISTRIBUTED
    assert line.startswith("rank 1 has not answered for ") and line.endswith(
        "last heard of in verify, round 3"
    )


def test_no_process_is_killed_that_a_stranger_names(
    stranger: Any, at: str, watched: Callable[..., Watched]
) -> None:
    """A beat of rank 1 with another process of this user, of which anybody can read what a beat says."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        found = own_identity()
        known = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        run = watched()
        run.watch.start()
        wait_for(lambda: run.watch._beats.get(1))
        forged = beat_text(9, "verify, round 3", Identity(found.machine, other.pid, known))
        stranger.set(f"{at}/rank/1", forged)
        wait_for(lambda: run.watch._beats[1].number == 9)
        run.end()
        other.communicate(b"\n")
    assert run.killed == [os.getpid()], "rank 1 is this process, by its first beat"


@pytest.mark.slow
def test_a_run_of_torchrun_ends_with_a_code_that_is_not_zero(tmp_path: Path) -> None:
    run = Started(tmp_path, 2, *RUN, "task.max_new_tokens=900", "out=null", "engine=eager")
    wait_for(lambda: run.has_come(0) and run.has_come(1))
    connected(run._store).set("llama_ssp/0/0/cause", cause(code=0))
    answers = run.finish()
    assert [answer.code for answer in answers] == [DISTRIBUTED] * 2
    assert [line for answer in answers for line in answer.errors] == [f"error: {FORGED}"]


def test_nothing_is_read_before_it_is_written(board: Board) -> None:
    assert board.read(["rank/0", "rank/1"]) == [b"", b""]
    assert board.first_cause() is None


def test_of_what_is_written_the_last_is_read(board: Board) -> None:
    board.write("rank/1", "a")
    board.write("rank/1", "b")
    assert board.read(["rank/0", "rank/1"]) == [b"", b"b"]


def test_the_first_cause_stays(board: Board) -> None:
    first, second = Cause("one", MODEL, 1), Cause("two", DISTRIBUTED, 0)
    assert [board.first_cause(new) for new in (None, first, second, None)] == [None, first, first, first]


def test_of_ranks_that_fail_together_one_is_the_first(board: Board) -> None:
    ready = threading.Barrier(8)

    def fail(rank: int) -> Cause | None:
        own = board.another()
        ready.wait(WAIT_S)
        return own.first_cause(Cause(f"rank {rank}", DISTRIBUTED, rank))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(fail, range(8)))) == 1


def test_any_line_is_a_cause(board: Board) -> None:
    """Such as one with a path that is no text, or what a compiler said."""
    found = board.first_cause(Cause("a\udcff\nb\x1b[2J " + "\N{GRINNING FACE}" * 50000, DISTRIBUTED, 0))
    assert found is not None and found.line.startswith(
        "a\N{REPLACEMENT CHARACTER} b\N{REPLACEMENT CHARACTER}[2J"
    )
    assert "(50" in found.line[-30:] and board.first_cause() == found


def test_a_folder_that_is_gone_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[int, str]] = []
    monkeypatch.setattr(GUARD, "on_signal", [])
    monkeypatch.setattr(failures, "leave_within", lambda _, code, line="": ended.append((code, line)))
    monkeypatch.setenv("LOCAL_RANK", "0")
    board = FolderBoard(tmp_path / "meeting")
    watch = Watch(board, 0, 1, PATIENCE_S)
    shutil.rmtree(tmp_path / "meeting")
    with pytest.raises(BoardLost):
        board.read(["rank/0"])
    watch.start()
    watch.join(WAIT_S)
    ((code, line),) = ended
    assert code == DISTRIBUTED and line.startswith(f"the ranks' folder {tmp_path}/meeting ")
