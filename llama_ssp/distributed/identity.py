"""Processes, whether they still run (a pid alone may become another's), and elements of schedulers' jobs."""

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

# Places in `_stat`.
STATE = 0
STARTED = 19
# Kubernetes sets the index; the manifest in docs/cluster.md sets the others, from the pod's metadata.
JOB_UID = "LLAMA_SSP_JOB_UID"
INDEX = "JOB_COMPLETION_INDEX"
POD_UID = "LLAMA_SSP_POD_UID"


@dataclass(frozen=True)
class Identity:
    """A process of some machine."""

    machine: str
    pid: int
    started: str

    @property
    def lives(self) -> bool | None:
        """Returns whether the process still runs; None where this machine cannot tell."""
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


@dataclass(frozen=True)
class Element:
    """`job` stays the same when the element is started again; `restart` does not.

    In Slurm they are the job's number and a count; in Kubernetes the Job's uid with the index, and the pod's.
    """

    job: str
    restart: int | str


def own_element() -> Element | None:
    """Returns this process's element; None if no scheduler has named it."""
    if job := os.environ.get("SLURM_JOB_ID"):
        return Element(job, int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    uid, index, pod = (os.environ.get(name) for name in (JOB_UID, INDEX, POD_UID))
    return Element(f"{uid}.{index}", pod) if uid and index and pod else None


def _machine() -> str:
    """Returns a name that is the same for processes that see each other's pids, and for no others."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def _started(pid: int) -> str:
    """When the process began, in ticks since the machine did."""
    stat = _stat(pid)
    return stat[STARTED] if stat else ""


def _stat(pid: int) -> list[str]:
    """Returns what Linux tells of a process after its name; empty if it is gone, or hidden."""
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return said.rpartition(")")[2].split()
    return []
