"""One rank's view of the others, and the collectives that every rank calls in the same order.

`Ranks` is the interface, and what a single process needs of it. Several processes have a `Group`
(process_group.py), which inherits these docstrings.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from llama_ssp.distributed.draft_link import Link
from llama_ssp.distributed.placement import LEADER
from llama_ssp.errors import DistributedError


def checksum(values: Iterable[int]) -> int:
    """Returns 32 bits that tell lists of integers apart; ranks compare them instead of the lists."""
    return zlib.crc32(",".join(map(str, values)).encode())


@dataclass(frozen=True)
class Place:
    """What a rank is doing, for messages. An engine counts its rounds from 1; 0 is outside of them."""

    phase: str
    round: int = 0
    doing: str = ""  # within the phase, such as how much it has read

    def __str__(self) -> str:
        phase = f"{self.phase}, round {self.round}" if self.round else self.phase
        return f"{phase}, {self.doing}" if self.doing else phase


class LeaderChannel:
    """Brings the leader's messages to some ranks."""

    lost: str | None = None  # why these ranks have gone; None while they are there
    essential = True  # whether the run ends when they have gone
    loss_logged = False  # whether the log says so already

    def broadcast_ints(self, values: list[int]) -> list[int]:
        """Returns the leader's integers, on every rank; what the other ranks pass is ignored."""
        return values

    def flush(self) -> None:
        """Waits until every message has been taken up."""


class Ranks(LeaderChannel):
    """The ranks of a run, or some of them as a group. This base class is one process without others."""

    rank: int = LEADER  # this process's place, from 0
    world: int = 1  # how many ranks there are
    patience_s: float = 0.0  # how long one rank waits for another
    ended = ""  # the error that has ended these ranks; empty while they run
    on_timeout: Callable[[], None] = staticmethod(lambda: None)  # called before `within` ends all ranks

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    @property
    def label(self) -> str:
        """Returns a text for the group and this rank's place in it: a compiled step is for one label."""
        return ""

    @property
    def through_host(self) -> bool:
        """Returns whether tensors of GPUs are exchanged by way of the host: no CUDA graph can hold that."""
        return False

    def connect(self) -> None:
        """Connects the ranks for sums, once, after waiting until every rank is here. All ranks call it.

        The first sum does so, too, except in a compiled step. Raises DistributedError where the ranks do not
        sum as they should; ends all where that takes too long.
        """

    def is_connected(self, members: tuple[int, ...]) -> bool:
        """Returns whether sums over these ranks take no further memory of a GPU."""
        return True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over ranks, which replaces the tensor's own numbers."""
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns every rank's tensor; all have one shape."""
        return [tensor]

    def during(self, what: str) -> AbstractContextManager[None]:
        """Returns a context for code that computes and exchanges tensors; `what` names it.

        An exchange that breaks inside means that another rank is lost.
        """
        return nullcontext()

    def within(self, seconds: float, what: str) -> AbstractContextManager[None]:
        """Returns a context whose body may take so long. Else `on_timeout` is called, and all ranks end.

        `what` names the body in the line that they end with.
        """
        return nullcontext()

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        """Returns every rank's integers; all ranks pass equally many."""
        return [values]

    def gather_texts(self, text: str) -> list[str]:
        """Returns every rank's text."""
        encoded = text.encode()
        lengths = [length for (length,) in self.gather_ints([len(encoded)])]
        padded = [*encoded, *[0] * (max(lengths) - len(encoded))]  # all ranks pass equally many bytes
        by_rank = zip(self.gather_ints(padded), lengths, strict=True)
        return [bytes(values[:length]).decode() for values, length in by_rank]

    def require_same(self, what: str, text: str) -> None:
        """Raises DistributedError on every rank if `text` is not the same on all; `what` says what it is.

        Where the texts are JSON objects, the error names the keys that differ.
        """

    def barrier(self) -> None:
        """Waits until every rank is here, as long as a rank that is not gets on with what it does."""

    def note(self, doing: str) -> None:
        """Tells the others, within a second, how far this rank is in its phase: that it gets on."""

    def await_leader(self) -> None:
        """Waits until the leader calls it, too, however long that takes. A rank that is lost ends it."""

    def patient(self) -> AbstractContextManager[None]:
        """Returns a context in which a person may stop all ranks, or their output, without a limit.

        Only a rank that dies, or freezes without the others, ends the run. All ranks enter it.
        """
        return nullcontext()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Opens a context in which ranks wait for each other's tensors as long as loading may take.

        That is so in groups of them, too. One rank may read or compile for minutes what another finds kept.
        The context ends when every rank is at its end.
        """
        yield
        self.barrier()

    def among(self, members: tuple[int, ...]) -> Ranks | None:
        """Returns these ranks as a group, numbered in this order; None on other ranks. All ranks call it."""
        return self if LEADER in members else None

    def link(self, one: int, other: int) -> Link | None:
        """Returns a connection between two ranks; None on other ranks. All ranks call it."""
        raise DistributedError("a single rank has no other to connect to", found=f"ranks {one} and {other}")

    def may_lose(self, members: tuple[int, ...]) -> None:
        """Lets these ranks, and no others, fail without ending the run, from now on. All ranks call it."""

    def drop_lost(self) -> None:
        """Goes on without the ranks that `may_lose` named. All that stay call it, at the same place."""

    def enter(self, phase: str, number: int = 0) -> None:
        """Records what this rank does next, and in which round, for messages about failures."""

    def keep_errors_in(self, folder: Path | None) -> None:
        """Says where a rank that fails writes its record; the leader's folder counts."""

    def cause_of(self, error: BaseException) -> BaseException:
        """Returns why this rank ends: the error, which the others are told, or the error they ended with."""
        return error

    def before_close(self, free: Callable[[], None]) -> None:
        """Has a method called before the ranks part, if its object still exists then."""

    def close(self) -> None:
        """Leaves in good order, after every rank is here."""


ALONE = Ranks()  # a single process


def broadcast_json(plain: Any, ranks: Ranks) -> Any:
    """Returns the leader's JSON value, on every rank; what the other ranks pass is ignored."""
    if ranks.world == 1:
        return plain
    encoded = json.dumps(plain).encode() if ranks.is_leader else b""
    return json.loads(bytes(ranks.broadcast_ints(list(encoded))))
