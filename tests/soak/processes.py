"""Everything a run has started, found by a mark in its environment: what it holds, and what is left of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.processes import living

MARK = "LLAMA_SSP_SOAK"
LOOK_S = 0.1
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Marked:
    """A process of a run, and which rank it is, if it is one."""

    pid: int
    rank: int | None


def marked(mark: str) -> list[Marked]:
    """The living processes that carry the mark."""
    found = living(f"{MARK}={mark}")
    return [Marked(pid, int(own["RANK"]) if own.get("RANK") else None) for pid, own in found]


def left_of(mark: str, patience_s: float) -> list[Marked]:
    """Those that are still there after so long."""
    until = time.monotonic() + patience_s
    while (found := marked(mark)) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return found


@dataclass(frozen=True)
class Held:
    """What a process held at one moment."""

    at: float
    resident: int
    handles: int


@dataclass
class Watcher:
    """Looks at one process again and again, from another thread, once it is `ready` until it has ended."""

    pid: int
    ready: Callable[[], bool]
    every_s: float = 0.2
    seen: list[Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        is_ready = False
        while not self._ended.wait(self.every_s):
            is_ready = is_ready or self.ready()
            if not is_ready:
                continue
            with suppress(OSError, IndexError):
                resident = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * PAGE
                handles = len(os.listdir(f"/proc/{self.pid}/fd"))
                if resident:
                    self.seen.append(Held(time.monotonic(), resident, handles))

    def stop(self) -> list[Held]:
        self._ended.set()
        self._thread.join()
        return self.seen
