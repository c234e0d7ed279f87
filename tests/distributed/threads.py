"""Ranks that are threads of one process: real values, no sockets, for many small cases."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.distributed.draft_link import Link
from llama_ssp.errors import DistributedError

PATIENCE_S = 60


class Meeting:
    """Where threads put what they bring, and find what all brought."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.brought: list[Any] = [None] * world
        self.barrier = threading.Barrier(world, timeout=PATIENCE_S)
        self.smaller: dict[tuple[int, ...], Meeting] = {}
        self.letters: dict[tuple[int, int], queue.Queue[bytes]] = {}
        self.lock = threading.Lock()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.brought[rank] = value
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found

    def of(self, members: tuple[int, ...]) -> Meeting:
        with self.lock:
            return self.smaller.setdefault(members, Meeting(len(members)))

    def post(self, source: int, to: int) -> queue.Queue[bytes]:
        with self.lock:
            return self.letters.setdefault((source, to), queue.Queue())

    def break_off(self) -> None:
        self.barrier.abort()
        for meeting in self.smaller.values():
            meeting.break_off()


class QueueLink:
    """One end of a line."""

    def __init__(self, out: queue.Queue[bytes], back: queue.Queue[bytes]) -> None:
        self._out, self._back = out, back

    def send(self, frame: bytes) -> None:
        self._out.put(frame)

    def has_frame(self) -> bool:
        return not self._back.empty()

    def receive(self, seconds: float) -> bytes | None:
        with suppress(queue.Empty):
            return self._back.get(timeout=seconds) if seconds > 0 else self._back.get_nowait()
        return None

    def close(self, last: bytes = b"") -> None:
        if last:
            self._out.put(last)


class ThreadRank(Ranks):
    """One thread's `Ranks`; counts what it takes part in."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world = rank, meeting.world
        self._meeting, self.patience_s = meeting, float(PATIENCE_S)
        self.counts = {"sums": 0, "gathers": 0, "messages": 0, "letters": 0}

    def among(self, members: tuple[int, ...]) -> Ranks | None:
        if members == tuple(range(self.world)):
            return self
        if len(members) == 1:
            return ALONE if self.rank in members else None
        meeting = self._meeting.of(members)
        return ThreadRank(members.index(self.rank), meeting) if self.rank in members else None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.counts["sums"] += 1
        return tensor.copy_(torch.stack(self._meeting.exchange(self.rank, tensor.clone())).sum(0))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.counts["gathers"] += 1
        parts = self._meeting.exchange(self.rank, tensor.clone())
        assert len({part.shape for part in parts}) == 1, "a gather wants tensors of one shape"
        return parts

    def link(self, one: int, other: int) -> Link | None:
        if self.rank not in (one, other):
            return None
        self.counts["letters"] += 1
        far = other if self.rank == one else one
        return QueueLink(self._meeting.post(self.rank, far), self._meeting.post(far, self.rank))

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
    """Runs a job a rank at the same time; what each returned. The first exception is raised."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = jobs[rank]()
        except BaseException as error:
            errors.append(error)
            ranks[rank]._meeting.break_off()

    # Without GPUs, torch 2.11 keeps for all threads what the first one that traces frees at its end.
    torch._C._ensureCUDADeviceGuardSet()
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
