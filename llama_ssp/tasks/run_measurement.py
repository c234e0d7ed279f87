"""What a run did, for comparison with its plan: the ways in which it wrote texts, and every rank's memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from llama_ssp.config import Drafting, RunConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.pair.assembly import RankModels
from llama_ssp.planner.run_plan import (
    COUNTED,
    DEVICE,
    HELD_BYTES,
    RESERVED,
    TENSORS,
    MeasuredMemory,
    RunMeasurement,
)
from llama_ssp.speculative.stats import Counts, ratio

STATUS = Path("/proc/self/status")


def way(name: str, pair: RankModels, run: RunConf, rows: int, figures: Mapping[str, Any]) -> RunMeasurement:
    """Texts written as `run` says; `figures` are the task's own, under their names in the JSON."""
    spec = run.speculation
    k = 0 if spec.drafter is Drafting.none or not spec.may_draft else None if spec.adaptive else spec.k
    took, stood = figures["ms_per_token"], figures["acceptance_rate_decided"]
    return RunMeasurement(name, pair.prediction, rows, k, took, stood, pair.held_bytes)


def pace_of_counts(decode_s: float, counts: Counts) -> dict[str, Any]:
    """What `way` wants to know of texts that were counted and timed."""
    counted = counts.summary()
    return {"ms_per_token": ratio(1000 * decode_s, counted["tokens_committed"]), **counted}


def memory_of_ranks(held: int, device: torch.device, ranks: Ranks) -> list[MeasuredMemory]:
    """The most that each rank has held; all ranks call it."""
    own = memory_here(held, device, ranks.rank)
    told = ranks.gather_ints([own.bytes[name] or 0 for name in COUNTED])
    return [
        MeasuredMemory(rank, {name: size or None for name, size in zip(COUNTED, sizes, strict=True)})
        for rank, sizes in enumerate(told)
    ]


def memory_here(held: int, device: torch.device, rank: int) -> MeasuredMemory:
    """Of this rank. `held` are its weights and caches; torch does not tell what else a CPU's tensors take."""
    found: dict[str, int | None] = {HELD_BYTES: held, TENSORS: None, RESERVED: None}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        beside = total - free - torch.cuda.memory_reserved(device)  # and what other processes have there
        found[TENSORS] = torch.cuda.max_memory_allocated(device)
        found[RESERVED] = torch.cuda.max_memory_reserved(device)
        return MeasuredMemory(rank, {**found, DEVICE: beside + torch.cuda.max_memory_reserved(device)})
    return MeasuredMemory(rank, {**found, DEVICE: process_bytes()})


def process_bytes() -> int:
    """The most of this process that was resident. A child's `ru_maxrss` begins with its parent's."""
    try:
        lines = STATUS.read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def most_held(ways: Sequence[RunMeasurement]) -> int:
    """Of the models that wrote them."""
    return max((one.held_bytes for one in ways), default=0)
