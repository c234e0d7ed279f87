"""Two nodes find each other: in network namespaces of their own, with the hosts file of a Debian."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from llama_ssp.batch.slurm import address
from llama_ssp.batch.slurm.script import Order
from llama_ssp.config import ClusterConf, SlurmConf
from llama_ssp.errors import DistributedError

RANK = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
sum_ = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(sum_)
print(f"node {os.uname().nodename}: {dist.get_world_size()} ranks, sum {sum_.item():.0f}")
# A rank that ends with an open group may abort, and its agent then waits 300 s for the other.
dist.destroy_process_group()
"""
# Slurm's commands: a step runs in the namespaces, with a host name of its own.
SRUN = """\
#!/bin/bash
where=
while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && where=${1#*=}; shift; done
on() {
    SLURM_NODEID=$1 ip netns exec "$2" unshare --uts bash -c 'hostname "$0"; exec "$@"' "${@:2}"
}
case $where in
    *-a) on 0 "$where" "$@";;
    *-b) on 1 "$where" "$@";;
    *) on 0 NAME-a "$@" & first=$!; on 1 NAME-b "$@" & second=$!; wait $first && wait $second;;
esac
"""
SCONTROL = """\
#!/bin/sh
case "$*" in *hostnames*) echo NAME-a NAME-b;; *) echo "NodeName=NAME-a NodeAddr=NAME-a State=IDLE";; esac
"""
# The nodes' python: no supervisor, and other ranks.
PYTHON = """\
#!/bin/bash
case "$*" in *supervisor*) shift 5; exec "$@";; esac
words=()
for word; do
    if [ "$word" = llama_ssp ]; then unset 'words[-1]'; words+=("RANK"); else words+=("$word"); fi
done
exec "REAL" "${words[@]}"
"""


@dataclass(frozen=True)
class Nodes:
    """Two namespaces that a cable joins, and the folder with the commands of Slurm's."""

    name: str
    folder: Path

    def run(self, interface: str | None) -> str:
        """The log of an element's script."""
        slurm = SlurmConf(
            python=str(self.folder / "python"),
            interface=interface,
            torchrun=['--rdzv-conf="is_host=$((SLURM_NODEID == 0)),join_timeout=60"'],
        )
        cluster = ClusterConf(gpu="cpu", gpus=1, nodes=2, slurm=slurm)
        script = Order("pair", cluster, 1, self.folder / "work", self.folder, (), 3).rendered()
        job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
        path = f"{self.folder}:{os.environ['PATH']}:/usr/sbin"
        env = {**os.environ, **job, "PATH": path, "SLURM_JOB_NODELIST": "n[1-2]", "OMP_NUM_THREADS": "1"}
        subprocess.run(["bash"], input=script, env=env, text=True, check=False, timeout=300)
        return (self.folder / "work" / "logs" / "pair-7_0.out").read_text(encoding="utf-8")


@pytest.fixture(params=["10.77.0", "fd77:"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    name, net = f"ssp{os.getpid()}", request.param
    joint, bits = (":", 64) if ":" in net else (".", 24)
    ends = {f"{name}-a": f"{net}{joint}1", f"{name}-b": f"{net}{joint}2"}
    hosts = {node: Path("/etc/netns") / node for node in ends}
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2, for network namespaces")
    try:
        for node in ends:
            if subprocess.run(["ip", "netns", "add", node], capture_output=True).returncode != 0:
                pytest.skip("this kernel, or container, allows no network namespaces")
            others = [f"{address} {other}" for other, address in ends.items() if other != node]
            hosts[node].mkdir(parents=True)
            lines = ["127.0.0.1 localhost", f"127.0.1.1 {node}", *others]
            (hosts[node] / "hosts").write_text("\n".join(lines) + "\n")
        first, second = ends
        ip("link", "add", "eth7", "netns", first, "type", "veth", "peer", "name", "eth7", "netns", second)
        for node, own in ends.items():
            ip("-n", node, "addr", "add", f"{own}/{bits}", "dev", "eth7", *["nodad"] * (bits == 64))
            for device in ("lo", "eth7"):
                ip("-n", node, "link", "set", device, "up")
        rank = tmp_path / "rank.py"
        rank.write_text(RANK)
        for file, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
            text = text.replace("NAME", name).replace("RANK", str(rank)).replace("REAL", sys.executable)
            (tmp_path / file).write_text(text)
            (tmp_path / file).chmod(0o755)
        yield Nodes(name, tmp_path)
    finally:
        for node in ends:
            subprocess.run(["ip", "netns", "delete", node], check=False, capture_output=True)
            shutil.rmtree(hosts[node], ignore_errors=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("interface", [None, "eth7"])
def test_two_nodes_of_a_group_meet(nodes: Nodes, interface: str | None):
    """The control: by its own name, each node finds itself only."""
    for node in ("a", "b"):
        own = subprocess.run(
            [nodes.folder / "srun", f"--nodelist={nodes.name}-{node}", "hostname", "--ip-address"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert own.stdout.split() == ["127.0.1.1"]
    log = nodes.run(interface)
    for node in ("a", "b"):
        assert f"node {nodes.name}-{node}: 2 ranks, sum 3" in log, log


def test_addresses_of_this_machine():
    assert address.of_interface("lo") == "127.0.0.1"
    assert address.towards("127.0.0.1") == ("127.0.0.1", "lo")
    assert address.resolve("127.0.0.1") == "127.0.0.1" and address.resolve("fd00::7") == "fd00::7"
    assert address.bracketed("fd00::7") == "[fd00::7]" and address.bracketed("10.0.0.1") == "10.0.0.1"
    with pytest.raises(DistributedError, match=r"a network has no address here.*found ib9, allowed .*lo"):
        address.of_interface("ib9")
    with pytest.raises(DistributedError, match=r"has no address.*cluster\.slurm\.interface=ib0"):
        address.resolve("no-such-host.invalid")


def test_another_node_s_own_addresses_come_last(monkeypatch: pytest.MonkeyPatch):
    found = [(0, 0, 0, "", (one, 0)) for one in ("127.0.1.1", "fd00::1", "10.0.0.9", "10.0.0.1")]
    monkeypatch.setattr(address.socket, "getaddrinfo", lambda *_, **__: found)
    assert address.resolve("n1") == "10.0.0.1"
    del found[2:]
    assert address.resolve("n1") == "fd00::1"
