"""Where an engine's time goes: the parts of its rounds, and what ranks say, on one stopwatch.

Every moment belongs to one part, the innermost that is being done, so the parts add up to the whole.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.draft_link import Link
from llama_ssp.speculative.engine import DECIDE, DRAFT, VERIFY

COMMUNICATE, HOST = "communicate", "host"
PARTS = (DRAFT, VERIFY, DECIDE, COMMUNICATE, HOST)
MEANING = {
    DRAFT: "drawing the draft's tokens: its forward passes, distributions and draws",
    VERIFY: "the target's forwards over K+1 positions",
    DECIDE: "distributions, acceptance and the correction, after the target's forward",
    COMMUNICATE: "calls between ranks, waiting for slower ranks included",
    HOST: "the loop: choosing K, cutting at ends, committing, rolling back",
}


class Stopwatch:
    """Divides time among parts. Off until `running`; then what no part claims is the host's."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._doing: list[str] = []
        self._since = 0.0
        self._wait: Callable[[], None] = _at_once

    @contextmanager
    def running(self, wait: Callable[[], None]) -> Iterator[None]:
        """Runs while inside. `wait` is called before every reading: until the device has done its work."""
        self._wait = wait
        wait()
        self._doing, self._since = [HOST], time.perf_counter()
        try:
            yield
        finally:
            self._turn()
            self._doing, self._wait = [], _at_once  # what waits is an engine's, which holds caches

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time inside is this part's, but for parts within it."""
        if not self._doing:
            yield
            return
        self._turn()
        self._doing.append(name)
        try:
            yield
        finally:
            self._turn()
            self._doing.pop()

    def _turn(self) -> None:
        self._wait()
        now = time.perf_counter()
        self.spent[self._doing[-1]] += now - self._since
        self._since = now


def _at_once() -> None:
    """Nothing to wait for."""


class TimedRanks(Ranks):
    """The same ranks, with all they say to each other on a stopwatch."""

    def __init__(self, ranks: Ranks, watch: Stopwatch) -> None:
        self._ranks, self._watch = ranks, watch
        self.rank, self.world, self.patience_s = ranks.rank, ranks.world, ranks.patience_s

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self._watch.part(COMMUNICATE):
            return self._ranks.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        with self._watch.part(COMMUNICATE):
            return self._ranks.all_gather(tensor)

    def broadcast_ints(self, values: list[int]) -> list[int]:
        with self._watch.part(COMMUNICATE):
            return self._ranks.broadcast_ints(values)

    def among(self, members: tuple[int, ...]) -> Ranks | None:
        some = self._ranks.among(members)
        return TimedRanks(some, self._watch) if some is not None else None

    def link(self, one: int, other: int) -> Link | None:
        return self._ranks.link(one, other)

    def may_lose(self, members: tuple[int, ...]) -> None:
        self._ranks.may_lose(members)

    def drop_lost(self) -> None:
        self._ranks.drop_lost()
        self.rank, self.world = self._ranks.rank, self._ranks.world

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        return self._ranks.gather_ints(values)

    def enter(self, phase: str, number: int = 0) -> None:
        self._ranks.enter(phase, number)

    def keep_errors_in(self, folder: Path | None) -> None:
        self._ranks.keep_errors_in(folder)

    def require_same(self, what: str, text: str) -> None:
        self._ranks.require_same(what, text)

    def barrier(self) -> None:
        self._ranks.barrier()

    def cause_of(self, error: BaseException) -> BaseException:
        return self._ranks.cause_of(error)

    def close(self) -> None:
        self._ranks.close()
