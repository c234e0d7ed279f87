"""Several ranks that exchange tensors and messages over torch.distributed.

Rank 0 leads: it broadcasts its decisions as integers, never as pickled objects. Each message has a number
and a checksum: otherwise a rank that skipped or repeated a broadcast would silently read a wrong message.
"""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _set_pg_timeout

from llama_ssp.config.environment import MAX_WORLD, number_of, rank_environment
from llama_ssp.config.run import flat
from llama_ssp.distributed.comm import ALONE, Place, Ranks, broadcast_json, checksum
from llama_ssp.distributed.cores import cores_here
from llama_ssp.distributed.draft_link import Link, Listener, connect
from llama_ssp.distributed.failures import APPEAR_S, LOADING_S, Watch, meet
from llama_ssp.distributed.nodes import reachable
from llama_ssp.distributed.placement import LEADER
from llama_ssp.distributed.signals import leave_within
from llama_ssp.errors import DistributedError, UsageError, first_line, shortened

log = logging.getLogger(__name__)
# In place of a GPU's UUID.
NO_GPU = "none"
MIG = "MIG"
PACKET = 1024  # integers of a message's first broadcast: enough for a round; a list of prompts needs a second
HEAD = 3  # number, length, checksum
UNLIMITED = timedelta(days=365)  # the watch finds ranks that have gone, are frozen, or do not get on
WORKING_S = 120.0  # how long they wait within a round, by default
FIRST_STEP_S = 60.0  # a first step, which compiles kernels, may take this long even where ranks wait less
MAX_NAMED = 3  # differences that a message names
MAX_DOING = 120  # characters of what a rank says that it does
TO_FREE: list[WeakMethod[Callable[[], None]]] = []  # methods that are called before ranks part
LATER_S = 10.0  # how much longer NCCL waits than the watch: it ends the process when it gives up
# Variables by which the user sets torch's allocator.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
GROWING = "expandable_segments:True"
FIXED = "expandable_segments:False"


class Group(Ranks):
    """Some of the ranks: tensors over one process group, messages over another on the CPU."""

    def __init__(self, members: tuple[int, ...], backend: str, watch: Watch, has_gpus: bool = False) -> None:
        """Makes a group of `members`, ranks as torchrun numbers them. Ranks that are no members make it, too.

        `backend` exchanges the tensors of all groups; `has_gpus` says whether any rank of the run has a GPU.
        """
        self._backend = backend
        self._watch = watch
        self.patience_s = watch.patience_s
        self._has_gpus = has_gpus
        self._join(members)
        self._staying: dict[frozenset[int], Group] = {}  # by the ranks that may be lost
        self._lost: tuple[int, ...] = ()
        self._closed = self._loads = False
        self._inner: dict[tuple[int, ...], Group] = {}  # by their members; each costs a communicator
        # Messages and barriers use gloo also where tensors use NCCL: a stuck kernel is still reported.
        ranks = list(members)
        patience = timedelta(seconds=self.patience_s)
        self._tensor_patience = patience + timedelta(seconds=LATER_S if backend == "nccl" else 0)
        what = "making groups"
        with self._watch.during(what), self.within(max(self.patience_s, FIRST_STEP_S), what):
            self._messages: Any = dist.new_group(ranks, backend="gloo", timeout=patience)
            self._waiting: Any = dist.new_group(ranks, backend="gloo", timeout=UNLIMITED)
            self._tensors: Any = dist.new_group(ranks, backend=backend, timeout=self._tensor_patience)
        # NCCL connects ranks at their first sum: until then this group takes no memory of a GPU.
        self._is_connected = backend != "nccl"

    def connect(self) -> None:
        if self._is_connected:
            return
        self.barrier()  # another rank may load for longer than the first sum may take
        self._sum_once()
        self._is_connected = True

    def is_connected(self, members: tuple[int, ...]) -> bool:
        chosen = self._chosen(members)
        group = self if chosen == self._members else self._inner.get(chosen)
        return self._backend != "nccl" or (group is not None and group._is_connected)

    def _sum_once(self) -> None:
        """Sums once, which connects the ranks: a broken or wrong link ends the start, not a later step."""
        what = "the first sum"
        with self._watch.during(what), self.within(max(self.patience_s, FIRST_STEP_S), what):
            count = torch.ones(1, device=torch.device("cuda", torch.cuda.current_device()))
            dist.all_reduce(count, group=self._tensors)
            total = int(count)
        if total != self.world:
            raise DistributedError(
                "a sum over the ranks is wrong",
                where=f"rank {self._watch.rank}",
                found=str(total),
                allowed=str(self.world),
                fix="check the links between the GPUs: nvidia-smi topo -m",
            )

    def _join(self, members: tuple[int, ...]) -> None:
        self._members = members
        self.world = len(members)
        self._sent = 0
        self.rank = members.index(self._watch.rank) if self._watch.rank in members else -1

    def among(self, members: tuple[int, ...]) -> Ranks | None:
        chosen = self._chosen(members)
        if chosen == self._members:
            return self
        group = self._of(chosen) if len(chosen) > 1 else ALONE
        return group if self._watch.rank in chosen else None

    def _chosen(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Returns members of this group as torchrun numbers them."""
        return tuple(self._members[member] for member in members)

    def _of(self, chosen: tuple[int, ...]) -> Group:
        """Returns the group of these ranks, which all ranks make once."""
        if chosen not in self._inner:
            self._inner[chosen] = Group(chosen, self._backend, self._watch, self._has_gpus)
        return self._inner[chosen]

    @property
    def label(self) -> str:
        gather = "sum" if self._gathers_by_sum else "gather"
        return f"{self._tensors.group_name}: {self.rank} of {self._members}, {gather}"

    @property
    def through_host(self) -> bool:
        return self._backend != "nccl"

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        limit = self.within(max(self.patience_s, FIRST_STEP_S), what) if self._loads else nullcontext()
        with self._watch.during(what, computes=True), limit:
            yield

    def within(self, seconds: float, what: str) -> AbstractContextManager[None]:
        return self._watch.within(seconds, what, self.on_timeout)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # in a compiled step, which is called in `during`
            summed: Tensor = functional.all_reduce(tensor, "sum", self._tensors)
            return summed
        self.connect()
        with self._watch.during("summing"):
            dist.all_reduce(tensor, group=self._tensors)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if torch.compiler.is_compiling():
            if self._gathers_by_sum:
                none = torch.zeros_like(tensor)
                ranks = range(self.world)
                parts = [tensor if rank == self.rank else none for rank in ranks]
                return list(functional.all_reduce(torch.stack(parts), "sum", self._tensors).unbind())
            every = functional.all_gather_tensor(tensor, 0, self._tensors).view(self.world, *tensor.shape)
            of = dict(zip(sorted(self._members), every.unbind(), strict=True))
            return [of[member] for member in self._members]
        self.connect()
        return self._gather(tensor, self._tensors, "gathering")

    @property
    def _gathers_by_sum(self) -> bool:
        """Says whether compiled steps gather by a sum: there gloo's gather crashes on a GPU's memory."""
        return self._has_gpus and self.through_host

    def link(self, one: int, other: int) -> Link | None:
        """Connects `one` to `other`, which listens and tells all ranks its address and a secret."""
        listener = Listener() if self.rank == other else None
        own = json.dumps([listener.host, listener.port, listener.secret] if listener else [])
        host, port, secret = json.loads(self.gather_texts(own)[other])
        if listener is not None:
            return listener.accept(self.patience_s)
        return connect(host, port, secret, self.patience_s) if self.rank == one else None

    def may_lose(self, members: tuple[int, ...]) -> None:
        spare = frozenset(members)
        if spare and spare not in self._staying:
            staying = tuple(rank for rank in self._members if rank not in spare)
            self._staying[spare] = self._of(staying)
        self._watch.spare = spare

    def drop_lost(self) -> None:
        staying = self._staying.get(self._watch.spare)
        if staying is not None and not self._lost:
            self._lost = tuple(self._watch.spare)
            self._join(staying._members)
            self._messages = staying._messages
            self._waiting = staying._waiting
            self._tensors = staying._tensors
            self._is_connected = staying._is_connected
            self._watch.excuse(self._lost)

    def broadcast_ints(self, values: list[int]) -> list[int]:
        self._sent += 1
        packet = torch.zeros(PACKET, dtype=torch.int64)
        if self.is_leader:
            packet[:HEAD] = torch.tensor([self._sent, len(values), checksum(values)])
            packet[HEAD : HEAD + len(values)] = torch.tensor(values[: PACKET - HEAD], dtype=torch.int64)
        self._broadcast(packet)
        number, length, sum_ = packet[:HEAD].tolist()
        received: list[int] = packet[HEAD : HEAD + length].tolist()
        missing = length - len(received)
        if missing > 0 and number == self._sent:
            rest = torch.tensor(values[len(received) :] if self.is_leader else [0] * missing)
            self._broadcast(rest)
            received += rest.tolist()
        if (number, sum_) != (self._sent, checksum(received)):
            raise DistributedError(
                "the ranks are out of step: another message",
                where=f"rank {self._watch.rank}, {self._watch.place}",
                found=f"number {number}, checksum {sum_:08x}",
                allowed=f"number {self._sent}, checksum {checksum(received):08x}",
                fix="report it: ranks derive all they do from the leader's messages",
            )
        return received

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        own = torch.tensor(values, dtype=torch.int64)
        with self._watch.awaiting():
            return [part.tolist() for part in self._gather(own, self._waiting, "comparing")]

    def require_same(self, what: str, text: str) -> None:
        texts = self.gather_texts(text)
        unlike = [rank for rank, own in enumerate(texts) if own != texts[LEADER]]
        if unlike:
            numbers = [self._members[rank] for rank in unlike]
            leader = self._members[LEADER]
            named = differing(texts[unlike[0]], texts[LEADER], (numbers[0], leader))
            raise DistributedError(
                f"the ranks differ in {what}",
                found=f"ranks {', '.join(map(str, numbers))} unlike rank {leader}{named}",
                allowed="the same on every rank",
                fix="start all ranks with the same command and files",
            )

    def barrier(self) -> None:
        with self._watch.during("waiting for the others"), self._watch.awaiting():
            dist.barrier(group=self._waiting)

    def note(self, doing: str) -> None:
        self._watch.place = replace(self._watch.place, doing=shortened(doing, MAX_DOING))

    def await_leader(self) -> None:
        self._watch.await_turn(self.is_leader)

    @contextmanager
    def patient(self) -> Iterator[None]:
        groups = self._joined()
        for group in groups:
            _set_pg_timeout(UNLIMITED, group._messages)
            _set_pg_timeout(UNLIMITED, group._tensors)
        yield
        for group in groups:
            _set_pg_timeout(timedelta(seconds=group.patience_s), group._messages)
            _set_pg_timeout(group._tensor_patience, group._tensors)

    def _joined(self) -> list[Group]:
        """Returns this group and those in it that this rank is a member of."""
        return [self, *(group for group in self._inner.values() if group.rank >= 0)]

    @contextmanager
    def loading(self) -> Iterator[None]:
        groups = self._joined()
        for group in groups:
            group._loads = True
            _set_pg_timeout(timedelta(seconds=self._watch.loading_s), group._tensors)
        yield
        self.barrier()
        for group in groups:
            group._loads = False
            _set_pg_timeout(group._tensor_patience, group._tensors)

    def enter(self, phase: str, number: int = 0) -> None:
        self._watch.enter(Place(phase, number))

    def keep_errors_in(self, folder: Path | None) -> None:
        name = broadcast_json(str(folder.resolve()) if folder else "", self)
        self._watch.folder = Path(name) if name else None

    def cause_of(self, error: BaseException) -> BaseException:
        cause = self._watch.cause_of(error)
        self.ended = str(cause)
        return cause

    def before_close(self, free: Callable[[], None]) -> None:
        TO_FREE.append(WeakMethod(free))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        while TO_FREE:  # else NCCL waits forever for CUDA graphs that hold its sums, whoever keeps them
            if free := TO_FREE.pop()():
                free()
        gc.collect()
        self._watch.place = Place("end")
        self._watch.closing = True
        self.barrier()
        self._watch.stop()
        if self.is_leader:
            self._watch.release(self._lost)
        what = "the ranks cannot disconnect"
        found = f"not done in {self.patience_s:g} s"
        fix = "results are written; if the GPUs stay in use, end the processes"
        late = DistributedError(what, where=f"rank {self._watch.rank}", found=found, fix=fix)
        alarm = leave_within(self.patience_s, late.code, str(late))
        dist.destroy_process_group()
        alarm.cancel()

    def _gather(self, own: Tensor, group: Any, what: str) -> list[Tensor]:
        """Every rank's tensor, in the members' order; torch orders them by their numbers in the run."""
        parts = [torch.empty_like(own) for _ in range(self.world)]
        with self._watch.during(what):
            dist.all_gather(parts, own, group=group)
        of = dict(zip(sorted(self._members), parts, strict=True))
        return [of[member] for member in self._members]

    def _broadcast(self, tensor: Tensor) -> None:
        with self._watch.during(f"message {self._sent}"):
            dist.broadcast(tensor, src=self._members[LEADER], group=self._messages)


def differing(text: str, leaders: str, ranks: tuple[int, int]) -> str:
    """Returns the first keys in which two JSON objects differ, with both values; nothing of other texts."""
    with suppress(ValueError):
        own = dict(flat(json.loads(text)))
        other = dict(flat(json.loads(leaders)))
        keys = [key for key in {**other, **own} if own.get(key) != other.get(key)]
        both = [(key, own.get(key, "nothing"), other.get(key, "nothing")) for key in keys]
        said = [f"{key} {one} on rank {ranks[0]}, {two} on rank {ranks[1]}" for key, one, two in both]
        more = f"; and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
        return f": {'; '.join(said[:MAX_NAMED])}{more}"
    return ""


def open_ranks(
    device: torch.device,
    patience_s: float = WORKING_S,
    appear_s: float = APPEAR_S,
    loading_s: float = LOADING_S,
) -> Ranks:
    """Returns the ranks that torchrun started, or ALONE. After closing them a process may call it again.

    `patience_s` limits how long ranks may be silent, or wait for one another; `appear_s` how far apart they
    may start; `loading_s` for how long none may get on while others wait for it. Sets the allocator of a GPU
    (`grow_segments`): the small processes of a trial have that of their run.
    """
    is_alone = rank_environment().world == 1
    if not is_alone and dist.is_initialized():
        raise UsageError(
            "torch.distributed is in use in this process",
            found="a pair that is not closed, or a process group of the script's own",
            fix="close it first; after an error start the script again",
        )
    if device.type == "cuda":
        if not is_alone:  # else what names no device would make a context on GPU 0, from every rank
            torch.cuda.set_device(device)
        grow_segments(device)
    if is_alone:
        return ALONE

    if device.type == "cuda":
        # Registered graphs may read memory that the allocator has moved (expandable segments).
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    # Each rank has workers of its own that compile.
    workers = cores_here() // number_of("LOCAL_WORLD_SIZE", 1, MAX_WORLD, default=1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(max(workers, 1), 32)))
    board, watch = meet(patience_s, appear_s, loading_s)
    try:
        store = board.groups_store(patience_s)
        with reachable(board, watch.rank, watch.world, patience_s):
            # NCCL connects ranks at their first sum: all wait in the store for the first one, which may load.
            own = store.clone()
            own.set_timeout(timedelta(seconds=loading_s))
            what = "connecting the ranks"
            with watch.within(max(patience_s, FIRST_STEP_S), what, lambda: None):
                dist.init_process_group(
                    "gloo", store=own, timeout=UNLIMITED, rank=watch.rank, world_size=watch.world
                )
                backend, has_gpus = _backend(device, store, watch)
                return Group(tuple(range(watch.world)), backend, watch, has_gpus)
    except BaseException as error:
        raise watch.cause_of(error) from error


def grow_segments(device: torch.device) -> None:
    """Has the segments of torch's allocator grow, unless the user has set it: prompts leave no gaps.

    Where the GPU cannot, as a virtual one without virtual memory management, they stay fixed. Raises what the
    GPU itself raises.
    """
    if not os.environ.keys().isdisjoint(ALLOCATOR):
        return
    _set_allocator(GROWING)
    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        return  # the plan says what is missing
    except RuntimeError as error:
        _set_allocator(FIXED)
        torch.empty(1, device=device)
        reason = first_line(error)[:200]
        log.warning(
            "the GPU's memory is taken in segments that cannot grow, which may leave gaps: %s", reason
        )


def _set_allocator(settings: str) -> None:
    """Sets torch's allocator. Newer versions of torch warn of the function that older ones have."""
    new: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    old: Any = torch.cuda.memory._set_allocator_settings
    (new or old)(settings)


def _backend(device: torch.device, store: Any, watch: Watch) -> tuple[str, bool]:
    """Returns the backend of all ranks' tensors, and whether a rank has a GPU.

    It is NCCL where every rank has a GPU of its own, else gloo.
    """
    own = gpu_of(device)
    with watch.during("comparing GPUs"):
        store.set(f"gpu/{watch.rank}", own)
        gpus = [store.get(f"gpu/{rank}").decode() for rank in range(watch.world)]
    backend, reason = backend_of(gpus)
    has_gpus = set(gpus) != {NO_GPU}
    if watch.rank == LEADER and has_gpus:
        level = logging.INFO if backend == "nccl" else logging.WARNING
        log.log(level, "ranks exchange tensors by %s: %s", backend, reason)
    return backend, has_gpus


def gpu_of(device: torch.device) -> str:
    """The device as NCCL tells devices apart: a GPU by its UUID, also where each rank sees only its own.

    NCCL takes the parts of one GPU (MIG) for the same device.
    """
    if device.type != "cuda":
        return NO_GPU
    found = torch.cuda.get_device_properties(device)
    return MIG if MIG in found.name.split() else str(found.uuid)


def backend_of(gpus: Sequence[str]) -> tuple[str, str]:
    """Returns the backend for ranks with these devices, by rank, and why."""
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu == NO_GPU:
            return "gloo", f"rank {rank} has no GPU, so all go through the host"
        if gpu == MIG:
            return "gloo", f"rank {rank} has a part of a GPU (MIG), which NCCL refuses"
        if gpu in first:
            return "gloo", f"ranks {first[gpu]} and {rank} share one GPU, which NCCL refuses"
        first[gpu] = rank
    return "nccl", "every rank has a GPU of its own"
