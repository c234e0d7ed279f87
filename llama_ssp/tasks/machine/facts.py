"""All that the check of a machine reads and measures on one rank, before anything is judged. No torch."""

from dataclasses import dataclass, field
from typing import Any

from llama_ssp.tasks.machine.driver import Driver
from llama_ssp.tasks.machine.host import CacheFolder, Compiler, Host

# What is measured. START is in place of a step: of the process that takes them.
START = "start"
DEVICE = "device"
MEMORY = "memory_bandwidth"
LAUNCH = "launch_cost"
PEERS = "peer_access"
SUMS = "sums"
KERNELS = "kernels"

Figures = dict[str, Any]  # of one step, as JSON has them


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the steps found, by their names; `failed` names the step that did not end well, and `why`.

    `is_late` says that it had no more time.
    """

    figures: dict[str, Figures] = field(default_factory=dict)
    failed: str = ""
    why: str = ""
    is_late: bool = False
    transports: tuple[str, ...] = ()  # of NCCL: P2P/CUMEM, SHM/direct, NET/IB ...


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """torch: its version, the CUDA or ROCm that it was built for, its threads, and whether it finds a GPU.

    `warning` is what it says of CUDA that it cannot use.
    """

    version: str
    cuda: str | None
    rocm: str | None
    threads: int
    has_gpu: bool
    warning: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What the first rank of a node reads for all of them; `c_compiler` only where there are GPUs."""

    driver: Driver
    cxx_compiler: Compiler
    c_compiler: Compiler | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one rank knows. `node` is None on all ranks of a node but the first."""

    rank: int
    world: int
    nodes: int
    on_gpu: bool  # whether this rank computes on a GPU
    host: Host
    build: TorchBuild
    folders: tuple[CacheFolder, ...]
    measured: Measured
    node: NodeFacts | None = None
