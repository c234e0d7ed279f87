"""The most memory that each rank has held, for comparison with the plan."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from llama_ssp.distributed.comm import Ranks
from llama_ssp.planner.run_plan import COUNTED, DEVICE, HELD_BYTES, RESERVED, TENSORS, Bytes

STATUS = Path("/proc/self/status")


def memory_of_ranks(held: int, device: torch.device, ranks: Ranks) -> list[Bytes]:
    """The most that each rank has held; `held` are this rank's weights and caches. All ranks call it."""
    own: Bytes = {HELD_BYTES: held, TENSORS: None, RESERVED: None, DEVICE: process_bytes()}
    if device.type == "cuda":  # on a CPU torch does not count what tensors take
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)  # other processes' memory, too
        own[TENSORS] = torch.cuda.max_memory_allocated(device)
        own[RESERVED] = reserved = torch.cuda.max_memory_reserved(device)
        own[DEVICE] = outside + reserved
    every = ranks.gather_ints([own[name] or 0 for name in COUNTED])
    return [{name: size or None for name, size in zip(COUNTED, sizes, strict=True)} for sizes in every]


def process_bytes() -> int:
    """The most of this process that was resident. A child's `ru_maxrss` begins with its parent's."""
    try:
        lines = STATUS.read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
