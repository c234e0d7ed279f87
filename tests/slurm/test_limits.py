"""What could never start is refused before it is queued. Tables as Slurm 22.05 prints them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llama_ssp.config import SlurmConf
from llama_ssp.errors import UsageError
from llama_ssp.slurm.ask import _table
from llama_ssp.slurm.limits import Demand, require_startable
from llama_ssp.slurm.script import GroupSize

PARTITIONS = _table(
    "PartitionName=gpu AllowGroups=ALL Default=YES DefaultTime=NONE MaxNodes=2 MaxTime=1-00:00:00 State=UP "
    "TotalCPUs=24 TotalNodes=3 SelectTypeParameters=NONE TRES=cpu=24,mem=12000M,node=3\n"
    "PartitionName=big Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP TotalNodes=1\n"
    "PartitionName=old Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=DRAIN TotalNodes=1\n"
)
NODES = _table(
    "NodeName=n1 Arch=x86_64 CPUTot=8 RealMemory=4000 Gres=gpu:a100:4(S:0-1) State=IDLE Partitions=gpu "
    "OS=Linux 6.1 #1 SMP Reason=none\n"
    "NodeName=n2 CPUTot=8 RealMemory=4000 Gres=gpu:a100:4,gpu:v100:2 State=DOWN* Partitions=gpu\n"
    "NodeName=n3 CPUTot=8 RealMemory=4000 Gres=(null) State=IDLE Partitions=gpu,old\n"
    "NodeName=n4 CPUTot=64 RealMemory=999000 Gres=gpu:8 State=IDLE Partitions=big\n"
)
CONFIG = {"MaxArraySize": "1001"}


def startable(size: GroupSize, elements: int = 1, **slurm: Any) -> str:
    demand = Demand(size, elements, replace(SlurmConf(), **slurm))
    return require_startable(demand, PARTITIONS, NODES, CONFIG)


def test_what_there_is_in_words():
    assert startable(GroupSize(2, 4, True)) == (
        "partition gpu: 2 nodes can take it, 1 of them down now; time limit 1-00:00:00"
    )
    assert startable(GroupSize(1, 8, True), partition="gpu,big").startswith("partition big: 1 nodes")
    assert startable(GroupSize(1, 2, True), gpu_type="v100").startswith("partition gpu: 1 nodes")
    assert startable(GroupSize(1, 99, False), time="1-00:00:00", mem="3G", elements=1001)


@pytest.mark.parametrize(
    ("size", "slurm", "key"),
    [
        (GroupSize(1, 1, True), {"partition": "gpus"}, "cluster.slurm.partition"),
        (GroupSize(1, 1, False), {"partition": "old"}, "cluster.slurm.partition"),
        (GroupSize(3, 1, False), {}, "cluster.nodes"),
        (GroupSize(2, 1, True), {"partition": "big"}, "cluster.nodes"),
        (GroupSize(1, 7, True), {}, "cluster.gpus"),
        (GroupSize(2, 2, True), {"gpu_type": "v100"}, "cluster.gpus"),
        (GroupSize(1, 1, True), {"time": "1-00:00:01"}, "cluster.slurm.time"),
        (GroupSize(1, 4, True), {"cpus_per_rank": 3}, "cluster.slurm.cpus_per_rank"),
        (GroupSize(1, 1, True), {"mem": "4G"}, "cluster.slurm.mem"),
        (GroupSize(1, 1, True), {"elements": 1002}, "cluster.groups"),
    ],
)
def test_what_could_never_start(size: GroupSize, slurm: dict[str, Any], key: str):
    with pytest.raises(UsageError, match=f"could never start; {key}"):
        startable(size, **slurm)
