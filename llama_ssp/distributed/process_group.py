"""Several ranks that talk over torch.distributed.

Rank 0 leads: what it decides goes out as integers, one broadcast a message, never as pickled objects.
A message carries its number and a checksum, because a rank that skipped or repeated one would otherwise
be paired with its neighbours' next message, silently.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llama_ssp.config.environment import rank_environment
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.distributed.draft_link import Calling, Link, Listener, call
from llama_ssp.distributed.failures import Report
from llama_ssp.distributed.placement import LEADER
from llama_ssp.distributed.rendezvous import meet
from llama_ssp.errors import DistributedError

PACKET = 1024  # integers of a message's first broadcast; a round's fit, a list of prompts takes a second one
HEAD = 3  # number, length, checksum
LOADING = timedelta(minutes=30)  # while ranks load
WORKING_S = 120.0  # while one waits for another in a round
MAX_NAMED = 3  # differences that a message names
LATER_S = 10.0  # how much later NCCL gives up, which then ends the process: the watch is to be first


@dataclass(frozen=True)
class Terms:
    """What all groups of a run share."""

    rank: int
    device: torch.device
    patience: timedelta
    report: Report


class Group:
    """Some of the ranks: tensors over one process group, messages over one of their own on the CPU."""

    def __init__(self, members: tuple[int, ...], terms: Terms) -> None:
        """`members` are numbers of torchrun's. All ranks make the group, members or not."""
        self._members, self._terms = members, terms
        self._sent = 0
        self._staying: dict[tuple[int, ...], Group] = {}  # by those that may be lost
        self._lost: tuple[int, ...] = ()
        # Messages and waiting go by gloo also where tensors go by NCCL: a stuck kernel is still reported.
        ranks = list(members)
        backend = _backend(terms.device)
        later = timedelta(seconds=LATER_S if backend == "nccl" else 0)
        with self._during("making groups"):
            self._messages: Any = dist.new_group(ranks, backend="gloo", timeout=terms.patience)
            self._waiting: Any = dist.new_group(ranks, backend="gloo", timeout=LOADING)
            self._tensors: Any = dist.new_group(ranks, backend=backend, timeout=terms.patience + later)

    @property
    def rank(self) -> int:
        return self._members.index(self._terms.rank)

    @property
    def world(self) -> int:
        return len(self._members)

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    def among(self, members: tuple[int, ...]) -> Ranks | None:
        chosen = tuple(self._members[member] for member in members)
        inside = self._terms.rank in chosen
        if chosen == self._members:
            return self
        if len(chosen) == 1:
            return ALONE if inside else None
        group = Group(chosen, self._terms)
        return group if inside else None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self._during("summing"):
            dist.all_reduce(tensor, group=self._tensors)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        with self._during("gathering"):
            dist.all_gather(parts, tensor, group=self._tensors)
        return self._in_order(parts)

    @property
    def patience_s(self) -> float:
        return self._terms.patience.total_seconds()

    def link(self, one: int, other: int) -> Link | None:
        """The other one listens, and pins up where, together with a word that only ranks know."""
        listener = Listener() if self.rank == other else None
        every = self.gather_ints((listener.calling if listener else Calling()).told())
        if listener is not None:
            return listener.accept(self.patience_s)
        return call(Calling.heard(every[other]), self.patience_s) if self.rank == one else None

    def may_lose(self, members: tuple[int, ...]) -> None:
        if members and members not in self._staying:
            staying = tuple(rank for rank in self._members if rank not in members)
            self._staying[members] = Group(staying, self._terms)
        self._terms.report.may_lose(frozenset(members))

    def part_with_lost(self) -> None:
        lost = tuple(sorted(self._terms.report.spare))
        staying = self._staying.get(lost)
        if staying is not None and not self._lost:
            self._lost, self._members, self._sent = lost, staying._members, 0
            self._messages, self._waiting = staying._messages, staying._waiting
            self._tensors = staying._tensors
            self._terms.report.excuse(lost)

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

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        own = torch.tensor(values, dtype=torch.int64)
        parts = [torch.empty_like(own) for _ in range(self.world)]
        with self._during("comparing"):
            dist.all_gather(parts, own, group=self._waiting)
        return [part.tolist() for part in self._in_order(parts)]

    def require_same(self, what: str, text: str) -> None:
        every = self.gather_ints(list(hashlib.sha256(text.encode()).digest()))
        other = [self._members[rank] for rank, theirs in enumerate(every) if theirs != every[LEADER]]
        if other:
            leader = self._members[LEADER]
            told = self._texts(text)
            named = differing(told[self._members.index(other[0])], told[LEADER], (other[0], leader))
            raise DistributedError(
                f"the ranks differ in {what}",
                found=f"ranks {', '.join(map(str, other))} unlike rank {leader}{named}",
                allowed="the same on every rank", fix="start all ranks with the same command and files",
            )  # fmt: skip

    def _texts(self, text: str) -> list[str]:
        """Every rank's text."""
        own = text.encode()
        lengths = [length for (length,) in self.gather_ints([len(own)])]
        padded = [*own, *[0] * (max(lengths) - len(own))]
        every = zip(self.gather_ints(padded), lengths, strict=True)
        return [bytes(values[:length]).decode() for values, length in every]

    def barrier(self) -> None:
        with self._during("waiting for the others"):
            dist.barrier(group=self._waiting)

    def enter(self, phase: str, number: int = 0) -> None:
        self._terms.report.enter(phase, number)

    def keep_errors_in(self, folder: Path | None) -> None:
        name = str(folder.resolve()) if folder else ""
        told = bytes(self.broadcast_ints(list(os.fsencode(name))))
        self._terms.report.folder = Path(os.fsdecode(told)) if told else None

    def cause_of(self, error: BaseException) -> BaseException:
        return self._terms.report.cause_of(error)

    def close(self) -> None:
        self._terms.report.leave()
        self.barrier()
        self._terms.report.part()
        if self.is_leader:
            self._terms.report.dismiss(self._lost)
        dist.destroy_process_group()
        self._terms.report.see_off()

    def _in_order(self, parts: list[Tensor]) -> list[Tensor]:
        """As the members are numbered here; torch goes by their numbers in the run."""
        of = dict(zip(sorted(self._members), parts, strict=True))
        return [of[member] for member in self._members]

    def _broadcast(self, tensor: Tensor) -> None:
        with self._during(f"message {self._sent}"):
            dist.broadcast(tensor, src=self._members[LEADER], group=self._messages)

    def _astray(self, what: str, found: str, allowed: str) -> DistributedError:
        return DistributedError(
            f"the ranks are out of step: {what}",
            where=f"rank {self._terms.rank}, {self._terms.report.place}", found=found, allowed=allowed,
            fix="report it: ranks derive all they do from the leader's messages",
        )  # fmt: skip

    def _during(self, what: str) -> AbstractContextManager[None]:
        return self._terms.report.during(what)


def differing(text: str, leaders: str, ranks: tuple[int, int]) -> str:
    """The first keys in which two JSON objects differ, with both values; nothing of other texts."""
    with suppress(ValueError):
        own, other = flat(json.loads(text)), flat(json.loads(leaders))
        keys = [key for key in {**other, **own} if own.get(key) != other.get(key)]
        both = [(key, own.get(key, "nothing"), other.get(key, "nothing")) for key in keys]
        said = [f"{key} {one} on rank {ranks[0]}, {two} on rank {ranks[1]}" for key, one, two in both]
        more = f"; and {len(keys) - MAX_NAMED} more" * (len(keys) > MAX_NAMED)
        return f": {'; '.join(said[:MAX_NAMED])}{more}"
    return ""


def flat(node: Any, prefix: str = "") -> dict[str, str]:
    """The values of a JSON document as JSON, each under its dotted key."""
    if not isinstance(node, dict) or not node:
        return {prefix.rstrip("."): json.dumps(node)}
    return {
        key: text for name, inner in node.items() for key, text in flat(inner, f"{prefix}{name}.").items()
    }


def checksum(values: list[int]) -> int:
    return zlib.crc32(",".join(map(str, values)).encode())


def open_ranks(device: torch.device, patience_s: float = WORKING_S) -> Ranks:
    """The ranks that torchrun started; a single one talks to nobody.

    `patience_s` is how long they may come after each other, be silent, or wait for one another.
    """
    if rank_environment().world == 1:
        return ALONE
    meeting = meet(patience_s)
    rank, world = meeting.address.rank, meeting.address.world
    report = Report(meeting, patience_s)
    try:
        dist.init_process_group("gloo", store=meeting.store, timeout=LOADING, rank=rank, world_size=world)
        return Group(tuple(range(world)), Terms(rank, device, timedelta(seconds=patience_s), report))
    except BaseException as error:
        raise report.cause_of(error) from error


def _backend(device: torch.device) -> str:
    """NCCL where every rank of the machine has a GPU of its own."""
    own = rank_environment().local_world <= torch.cuda.device_count()
    return "nccl" if device.type == "cuda" and own else "gloo"
