"""What a rank can say to others; one process is the case of a single rank."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from llama_ssp.distributed.draft_link import Link
from llama_ssp.distributed.placement import LEADER
from llama_ssp.errors import DistributedError


class Ranks(Protocol):
    """One rank's view of all: what it is, and the collectives that every rank calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def patience_s(self) -> float:
        """How long one rank may wait for another."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor; all are of one shape."""

    def broadcast_ints(self, values: list[int]) -> list[int]:
        """The leader's integers, on every rank; what the others pass is not looked at."""

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        """Every rank's integers, as many from each."""

    def require_same(self, what: str, text: str) -> None:
        """Refuses, on every rank, ranks that differ in `text`. Of JSON objects it names differing keys."""

    def barrier(self) -> None:
        """Waits until every rank has come here; for as long as loading may take."""

    def among(self, members: tuple[int, ...]) -> Ranks | None:
        """Some of these ranks as a group of its own, numbered in that order; None where this one is not in.

        All ranks call it alike, members or not.
        """

    def link(self, one: int, other: int) -> Link | None:
        """A line between two of these ranks; None on the others. All ranks call it alike."""

    def may_lose(self, members: tuple[int, ...]) -> None:
        """From now on these ranks, and no others, may go without ending the run. All ranks call it alike."""

    def part_with_lost(self) -> None:
        """Goes on without those that might be lost. All others call it, at the same place."""

    def enter(self, phase: str, number: int = 0) -> None:
        """Says what this rank is about to do, and in which round, for messages about failures."""

    def keep_errors_in(self, folder: Path | None) -> None:
        """Where a rank that fails leaves a record; the leader's folder counts."""

    def cause_of(self, error: BaseException) -> BaseException:
        """Why this rank ends: the error, which the others get to know, or the one they ended with."""

    def close(self) -> None:
        """Leaves in good order, after every rank has come here."""


class Alone:
    """One process: nothing to say, nobody to wait for."""

    rank, world, is_leader, patience_s = LEADER, 1, True, 0.0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def broadcast_ints(self, values: list[int]) -> list[int]:
        return values

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        return [values]

    def require_same(self, what: str, text: str) -> None:
        pass

    def barrier(self) -> None:
        pass

    def among(self, members: tuple[int, ...]) -> Ranks | None:
        return self if LEADER in members else None

    def link(self, one: int, other: int) -> Link | None:
        raise DistributedError("a single rank has nobody to talk to", found=f"ranks {one} and {other}")

    def may_lose(self, members: tuple[int, ...]) -> None:
        pass

    def part_with_lost(self) -> None:
        pass

    def enter(self, phase: str, number: int = 0) -> None:
        pass

    def keep_errors_in(self, folder: Path | None) -> None:
        pass

    def cause_of(self, error: BaseException) -> BaseException:
        return error

    def close(self) -> None:
        pass


ALONE = Alone()
