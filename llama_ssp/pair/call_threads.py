"""Threads of torch in calls of the Python API: fewer in a container, and while others use the cores.

A command gives cores away for its whole life (models/host_cores.py). A script's process is not ours to
confine, and it may have imported torch already. So each call takes as many threads as there are free cores,
and no more than a container's quota, and gives torch's own number back at its end.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llama_ssp.distributed.cores import cores_here
from llama_ssp.models.host_cores import THREADS, core_times, free_cores, given_threads, usual_threads

log = logging.getLogger(__name__)


class CallThreads:
    """Chooses the number of threads of each call by what others did since the call before."""

    def __init__(self, on_cpu: bool) -> None:
        self._is_on = on_cpu and given_threads() is None
        self._times = core_times()
        self._free: int | None = None  # cores, when it was last known
        # torch counts cores, and knows no quota; a number that the script gave it is left as it is.
        self._share = cores_here() if torch.get_num_threads() == usual_threads() else None

    @contextmanager
    def chosen(self, is_new: bool = True) -> Iterator[None]:
        """Has torch compute with the number for this call inside; a new call chooses it."""
        if is_new:
            self._look()
        usual = torch.get_num_threads()
        limits = [limit for limit in (self._free, self._share) if limit is not None]
        threads = min([usual, *limits])
        if not self._is_on or threads == usual:
            yield
            return

        torch.set_num_threads(threads)
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
            message = "others use %.1f of %d cores: calls use %d thread(s) until they are free (%s=N sets it)"
            log.warning(message, free.taken, len(free.cores), free.count, THREADS)
        self._free = free.count
