"""Cores of this host: how many threads compute on them, and how many others keep busy. No torch.

A kernel on several threads ends when its last thread does. Where another program has the core of one of
them, all wait for a time slice of the system, many times a token: two threads on two busy cores take ten
times as long as two threads on one core. So a run gives away as many cores as others use.
"""

import logging
import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llama_ssp.distributed.cores import cores_here, own_cores

log = logging.getLogger(__name__)

TABLE = Path("/proc/stat")
OWN_STATE = Path("/proc/self/stat")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
LAST_CORE = 36  # the core that this process ran on last, in OWN_STATE, counted after its name
LEAST_S = 0.25  # for a look at what others do: the system counts in hundredths of a second
TAKEN = 0.7  # share of its time for which others use a core that is left to them
THREADS = "OMP_NUM_THREADS"
WAITING = "OMP_WAIT_POLICY"
SPINNING = "GOMP_SPINCOUNT"
SPINS = "30000"  # of a thread that waits for others: ten times as many, as is usual, choke a busy machine


def shorten_spins() -> None:
    """Has threads that wait sleep sooner, unless the user says how.

    OpenMP reads the variable when torch is imported.
    """
    if WAITING not in os.environ:
        os.environ.setdefault(SPINNING, SPINS)


def usual_threads() -> int:
    """Returns the number of threads that torch takes for the cores of this process, if nobody says another.

    On x86-64 its library MKL decides, which takes one thread for a core that counts as two.
    """
    cores = own_cores()
    if platform.machine() != "x86_64":
        return len(cores)
    with suppress(OSError):
        siblings = {SIBLINGS.format(core) for core in cores}
        return len({Path(path).read_text(encoding="ascii") for path in siblings})
    return len(cores)


def given_threads() -> int | None:
    """Returns the number of threads that the user wants; None if that is left to torch."""
    given = os.environ.get(THREADS, "")
    return int(given) if given.isdecimal() and int(given) else None


def keep_threads_to_share() -> None:
    """Has torch take no more threads than this process may keep busy, unless the user says how many.

    torch counts the cores that it may run on, and knows no quota. OpenMP and MKL read the variable when torch
    is imported. Ranks have their parts from what starts them.
    """
    share = cores_here()
    if given_threads() is None and share < usual_threads():
        os.environ[THREADS] = str(share)


@dataclass(frozen=True, kw_only=True)
class CoreTimes:
    """What the system has counted up to a moment: seconds that each core was busy, and this process's own."""

    at_s: float
    busy_s: dict[int, float]
    own_s: float


def core_times() -> CoreTimes | None:
    """Returns what the system has counted up to now; None where it does not say, as on macOS."""
    try:
        lines = TABLE.read_text(encoding="ascii").splitlines()
        ticks_per_s = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None

    cores = own_cores()
    busy_s = dict[int, float]()
    for line in lines:
        name, *counts = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            user, nice, system, _idle, _waiting, hard, soft, steal = map(int, counts[:8])
            busy_s[int(name[3:])] = (user + nice + system + hard + soft + steal) / ticks_per_s

    own = os.times()
    own_s = own.user + own.system + own.children_user + own.children_system
    return CoreTimes(at_s=time.monotonic(), busy_s=busy_s, own_s=own_s)


@dataclass(frozen=True, kw_only=True)
class FreeCores:
    """The cores that others left to this process between two moments, the freest first."""

    cores: list[int]
    taken: float  # cores that others used, on average

    @property
    def count(self) -> int:
        """Returns how many cores are free: one at least.

        A core that others use for less than TAKEN of the time is free: a short burst of something must not
        cost a run its cores.
        """
        return max(1, len(self.cores) - int(self.taken + 1.0 - TAKEN))


def free_cores(before: CoreTimes | None) -> FreeCores | None:
    """Returns the cores that others have left free since `before`; None where the system does not say."""
    after = core_times()
    if before is None or after is None or before.busy_s.keys() != after.busy_s.keys():
        return None
    passed_s = after.at_s - before.at_s
    if passed_s < LEAST_S or not after.busy_s:
        return None

    used = {core: (after.busy_s[core] - before.busy_s[core]) / passed_s for core in after.busy_s}
    own = (after.own_s - before.own_s) / passed_s
    taken = max(0.0, sum(used.values()) - own)

    here = _last_core()
    if here in used:
        used[here] -= own
    return FreeCores(cores=sorted(used, key=lambda core: (used[core], core)), taken=taken)


def _last_core() -> int:
    """Returns the core that this process ran on last; -1 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(
            OWN_STATE.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[LAST_CORE]
        )
    return -1


def give_cores_away(before: CoreTimes | None) -> None:
    """Leaves the cores that others have used since `before` to them, for the rest of this process.

    The number of threads stays that of all cores, or the user's: what a run computes does not depend, to the
    bit, on what others do meanwhile. Does nothing once torch is imported: its threads have their cores.
    """
    if "torch" in sys.modules or not hasattr(os, "sched_setaffinity"):
        return
    threads = given_threads() or usual_threads()
    free = free_cores(before)
    if free is None or threads <= free.count:
        return

    os.environ[THREADS] = str(threads)
    try:
        os.sched_setaffinity(0, free.cores[: free.count])
    except OSError as error:
        log.debug("the cores stay as they are: %s", error)
        return
    message = "others use %.1f of %d cores: this run computes on %d of them"
    log.info(message, free.taken, len(free.cores), free.count)
