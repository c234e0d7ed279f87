"""How many cores others use, and what a run then takes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llama_ssp.models import host_cores
from llama_ssp.models.host_cores import CoreTimes, FreeCores, core_times, free_cores
from llama_ssp.pair import call_threads
from llama_ssp.pair.call_threads import CallThreads

ROOT = Path(__file__).parents[1]
TICKS = os.sysconf("SC_CLK_TCK")


class Host:
    """A machine whose counters the test moves: it stands where the system's files are."""

    def __init__(self, folder: Path, cores: int) -> None:
        self.table = folder / "stat"
        self.state = folder / "self"
        self.user = [0.0] * cores
        self.nice = [0.0] * cores
        self.own_s = 0.0
        self.now_s = 100.0
        self.pass_time(0.0, {})

    def pass_time(self, seconds: float, busy: dict[int, float], own: float = 0.0, nice: bool = False) -> None:
        """Lets so many seconds pass, in which cores are busy for these shares; `own` is this process's."""
        self.now_s += seconds
        self.own_s += own * seconds
        for core, share in busy.items():
            (self.nice if nice else self.user)[core] += share * seconds
        lines = ["cpu 1 2 3 4 5 6 7 8 9 10"]
        for core, (user, nice_s) in enumerate(zip(self.user, self.nice, strict=True)):
            lines.append(f"cpu{core} {user * TICKS:.0f} {nice_s * TICKS:.0f} 0 99999 77 0 0 0 0 0")
        self.table.write_text("\n".join([*lines, "intr 5", ""]))

    def run_on(self, core: int) -> None:
        self.state.write_text(f"1 (a name) {' '.join(str(core if n == 36 else 0) for n in range(45))}")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Four cores, of which this process may use the first three; it runs on core 0."""
    made = Host(tmp_path, cores=4)
    made.run_on(0)
    monkeypatch.setattr(host_cores, "TABLE", made.table)
    monkeypatch.setattr(host_cores, "OWN_STATE", made.state)
    monkeypatch.setattr(host_cores, "own_cores", lambda: {0, 1, 2})
    monkeypatch.setattr(host_cores, "time", SimpleNamespace(monotonic=lambda: made.now_s))

    def times() -> SimpleNamespace:
        return SimpleNamespace(
            user=made.own_s / 2, system=made.own_s / 2, children_user=0.0, children_system=0.0
        )

    monkeypatch.setattr(host_cores.os, "times", times)
    return made


@pytest.mark.parametrize(
    ("busy", "own", "count", "first"),
    [
        ({}, 0.0, 3, 0),
        ({0: 1.0}, 1.0, 3, 0),
        ({1: 0.3}, 0.0, 3, 0),
        ({1: 0.6}, 0.0, 3, 0),
        ({1: 0.8}, 0.0, 2, 0),
        ({0: 1.0, 1: 1.0}, 1.0, 2, 0),
        ({0: 1.0, 1: 1.0, 2: 1.0}, 1.0, 1, 0),
        ({0: 1.0, 1: 1.0, 2: 1.0}, 0.2, 1, 0),
        ({0: 0.9, 1: 1.0, 2: 0.1}, 0.0, 1, 2),
        ({3: 1.0}, 0.0, 3, 0),
    ],
    ids=[
        "idle", "own work", "a little", "a burst", "most of the time", "one other", "two others",
        "all, hardly own", "the freest", "a core that is not ours",
    ],
)  # fmt: skip
def test_cores_that_others_use_are_not_free(
    busy: dict[int, float], own: float, count: int, first: int, host: Host
) -> None:
    before = core_times()
    host.pass_time(2.0, busy, own)
    free = free_cores(before)
    assert free is not None
    assert (free.count, free.cores[0]) == (count, first)


def test_work_of_low_priority_counts_too(host: Host) -> None:
    """In another session it gets as large a share as any."""
    before = core_times()
    host.pass_time(2.0, {1: 1.0}, nice=True)
    free = free_cores(before)
    assert free is not None and free.count == 2


def test_a_look_that_is_too_short_tells_nothing(host: Host) -> None:
    before = core_times()
    host.pass_time(0.1, {1: 1.0})
    assert free_cores(before) is None


def test_a_system_that_does_not_count_tells_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    before = core_times()
    monkeypatch.setattr(host_cores, "TABLE", host.table.with_name("none"))
    assert core_times() is None and free_cores(before) is None and free_cores(None) is None


CHILD = """
import logging, os, sys
from llama_ssp.models import host_cores
from llama_ssp.models.host_cores import FreeCores, give_cores_away
logging.basicConfig(level=logging.INFO, format="%(message)s")
cores = sorted(os.sched_getaffinity(0))
host_cores.free_cores = lambda _: FreeCores(cores=cores[::-1], taken=float(sys.argv[1]))
host_cores.usual_threads = lambda: len(cores)
give_cores_away(None)
print(len(cores), *sorted(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS"))
"""


def confined(taken: float, threads: str | None = None) -> tuple[list[str], str]:
    """What a new process has after giving cores away; and what it says."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads is not None:
        env["OMP_NUM_THREADS"] = threads
    words = [sys.executable, "-c", CHILD, str(taken)]
    ended = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return ended.stdout.split(), ended.stderr


@pytest.mark.skipif(len(host_cores.own_cores()) < 2, reason="one core cannot be given away")
def test_a_run_that_gives_cores_away_keeps_its_number_of_threads() -> None:
    """Then its texts are, to the bit, those of a machine where nobody else computes."""
    cores = sorted(map(str, os.sched_getaffinity(0)), key=int)
    said, line = confined(taken=1.0)
    assert said == [str(len(cores)), *cores[1:], str(len(cores))]
    assert f"others use 1.0 of {len(cores)} cores: this run computes on {len(cores) - 1} of them" in line


def test_a_run_on_an_idle_machine_keeps_all_cores() -> None:
    said, line = confined(taken=0.2)
    assert said[-1] == "None" and len(said) - 2 == len(os.sched_getaffinity(0)) and not line


def test_a_run_of_one_thread_is_not_confined() -> None:
    said, line = confined(taken=100.0, threads="1")
    assert said[-1] == "1" and len(said) - 2 == len(os.sched_getaffinity(0)) and not line


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def look(monkeypatch: pytest.MonkeyPatch, taken: float | None) -> None:
    """What the next call sees of four cores; None: it cannot tell."""
    free = None if taken is None else FreeCores(cores=[0, 1, 2, 3], taken=taken)
    monkeypatch.setattr(call_threads, "free_cores", lambda _: free)


@pytest.fixture
def threads_taken(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads of calls, of which others take more and less; each call gives them back."""
    threads, taken_by_calls = CallThreads(on_cpu=True), []
    for taken in (0.0, 3.0, None, 1.0, 4.0, 0.0):
        look(monkeypatch, taken)
        with threads.chosen():
            taken_by_calls.append(torch.get_num_threads())
        assert torch.get_num_threads() == 4, taken
    return taken_by_calls


def test_calls_take_the_threads_that_are_free(threads_taken: list[int]) -> None:
    assert threads_taken == [4, 1, 1, 3, 1, 4]


@pytest.mark.usefixtures("threads_taken")
def test_calls_that_take_fewer_threads_say_so(caplog: pytest.LogCaptureFixture) -> None:
    said = [record.message for record in caplog.get_records("setup")]
    assert len(said) == 3 and said[0].startswith("others use 3.0 of 4 cores: calls use 1 thread(s)")


def test_a_call_that_fails_gives_the_threads_back(
    four_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = CallThreads(on_cpu=True)
    look(monkeypatch, 3.0)
    with pytest.raises(KeyError), threads.chosen():
        raise KeyError
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("how", ["the user's number", "a GPU", "an unknown machine"])
def test_calls_leave_the_threads_alone(how: str, four_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "the user's number":
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
    threads = CallThreads(on_cpu=how != "a GPU")
    look(monkeypatch, None if how == "an unknown machine" else 3.0)
    with threads.chosen():
        assert torch.get_num_threads() == 4


def test_times_of_this_machine_are_read() -> None:
    times = core_times()
    if not host_cores.TABLE.exists():
        pytest.skip("this system does not count")
    assert isinstance(times, CoreTimes) and times.busy_s.keys() == host_cores.own_cores() and times.own_s > 0
