"""The ranks of a run and what they say to each other; the only room that knows torch.distributed.

Rank 0 leads: what it decides goes out as integers, one broadcast a message, never as pickled objects.
A message carries its number and a checksum, because a rank that skipped or repeated one would otherwise
be paired with its neighbours' next message, silently. One process is the case of a single rank.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from llama_ssp.errors import DistributedError, RunError

LEADER = 0
PACKET = 512  # integers of a message's first broadcast; a round's fit, a list of prompts takes a second one
HEAD = 3  # number, length, checksum
LOADING = timedelta(minutes=30)  # until all ranks have come, or have loaded
WORKING = timedelta(minutes=5)  # while one waits for another in a round
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = "lo"
COMPLAINT = "llama_ssp_complaint"
PATIENCE_S = 2.0  # for a rank that has failed to say why


class Ranks(Protocol):
    """One rank's view of all: what it is, and the collectives that every rank calls in the same order."""

    rank: int
    world: int

    @property
    def is_leader(self) -> bool: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor; all are of one shape."""

    def broadcast_ints(self, values: list[int]) -> list[int]:
        """The leader's integers, on every rank; what the others pass is not looked at."""

    def require_same(self, what: str, text: str) -> None:
        """Refuses, on every rank, ranks that differ in `text`."""

    def barrier(self) -> None:
        """Waits until every rank has come here; for as long as loading may take."""

    def cause_of(self, error: BaseException) -> BaseException:
        """Why this rank ends: the error, which the others get to know, or the one they ended with."""

    def close(self) -> None:
        """Leaves in good order, after every rank has come here."""


class Alone:
    """One process: nothing to say, nobody to wait for."""

    rank, world, is_leader = LEADER, 1, True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def broadcast_ints(self, values: list[int]) -> list[int]:
        return values

    def require_same(self, what: str, text: str) -> None:
        pass

    def barrier(self) -> None:
        pass

    def cause_of(self, error: BaseException) -> BaseException:
        return error

    def close(self) -> None:
        pass


ALONE = Alone()


class LostPeer(DistributedError):
    """Another rank has ended, or is stuck: the cause is there, not here."""


class Group:
    """All ranks of torchrun: tensors over one group, messages over a group of their own on the CPU."""

    def __init__(self, rank: int, world: int, device: torch.device, store: Any) -> None:
        self.rank, self.world = rank, world
        self._store = store
        self._sent = 0
        # Messages and waiting go by gloo also where tensors go by NCCL: a stuck kernel is still reported.
        self._messages: Any = dist.new_group(backend="gloo", timeout=WORKING)
        self._waiting: Any = dist.new_group(backend="gloo", timeout=LOADING)
        self._tensors: Any = dist.new_group(backend=_backend(device), timeout=WORKING)

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self._spoken("summing"):
            dist.all_reduce(tensor, group=self._tensors)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        with self._spoken("gathering"):
            dist.all_gather(parts, tensor, group=self._tensors)
        return parts

    def broadcast_ints(self, values: list[int]) -> list[int]:
        self._sent += 1
        packet = torch.zeros(PACKET, dtype=torch.int64)
        if self.is_leader:
            packet[:HEAD] = torch.tensor([self._sent, len(values), checksum(values)])
            packet[HEAD : HEAD + len(values)] = torch.tensor(values[: PACKET - HEAD], dtype=torch.int64)
        self._broadcast(packet)
        number, length, sum_ = packet[:HEAD].tolist()
        if number != self._sent:
            raise self._astray("another message than was due", f"number {number}", f"number {self._sent}")
        heard: list[int] = packet[HEAD : HEAD + length].tolist()
        if length > len(heard):
            rest = torch.tensor(values[len(heard) :] if self.is_leader else [0] * (length - len(heard)))
            self._broadcast(rest)
            heard += rest.tolist()
        if checksum(heard) != sum_:
            raise self._astray("a damaged message", f"checksum {checksum(heard):08x}", f"{sum_:08x}")
        return heard

    def require_same(self, what: str, text: str) -> None:
        digest = hashlib.sha256(text.encode()).digest()
        own = torch.tensor(list(digest), dtype=torch.int64)
        every = [torch.empty_like(own) for _ in range(self.world)]
        with self._spoken("comparing"):
            dist.all_gather(every, own, group=self._waiting)
        other = [rank for rank, theirs in enumerate(every) if not torch.equal(theirs, every[LEADER])]
        if other:
            raise DistributedError(
                f"the ranks differ in {what}",
                found=f"ranks {', '.join(map(str, other))} unlike rank {LEADER}",
                allowed="the same on every rank", fix="start all ranks with the same command and files",
            )  # fmt: skip

    def barrier(self) -> None:
        with self._spoken("waiting for the others"):
            dist.barrier(group=self._waiting)

    def cause_of(self, error: BaseException) -> BaseException:
        if isinstance(error, LostPeer | KeyboardInterrupt):
            left = self._complaint(PATIENCE_S if isinstance(error, LostPeer) else 0.0)
            return error if left is None else DistributedError(left)
        what = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        line = f"rank {self.rank} failed; {what}"
        with suppress(RuntimeError):  # the others find that this rank is gone
            self._store.compare_set(COMPLAINT, "", line)
        return error if isinstance(error, RunError | OSError) else DistributedError(line)

    def _complaint(self, patience_s: float) -> str | None:
        """What the first rank that failed has left, waiting a little for it."""
        until = time.monotonic() + patience_s
        with suppress(RuntimeError):  # the store may be gone, too
            while not (left := self._store.check([COMPLAINT])) and time.monotonic() < until:
                time.sleep(0.05)
            if left:
                return str(self._store.get(COMPLAINT).decode())
        return None

    def close(self) -> None:
        self.barrier()
        dist.destroy_process_group()

    def _broadcast(self, tensor: Tensor) -> None:
        with self._spoken(f"message {self._sent}"):
            dist.broadcast(tensor, src=LEADER, group=self._messages)

    def _astray(self, what: str, found: str, allowed: str) -> DistributedError:
        return DistributedError(
            f"the ranks are out of step: {what}", where=f"rank {self.rank}", found=found, allowed=allowed,
            fix="report it: ranks derive all they do from the leader's messages",
        )  # fmt: skip

    @contextmanager
    def _spoken(self, phase: str) -> Iterator[None]:
        """A peer that is gone, or late beyond its time, ends this rank with one line."""
        try:
            yield
        except RuntimeError as error:
            raise LostPeer(
                "another rank has gone or does not answer", where=f"rank {self.rank}, {phase}",
                found=str(error)[-160:], fix="look for the first error of the other ranks",
            ) from error  # fmt: skip


def checksum(values: list[int]) -> int:
    return zlib.crc32(",".join(map(str, values)).encode())


def open_ranks(device: torch.device) -> Ranks:
    """The ranks that torchrun started; a single one talks to nobody."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    missing = [name for name in ENVIRONMENT if not os.environ.get(name)]
    if missing:
        raise DistributedError(
            "several ranks were asked for, but not by torchrun", where="environment",
            found=f"no {', '.join(missing)}", fix="start with torchrun --nproc-per-node N launch/run.py",
        )  # fmt: skip
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world) and _has_loopback():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    try:
        store, rank, world = next(rendezvous("env://", rank, world, timeout=LOADING))
        dist.init_process_group("gloo", store=store, timeout=LOADING, rank=rank, world_size=world)
        return Group(rank, world, device, store)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            "the ranks do not find each other", where=f"rank {rank} of {world}", found=str(error)[:160],
            fix="check MASTER_ADDR, MASTER_PORT and that every rank was started",
        ) from error  # fmt: skip


def are_open() -> bool:
    """Whether this process is one of several that have found each other, and have not parted."""
    return dist.is_initialized()


def _backend(device: torch.device) -> str:
    """NCCL where every rank of the machine has a GPU of its own."""
    own = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    return "nccl" if device.type == "cuda" and own else "gloo"


def _has_loopback() -> bool:
    return LOOPBACK in {name for _, name in socket.if_nameindex()}
