"""Two nodes find each other: in network namespaces of their own, with the hosts file of a Debian."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_ssp.batch.job import Job
from llama_ssp.batch.manifest import Manifest
from llama_ssp.batch.slurm.script import sbatch_script
from llama_ssp.config import BatchConf, ClusterConf, RunConf, SlurmConf

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
# Slurm's commands: each task of a step runs in a namespace, with a host name of its own.
SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
on() { ip netns exec "$1" unshare --uts bash -c 'hostname "$0"; exec "$@"' "$@"; }
on NAME-a "$@" & first=$!
on NAME-b "$@" & second=$!
wait $first && wait $second
"""
SCONTROL = "#!/bin/sh\necho NAME-a\necho NAME-b\n"
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


@pytest.fixture(params=["10.77.0", "fd77:"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Two namespaces that a cable joins, and a folder with the commands of Slurm's."""
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
        yield tmp_path
    finally:
        for node in ends:
            subprocess.run(["ip", "netns", "delete", node], check=False, capture_output=True)
            shutil.rmtree(hosts[node], ignore_errors=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.mark.few(2)
@pytest.mark.slow
def test_two_nodes_of_a_group_meet(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A node that looks up its own name finds 127.0.1.1, so gloo has to be told the network."""
    monkeypatch.chdir(folder)
    slurm = SlurmConf(python=str(folder / "python"), setup=["export GLOO_SOCKET_IFNAME=eth7"])
    run = RunConf(cluster=ClusterConf(gpu="cpu", gpus=1, nodes=2, slurm=slurm), task=BatchConf(name="batch"))
    job = Job(run, folder / "work", Path("pair"), Manifest("", 0, {}, ()), [])
    names = {"ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "0", "JOB_ID": "7", "JOB_NAME": "pair", "JOB_NODELIST": ""}
    env = {f"SLURM_{name}": text for name, text in names.items()}
    env |= {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}:/usr/sbin", "OMP_NUM_THREADS": "1"}
    text = sbatch_script(job, 1, ("task=batch",))
    subprocess.run(["bash"], input=text, env=env, text=True, check=False, timeout=300)
    log = (folder / "work" / "logs" / "pair-7_0.out").read_text(encoding="utf-8")
    assert log.count(": 2 ranks, sum 3") == 2, log
