"""Threads of torch in calls of the Python API: fewer while other programs use the cores.

A command gives cores away for its whole life (models/host_cores.py). A script's process is not ours to
confine, and it may have imported torch already. So each call takes as many threads as there are free cores,
and gives torch's own number back at its end.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llama_ssp.models.host_cores import THREADS, core_times, free_cores, given_threads

log = logging.getLogger(__name__)


class CallThreads:
    """Chooses the number of threads of each call by what others did since the call before."""

    def __init__(self, on_cpu: bool) -> None:
        self._is_on = on_cpu and given_threads() is None
        self._times = core_times()
        self._free: int | None = None  # cores, when it was last known

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Has torch compute with the number for this call inside."""
        self._look()
        usual = torch.get_num_threads()
        if not self._is_on or self._free is None or self._free >= usual:
            yield
            return

        torch.set_num_threads(self._free)
        try:
            yield
        finally:
            torch.set_num_threads(usual)

    def _look(self) -> None:
        """Counts the free cores anew, if enough time has passed to tell; says once that some are not free."""
        if not self._is_on:
            return
        free = free_cores(self._times)
        if free is None:
            return

        self._times = core_times()
        if free.count < len(free.cores) and free.count != self._free:
            message = (
                "others use %.1f of %d cores: calls compute on %d threads until they are free (%s=N sets it)"
            )
            log.warning(message, free.taken, len(free.cores), free.count, THREADS)
        self._free = free.count
