"""Divides an engine's time among the parts of its rounds, and messages: each moment counts for one."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from llama_ssp.distributed.comm import Ranks
from llama_ssp.speculative.engine import DECIDE, DRAFT, VERIFY, Observer

COMMUNICATE = "communicate"
HOST = "host"
MESSAGES = ("all_reduce", "all_gather", "broadcast_ints")
# Drawing the draft's tokens; the target's forwards; distributions, acceptance and the correction after them;
# calls between ranks, waiting for slower ranks included; the loop: choosing K, cutting at ends, committing.
PARTS = (DRAFT, VERIFY, DECIDE, COMMUNICATE, HOST)


class Stopwatch(Observer):
    """Divides time among parts. Off until `running`; then time in no part is the host's."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._doing: list[str] = []
        self._since = 0.0
        self._wait: Callable[[], None] = lambda: None

    @contextmanager
    def running(self, wait: Callable[[], None]) -> Iterator[None]:
        """Runs while inside. `wait` is called before every reading: until the device has done its work."""
        self._wait = wait
        wait()
        self._doing = [HOST]
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._turn()
            self._doing = []
            self._wait = lambda: None  # what waits is an engine's, which holds caches

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts time inside as this part's, without that of parts within it."""
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


def timed_ranks(ranks: Ranks, watch: Stopwatch) -> Ranks:
    """Returns the ranks with their messages on the stopwatch, also those within smaller groups."""
    return cast(Ranks, _TimedRanks(ranks, watch))


class _TimedRanks:
    def __init__(self, ranks: Ranks, watch: Stopwatch) -> None:
        self._ranks = ranks
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._ranks, name)
        return self._watch.part(COMMUNICATE)(attribute) if name in MESSAGES else attribute

    def among(self, members: tuple[int, ...]) -> Ranks | None:
        group = self._ranks.among(members)
        return timed_ranks(group, self._watch) if group is not None else None
