"""The machine to plan for where the configuration names none: this one. No torch.

Its GPUs are read from nvidia-smi, else its CPU and memory.
"""

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_ssp.config import ClusterConf, Scheduler
from llama_ssp.distributed.cores import cores_here
from llama_ssp.distributed.gpus import SLICES, gpus_here
from llama_ssp.errors import UsageError
from llama_ssp.models.host_cores import given_threads
from llama_ssp.models.host_memory import memory_here
from llama_ssp.planner.hardware import Machine, by_gpu, machine_of, matching
from llama_ssp.planner.storage import CPU
from llama_ssp.planner.workload import GIB

CPU_TABLE = Path("/proc/cpuinfo")


def machine_for(cluster: ClusterConf, measured: int | None = None, connected: int = 0) -> Machine:
    """Returns the cluster's machine; this one where it names no GPU. The arguments are those of `machine_of`.

    Raises UsageError for a GPU without known figures.
    """
    if cluster.gpu is None and cluster.scheduler is not Scheduler.none:  # it will run on other machines
        raise UsageError(
            "the nodes' GPU is not known here",
            where="cluster.gpu",
            allowed=", ".join(sorted(by_gpu())),
            fix="name it with cluster.gpu=",
        )
    whole = with_this_machine(cluster) if cluster.gpu is None else cluster
    if whole.gib is None and whole.gpu == CPU:
        whole = replace(whole, gib=memory_here() / GIB)
    return machine_of(
        whole, measured=measured, limit_gib=cluster.gib, connected=connected, threads=threads_here()
    )


def with_this_machine(cluster: ClusterConf) -> ClusterConf:
    """Returns the cluster with this machine's GPUs, or its CPU."""
    here: dict[str, Any]
    if gpus := gpus_here():
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


def threads_here() -> int:
    """Returns the number of threads of torch, by default."""
    return given_threads() or cores_here()


def cpu_has_bf16() -> bool:
    """Returns whether torch's CPU kernels compute in bf16 here, which needs AVX-512."""
    with suppress(OSError):
        return "avx512bw" in CPU_TABLE.read_text(encoding="utf-8", errors="replace")
    return False
