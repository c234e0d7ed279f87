"""Ranks that are threads of one process: real values, no process groups, for many small cases."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.distributed.draft_link import Link, Listener, connect
from llama_ssp.errors import DistributedError

PATIENCE_S = 60


class Meeting:
    """Where threads put what they bring, and find what all brought."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.brought: list[Any] = [None] * world
        self.barrier = threading.Barrier(world, timeout=PATIENCE_S)
        self.smaller: dict[tuple[int, ...], Meeting] = {}

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.brought[rank] = value
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found

    def break_off(self) -> None:
        self.barrier.abort()
        for meeting in self.smaller.values():
            meeting.break_off()


class ThreadRank(Ranks):
    """One thread's `Ranks`; counts what it takes part in."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world = rank, meeting.world
        self._meeting, self.patience_s = meeting, float(PATIENCE_S)
        self.counts = {"sums": 0, "gathers": 0, "messages": 0}

    def among(self, members: tuple[int, ...]) -> Ranks | None:
        if members == tuple(range(self.world)):
            return self
        if self.rank not in members:
            return None
        if len(members) == 1:
            return ALONE
        meeting = self._meeting.smaller.setdefault(members, Meeting(len(members)))
        return ThreadRank(members.index(self.rank), meeting)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.counts["sums"] += 1
        return tensor.copy_(torch.stack(self._meeting.exchange(self.rank, tensor.clone())).sum(0))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.counts["gathers"] += 1
        parts = self._meeting.exchange(self.rank, tensor.clone())
        assert len({part.shape for part in parts}) == 1, "a gather wants tensors of one shape"
        return parts

    def link(self, one: int, other: int) -> Link | None:
        listener = Listener() if self.rank == other else None
        address = listener and (listener.host, listener.port, listener.secret)
        address = self._meeting.exchange(self.rank, address)[other]
        if listener is not None:
            return listener.accept(PATIENCE_S)
        return connect(*address, PATIENCE_S) if self.rank == one else None

    def broadcast_ints(self, values: list[int]) -> list[int]:
        self.counts["messages"] += 1
        return list(self._meeting.exchange(self.rank, values)[0])

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        return list(self._meeting.exchange(self.rank, values))

    def require_same(self, what: str, text: str) -> None:
        if len(set(self._meeting.exchange(self.rank, text))) > 1:
            raise DistributedError(f"the ranks differ in {what}")

    def barrier(self) -> None:
        self._meeting.exchange(self.rank, None)


def ranks_of(world: int) -> list[ThreadRank]:
    meeting = Meeting(world)
    return [ThreadRank(rank, meeting) for rank in range(world)]


def together(jobs: list[Callable[[], Any]], ranks: list[ThreadRank]) -> list[Any]:
    """Runs a job a rank at the same time; what each returned. What the first rank raised is raised."""

    def work(job: Callable[[], Any], rank: ThreadRank) -> Any:
        try:
            return job()
        except BaseException:
            rank._meeting.break_off()
            raise

    # Without GPUs, torch 2.11 keeps for all threads what the first one that traces frees at its end.
    torch._C._ensureCUDADeviceGuardSet()
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(work, job, rank) for job, rank in zip(jobs, ranks, strict=True)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
