"""What is asked for against what the partitions have: many clusters queue for ever what can never start."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llama_ssp.checks.cluster import seconds_of
from llama_ssp.config import SlurmConf
from llama_ssp.errors import UsageError
from llama_ssp.slurm.script import GroupSize

Row = dict[str, str]
GPUS = re.compile(r"gpu(?::(?P<kind>[A-Za-z_][\w.-]*))?:(?P<count>\d+)")
UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")
MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True)
class Demand:
    """What one element of the array asks for, and how many there are."""

    size: GroupSize
    elements: int
    slurm: SlurmConf

    @property
    def cpus(self) -> int:
        return (self.slurm.cpus_per_rank or 0) * self.size.ranks or 1

    @property
    def mebibytes(self) -> float:
        asked = self.slurm.mem or "0M"
        number, unit = (asked, "M") if asked[-1].isdecimal() else (asked[:-1], asked[-1])
        return int(number) * MIB[unit]


def require_startable(demand: Demand, partitions: list[Row], nodes: list[Row], config: Row) -> str:
    """Refuses what no partition of those named could ever start; else says what there is, in words."""
    most = int(config.get("MaxArraySize", "1001"))
    if demand.elements > most:
        raise _never("cluster.groups", demand.elements, f"at most {most} (MaxArraySize)")
    names = demand.slurm.partition
    wanted = (
        names.split(",") if names else [p["PartitionName"] for p in partitions if p.get("Default") == "YES"]
    )
    known = {partition["PartitionName"]: partition for partition in partitions}
    if unknown := [name for name in wanted if name not in known]:
        raise _never("cluster.slurm.partition", ", ".join(unknown), ", ".join(sorted(known)))
    if not wanted:
        raise _never(
            "cluster.slurm.partition", "none, and the cluster has no default", ", ".join(sorted(known))
        )
    refusals = []
    for name in wanted:
        try:
            return _words(known[name], _require(demand, known[name], nodes))
        except UsageError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _require(demand: Demand, partition: Row, nodes: list[Row]) -> list[Row]:
    """The partition's nodes that could take part."""
    name, size = partition["PartitionName"], demand.size
    if partition.get("State", "UP") != "UP":
        raise _never("cluster.slurm.partition", f"{name}, which is {partition['State']}", "one that is UP")
    limit = partition.get("MaxTime", "")
    if demand.slurm.time and limit not in UNLIMITED and seconds_of(demand.slurm.time) > seconds_of(limit):
        raise _never("cluster.slurm.time", demand.slurm.time, f"at most {limit} in partition {name}")
    most = partition.get("MaxNodes", "")
    if most not in UNLIMITED and size.nodes > int(most):
        raise _never("cluster.nodes", size.nodes, f"at most {most} in partition {name}")
    there = [node for node in nodes if name in node.get("Partitions", "").split(",")]
    kind = demand.slurm.gpu_type
    what = f" {kind} GPUs" if kind else " GPUs"
    gpus = {_name(node): _gpus(node, kind) for node in there}
    cpus = {_name(node): int(node.get("CPUTot", "0")) for node in there}
    memory = {_name(node): int(node.get("RealMemory", "0")) for node in there}
    for key, needed, having, unit in (
        ("cluster.gpus", size.ranks if size.gpus else 0, gpus, what),
        ("cluster.slurm.cpus_per_rank", demand.cpus, cpus, " CPUs"),
        ("cluster.slurm.mem", demand.mebibytes, memory, " MiB"),
    ):
        fitting = [node for node in there if having[_name(node)] >= needed]
        if len(fitting) < size.nodes:
            raise _never(
                key if len(there) >= size.nodes else "cluster.nodes",
                f"{size.nodes} nodes with {needed:.0f}{unit} each",
                f"{len(there)} nodes with up to {max(having.values(), default=0)}{unit} in partition {name}",
            )
        there = fitting
    return there


def _name(node: Row) -> str:
    return node["NodeName"]


def _gpus(node: Row, kind: str | None) -> int:
    found = GPUS.finditer(node.get("Gres", ""))
    return sum(int(one["count"]) for one in found if kind is None or one["kind"] == kind)


def _words(partition: Row, nodes: list[Row]) -> str:
    gone = sum(bool(re.match(r"DOWN|DRAIN|FAIL|NOT_RESPONDING", node.get("State", ""))) for node in nodes)
    away = f", {gone} of them down now" if gone else ""
    limit = partition.get("MaxTime", "UNLIMITED")
    return f"partition {partition['PartitionName']}: {len(nodes)} nodes can take it{away}; time limit {limit}"


def _never(key: str, found: object, allowed: str) -> UsageError:
    return UsageError(
        "the job could never start", where=key, found=found, allowed=allowed, fix="ask for less, or elsewhere"
    )
