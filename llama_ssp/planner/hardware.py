"""What there is to run on: a cluster's figures, looked up where it leaves them open. No torch.

`local` asks the machine at hand: nvidia-smi for its GPUs, else the CPU and its memory. A GPU's figures
are those of the preset under conf/cluster that has it.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from llama_ssp.config import ClusterConf, Dtype, Scheduler, TimesConf
from llama_ssp.config.overrides import CONF
from llama_ssp.errors import DistributedError, UsageError
from llama_ssp.models.host_memory import memory_here
from llama_ssp.planner.activations import GPU, Kernels
from llama_ssp.planner.room import GIB
from llama_ssp.planner.speed import Times, times_of

LOCAL, CPU = "local", "cpu"
MIB = 2**20
QUERY = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
CPU_TABLE = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Taken:
    """Bytes that libraries take on a GPU, beside tensors."""

    context: int
    cublas: int
    nccl: int
    graph: int


@dataclass(frozen=True)
class Machine:
    """A cluster without gaps. `capacity` is one GPU's, or that of the CPU's memory, less the reserve."""

    name: str
    gpu: str
    nodes: int
    gpus: int
    capacity: int
    bf16: bool
    link: str
    taken: Taken
    times: Times

    @property
    def world(self) -> int:
        """How many ranks it has room for: one a GPU."""
        return self.nodes * self.gpus

    @property
    def kernels(self) -> Kernels:
        """Whose scratch and rounding the bill has."""
        return Kernels(cpu=True, threads=threads_here()) if self.is_cpu else GPU

    @property
    def is_cpu(self) -> bool:
        return self.gpu == CPU

    def capacity_of(self, world: int) -> int:
        """What one of so many ranks may take; those of a CPU share its memory."""
        return self.capacity // -(-world // self.nodes) if self.is_cpu else self.capacity

    def dtype(self, asked: Dtype) -> Dtype:
        """What `auto` stands for there, as the loader has it."""
        if asked is not Dtype.auto:
            return asked
        return Dtype.bf16 if self.bf16 else (Dtype.fp32 if self.is_cpu else Dtype.fp16)

    def in_words(self) -> str:
        what = f"{self.gpu}, {self.capacity / GIB:.1f} GiB"
        if self.world > 1:
            what = f"{self.world} x {what}{' each' * (not self.is_cpu)}{', ' * bool(self.link)}{self.link}"
        return f"{self.name}: {what}{f' on {self.nodes} nodes' if self.nodes > 1 else ''}"


def machine_of(cluster: ClusterConf, capacity: int | None = None) -> Machine:
    """The cluster with every figure in its place; `capacity` is a GPU's where it has been measured."""
    _require_own_gpu(cluster)
    if cluster.gpu is None and cluster.scheduler is not Scheduler.none:  # this is not where it will run
        raise UsageError(
            "the nodes' GPU is not known here", where="cluster.gpu", allowed=", ".join(sorted(_gpus_known())),
            fix="name it with cluster.gpu=",
        )  # fmt: skip
    measured = capacity if cluster.gib is None else None
    own_times = cluster.times.layer_us is not None
    whole = _completed(_asked_of_this_machine(cluster) if cluster.gpu is None else cluster)
    if whole.gib is None:
        whole = replace(whole, gib=memory_here() / GIB)
    values = (whole.context_mib, whole.cublas_mib, whole.nccl_mib, whole.graph_mib)
    free = int((whole.gib or 0) * GIB) if measured is None else measured
    borrowed = whole.gpu == CPU and not own_times
    return Machine(
        name=whole.name,
        gpu=str(whole.gpu),
        nodes=whole.nodes,
        gpus=whole.gpus or 1,
        capacity=int(free * (1 - whole.reserve)),
        bf16=bool(whole.bf16),
        link=whole.link,
        taken=Taken(*(int((mib or 0) * MIB) for mib in values)),
        times=times_of(whole.times, whole.gb_s or 0.0, whole.tflops or 0.0, whole.link_gb_s, borrowed),
    )


def known() -> dict[str, dict[str, Any]]:
    """Every cluster preset that names a GPU, by its file's name."""
    found = {}
    for file in sorted((CONF / "cluster").glob("*.yaml")):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("gpu"):
            found[file.stem] = content
    return found


def _gpus_known() -> set[str]:
    return {str(preset["gpu"]) for preset in known().values()}


def _require_own_gpu(cluster: ClusterConf) -> None:
    """A preset's figures are its GPU's; another GPU's name beside them would be a lie."""
    file = CONF / "cluster" / f"{Path(cluster.name).name}.yaml"
    if cluster.name == LOCAL or cluster.gpu is None or not file.is_file():
        return
    its_own = yaml.safe_load(file.read_text(encoding="utf-8")).get("gpu")
    if its_own not in (None, cluster.gpu):
        raise UsageError(
            "cluster.gpu is not that cluster's", found=f"{cluster.gpu}, cluster {cluster.name}",
            allowed=str(its_own), fix=f"use cluster=local cluster.gpu={cluster.gpu} cluster.gpus=N",
        )  # fmt: skip


def _completed(cluster: ClusterConf) -> ClusterConf:
    """What is open comes from the preset that has this GPU."""
    needed = ("bf16", "gb_s", "tflops", "context_mib", "cublas_mib", "nccl_mib", "graph_mib")
    if all(getattr(cluster, name) is not None for name in needed):
        return cluster
    by_gpu = {str(preset["gpu"]): preset for preset in reversed(known().values())}
    if cluster.gpu not in by_gpu:
        raise UsageError(
            "the GPU's figures are not known", where=f"cluster {cluster.name}", found=cluster.gpu,
            allowed=", ".join(sorted(by_gpu)),
            fix="measure them with task=calibrate, or give cluster.gib, gb_s, tflops, bf16 and *_mib",
        )  # fmt: skip
    preset = by_gpu[str(cluster.gpu)]
    blank = ClusterConf()
    open_ones = [n for n in preset if n not in ("name", "times", "reserve", "gpus", "nodes")]
    found = {n: preset[n] for n in open_ones if getattr(cluster, n) == getattr(blank, n)}
    times = cluster.times if cluster.times != TimesConf() else TimesConf(**preset.get("times", {}))
    return replace(cluster, **found, times=times)


def _asked_of_this_machine(cluster: ClusterConf) -> ClusterConf:
    gpus = gpus_here()
    if not gpus:
        gib = memory_here() / GIB if cluster.gib is None else cluster.gib
        bf16 = cpu_has_bf16() if cluster.bf16 is None else cluster.bf16
        return replace(cluster, gpu=CPU, gpus=cluster.gpus or 1, gib=gib, bf16=bf16)
    name, free = min(gpus, key=lambda gpu: gpu[1])
    return replace(
        cluster, gpu=matching(name, [str(preset["gpu"]) for preset in known().values()]) or name,
        gpus=cluster.gpus or len(gpus), gib=free / GIB if cluster.gib is None else cluster.gib,
    )  # fmt: skip


def matching(name: str, gpus: list[str]) -> str | None:
    """Which of these GPUs a driver's name means: "NVIDIA A100-SXM4-40GB" is A100-40, "NVIDIA L4" is L4."""
    words = re.split(r"[^A-Za-z0-9]+", name.upper())
    for gpu in gpus:
        kind, _, size = gpu.upper().partition("-")
        if kind in words and (not size or any(re.fullmatch(f"{size}(GB)?", word) for word in words)):
            return gpu
    return None


@cache
def gpus_here() -> list[tuple[str, int]]:
    """Name and free bytes of this machine's GPUs, as nvidia-smi has them, but those hidden from us."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        said = subprocess.run(QUERY, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.rpartition(",") for line in said.splitlines() if line.strip()]
    found = [(name.strip(), int(free) * MIB) for name, _, free in lines if free.strip().isdecimal()]
    if hidden is None:
        return found
    seen = [int(part) for part in hidden.split(",") if part.strip().isdecimal()]
    return [found[index] for index in seen if index < len(found)]


def threads_here() -> int:
    """How many threads torch computes with, unless it is told otherwise."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdecimal() and int(told) else os.cpu_count() or 1


def cpu_has_bf16() -> bool:
    """Whether torch's CPU kernels take bf16 here: they want AVX-512."""
    try:
        return "avx512bw" in CPU_TABLE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def require_world(machine: Machine, ranks: int) -> None:
    """Ranks that torchrun started must be as many as the cluster has room for."""
    if ranks not in (1, machine.world):
        raise DistributedError(
            "the number of ranks is not the cluster's", where=f"cluster {machine.name}",
            found=f"{ranks} ranks", allowed=f"{machine.nodes} nodes x {machine.gpus} = {machine.world}",
            fix=f"plan without torchrun, or give cluster.nodes and cluster.gpus so that they make {ranks}",
        )  # fmt: skip
