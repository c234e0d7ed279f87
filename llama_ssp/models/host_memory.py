"""Memory of this host. No torch."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

MEMORY_TABLE = Path("/proc/meminfo")


def memory_here() -> int:
    """Bytes that the system has available."""
    try:
        lines = MEMORY_TABLE.read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def return_memory() -> None:
    """Has the C library return freed memory to the system: glibc keeps many megabytes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
