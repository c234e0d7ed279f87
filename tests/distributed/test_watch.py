"""What a rank makes of the others' signs of life."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from llama_ssp.distributed import peers as processes
from llama_ssp.distributed.failures import Watch
from llama_ssp.distributed.signals import GUARD
from llama_ssp.distributed.store import END, Cause, Place, View

PATIENCE_S = 0.05


class Board:
    """Rank 1 beats no more."""

    def __init__(self, phase: str) -> None:
        self._phase = phase

    def clone(self) -> Board:
        return self

    def beat(self, number: int) -> None: ...

    def read(self) -> View:
        return View([Place(END), Place(self._phase)], [str(time.monotonic()), "1"], None)

    def blame(self, cause: Cause) -> Cause:
        return cause


class Peers:
    """Rank 1 stands still; any other that is here goes when it is waited for."""

    def __init__(self, here: set[int] | None = None) -> None:
        self.here = here or set()
        self.killed: list[int] = []

    def wake(self) -> None: ...

    def living(self) -> set[int]:
        return self.here & {1} - set(self.killed)

    def signal(self, rank: int, number: signal.Signals) -> None:
        assert number is signal.SIGKILL
        self.killed.append(rank)


@pytest.mark.parametrize("phase", ["verify", END])
@pytest.mark.parametrize("gone", [set(), {1}], ids=["stopped", "gone"])
def test_who_stands_still_on_its_way_out_is_ended_too(
    phase: str, gone: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this rank still waits for it; one that has gone in good order is no fault."""
    monkeypatch.setattr(GUARD, "on_signal", [])
    board, peers = Board(phase), Peers()
    watch = Watch(board, peers, 0, 2, PATIENCE_S, True)  # type: ignore[arg-type]
    watch._look(1, set())
    time.sleep(2 * PATIENCE_S)
    cause: Any = watch._look(2, gone)
    if phase == END and gone:
        assert cause is None
    else:
        assert cause.silent == (1,) and f"during {phase}" in cause.line
    assert peers.killed == ([] if gone else [1])


@pytest.mark.parametrize(
    ("rank", "here", "killed"), [(0, {1, 2}, [1]), (2, {0, 1}, []), (0, {2}, []), (0, set(), [])]
)
def test_the_first_of_a_machine_ends_who_does_not_leave(
    rank: int, here: set[int], killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all is done, and nobody else looks any more."""
    monkeypatch.setattr(GUARD, "on_signal", [])
    peers = Peers(here)
    Watch(Board(END), peers, rank, 3, PATIENCE_S, True).see_off()  # type: ignore[arg-type]
    assert peers.killed == killed


def test_a_script_s_own_interrupt_is_a_cause(monkeypatch: pytest.MonkeyPatch):
    """Without the guard, which the command line starts, it has no number."""
    monkeypatch.setattr(GUARD, "on_signal", [])
    watch = Watch(Board("verify"), Peers(), 0, 2, PATIENCE_S, True)  # type: ignore[arg-type]
    cause = watch._own(KeyboardInterrupt())
    assert cause.code == 130 and cause.line == "rank 0 was stopped by SIGINT during start"


def test_a_rank_that_is_gone_ends_one_wait_only():
    """The watch of a run that goes on without its draft would look twenty times a second."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = processes.own_identity()
    other = processes.Identity(own.machine, child.pid, processes._started(child.pid))
    peers = processes.Peers({0: own, 1: other}, 0)
    assert peers.wait(0.0) == set()
    child.communicate()
    assert peers.wait(10.0) == {1}
    began = time.monotonic()
    assert peers.wait(0.2) == {1} and time.monotonic() - began >= 0.2
