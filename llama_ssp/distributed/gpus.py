"""This machine's GPUs as CUDA will show them, from nvidia-smi and CUDA_VISIBLE_DEVICES. No torch.

A GPU may be divided into parts (MIG), which nvidia-smi lists apart, and of which it does not say the free
memory. A program sees a single part, whatever there is besides (MIG user guide, "CUDA Device Enumeration").
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

MIB = 2**20
SMI = "nvidia-smi"
QUERY = "--query-gpu=name,memory.free,uuid,mig.mode.current,memory.used,compute_mode"
FIGURES = [SMI, QUERY, "--format=csv,noheader,nounits"]
LIST = [SMI, "-L"]
GPU_LINE = re.compile(r"GPU \d+: .*\(UUID: (\S+)\)")
# A part's name has its slices of the units and its gigabytes: MIG 3g.20gb, 1c.3g.20gb, 1g.10gb+me.
PART_LINE = re.compile(r"\s+(MIG \S*?(\d+)g\.(\d+)gb\S*)\s+Device.*\(UUID: (\S+)\)")
SLICES = 7  # of a GPU's units
# How CUDA numbers GPUs: as nvidia-smi does, or, if nothing is said, the fastest first.
ORDER = "CUDA_DEVICE_ORDER"
AS_LISTED = "PCI_BUS_ID"
# Where the daemon is found that lets processes share a GPU in exclusive mode (MPS).
MPS = "CUDA_MPS_PIPE_DIRECTORY"
MPS_USUAL = "/tmp/nvidia-mps"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU or a part of one: free bytes, None if not known; its parts; the slices of a part, else 0.

    `used` are the bytes that programs hold, 0 if not known. `exclusive`: it admits one process at a time.
    """

    name: str
    free: int | None = None
    uuid: str = ""
    parts: tuple[Gpu, ...] = ()
    slices: int = 0
    used: int = 0
    exclusive: bool = False


@cache
def gpus_here() -> list[Gpu]:
    """Returns the GPUs that programs see; one part of a GPU, if there are any.

    Where GPUs are of several kinds, CUDA is set to number them in nvidia-smi's order, unless
    CUDA_DEVICE_ORDER is set.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = _every_gpu()
    if len({gpu.name for gpu in every}) > 1:
        os.environ.setdefault(ORDER, AS_LISTED)
    seen = every if shown is None else _named(every, shown.split(","))
    parts = [part for gpu in seen for part in (gpu.parts or (gpu,)) if part.slices]
    return parts[:1] or seen


def _every_gpu() -> list[Gpu]:
    gpus = list[Gpu]()
    is_divided = False
    for line in _output(FIGURES):
        name, free, uuid, mode, used, compute, *_ = (field.strip() for field in f"{line},,,,,".split(","))
        if free:
            is_exclusive = compute.startswith("Exclusive") and not is_shared()
            gpus.append(
                Gpu(name=name, free=_bytes(free), uuid=uuid, used=_bytes(used) or 0, exclusive=is_exclusive)
            )
            is_divided |= mode == "Enabled"
    if not is_divided:
        return gpus
    parts = _parts({gpu.uuid: gpu.name for gpu in gpus})
    return [replace(gpu, parts=parts.get(gpu.uuid, ())) for gpu in gpus]


def _bytes(mib: str) -> int | None:
    """Returns the bytes of a size in MiB; None where the driver does not say it."""
    return int(mib) * MIB if mib.isdecimal() else None


def is_shared() -> bool:
    """Returns whether MPS runs: then a GPU's one process is its server, for all others."""
    return Path(os.environ.get(MPS, MPS_USUAL), "control").exists()


def _parts(names: dict[str, str]) -> dict[str, tuple[Gpu, ...]]:
    """Returns the parts of each GPU, by its UUID. A part's memory is that of its profile."""
    parts: dict[str, tuple[Gpu, ...]] = {}
    whole = ""
    for line in _output(LIST):
        if gpu := GPU_LINE.fullmatch(line):
            whole = gpu[1]
        elif part := PART_LINE.fullmatch(line):
            profile, slices, gigabytes, uuid = part.groups()
            name = f"{names.get(whole, '')} {profile}"
            made = Gpu(name=name, free=int(gigabytes) * 10**9, uuid=uuid, slices=int(slices))
            parts[whole] = (*parts.get(whole, ()), made)
    return parts


def _named(gpus: list[Gpu], words: list[str]) -> list[Gpu]:
    """Returns GPUs by number, or by the UUID's beginning; CUDA stops at the first word that names nothing."""
    seen: list[Gpu] = []
    for word in map(str.strip, words):
        found = [gpu for number, gpu in enumerate(gpus) if word == str(number)]
        if word.startswith(("GPU-", "MIG-")):
            found = [one for gpu in gpus for one in (gpu, *gpu.parts) if one.uuid.startswith(word)]
        if len(found) != 1:
            break
        seen += found
    return seen


def _output(command: list[str]) -> list[str]:
    """Returns the command's lines; none where it fails."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.rstrip() for line in output.splitlines()]
