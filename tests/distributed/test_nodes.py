"""Two nodes: what ends when one is frozen, killed or cut off, and what is said where they cannot connect.

`python -m tests.distributed.nodes` goes through every phase and measures how soon; here a few stand for all.
"""

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from llama_ssp.distributed import failures, interfaces, nodes
from llama_ssp.distributed.board import STEPS, BoardLost, FolderBoard, StoreBoard, answered_within, beat_text
from llama_ssp.distributed.comm import Place
from llama_ssp.distributed.draft_link import Link
from llama_ssp.distributed.failures import WAITING, Watch
from llama_ssp.distributed.identity import Identity
from llama_ssp.distributed.nodes import Address, choose_interface, reachable, read_address
from llama_ssp.distributed.signals import GUARD, UNWAITED
from llama_ssp.errors import DistributedError
from tests.distributed.faults import RUN
from tests.distributed.nodes import CUT, FROZEN, KILLED, LEADERS, OTHER, Cell, network, outcome
from tests.processes import wait_for
from tests.warm import Started, server

stores: Any = dist
SOME = [
    Cell(FROZEN, "verify", LEADERS),
    Cell(FROZEN, "load", OTHER),
    Cell(KILLED, "verify", OTHER),
    Cell(CUT, "verify", OTHER),
    Cell(FROZEN, "start", LEADERS),
    Cell(CUT, "end", OTHER),
]


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("cell", SOME, ids=", ".join)
def test_all_ranks_end_whatever_befalls_a_node(cell: Cell, tmp_path: Path) -> None:
    with network() as made:
        if made is None and cell.event == CUT:
            pytest.skip("no network namespaces can be made here: they need root, and ip")
        found = outcome(cell, tmp_path, made)
    assert not found.wrong, found


# The store.


@pytest.fixture
def silent() -> Iterator[StoreBoard]:
    """A board in the store of a stopped process; the store answers within half a second or is lost."""
    code = "from torch.distributed import TCPStore; s = TCPStore('127.0.0.1', 0, is_master=True, "
    code += "wait_for_workers=False); print(s.port, flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as keeper:
        assert keeper.stdout is not None
        port = int(keeper.stdout.readline())
        limit = timedelta(seconds=2)  # of a connection: torch tries again meanwhile
        store = stores.TCPStore("127.0.0.1", port, timeout=limit, wait_for_workers=False)
        board = StoreBoard(store, 0.5)
        board.write("rank/0", "here")
        keeper.send_signal(signal.SIGSTOP)
        wait_for(partial(_is_stopped, keeper.pid))  # `kill` returns before the process has stopped
        yield board
        keeper.kill()
    none_is_left()


def _is_stopped(pid: int) -> bool:
    """Returns whether each thread of a process has stopped: the store answers in a thread of its own."""
    states = [
        stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return bool(states) and all(state == "T" for state in states)


def none_is_left() -> None:
    """Waits until no call of a store is under way: a command that ends in this process would leave it."""
    wait_for(lambda: all(thread.name != UNWAITED for thread in threading.enumerate()))


@pytest.mark.slow
def test_no_call_waits_for_a_store_that_is_silent(silent: StoreBoard) -> None:
    """Each kind of call; without the limit none of them returns."""
    calls: list[Callable[[], object]] = [
        partial(silent.read, ["rank/0"]), partial(silent.first, "cause", ""), silent.another,
    ]  # fmt: skip
    for call in calls:
        began = time.monotonic()
        with pytest.raises(
            BoardLost, match=r"has not answered for 0\.5 s: its machine is stopped or cut off"
        ):
            call()
        assert time.monotonic() - began < 5


def test_an_error_of_a_call_is_the_call_s() -> None:
    def fail(kind: type[Exception]) -> None:
        raise kind("no such thing")

    with pytest.raises(BoardLost, match="is gone"):
        answered_within(5.0, partial(fail, RuntimeError))
    with pytest.raises(TypeError, match="no such thing"):
        answered_within(5.0, partial(fail, TypeError))
    assert answered_within(5.0, lambda: 7) == 7


def _ask(folder: str) -> None:
    (Path(folder) / "asks").touch()
    began = time.monotonic()
    try:
        answered_within(2.0, partial(time.sleep, 60))
    except BoardLost:
        (Path(folder) / "lost.part").write_text(str(time.monotonic() - began))
        (Path(folder) / "lost.part").rename(Path(folder) / "lost")
    os._exit(0)


def test_time_in_which_this_process_is_stopped_does_not_count(tmp_path: Path) -> None:
    """After Ctrl-Z and fg the store has its time: it did answer, and this process did not look."""
    process = server().Process(target=_ask, args=(str(tmp_path),), daemon=True)
    process.start()
    wait_for((tmp_path / "asks").exists)
    stopped_s = 3.0
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(stopped_s)
    os.kill(process.pid, signal.SIGCONT)
    wait_for((tmp_path / "lost").exists)
    process.join()
    own_s = float((tmp_path / "lost").read_text()) - stopped_s
    assert own_s > 2.0 * (STEPS - 2) / STEPS - 0.3, "it was lost as soon as the process went on"


def test_a_watch_whose_store_is_silent_ends_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the line of one rank a node, which says what was not answered, and where the rank was."""
    ended = []
    monkeypatch.setattr(GUARD, "on_signal", [])
    monkeypatch.setattr(failures, "leave_within", lambda _, code, line="": ended.append((code, line)))
    answer = threading.Event()
    for local, said in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", local)
        store = FolderBoard(tmp_path / local)
        watch = Watch(store, 1, 2, 1.0)
        watch.place = Place("verify", 3)
        silence = partial(answered_within, 0.1, partial(answer.wait, 30))
        monkeypatch.setattr(store, "read", lambda _, silence=silence: silence())
        watch.start()
        watch.join(30)
        ((code, line),) = ended
        ended.clear()
        assert code == 5 and bool(line) == said
        if said:
            assert line.startswith("torchrun's store (") and line.endswith("; rank 1, verify, round 3")
    answer.set()
    none_is_left()


# Loading.


class Clock:
    """Stands in for the module `time` of the watch: it moves only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Loading:
    """Rank 0 waits for rank 1, which loads; nothing ends this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, loading_s: float) -> None:
        self.clock = Clock()
        monkeypatch.setattr(failures, "time", self.clock)
        monkeypatch.setattr(failures, "leave_within", lambda *_: None)
        monkeypatch.setattr(GUARD, "on_signal", [])
        self.board = FolderBoard(folder)
        self.watch = Watch(self.board, 0, 2, 60.0, loading_s)
        self.watch.place = Place("load")
        self._numbers = iter(range(1, 10_000))

    def look(self, doing: str, seconds: float) -> str:
        """Returns why all end so many seconds later, if rank 1 beats meanwhile, and does this."""
        lines = []
        for _ in range(int(seconds // 10)):
            self.clock.now += 10
            place = str(Place("load", doing=doing))
            self.board.write("rank/1", beat_text(next(self._numbers), place, Identity("", 4, "")))
            cause = self.watch._look()
            lines.append(cause.line if cause else "")
        return next(filter(None, lines), "")


@pytest.fixture
def loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loading:
    return Loading(tmp_path / "board", monkeypatch, 600.0)


def test_a_rank_that_reads_is_waited_for_however_long_it_takes(loading: Loading) -> None:
    with loading.watch.awaiting():
        for read in range(20):
            assert loading.look(f"{read}.0 of 20.0 MB read of model m", 300) == ""
        line = loading.look("19.0 of 20.0 MB read of model m", 700)
    assert line.startswith("rank 1 has not got on for 61") and "placement.loading_s" in line
    assert line.endswith("last heard of in load, 19.0 of 20.0 MB read of model m")


def test_a_rank_that_does_not_wait_has_no_limit_of_loading(loading: Loading) -> None:
    assert loading.look("1.0 of 20.0 MB read of model m", 7000) == ""


def test_ranks_that_all_wait_for_each_other_end(loading: Loading) -> None:
    with loading.watch.awaiting():
        assert loading.look(WAITING, 500) == ""
        line = loading.look(WAITING, 200)
    assert line.startswith("all ranks have waited for each other for ")
    assert str(loading.watch.place) == "load"


def test_the_leader_says_for_whom_it_waits_once_and_within_a_minute(
    loading: Loading, caplog: pytest.LogCaptureFixture
) -> None:
    with loading.watch.awaiting():
        assert loading.look("1.0 of 9.0 MB read of model m", 40) == "" and not caplog.records
        assert loading.look("2.0 of 9.0 MB read of model m", 20) == ""
        assert loading.look("3.0 of 9.0 MB read of model m", 300) == ""
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "waiting for 1 of 2 ranks (rank 1: load, 2.0 of 9.0 MB read of model m)" in record.getMessage()


def read_slowly(seconds: float, rank: int) -> None:
    """Rank 1 takes so long for each tensor."""
    from llama_ssp.models.safetensors_io import WatchedSource

    read = WatchedSource.read

    def late(self: Any, name: str, cut: Any) -> Any:
        time.sleep(seconds)
        return read(self, name, cut)

    if rank == 1:
        WatchedSource.read = late  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "code"), [(0.4, 0), (60.0, 5)], ids=["slow", "stuck"])
def test_a_slow_reader_is_waited_for_and_one_that_is_stuck_is_not(
    seconds: float, code: int, tmp_path: Path
) -> None:
    """The tiny model has some twenty tensors: the slow one takes several times the limit for all."""
    run = (*RUN, "placement=leader", "placement.loading_s=3", "out=null", "engine=eager")
    began = time.monotonic()
    answers = Started(tmp_path, 2, *run, fault=partial(read_slowly, seconds)).finish()
    assert [answer.code for answer in answers] == [code] * 2, answers
    assert time.monotonic() - began > 6
    lines = [line for answer in answers for line in answer.errors]
    assert len(lines) == (code != 0)
    assert not lines or "rank 1 has not got on for" in lines[0]


# Where nodes listen.


@pytest.fixture
def over_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the first rank of the first of two nodes."""
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def other_node(board: FolderBoard, port: int, address: str = "127.0.0.1", machine: str = "") -> None:
    machine = machine or nodes.own_identity().machine
    board.write("node/1", json.dumps(["beta", machine, address, port]))


def entered(board: FolderBoard) -> None:
    with reachable(board, 0, 2, 5.0):
        pass


@pytest.mark.usefixtures("over_two")
def test_nodes_that_connect_go_on(tmp_path: Path) -> None:
    board = FolderBoard(tmp_path / "board")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other_node(board, listener.getsockname()[1])
        with reachable(board, 0, 2, 5.0):
            own = read_address(board.read(["node/0"])[0])
            socket.create_connection((own.address, own.port), 5).close()
    with pytest.raises(OSError):
        socket.create_connection((own.address, own.port), 5)


@pytest.mark.usefixtures("over_two")
def test_a_port_that_is_closed_is_named(tmp_path: Path) -> None:
    board = FolderBoard(tmp_path / "board")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    other_node(board, port)
    with pytest.raises(DistributedError, match=f"two nodes cannot connect.*to beta, 127.0.0.1, port {port}"):
        entered(board)


@pytest.mark.usefixtures("over_two")
def test_a_firewall_that_drops_what_comes_is_named_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux drops connections to a port whose queue is full, as a firewall does."""
    monkeypatch.setattr(nodes, "TRY_S", 0.5)
    board = FolderBoard(tmp_path / "board")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        place = listener.getsockname()
        waiting = []
        for _ in range(8):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(place)
            waiting.append(one)
        time.sleep(0.2)
        other_node(board, place[1])
        with pytest.raises(DistributedError, match=r"no answer in 0\.5 s; open all TCP ports between"):
            entered(board)
        for one in waiting:
            one.close()


@pytest.mark.usefixtures("over_two")
def test_a_node_whose_name_is_a_loopback_address_is_named(tmp_path: Path) -> None:
    """Even where something listens there: that is on this machine."""
    board = FolderBoard(tmp_path / "board")
    with socket.create_server(("127.0.1.1", 0)) as listener:
        other_node(board, listener.getsockname()[1], "127.0.1.1", machine="another")
        with pytest.raises(
            DistributedError, match=r"its own name is a loopback address; beta; .*127\.0\.1\.1"
        ):
            entered(board)


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{}", b"no json", b"[" * 500, b'["a", "b", "nowhere", 5]', b'["a", "b", "127.0.0.1", 70000]',
     b'["a", "b", "127.0.0.1", "5"]', json.dumps(["a" * 500, "b", "127.0.0.1", 5]).encode()],
)  # fmt: skip
def test_what_no_node_wrote_is_refused(content: bytes) -> None:
    with pytest.raises(BoardLost, match="something that no rank wrote"):
        read_address(content)
    written = json.dumps(["alpha", "m", "127.0.0.1", 5]).encode()
    assert read_address(written) == Address("alpha", "m", "127.0.0.1", 5)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives this machine's name an address."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def name(address: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
        monkeypatch.setattr(nodes.socket, "getaddrinfo", lambda *_, **__: found)
        monkeypatch.setattr(nodes, "default_interface", lambda: "eth7")

    return name


def test_a_loopback_name_takes_the_interface_of_the_default_route(
    named: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    named("127.0.1.1")
    choose_interface()
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "eth7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0", "the user's own stays"


def test_another_name_is_left_alone(named: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    named("127.0.0.1")
    monkeypatch.setattr(nodes, "own_address", lambda: "192.0.2.9")
    choose_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_the_preferred_default_route_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
    rows = [
        "wlan0 00000000 010200C0 0003 0 0 600 00000000 0 0 0",
        "eth1 00000000 010200C0 0003 0 0 100 00000000 0 0 0",
        "eth0 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0",
    ]
    monkeypatch.setattr(interfaces, "ROUTES", tmp_path / "route")
    assert interfaces.default_interface() == ""
    (tmp_path / "route").write_text("\n".join([head, *rows, ""]))
    assert interfaces.default_interface() == "eth1"


def test_the_kernel_probes_the_connection_to_a_draft() -> None:
    """Every option that this system knows; a connection as it comes has none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plain = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    assert not accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    link = Link(accepted, 40.0)
    with socket.socket(fileno=os.dup(link._connection.fileno())) as held:
        assert held.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s, between_s, probes = (
            held.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle_s + probes * between_s <= 40 < 2 * (idle_s + probes * between_s)
        assert held.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 40_000
    link.close()
    plain.close()


# What ranks have.


def other_code(rank: int) -> None:
    """Rank 1 has another version of one module."""
    from llama_ssp.pair import session

    if rank == 1:
        own = session.sources()
        session.sources = lambda: own | {"speculative/engine.py": "0" * 12}


@pytest.mark.slow
def test_other_code_of_the_same_version_is_refused_with_its_name(tmp_path: Path) -> None:
    answers = Started(tmp_path, 2, *RUN, "placement=leader", "out=null", fault=other_code).finish()
    assert [answer.code for answer in answers] == [5, 5]
    (line,) = [line for answer in answers for line in answer.errors]
    assert (
        "the ranks differ in the code of llama_ssp; found ranks 1 unlike rank 0: speculative/engine.py"
        in line
    )


def with_own_folder(folders: list[str], rank: int) -> None:
    sys.argv[1:] = [f"model={folders[rank]}" if word == "model=FOLDER" else word for word in sys.argv[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("is_equal", [True, False], ids=["equal files", "other files"])
def test_equal_files_may_lie_elsewhere(is_equal: bool, saved: Any, tmp_path: Path) -> None:
    """As on a disk of each node; what they are is compared."""
    copy = tmp_path / "mine"
    shutil.copytree(saved.whole, copy)
    if not is_equal:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "note": "another"}))
    run = [
        "model=FOLDER", "draft=none", "placement=leader", 'task.prompts=["hello"]', "task.max_new_tokens=4",
        "model.dtype=fp32", "output=json", "out=null", "engine=eager",
    ]  # fmt: skip
    fault = partial(with_own_folder, [str(saved.whole), str(copy)])
    answers = Started(tmp_path / "run", 2, *run, fault=fault).finish()
    lines = [line for answer in answers for line in answer.errors]
    if is_equal:
        assert [answer.code for answer in answers] == [0, 0], lines
    else:
        assert [answer.code for answer in answers] == [5, 5]
        assert len(lines) == 1 and "the ranks differ in the models' files" in lines[0]
