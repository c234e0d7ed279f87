"""Memory of this host. No torch."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MEMORY_TABLE = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
GROUPS_TABLE = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
# Limit, use, and what `memory.stat` calls the cache of files in it; of version 2, and of version 1.
NAMES = {
    "": ("memory.max", "memory.current", "{}active_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_{}active_file"),
}


def memory_here() -> int:
    """Bytes that are available: of the system, and of the container or the job that this process is in."""
    return min([_of_system(), *_of_groups()])


def _of_groups() -> Iterator[int]:
    """What is left to each control group of this process that has a limit."""
    with suppress(OSError):
        for line in GROUPS_TABLE.read_text(encoding="utf-8").splitlines():
            _, kind, own = line.split(":", 2)
            if kind in NAMES:
                own = own.strip("/")
                for name in (own, *map(str, Path(own).parents)):  # a container may show its own as the root
                    with suppress(OSError, ValueError, KeyError):  # "max" is no number
                        yield _left(GROUPS / kind / name, *NAMES[kind])


def _left(folder: Path, limit: str, used: str, cache: str) -> int:
    allowed, taken = (int((folder / file).read_text(encoding="ascii")) for file in (limit, used))
    stat = dict(map(str.split, (folder / "memory.stat").read_text(encoding="ascii").splitlines()))
    return max(0, allowed - taken + sum(int(stat[cache.format(part)]) for part in ("", "in")))


def _of_system() -> int:
    try:
        lines = MEMORY_TABLE.read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def process_bytes() -> int:
    """The most of this process that was resident. A child's `ru_maxrss` begins with its parent's."""
    try:
        lines = STATUS.read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def return_memory() -> None:
    """Has the C library return freed memory to the system: glibc keeps many megabytes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
