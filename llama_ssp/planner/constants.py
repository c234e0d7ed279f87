"""What libraries take on a GPU beside tensors: constants of the cluster, each with its source. No torch."""

from __future__ import annotations

from llama_ssp.distributed.placement import Placement
from llama_ssp.planner.hardware import Machine
from llama_ssp.planner.workload import Kind, Line

LIBRARIES = "libraries"  # whose lines these are
SHAPES = {"target": 2, "draft": 1}  # that graphs are captured of: decode and verify; a draft's step


def constant_lines(machine: Machine, placement: Placement, rank: int) -> tuple[Line, ...]:
    """The context, and workspaces of what the rank takes part in."""
    taken, source = machine.taken, f"cluster {machine.name}"
    if machine.is_cpu:
        return (Line(LIBRARIES, "process", taken.context, Kind.constant, source),)
    groups = communicators(placement, rank)
    shapes = SHAPES["target"] * (rank in placement.target) + SHAPES["draft"] * (rank in placement.draft)
    lines = (
        ("context and kernels", taken.context),
        ("cuBLAS workspaces", taken.cublas),
        (f"NCCL, {groups} group{'s' * (groups != 1)}", taken.nccl * groups),
        ("graph pools", taken.graph * shapes),
    )
    return tuple(Line(LIBRARIES, name, size, Kind.constant, source) for name, size in lines if size)


def communicators(placement: Placement, rank: int) -> int:
    """NCCL groups the rank is in: all ranks', and the draft's where it is split over only some of them."""
    everyone = placement.world > 1
    split = placement.draft_degree > 1 and rank in placement.draft
    apart = split and len(placement.draft) < placement.world
    of_target = placement.draft_apart and len(placement.target) > 1 and rank in placement.target
    return int(everyone) + int(apart) + int(of_target)
