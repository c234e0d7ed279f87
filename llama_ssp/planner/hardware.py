"""The machine to plan for: a cluster's figures, looked up where the configuration leaves them open. No torch.

A GPU's figures that are open are those of the preset under conf/cluster that has it. This machine's own are
read elsewhere (placing/this_machine.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llama_ssp.config import ClusterConf, Dtype, TimesConf
from llama_ssp.config.presets import machines, nearest
from llama_ssp.distributed.placement import LEADER
from llama_ssp.errors import DistributedError, UsageError
from llama_ssp.planner.activations import GPU, Kernels
from llama_ssp.planner.speed import Times, times_of
from llama_ssp.planner.storage import CPU, CUDA, OLD, Storage
from llama_ssp.planner.workload import GIB, MIB

CPU_RESERVE = 0.1  # of the memory of a CPU, which other programs use, too
MOST_OF_NODE = 8  # GPUs, of those that are sold one by one
GPU_RESERVE = 256 * MIB  # of a GPU's free memory: kernels that are loaded later, and what others take


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A cluster with every figure. `capacity` is a GPU's bytes, or the CPU's memory, less the reserve.

    `capacities` are those of the ranks of a run, where each has measured its own. `taken` are the bytes that
    libraries take on a GPU: the context, a workspace, a communicator, a graph.
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
    threads: int = 1  # of a CPU's kernels, each of which has scratch memory
    lacks: str = ""  # why the times of this machine are not measured ones; empty of a named cluster
    capacities: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        """Returns the number of ranks: one a GPU."""
        return self.nodes * self.gpus

    @property
    def kernels(self) -> Kernels:
        """Returns the kernels, for the scratch and rounding in a memory estimate."""
        return Kernels(cpu=True, threads=self.threads) if self.is_cpu else GPU

    @property
    def is_cpu(self) -> bool:
        return self.gpu == CPU

    @property
    def is_borrowed(self) -> bool:
        """Returns whether its times are those of another CPU."""
        return self.is_cpu and self.times.borrowed

    @property
    def constants_from(self) -> str:
        """Returns where the constants of its times are from, and why not from this machine, if so."""
        return f"{self.times.source}; {self.lacks}" if self.lacks else self.times.source

    def of_ranks(self, ranks: int) -> Machine:
        """Returns the part of the machine that so many ranks use. Raises UsageError where it has fewer."""
        if self.is_cpu:
            return replace(self, gpus=ranks, nodes=1)
        if ranks > self.world:
            raise DistributedError(
                "there is a GPU for each rank",
                where="ranks",
                found=ranks,
                allowed=f"1..{self.world}",
                fix="lower it, or raise cluster.gpus or cluster.nodes",
            )
        nodes = -(-ranks // self.gpus)
        if ranks % nodes:
            raise DistributedError(
                "the ranks are not the same number on each node",
                where="ranks",
                found=f"{ranks} on {nodes} nodes",
                allowed=f"a multiple of {nodes}, or at most {self.gpus}",
                fix="lower or raise it",
            )
        return replace(self, gpus=ranks // nodes, nodes=nodes)

    def node_of(self, rank: int) -> int:
        """Returns the node of a rank: launchers fill one node after the other."""
        return min(rank // self.gpus, self.nodes - 1)

    def nodes_of(self, ranks: Sequence[int]) -> int:
        """Returns on how many nodes these ranks are."""
        return len({self.node_of(rank) for rank in ranks})

    def capacity_of(self, world: int, rank: int = LEADER) -> int:
        """Returns the bytes for one of `world` ranks; those on the CPUs of one node share its memory."""
        capacity = self.capacities[rank] if rank < len(self.capacities) else self.capacity
        if not self.is_cpu:
            return capacity
        node = self.node_of(rank)
        return capacity // sum(self.node_of(other) == node for other in range(world))

    def dtype(self, conf: Dtype) -> Dtype:
        """Resolves `auto` as the loader does."""
        if conf is not Dtype.auto:
            return conf
        if self.bf16:
            return Dtype.bf16
        return Dtype.fp32 if self.is_cpu else Dtype.fp16

    def store(self, compiled: bool) -> Storage:
        """Returns how its kernels keep the weights of a model, whose steps may be compiled."""
        if self.is_cpu:
            kernel = CPU
        else:
            kernel = CUDA if self.bf16 else OLD
        return Storage(kernel=kernel, compiled=compiled)

    def in_words(self) -> str:
        words = f"{self.name}: "
        memory = f"{self.capacity / GIB:.1f} GiB"
        if self.world == 1:
            words += f"{self.gpu}, {memory}"
        else:
            each = "" if self.is_cpu else " each"
            link = f", {self.link}" if self.link else ""
            words += f"{self.world} x {self.gpu}, {memory}{each}{link}"
        if self.nodes > 1:
            words += f" on {self.nodes} nodes"
        return words


def machine_of(
    cluster: ClusterConf,
    *,
    measured: int | None = None,
    limit_gib: float | None = None,
    connected: int = 0,
    threads: int = 1,
) -> Machine:
    """Completes the cluster's figures; returns the machine. Raises UsageError for a GPU without known ones.

    `measured` are the bytes that are free for this process on its device, and `limit_gib` is a further limit.
    On a GPU a process has its context by then, and so many groups of ranks are `connected`: the plan counts
    both, so they are added.
    """
    of_preset = machines().get(cluster.name, {})
    preset_gpu = of_preset.get("gpu")
    if preset_gpu not in (None, cluster.gpu):  # the preset's figures are its own GPU's
        raise UsageError(
            "cluster.gpu is not that cluster's",
            found=f"{cluster.gpu}, cluster {cluster.name}",
            allowed=preset_gpu,
            fix=f"use cluster=local cluster.gpu={cluster.gpu} cluster.gpus=N",
        )
    whole = _completed(cluster)
    is_cpu = whole.gpu == CPU
    names = ("context", "cublas", "nccl", "graph")
    taken = {name: int((getattr(whole, f"{name}_mib") or 0) * MIB) for name in names}
    is_borrowed = is_cpu and cluster.times.layer_us is None  # the times are another CPU's
    return Machine(
        name=whole.name,
        gpu=str(whole.gpu),
        nodes=whole.nodes,
        gpus=whole.gpus or 1,
        capacity=_capacity(whole, limit_gib, measured, taken["context"] + taken["nccl"] * connected),
        bf16=bool(whole.bf16),
        link=whole.link,
        taken=taken,
        times=times_of(
            whole.times,
            whole.gb_s or 0.0,
            whole.tflops or 0.0,
            whole.link_gb_s,
            between_us=whole.between_us,
            between_gb_s=whole.between_gb_s,
            on_cpu=is_cpu,
            borrowed=is_borrowed,
        ),
        gpus_of_node=_most_of_node(of_preset, whole),
        threads=threads,
    )


def _most_of_node(of_preset: dict[str, Any], whole: ClusterConf) -> int:
    """Returns how many such GPUs a node may have: as many as the preset's, of a single GPU MOST_OF_NODE."""
    of_node = int(of_preset.get("gpus") or MOST_OF_NODE)
    return max(of_node if of_node > 1 else MOST_OF_NODE, whole.gpus or 1)


def _capacity(whole: ClusterConf, limit_gib: float | None, measured: int | None, there: int) -> int:
    """Returns the bytes for weights and what else a plan counts: those of the figures, or `measured` ones.

    `there` are bytes that a measured GPU's process holds already, and that the plan counts.
    """
    is_cpu = whole.gpu == CPU
    share = whole.reserve
    if share is None and is_cpu:
        share = CPU_RESERVE
    size = int((whole.gib or 0.0) * GIB)
    planned = max(0, size - (GPU_RESERVE if share is None else int(size * share)))
    if measured is None:
        return planned
    if is_cpu:
        free = int(measured * (1 - (share or 0.0)))
    else:
        free = max(0, measured - GPU_RESERVE) + there
    return free if limit_gib is None else min(free, planned)


def by_gpu() -> dict[str, dict[str, Any]]:
    """Returns the first preset with each GPU."""
    return {str(preset["gpu"]): preset for preset in reversed(machines().values())}


def _completed(cluster: ClusterConf) -> ClusterConf:
    """Returns the cluster with the figures that are open taken from the preset with this GPU."""
    needed = ("bf16", "gb_s", "tflops", "context_mib", "cublas_mib", "nccl_mib", "graph_mib")
    if all(getattr(cluster, name) is not None for name in needed):
        return cluster
    presets = by_gpu()
    if cluster.gpu not in presets:
        near = nearest(str(cluster.gpu), list(presets))
        measure = "measure them with task=calibrate, or give cluster.gib, gb_s, tflops, bf16 and *_mib"
        raise UsageError(
            "the GPU's figures are not known",
            where=f"cluster {cluster.name}",
            found=cluster.gpu,
            allowed=", ".join(sorted(presets)),
            fix=f"did you mean {near}? else {measure}" if near else measure,
        )
    preset = presets[str(cluster.gpu)]
    blank = ClusterConf()
    of_gpu = [name for name in preset if name not in ("name", "times", "reserve", "gpus", "nodes")]
    open_figures = {name: preset[name] for name in of_gpu if getattr(cluster, name) == getattr(blank, name)}
    times = cluster.times
    if times == TimesConf():
        times = replace(times, **preset.get("times", {}))
    return replace(cluster, **open_figures, times=times)


def matching(name: str, gpus: list[str]) -> str | None:
    """Returns the GPU that a driver's name means: "NVIDIA A100-SXM4-40GB" is A100-40, "NVIDIA L4" is L4."""
    words = re.split(r"[^A-Za-z0-9]+", name.upper())
    if "LAPTOP" in words:  # a slower chip of the same name
        return None
    for gpu in gpus:
        kind, _, size = gpu.upper().partition("-")
        if kind in words and (not size or any(re.fullmatch(f"{size}(GB)?", word) for word in words)):
            return gpu
    return None


def require_world(machine: Machine, ranks: int) -> None:
    """Refuses another number of ranks of torchrun than the cluster has."""
    if ranks not in (1, machine.world):
        raise DistributedError(
            "the number of ranks is not the cluster's",
            where=f"cluster {machine.name}",
            found=f"{ranks} ranks",
            allowed=f"{machine.nodes} nodes x {machine.gpus} = {machine.world}",
            fix=f"plan without torchrun, or give cluster.nodes and cluster.gpus so that they make {ranks}",
        )
