"""Cores that this process may keep busy: by its affinity, and by the quota of its container. No torch."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from llama_ssp.distributed.control_groups import folders_of

# What says how many microseconds a group may compute in a period of so many, by the version of its files.
QUOTA_FILES = {2: ("cpu.max",), 1: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}


def own_cores() -> set[int]:
    """Returns the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cores_here() -> int:
    """Returns how many cores this process may keep busy at once; a part of a core counts as one.

    A container or a job may have less time than its cores have: threads beyond its quota only wait for one
    another until the next period begins.
    """
    return min([len(own_cores()), *map(math.ceil, _quotas())])


def _quotas() -> Iterator[float]:
    """Yields the quota, in cores, of each control group of this process that has one."""
    for version, folder in folders_of("cpu"):
        with suppress(OSError, ValueError):  # "max" is no number
            quota_us, period_us = map(int, _words(folder, QUOTA_FILES[version]))
            if quota_us > 0 and period_us > 0:  # -1 is no limit
                yield quota_us / period_us


def _words(folder: Path, names: tuple[str, ...]) -> list[str]:
    """Returns the words of these files."""
    return " ".join((folder / name).read_text(encoding="ascii") for name in names).split()
