"""Memory of this host. No torch."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from llama_ssp.distributed.control_groups import folders_of

MEMORY_TABLE = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
# Limit, use, and what `memory.stat` calls the cache of files in it, by the version of a group's files.
NAMES = {
    2: ("memory.max", "memory.current", "{}active_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_{}active_file"),
}


def memory_here() -> int:
    """Returns the bytes that are available to this process.

    They are those of the system, of its container and of its job, whichever are fewest.
    """
    return min([_of_system(), *_of_groups()])


def _of_groups() -> Iterator[int]:
    """Yields what is left to each control group of this process that has a limit."""
    for version, folder in folders_of("memory"):
        with suppress(OSError, ValueError, KeyError):  # "max" is no number
            yield _left(folder, *NAMES[version])


def _left(folder: Path, limit: str, used: str, cache: str) -> int:
    """Returns the bytes that a group may still take: its cache of files is given up for them."""
    allowed = int((folder / limit).read_text(encoding="ascii"))
    taken = int((folder / used).read_text(encoding="ascii"))
    stat = dict(map(str.split, (folder / "memory.stat").read_text(encoding="ascii").splitlines()))
    cached = sum(int(stat[cache.format(part)]) for part in ("", "in"))
    return max(0, allowed - taken + cached)


def _of_system() -> int:
    try:
        lines = MEMORY_TABLE.read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def process_bytes() -> int:
    """Returns the most bytes of this process that were resident.

    A child's `ru_maxrss` begins with its parent's.
    """
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
