"""The machine to plan for where the configuration names none: this one. No torch.

Its GPUs are read from nvidia-smi, else its CPU and memory.
"""

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_ssp.config import ClusterConf, RunConf, Scheduler
from llama_ssp.distributed.gpus import SLICES, gpus_here
from llama_ssp.errors import UsageError
from llama_ssp.models.host_memory import memory_here
from llama_ssp.placing.kept_constants import Kept, kept_constants, threads_of
from llama_ssp.planner.hardware import Machine, by_gpu, machine_of, matching
from llama_ssp.planner.storage import CPU
from llama_ssp.planner.workload import GIB

CPU_TABLE = Path("/proc/cpuinfo")


def machine_for(
    cluster: ClusterConf,
    measured: int | None = None,
    connected: int = 0,
    *,
    ranks: int = 1,
    on_cpu: bool = False,
) -> Machine:
    """Returns the cluster's machine; this one where it names no GPU, with what was measured of it.

    `ranks`: how many a run has, which on a CPU share it; `on_cpu`: it leaves GPUs alone. The others are as
    those of `machine_of`. Raises UsageError for a GPU without known figures.
    """
    if cluster.gpu is None and cluster.scheduler is not Scheduler.none:  # it will run on other machines
        raise UsageError(
            "the nodes' GPU is not known here",
            where="cluster.gpu",
            allowed=", ".join(sorted(by_gpu())),
            fix="name it with cluster.gpu=",
        )
    whole = cluster
    lacks = ""
    if cluster.gpu is None:
        whole = with_this_machine(cluster, on_cpu)
        kept = kept_constants(str(whole.gpu), ranks)
        lacks = kept.lacks
        if kept.constants is not None:
            whole = kept.constants.over(whole, by_gpu().get(str(whole.gpu), {}))
    if whole.gib is None and whole.gpu == CPU:
        whole = replace(whole, gib=memory_here() / GIB)
    machine = machine_of(
        whole, measured=measured, limit_gib=cluster.gib, connected=connected, threads=threads_of(1)
    )
    return replace(machine, lacks=lacks)


def kept_of(run: RunConf, ranks: int) -> Kept | None:
    """Returns what is kept of the machine that the run plans for; None of one that it names."""
    if run.cluster.gpu is not None or run.cluster.scheduler is not Scheduler.none:
        return None
    return kept_constants(str(with_this_machine(run.cluster, plans_for_cpu(run)).gpu), ranks)


def plans_for_cpu(run: RunConf) -> bool:
    """Returns whether the run leaves the machine's GPUs alone."""
    return run.placement.target_device == CPU


def with_this_machine(cluster: ClusterConf, on_cpu: bool = False) -> ClusterConf:
    """Returns the cluster with this machine's GPUs, or its CPU."""
    here: dict[str, Any]
    gpus = [] if on_cpu else gpus_here()
    if gpus:
        least = min(gpus, key=lambda gpu: gpu.free or sys.maxsize)
        gpu = matching(least.name, list(by_gpu())) or least.name
        here = {"gpus": len(gpus), "gib": least.free / GIB if least.free else None}
        if least.slices and least.free and gpu in by_gpu():
            whole = by_gpu()[gpu]  # a part has its share of the memory's channels and of the units
            here["gb_s"] = whole["gb_s"] * min(least.free / GIB / whole["gib"], 1.0)
            here["tflops"] = whole["tflops"] * least.slices / SLICES
    else:
        gpu = CPU
        here = {"gpus": 1, "gib": memory_here() / GIB, "bf16": cpu_has_bf16()}
    return replace(cluster, gpu=gpu, **{key: here[key] for key in here if getattr(cluster, key) is None})


def cpu_has_bf16() -> bool:
    """Returns whether torch's CPU kernels compute in bf16 here, which needs AVX-512."""
    with suppress(OSError):
        return "avx512bw" in CPU_TABLE.read_text(encoding="utf-8", errors="replace")
    return False
