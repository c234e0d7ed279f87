"""Processes, and whether they still run: a pid alone may come to be another process's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

STATE, STARTED = 0, 19  # places in `_stat`


@dataclass(frozen=True)
class Identity:
    """A process of some machine."""

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

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to a process of this machine that runs; does nothing to others."""
        if self.lives:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)


def own_identity() -> Identity:
    return Identity(_machine(), os.getpid(), _started(os.getpid()))


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
    """What Linux tells of a process after its name; empty if it is gone, or hidden."""
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return said.rpartition(")")[2].split()
    return []
