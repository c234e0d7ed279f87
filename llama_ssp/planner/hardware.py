"""The machine to plan for: a cluster's figures, looked up where the configuration leaves them open. No torch.

`local` reads this machine: its GPUs from nvidia-smi, else its CPU and memory. A GPU's other figures are those
of the preset under conf/cluster that has it.
"""

import re
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from llama_ssp.config import ClusterConf, Dtype, Scheduler, TimesConf
from llama_ssp.config.presets import CONF, nearest
from llama_ssp.distributed.cores import cores_here
from llama_ssp.errors import DistributedError, UsageError
from llama_ssp.models.host_cores import given_threads
from llama_ssp.models.host_memory import memory_here
from llama_ssp.planner.activations import GPU, Kernels
from llama_ssp.planner.gpus import SLICES, gpus_here
from llama_ssp.planner.speed import Times, times_of
from llama_ssp.planner.storage import CPU, CUDA, OLD, Storage
from llama_ssp.planner.workload import GIB, MIB

CPU_TABLE = Path("/proc/cpuinfo")
CPU_RESERVE = 0.1  # of the memory of a CPU, which other programs use, too
GPU_RESERVE = 256 * MIB  # of a GPU's free memory: kernels that are loaded later, and what others take


@dataclass(frozen=True)
class Machine:
    """A cluster with every figure. `capacity` is a GPU's bytes, or the CPU's memory, less the reserve.

    `taken` are the bytes that libraries take on a GPU: the context, a workspace, a communicator, a graph.
    """

    name: str
    gpu: str
    nodes: int
    gpus: int
    capacity: int
    bf16: bool
    link: str
    taken: dict[str, int]
    times: Times
    gpus_of_node: int = 1  # as the cluster's preset has them

    @property
    def world(self) -> int:
        """The number of ranks: one a GPU."""
        return self.nodes * self.gpus

    @property
    def kernels(self) -> Kernels:
        """The kernels, for the scratch and rounding in a memory estimate."""
        return Kernels(cpu=True, threads=threads_here()) if self.is_cpu else GPU

    @property
    def is_cpu(self) -> bool:
        return self.gpu == CPU

    def capacity_of(self, world: int) -> int:
        """The bytes for one of `world` ranks; ranks on a CPU share its memory."""
        return self.capacity // -(-world // self.nodes) if self.is_cpu else self.capacity

    def dtype(self, conf: Dtype) -> Dtype:
        """`auto` resolved as by the loader."""
        if conf is not Dtype.auto:
            return conf
        return Dtype.bf16 if self.bf16 else Dtype.fp32 if self.is_cpu else Dtype.fp16

    def store(self, compiled: bool) -> Storage:
        """How its kernels keep the weights of a model, whose steps may be compiled."""
        return Storage(kernel=CPU if self.is_cpu else CUDA if self.bf16 else OLD, compiled=compiled)

    def in_words(self) -> str:
        what = f"{self.gpu}, {self.capacity / GIB:.1f} GiB"
        if self.world > 1:
            what = f"{self.world} x {what}{' each' * (not self.is_cpu)}{', ' * bool(self.link)}{self.link}"
        return f"{self.name}: {what}{f' on {self.nodes} nodes' if self.nodes > 1 else ''}"


def machine_of(cluster: ClusterConf, measured: int | None = None, connected: int = 0) -> Machine:
    """Completes the cluster's figures; returns the machine. Raises UsageError for a GPU without known ones.

    `measured` are the bytes that are free for this process on its device. On a GPU it has its context by
    then, and so many groups of ranks are `connected`: the plan counts both, so they are added.
    cluster.gib is a further limit.
    """
    own = known().get(cluster.name, {}).get("gpu")
    if cluster.gpu is not None and own not in (None, cluster.gpu):  # the preset's figures are its own GPU's
        found, fix = f"{cluster.gpu}, cluster {cluster.name}", f"cluster=local cluster.gpu={cluster.gpu}"
        raise UsageError("cluster.gpu is not that cluster's", "", found, own, f"use {fix} cluster.gpus=N")
    if cluster.gpu is None and cluster.scheduler is not Scheduler.none:  # it will run on other machines
        what, fix = "the nodes' GPU is not known here", "name it with cluster.gpu="
        raise UsageError(what, "cluster.gpu", allowed=", ".join(sorted(_by_gpu())), fix=fix)
    whole = _completed(_this_machine(cluster) if cluster.gpu is None else cluster)
    names = ("context", "cublas", "nccl", "graph")
    taken = {name: int((getattr(whole, f"{name}_mib") or 0) * MIB) for name in names}
    is_cpu, share = whole.gpu == CPU, whole.reserve
    share = CPU_RESERVE if share is None and is_cpu else share
    capacity = memory_here() if whole.gib is None else int(whole.gib * GIB)
    capacity = max(0, capacity - (GPU_RESERVE if share is None else int(capacity * share)))
    if measured is not None:
        own = int(measured * (1 - (share or 0.0)))
        if not is_cpu:
            own = max(0, measured - GPU_RESERVE) + taken["context"] + taken["nccl"] * connected
        capacity = own if cluster.gib is None else min(own, capacity)
    borrowed = is_cpu and cluster.times.layer_us is None
    times = times_of(whole.times, whole.gb_s or 0.0, whole.tflops or 0.0, whole.link_gb_s, borrowed)
    shape = whole.name, str(whole.gpu), whole.nodes, whole.gpus or 1
    of_node = int(known().get(cluster.name, {}).get("gpus") or whole.gpus or 1)
    return Machine(*shape, capacity, bool(whole.bf16), whole.link, taken, times, of_node)


@cache
def known() -> dict[str, dict[str, Any]]:
    """Every cluster preset that names a GPU, by its file's name."""
    files = sorted((CONF / "cluster").glob("*.yaml"))
    presets = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in files}
    return {name: preset for name, preset in presets.items() if preset.get("gpu")}


def _by_gpu() -> dict[str, dict[str, Any]]:
    """The first preset with each GPU."""
    return {str(preset["gpu"]): preset for preset in reversed(known().values())}


def _completed(cluster: ClusterConf) -> ClusterConf:
    """The figures that are open are those of the preset with this GPU."""
    needed = ("bf16", "gb_s", "tflops", "context_mib", "cublas_mib", "nccl_mib", "graph_mib")
    if all(getattr(cluster, name) is not None for name in needed):
        return cluster
    by_gpu = _by_gpu()
    if cluster.gpu not in by_gpu:
        where, allowed = f"cluster {cluster.name}", ", ".join(sorted(by_gpu))
        near = nearest(str(cluster.gpu), list(by_gpu))
        measured = "measure them with task=calibrate, or give cluster.gib, gb_s, tflops, bf16 and *_mib"
        fix = f"did you mean {near}? else {measured}" if near else measured
        raise UsageError("the GPU's figures are not known", where, cluster.gpu, allowed, fix)
    preset, blank = by_gpu[str(cluster.gpu)], ClusterConf()
    own = [name for name in preset if name not in ("name", "times", "reserve", "gpus", "nodes")]
    found = {name: preset[name] for name in own if getattr(cluster, name) == getattr(blank, name)}
    times = cluster.times if cluster.times != TimesConf() else TimesConf(**preset.get("times", {}))
    return replace(cluster, **found, times=times)


def _this_machine(cluster: ClusterConf) -> ClusterConf:
    """The cluster with this machine's GPUs, or its CPU."""
    here: dict[str, Any]
    if gpus := gpus_here():
        least = min(gpus, key=lambda gpu: gpu.free or sys.maxsize)
        gpu = matching(least.name, list(_by_gpu())) or least.name
        here = {"gpus": len(gpus), "gib": least.free / GIB if least.free else None}
        if least.slices and least.free and gpu in _by_gpu():
            whole = _by_gpu()[gpu]  # a part has its share of the memory's channels and of the units
            here["gb_s"] = whole["gb_s"] * min(least.free / GIB / whole["gib"], 1.0)
            here["tflops"] = whole["tflops"] * least.slices / SLICES
    else:
        gpu, here = CPU, {"gpus": 1, "gib": memory_here() / GIB, "bf16": cpu_has_bf16()}
    return replace(cluster, gpu=gpu, **{key: here[key] for key in here if getattr(cluster, key) is None})


def matching(name: str, gpus: list[str]) -> str | None:
    """The GPU that a driver's name means: "NVIDIA A100-SXM4-40GB" is A100-40, "NVIDIA L4" is L4."""
    words = re.split(r"[^A-Za-z0-9]+", name.upper())
    if "LAPTOP" in words:  # a slower chip of the same name
        return None
    for gpu in gpus:
        kind, _, size = gpu.upper().partition("-")
        if kind in words and (not size or any(re.fullmatch(f"{size}(GB)?", word) for word in words)):
            return gpu
    return None


def threads_here() -> int:
    """The number of threads of torch, by default."""
    return given_threads() or cores_here()


def cpu_has_bf16() -> bool:
    """Whether torch's CPU kernels compute in bf16 here, which needs AVX-512."""
    with suppress(OSError):
        return "avx512bw" in CPU_TABLE.read_text(encoding="utf-8", errors="replace")
    return False


def require_world(machine: Machine, ranks: int) -> None:
    """Refuses another number of ranks of torchrun than the cluster has."""
    if ranks not in (1, machine.world):
        what, allowed = "the number of ranks is not the cluster's", f"{machine.nodes} nodes x {machine.gpus}"
        fix = f"plan without torchrun, or give cluster.nodes and cluster.gpus so that they make {ranks}"
        where, found = f"cluster {machine.name}", f"{ranks} ranks"
        raise DistributedError(what, where, found, f"{allowed} = {machine.world}", fix)
