"""Why a rank ends: the first one that fails leaves its reason, and the others give it as theirs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from llama_ssp.errors import DistributedError, RunError

COMPLAINT = "llama_ssp_complaint"
PATIENCE_S = 2.0  # for a rank that has failed to say why


class LostPeer(DistributedError):
    """Another rank has ended, or is stuck: the cause is there, not here."""


class Report:
    """One rank's account of what it is doing, and of what ended it."""

    def __init__(self, rank: int, store: Any) -> None:
        self.rank = rank
        self.phase = "start"
        self._store = store

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """A peer that is gone, or late beyond its time, ends this rank with one line."""
        try:
            yield
        except RuntimeError as error:
            raise LostPeer(
                "another rank has gone or does not answer", where=f"rank {self.rank}, {self.phase}, {what}",
                found=str(error)[-160:], fix="look for the first error of the other ranks",
            ) from error  # fmt: skip

    def cause_of(self, error: BaseException) -> BaseException:
        """The error, which the others get to know, or the one they ended with."""
        if isinstance(error, LostPeer | KeyboardInterrupt):
            left = self._complaint(PATIENCE_S if isinstance(error, LostPeer) else 0.0)
            return error if left is None else DistributedError(left)
        what = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        line = f"rank {self.rank} failed in {self.phase}; {what}"
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
