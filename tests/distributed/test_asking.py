"""While the leader waits for a person, the other ranks wait with it, however long it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from llama_ssp.distributed.comm import ALONE
from llama_ssp.errors import DistributedError
from llama_ssp.tasks import interactive as asking
from llama_ssp.tasks.interactive import while_others_wait
from tests.distributed.threads import ThreadRank, ranks_of, together


def asked(ranks: list[ThreadRank], work: Callable[[], list[int]]) -> list[list[int]]:
    """What each rank gets; only the leader works."""

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
