"""What surrounds the computing of a script's call: one thread at a time, and a process that stays as it was.

A stream computes when its reader takes a round. So this surrounds each round, and never the code of the
script. What torch and the compilers are told for our computing is taken back at its end.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from llama_ssp.errors import UsageError
from llama_ssp.models.kept_files import INDUCTOR, TRITON
from llama_ssp.pair.call_threads import CallThreads

FOLDERS = (INDUCTOR, TRITON)  # variables that name the folders of compilers


class Calls:
    """Surrounds what one pair computes."""

    def __init__(self, device: torch.device, threads: CallThreads) -> None:
        """`device` is the target's."""
        self._devices = sorted({device.type, "cpu"})
        self._threads = threads
        self._lock = threading.RLock()  # the thread that has it may take it again
        self._owner = 0  # this thread
        self._folders: dict[str, str] = {}  # what our computing has set of FOLDERS

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the pair for this thread. Raises UsageError where another thread has it."""
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                "another thread uses the pair",
                found=f"thread {self._owner}, and this one is {threading.get_ident()}",
                fix="have threads take turns, with a lock around each call, or give each a pair of its own",
            )
        try:
            self._owner = threading.get_ident()
            yield
        finally:
            self._lock.release()

    @contextmanager
    def computing(self, goes_on: bool = False) -> Iterator[None]:
        """Surrounds computing, of a new call or of one that goes on. Raises as `held`."""
        with (
            self.held(),
            self._threads.chosen(is_new=not goes_on),
            _as_usual(self._devices),
            self._own_folders(),
        ):
            yield

    @contextmanager
    def _own_folders(self) -> Iterator[None]:
        """Gives compilers the folders that earlier computing has chosen; then the script has its own."""
        before = {name: os.environ.get(name) for name in FOLDERS}
        os.environ |= {name: folder for name, folder in self._folders.items() if before[name] is None}
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None and name in os.environ:
                    self._folders[name] = os.environ.pop(name)


@contextmanager
def _as_usual(devices: list[str]) -> Iterator[None]:
    """Has torch compute as it does in a command, whatever the script has set for its own computing.

    Under autocast texts would be those of another model. Loading switches off cuDNN's attention
    (pair/assembly.py).
    """
    had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    with ExitStack() as inside:
        for device in filter(torch.is_autocast_enabled, devices):
            inside.enter_context(torch.autocast(device, enabled=False))
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(had_cudnn)
