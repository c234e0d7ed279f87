"""The other ranks' processes on this machine: whether they live, and how to end them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

STATE, STARTED = 0, 19  # places in `_stat`


@dataclass(frozen=True)
class Identity:
    """A process of some machine. A pid alone may come to be another process's."""

    machine: str
    pid: int
    started: str

    @property
    def lives(self) -> bool | None:
        """Whether the process still runs; None where this machine cannot tell."""
        if not self.started or self.machine != _machine():
            return None
        if stat := _stat(self.pid):
            return stat[STATE] not in "ZX" and stat[STARTED] == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return None  # it ends just now, or is another user's, which /proc may hide


def own_identity() -> Identity:
    return Identity(_machine(), os.getpid(), _started(os.getpid()))


class Peers:
    """The other ranks of this machine, by pidfd: Linux reports when one ends, and never means another."""

    def __init__(self, everyone: dict[int, Identity], own: int) -> None:
        self._handles: dict[int, int] = {}
        self._ended: set[int] = set()  # ranks that `wait` has found gone
        self._waiting, self._waking = os.pipe()
        if not hasattr(os, "pidfd_open"):
            return
        for rank, process in everyone.items():
            if rank != own and process.machine == everyone[own].machine:
                with contextlib.suppress(OSError):
                    self._hold(rank, process)

    @property
    def here(self) -> set[int]:
        """The other ranks of this machine."""
        return set(self._handles)

    def wait(self, seconds: float) -> set[int]:
        """Ranks that are gone; returns as soon as there is another one, upon `wake`, or after this time."""
        running = {rank: handle for rank, handle in self._handles.items() if rank not in self._ended}
        ready = _ready([self._waiting, *running.values()], seconds)
        if self._waiting in ready:
            os.read(self._waiting, 64)
        self._ended |= {rank for rank, handle in running.items() if handle in ready}
        return set(self._ended)

    def wake(self) -> None:
        """Ends the `wait` that is going on, or the next one."""
        os.write(self._waking, b"!")

    def living(self) -> set[int]:
        """The other ranks of this machine that have not ended."""
        ended = _ready(self._handles.values(), 0.0)
        return {rank for rank, handle in self._handles.items() if handle not in ended}

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a rank of this machine; does nothing for others."""
        if rank in self._handles:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._handles[rank], number)

    def _hold(self, rank: int, process: Identity) -> None:
        handle = os.pidfd_open(process.pid)
        if _started(process.pid) == process.started:
            self._handles[rank] = handle
        else:
            os.close(handle)


def _ready(handles: Iterable[int], seconds: float) -> set[int]:
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    return {handle for handle, _ in poll.poll(1000 * seconds)}


def _machine() -> str:
    """The same for processes that see each other's pids, and for no others."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def _started(pid: int) -> str:
    """When the process began, in ticks since the machine did."""
    stat = _stat(pid)
    return stat[STARTED] if stat else ""


def _stat(pid: int) -> list[str]:
    """What Linux tells of a process, behind its name; empty if it is gone, or hidden."""
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return said.rpartition(")")[2].split()
    return []
