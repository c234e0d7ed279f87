"""The check of a machine: each fault that people meet is found, with what to do, and a sound machine is fit.

Facts are planted: what is read and measured is apart from how it is judged. There is no GPU here: its facts
are those of texts that nvidia-smi and NCCL print, and of figures as an H200 would have them.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llama_ssp.config import RunConf
from llama_ssp.distributed.bounded import Said, said_within
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.models.kernels.build import FLAGS
from llama_ssp.tasks import calibrate, runner
from llama_ssp.tasks.machine import check, device, driver, host, small
from llama_ssp.tasks.machine.check import judged_here
from llama_ssp.tasks.machine.driver import Card, Driver, cards_of, links_of
from llama_ssp.tasks.machine.facts import Facts, Measured, NodeFacts, TorchBuild
from llama_ssp.tasks.machine.finding import Finding, Verdict, merged, sentence
from llama_ssp.tasks.machine.host import CacheFolder, Compiler, Host, Space
from llama_ssp.tasks.machine.small import measured_apart, measured_here, measured_of
from tests.conftest import Command
from tests.warm import ROOT, Answer, Started

GIB = 2**30
CPU = torch.device("cpu")

# What `nvidia-smi --query-gpu=...` says of a machine with two GPUs, by driver 580.
SAID = """\
GPU-5c9f1c5e-0a4b-8e6d-1111-000000000000, NVIDIA H200, 580.95.05, Default, 143771, 4, 700.00, 700.00, 0
GPU-5c9f1c5e-0a4b-8e6d-1111-000000000001, NVIDIA H200, 580.95.05, Default, 143771, 4, 700.00, 700.00, 0
"""
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t48-95\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n"
)
NCCL_LOG = """\
node:71:71 [0] NCCL INFO NCCL version 2.27.5+cuda13.0
node:71:99 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node:71:99 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
"""
CARDS = cards_of(SAID)

PLAIN_HOST = Host(
    processor="AMD EPYC",
    features=frozenset({"avx2", "avx512bw"}),
    cores=16,
    memory=100 * GIB,
    memlock=None,
    shared=Space(total=64 * GIB, free=64 * GIB),
    has_fabric=False,
    has_amd=False,
    interfaces=("lo", "eth0"),
    variables={},
)
FOLDER = CacheFolder(path="/home/me/.cache/llama-ssp/compiled/llama_ssp", free=50 * GIB)
NODE = NodeFacts(
    driver=Driver(cards=CARDS, links=("NV18",), has_device=True),
    cxx_compiler=Compiler(path="/usr/bin/g++"),
    c_compiler=Compiler(path="/usr/bin/gcc"),
)
FIGURES: dict[str, dict[str, Any]] = {
    "device": {
        "name": "NVIDIA H200",
        "capability": [9, 0],
        "built_for": ["sm_80", "sm_90", "sm_100", "compute_120"],
        "count": 2,
        "nccl": "2.27.5",
    },
    "memory_bandwidth": {"gb_s": 4300.0},
    "launch_cost": {"us": 4.0},
    "peer_access": {"pairs": 2, "reachable": 2, "wrong": []},
    "sums": {
        "world": 2,
        "through_host": False,
        "is_right": True,
        "us": {"16384": 18.0, "1048576": 25.0, "67108864": 400.0},
    },
    "kernels": {"fails": ""},
}
MEASURED = Measured(figures=FIGURES, transports=("P2P/CUMEM",))
# Rank 0 of two, each with an H200.
GPUS = Facts(
    rank=0,
    world=2,
    nodes=1,
    on_gpu=True,
    host=PLAIN_HOST,
    build=TorchBuild(version="2.13.0+cu130", cuda="13.0", rocm=None, threads=8, has_gpu=True),
    folders=(FOLDER,),
    measured=MEASURED,
    node=NODE,
)
# One rank on a machine without GPUs.
ON_CPU = replace(
    GPUS,
    world=1,
    on_gpu=False,
    build=TorchBuild(version="2.13.0+cpu", cuda=None, rocm=None, threads=8, has_gpu=False),
    node=replace(NODE, driver=Driver(), c_compiler=None),
    measured=Measured(figures={"memory_bandwidth": {"gb_s": 20.0}, "launch_cost": {"us": 5.0}}),
)


def with_host(**changes: Any) -> Facts:
    return replace(GPUS, host=replace(PLAIN_HOST, **changes))


def with_cards(**changes: Any) -> Facts:
    cards = (replace(CARDS[0], **changes), CARDS[1])
    return replace(GPUS, node=replace(NODE, driver=replace(NODE.driver, cards=cards)))


def with_driver(facts: Facts, **changes: Any) -> Facts:
    assert facts.node is not None
    return replace(facts, node=replace(facts.node, driver=replace(facts.node.driver, **changes)))


def with_tools(facts: Facts, **changes: Any) -> Facts:
    assert facts.node is not None
    return replace(facts, node=replace(facts.node, **changes))


def with_figures(step: str, **changes: Any) -> Facts:
    figures = FIGURES | {step: FIGURES[step] | changes}
    return replace(GPUS, measured=replace(MEASURED, figures=figures))


def that_stops(step: str, why: str, is_late: bool = False) -> Facts:
    """In this step of measuring: what comes after it is not known."""
    names = list(FIGURES)
    done = {name: FIGURES[name] for name in names[: names.index(step)]}
    return replace(GPUS, measured=Measured(figures=done, failed=step, why=why, is_late=is_late))


def with_folder(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, folders=(replace(FOLDER, **changes),))


def with_build(**changes: Any) -> Facts:
    return replace(GPUS, build=replace(GPUS.build, **changes))


def test_two_sound_gpus_are_fit() -> None:
    findings = {finding.name: finding for finding in judged_here(GPUS)}
    assert not [finding for finding in findings.values() if finding.verdict is not Verdict.ok or finding.fix]
    assert list(findings) == [
        "gpus", "gpu_health", "driver", "compute_mode", "torch", "peer_access", "nccl", "sums",
        "memory_bandwidth", "launch_cost", "kernels", "cpu", "host_memory", "memlock", "shared_memory",
        "compiler", "cache_folder", "environment",
    ]  # fmt: skip
    found = {row.name: row.found for row in merged([list(findings.values())])}
    assert found["gpus"] == "2 x NVIDIA H200 of 140.4 GiB"
    assert found["driver"] == "580.95.05; torch is for CUDA 13.0"
    assert found["peer_access"] == "all 2 pairs of GPUs reach each other (NV18)"
    assert found["nccl"] == "NCCL 2.27.5 over P2P/CUMEM"
    assert found["sums"] == ("over 2 ranks: 16 KiB 18 us, 1 MiB 25 us (41.9 GB/s), 64 MiB 400 us (168 GB/s)")
    assert found["memory_bandwidth"] == "4300 GB/s read and written by copies, 4800 by the data sheet"


def test_a_sound_machine_without_gpus_is_fit() -> None:
    findings = judged_here(ON_CPU)
    assert {finding.verdict for finding in findings} == {Verdict.ok}
    assert next(finding.found for finding in findings if finding.name == "gpus").startswith("none")
    assert not {"driver", "compute_mode", "nccl", "peer_access", "kernels"} & {each.name for each in findings}


FAULT = Verdict.fault
NOTE = Verdict.note
OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."
# What is planted, in which row it is found, how bad it is, and words of what was found, and of what to do.
PLANTED: dict[str, tuple[Facts, str, Verdict, str, str]] = {
    "a GPU of another rank that does not start": (
        replace(that_stops("device", "no end after 30 s"), rank=1, node=None),
        "driver", FAULT, "does not start: no end after 30 s", "dmesg",
    ),
    "no driver": (
        with_driver(ON_CPU, fails="NVIDIA-SMI has failed"),
        "gpus", FAULT, "NVIDIA-SMI has failed", "ubuntu-drivers",
    ),
    "no nvidia-smi": (with_driver(ON_CPU, has_device=True), "gpus", NOTE, "without nvidia-smi", "--gpus all"),
    "torch for CPUs": (
        replace(GPUS, build=ON_CPU.build, on_gpu=False), "gpus", FAULT, "build for CPUs", "--cuda",
    ),
    "a GPU of AMD": (
        replace(ON_CPU, host=replace(PLAIN_HOST, has_amd=True)), "gpus", NOTE, "of AMD", "--rocm",
    ),
    "errors of memory": (
        with_cards(memory_errors=3.0),
        "gpu_health", NOTE, "uncorrected errors of memory: GPU 0 3", "-r",
    ),
    "less power": (
        with_cards(power_w=450.0), "gpu_health", NOTE, "lower power limit: GPU 0 450 of 700 W", "-pl",
    ),
    "another program": (
        with_cards(used_mib=20000.0),
        "gpu_health", NOTE, "other programs hold: GPU 0 20000 MiB", "nvidia-smi",
    ),
    "an old driver": (
        with_build(has_gpu=False, warning=OLD), "driver", FAULT, "too old", "update the driver, or",
    ),
    "no GPU is shown": (
        with_build(has_gpu=False), "driver", FAULT, "finds no GPU", "CUDA_VISIBLE_DEVICES",
    ),
    "no Fabric Manager": (
        that_stops("device", "RuntimeError: Error 802: system not yet initialized"), "driver", FAULT,
        "does not start", "nvidia-fabricmanager",
    ),
    "a GPU in use": (
        that_stops("device", "AcceleratorError: CUDA-capable device(s) is/are busy or unavailable"),
        "driver", FAULT, "busy", "has the GPU for itself",
    ),
    "a driver that hangs": (
        that_stops("device", "no end after 30 s"), "driver", FAULT, "no end after 30 s", "dmesg",
    ),
    "one process a GPU": (
        with_cards(mode="Exclusive_Process"), "compute_mode", FAULT, "steps run eagerly", "-c DEFAULT",
    ),
    "one process a GPU, one rank": (
        replace(with_cards(mode="Exclusive_Process"), world=1),
        "compute_mode", NOTE, "one process", "-c DEFAULT",
    ),
    "no process may": (
        replace(with_cards(mode="Prohibited"), world=1),
        "compute_mode", FAULT, "no program", "-c DEFAULT",
    ),
    "no code for it": (
        with_figures("device", capability=[6, 1]),
        "torch", FAULT, "without code for NVIDIA H200 (sm_61)", "--cuda=cu126",
    ),
    "no bf16": (
        with_figures("device", capability=[7, 5], built_for=["sm_75"]),
        "torch", NOTE, "no bf16", "fp16",
    ),
    "no peer access": (
        with_figures("peer_access", reachable=0), "peer_access", NOTE, "0 of 2 pairs", "by design",
    ),
    "copies that are lost": (
        with_figures("peer_access", wrong=[[0, 1]]), "peer_access", FAULT, "wrong: GPU 0 to 1", "IOMMU",
    ),
    "copies that hang": (
        that_stops("peer_access", "no end after 30 s"),
        "peer_access", FAULT, "no end", "NCCL_P2P_DISABLE",
    ),
    "NCCL hangs": (
        that_stops("sums", "no end after 30 s"),
        "nccl", FAULT, "NCCL 2.27.5 does not sum: no end", "NCCL_P2P_DISABLE=1",
    ),
    "sums through the host": (
        replace(GPUS, measured=replace(MEASURED, transports=("SHM/direct/direct",))), "nccl", NOTE,
        "through the host's memory", "peer access",
    ),
    "the network within a node": (
        replace(GPUS, measured=replace(MEASURED, transports=("NET/Socket/0",))), "nccl", NOTE,
        "over the network within one node", "--ipc=host",
    ),
    "TCP with InfiniBand": (
        replace(
            with_host(has_fabric=True), nodes=2, measured=replace(MEASURED, transports=("NET/Socket/0",))
        ),
        "nccl", NOTE, "TCP", "/dev/infiniband",
    ),
    "ranks share a GPU": (
        with_figures("sums", through_host=True), "nccl", NOTE, "share a GPU", "as many ranks as",
    ),
    "wrong sums": (with_figures("sums", is_right=False), "sums", FAULT, "they are wrong", "NCCL_P2P_DISABLE"),
    "slow sums": (
        with_figures("sums", us={"16384": 900.0, "1048576": 950.0}),
        "sums", NOTE, "16 KiB", "two sums a layer",
    ),
    "no sums on CPUs": (
        replace(ON_CPU, world=2, measured=Measured(failed="sums", why="refused")),
        "sums", FAULT, "refused", "GLOO",
    ),
    "a slow GPU": (
        with_figures("memory_bandwidth", gb_s=1900.0), "memory_bandwidth", NOTE, "4800", "PERFORMANCE",
    ),
    "memory that fails": (
        that_stops("memory_bandwidth", "CUDA error"), "memory_bandwidth", FAULT, "CUDA error", "dmesg",
    ),
    "a slow host": (with_figures("launch_cost", us=45.0), "launch_cost", NOTE, "{us} us", "governor"),
    "kernels that fail": (
        with_figures("kernels", fails="no ptxas"), "kernels", FAULT, "eagerly: no ptxas", "compiler",
    ),
    "kernels that fail at once": (
        that_stops("kernels", "out of resources"), "kernels", FAULT, "eagerly: out of", "compiler",
    ),
    "kernels that take long": (
        that_stops("kernels", "no end after 30 s", is_late=True),
        "kernels", NOTE, "no end after 30 s", "engine=eager",
    ),
    "fewer cores than threads": (with_host(cores=4), "cpu", NOTE, "4 cores, 8 threads", "OMP_NUM_THREADS=4"),
    "an old processor": (
        replace(ON_CPU, host=replace(PLAIN_HOST, features=frozenset())),
        "cpu", NOTE, "without AVX2", "slow",
    ),
    "no memory": (with_host(memory=GIB // 2), "host_memory", FAULT, "available", "--memory"),
    "little memory": (with_host(memory=2 * GIB), "host_memory", NOTE, "available", "--memory"),
    "memlock": (
        replace(with_host(memlock=2**16, has_fabric=True), nodes=2),
        "memlock", FAULT, "0 MiB", "memlock=-1",
    ),
    "memlock of one node": (
        with_host(memlock=8 * 2**20, has_fabric=True),
        "memlock", NOTE, "too little for InfiniBand", "limits.conf",
    ),
    "no /dev/shm": (with_host(shared=None), "shared_memory", FAULT, "no /dev/shm", "--ipc=host"),
    "no /dev/shm on CPUs": (
        replace(ON_CPU, host=replace(PLAIN_HOST, shared=None)),
        "shared_memory", NOTE, "no /dev/shm", "TMPDIR",
    ),
    "Docker's /dev/shm": (
        with_host(shared=Space(total=2**26, free=2**26)), "shared_memory", NOTE, "64 MiB", "--shm-size",
    ),
    "a full /dev/shm": (
        with_host(shared=Space(total=2**26, free=2**20)),
        "shared_memory", FAULT, "1 MiB free", "--ipc=host",
    ),
    "a full /dev/shm on CPUs": (
        replace(ON_CPU, host=replace(PLAIN_HOST, shared=Space(total=2**26, free=0))), "shared_memory", NOTE,
        "0 MiB free", "ls -l /dev/shm",
    ),
    "no C compiler": (
        with_tools(GPUS, c_compiler=Compiler(path=None)),
        "compiler", FAULT, "none for C;", "python3-dev",
    ),
    "no headers": (
        with_tools(GPUS, c_compiler=Compiler(path="/usr/bin/gcc", fails="Python.h: No such file")),
        "compiler", FAULT, "Python.h", "python3-dev",
    ),
    "no C++ compiler": (
        with_tools(ON_CPU, cxx_compiler=Compiler(path=None)),
        "compiler", NOTE, "none for C++", "apt install g++",
    ),
    "a folder that cannot be written": (
        with_folder(GPUS, fails="Permission denied"),
        "cache_folder", FAULT, "Permission denied", "INDUCTOR_CACHE_DIR",
    ),
    "the same on a CPU": (
        with_folder(ON_CPU, fails="Read-only file system"),
        "cache_folder", NOTE, "Read-only", "INDUCTOR_CACHE_DIR",
    ),
    "noexec": (with_folder(GPUS, runs_code=False), "cache_folder", FAULT, "noexec", "INDUCTOR_CACHE_DIR"),
    "a full disk": (with_folder(GPUS, free=2**20), "cache_folder", FAULT, "1 MiB free", "make room"),
    "little room": (with_folder(GPUS, free=2**28), "cache_folder", NOTE, "256 MiB free", "make room"),
    "a temporary folder": (
        with_folder(GPUS, is_temporary=True), "cache_folder", NOTE, "temporary", "~/.cache/llama-ssp",
    ),
    "a variable that hurts": (
        with_host(variables={"CUDA_LAUNCH_BLOCKING": "1"}),
        "environment", FAULT, "LAUNCH_BLOCKING=1: the host",
        "unset CUDA_LAUNCH_BLOCKING",
    ),
    "a variable of NCCL": (
        with_host(variables={"NCCL_P2P_DISABLE": "1"}),
        "environment", NOTE, "NCCL_P2P_DISABLE=1", "unset",
    ),
    "an interface that is not there": (
        with_host(variables={"NCCL_SOCKET_IFNAME": "ib0"}),
        "environment", FAULT, "here are lo, eth0", "ip address",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_with_what_to_do(name: str) -> None:
    facts, row, verdict, found, fix = PLANTED[name]
    bad = [finding for finding in judged_here(facts) if finding.verdict is not Verdict.ok]
    (finding,) = (each for each in bad if each.name == row)
    assert finding.verdict is verdict
    assert found in finding.found and fix in finding.fix, finding


@pytest.mark.parametrize(
    "variables",
    [
        {"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "NVL", "NCCL_DEBUG": "INFO", "NCCL_GRAPH_REGISTER": "0"},
        {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "lo"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"NCCL_SOCKET_IFNAME": "ib,eth"},
    ],
    ids=["harmless", "whole names", "left out", "beginnings"],
)
def test_variables_that_do_no_harm_are_no_faults(variables: dict[str, str]) -> None:
    (finding,) = (each for each in judged_here(with_host(variables=variables)) if each.name == "environment")
    assert finding.verdict is Verdict.ok


def test_every_check_is_planted_a_fault() -> None:
    names = {finding.name for facts in (GPUS, ON_CPU) for finding in judged_here(facts)}
    assert {row for _, row, *_ in PLANTED.values()} == names


@pytest.mark.parametrize(
    ("capability", "built_for", "has_code"),
    [
        ([8, 9], ["sm_80", "sm_86"], True),
        ([9, 0], ["sm_80"], False),
        ([12, 0], ["sm_90", "compute_90"], True),
        ([9, 0], ["sm_90a"], True),
        ([10, 3], ["sm_100a"], False),
        ([8, 0], ["sm_86"], False),
    ],
)
def test_code_of_one_generation_and_ptx_of_an_earlier_one_will_do(
    capability: list[int], built_for: list[str], has_code: bool
) -> None:
    facts = with_figures("device", capability=capability, built_for=built_for)
    (finding,) = (each for each in judged_here(facts) if each.name == "torch")
    assert (finding.verdict is Verdict.ok) == has_code


def test_what_nvidia_smi_says_is_read() -> None:
    assert CARDS[1] == Card(
        uuid="GPU-5c9f1c5e-0a4b-8e6d-1111-000000000001",
        name="NVIDIA H200",
        driver="580.95.05",
        mode="Default",
        total_mib=143771.0,
        used_mib=4.0,
        power_w=700.0,
        usual_power_w=700.0,
        memory_errors=0.0,
    )
    other = "GPU-1, NVIDIA GeForce RTX 4090, 550.1, [N/A], 24564, 1, [Not Supported], [N/A], [N/A]"
    (card,) = cards_of(other)
    assert (card.total_mib, card.power_w, card.memory_errors) == (24564.0, None, None)
    assert cards_of("No devices were found\n") == ()
    assert links_of(TOPOLOGY) == ("NV18",)
    assert links_of("") == ()


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program of this name before all others; it is a script for sh."""

    def install(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_nvidia_smi_is_asked(nvidia_smi: Callable[[str], None], tmp_path: Path) -> None:
    (tmp_path / "said").write_text(SAID)
    (tmp_path / "topology").write_text(TOPOLOGY)
    nvidia_smi(f'case "$1" in topo) cat {tmp_path}/topology ;; *) cat {tmp_path}/said ;; esac')
    assert driver.driver_here() == Driver(cards=CARDS, links=("NV18",), has_device=driver.DEVICE.exists())


@pytest.mark.parametrize(
    ("script", "fails"),
    [("echo NVIDIA-SMI has failed; exit 9", "NVIDIA-SMI has failed"), ("sleep 60", "no answer in 0.5 s")],
)
def test_an_nvidia_smi_that_fails_is_said(
    script: str, fails: str, nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "ASK_S", 0.5)
    nvidia_smi(script)
    there = driver.driver_here()
    assert (there.cards, there.fails) == ((), fails)


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "MPS"])
def test_a_gpu_that_a_server_shares_is_fit(
    is_shared: bool, nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MPS is the one process of a GPU in exclusive mode, for all others: the trial can start."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if is_shared:
        (tmp_path / "control").touch()
    (tmp_path / "said").write_text(SAID.replace("Default", "Exclusive_Process", 1))
    nvidia_smi(f"cat {tmp_path}/said")
    cards = driver.driver_here().cards
    (mode,) = (each for each in judged_here(with_driver(GPUS, cards=cards)) if each.name == "compute_mode")
    assert (mode.verdict is Verdict.ok) == is_shared
    assert mode.found.startswith(f"Default, Exclusive_Process{' (MPS)' if is_shared else ''}")


def test_a_gpu_that_is_not_shown_matters_to_nobody(
    nvidia_smi: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "said").write_text(SAID.replace("Default", "Prohibited", 1))
    nvidia_smi(f"cat {tmp_path}/said")
    monkeypatch.setattr(driver, "gpus_here", lambda: [SimpleNamespace(uuid=CARDS[1].uuid)])
    there = driver.driver_here()
    assert [card.is_shown for card in there.cards] == [False, True]
    (mode,) = (
        each for each in judged_here(with_driver(GPUS, cards=there.cards)) if each.name == "compute_mode"
    )
    assert (mode.verdict, mode.found) == (Verdict.ok, "Default")


def test_one_rank_says_how_several_are_checked() -> None:
    figures = FIGURES | {
        "peer_access": {"pairs": 0, "reachable": 0, "wrong": []},
        "sums": FIGURES["sums"] | {"us": {}},
    }
    findings = judged_here(replace(GPUS, world=1, measured=Measured(figures=figures)))
    found = {finding.name: finding.found for finding in findings}
    assert found["peer_access"] == "tried by llama-ssp calibrate ranks=2 (NV18)"
    assert "llama-ssp calibrate ranks=2" in found["sums"] and "nccl" not in found


def test_a_command_has_a_limit() -> None:
    said = said_within(0.3, ["sh", "-c", "echo before; echo it >&2; sleep 60"])
    assert (said.is_late, said.code, said.out, said.err) == (True, None, "before\n", "it\n")
    assert said_within(60, ["sh", "-c", "cat; exit 3"], "given") == Said(out="given", code=3)
    assert said_within(60, ["/no/such/program"]).fails == "No such file or directory"


def test_this_host_is_read() -> None:
    here = host.host_here()
    assert here.cores >= 1 and here.memory > 0 and here.interfaces
    assert here.variables == dict(os.environ)


@pytest.mark.compiler
def test_the_compilers_of_this_machine_are_tried() -> None:
    tried = host.cxx_compiler(FLAGS)
    assert tried.path and not tried.fails


@pytest.mark.parametrize(
    ("script", "fails"),
    [("echo 'tried.cpp:1: error: no header' >&2; exit 1", "error: no header"), ("exit 3", "exit code 3")],
)
def test_a_compiler_that_fails_is_found(
    script: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("CC", str(compiler))
    for tried in (host.cxx_compiler(FLAGS), host.c_compiler()):
        assert tried.path == str(compiler) and fails in tried.fails
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert host.cxx_compiler(FLAGS) == Compiler(path=None)


def test_a_folder_is_tried_by_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cache_folder", lambda: tmp_path / "with a blank" / "llama_ssp")
    (here,) = host.cache_folders(with_triton=False)
    assert not here.fails and here.runs_code and here.free and not any(Path(here.path).iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(host, "cache_folder", lambda: tmp_path / "file" / "llama_ssp")
    (here,) = host.cache_folders(with_triton=False)
    assert here.fails == "Not a directory"
    monkeypatch.setattr(host, "cache_folder", lambda: tmp_path / "llama-ssp-0" / "llama_ssp")
    (here,) = host.cache_folders(with_triton=False)
    assert here.is_temporary


def finding(found: str = "good", verdict: Verdict = Verdict.ok, **figures: float) -> Finding:
    return Finding(name="thing", found=found, verdict=verdict, figures=figures)


def test_ranks_that_find_the_same_share_a_row() -> None:
    (row,) = merged([[finding("{gb_s} GB/s", gb_s=2900.0)], [finding("{gb_s} GB/s", gb_s=2850.0)]])
    assert (row.found, row.ranks) == ("2850 to 2900 GB/s", [0, 1])
    assert row.figures == {"gb_s": [2900.0, 2850.0]}


def test_ranks_that_differ_are_named() -> None:
    first, second = merged([[finding()], [finding("bad", Verdict.fault)], [finding()], [finding()]])
    assert (first.found, first.ranks) == ("ranks 0,2,3: good", [0, 2, 3])
    assert (second.found, second.verdict) == ("rank 1: bad", Verdict.fault)
    assert sentence([first, second]) == "not fit: 1 fault (thing)"


def test_a_rank_with_much_less_bandwidth_is_named() -> None:
    by_rank = [[finding("{gb_s} GB/s", gb_s=gb_s)] for gb_s in (4300.0, 4250.0, 2000.0, 4200.0)]
    usual, slow = merged(by_rank)
    assert usual.found == "ranks 0,1,3: 4200 to 4300 GB/s" and usual.verdict is Verdict.ok
    assert slow.found == "rank 2: 2000 GB/s" and slow.verdict is Verdict.note
    assert "other ranks have 4300 GB/s" in slow.fix


def test_ranks_that_share_a_host_may_have_less_of_its_bandwidth() -> None:
    """On a busy machine that is chance."""
    less = replace(ON_CPU, measured=Measured(figures={"memory_bandwidth": {"gb_s": 5.0}}))
    rows = merged([judged_here(ON_CPU), judged_here(less)])
    (row,) = (each for each in rows if each.name == "memory_bandwidth")
    assert (row.verdict, row.figures) == (Verdict.ok, {"host_gb_s": [20.0, 5.0]})


def test_what_a_library_says_is_no_template() -> None:
    (row,) = merged([[finding("{not a figure} {us} us", us=4.0)]])
    assert row.found == "{not a figure} 4 us"


def test_the_figures_of_a_cpu_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "COPIED", {"cpu": 2**22})
    measured = measured_here(device.steps(CPU, lambda: ALONE, tries_peers=False))
    assert not measured.failed
    assert measured.figures["memory_bandwidth"]["gb_s"] > 0
    assert measured.figures["launch_cost"]["us"] > 0
    assert measured.figures["sums"]["us"] == {}


class Pretended(Ranks):
    """Two ranks with the same numbers; a `wrong` sum forgets the last of them."""

    world = 2

    def __init__(self, wrong: bool = False) -> None:
        self.wrong = wrong

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.mul_(2)
        if self.wrong:
            tensor[-1] = 1
        return tensor


@pytest.mark.parametrize("wrong", [False, True])
def test_sums_are_timed_by_size_and_compared_with_what_is_right(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "SUMMED_S", 0.001)
    figures = device.sum_times(Pretended(wrong), CPU)
    assert list(figures["us"]) == [2**14, 2**20, 2**26]
    assert all(us > 0 for us in figures["us"].values())
    assert figures["is_right"] != wrong


def test_peers_are_asked_and_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs that are said to be three GPUs, of which two do not reach each other."""
    monkeypatch.setattr(device, "GPU", "cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {0, 2})
    assert device.peer_copies() == {"pairs": 6, "reachable": 4, "wrong": []}
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    assert device.peer_copies()["wrong"] == [(0, 1), (1, 2)]


def test_why_kernels_fail_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, *_: object) -> bool:
        device.logging.getLogger("llama_ssp.models.steps").warning("%s runs eagerly: no ptxas", name)
        return False

    monkeypatch.setattr(device, "dtype_of", lambda *_: device.Dtype.bf16)
    monkeypatch.setattr(device, "has_kernels", fails)
    assert device.try_kernels(CPU) == {"fails": "bf16 runs eagerly: no ptxas"}
    monkeypatch.setattr(device, "has_kernels", lambda *_: True)
    assert device.try_kernels(CPU) == {"fails": ""}


LINES = [["begun", "device", None], ["done", "device", {"count": 2}], ["begun", "sums", None]]


def said(*lines: object) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_small_process_that_ends_early_leaves_what_it_had_and_names_its_step() -> None:
    hung = measured_of(Said(out=said(*LINES) + '["done", "su', is_late=True), nccl_log=NCCL_LOG)
    assert (hung.failed, hung.why, list(hung.figures)) == ("sums", "no end after 30 s", ["device"])
    assert hung.transports == ("P2P/CUMEM",)
    told = measured_of(Said(out=said(*LINES, ["failed", "sums", "it is broken"]), code=5))
    assert (told.failed, told.why) == ("sums", "it is broken")
    silent = measured_of(Said(err="Traceback\nerror: cannot import torch", code=1))
    assert (silent.failed, silent.why) == ("start", "cannot import torch")
    whole = measured_of(Said(out=said(*LINES[:2]), code=0))
    assert (whole.failed, whole.why) == ("", "")


def test_a_small_process_that_ends_because_of_another_names_no_step() -> None:
    """The rank with the fault does."""
    assert measured_of(Said(out=said(*LINES[:2]), err="error: rank 1 is gone", code=5)).failed == ""


@pytest.mark.parametrize(
    ("script", "why"),
    [("sleep 60", "no end after 0.5 s"), ("echo error: no module >&2; exit 1", "no module")],
)
def test_a_small_process_is_ended_where_it_hangs(
    script: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "LIMIT_S", 0.5)
    monkeypatch.setattr(small, "COMMAND", ["sh", "-c", f"echo '{said(*LINES).strip()}'; {script}"])
    measured = measured_apart(CPU, ALONE, tries_peers=True)
    assert (measured.failed, measured.why, list(measured.figures)) == ("sums", why, ["device"])


@pytest.mark.slow
def test_a_small_process_measures() -> None:
    measured = measured_apart(CPU, ALONE, tries_peers=False)
    assert (measured.failed, list(measured.figures)) == ("", ["memory_bandwidth", "launch_cost", "sums"])


def hang_in_sums(rank: int) -> None:
    """In place of a small process: rank 1's sums hang."""
    if rank == 1:
        patch.object(device, "sum_times", lambda *_: subprocess.run(["sleep", "1000"])).start()
    small.main()


def pretending(_: int, hangs: bool) -> None:
    """Has ranks take their CPUs for GPUs, which are measured apart; then they meet again."""
    check.may_hang = lambda _: True
    if hangs:
        start = f"import os, sys; sys.path.insert(0, {str(ROOT)!r})"
        code = f"{start}; from tests.test_machine_check import hang_in_sums"
        small.COMMAND = [sys.executable, "-c", f"{code}; hang_in_sums(int(os.environ['RANK']))"]
        small.LIMIT_S = 30.0


def on_two(folder: Path, *words: str, fault: Callable[[int], object] | None = None) -> Answer:
    """Returns the leader's answer; both ranks end with one exit code."""
    all_words = ("task=calibrate", "model=tiny", "draft=tiny_draft", "out=null", *words)
    leader, other = Started(folder, 2, *all_words, fault=fault).finish()
    assert leader.code == other.code, leader.err + other.err
    return leader


@pytest.mark.long
@pytest.mark.parametrize("hangs", [False, True], ids=["sound", "hangs"])
def test_small_processes_of_two_ranks_sum_together(hangs: bool, tmp_path: Path) -> None:
    fault = partial(pretending, hangs=hangs)
    answer = on_two(tmp_path, "task.measure=false", "output=json", fault=fault)
    rows = {row["name"]: row for row in answer.document["machine"]["checks"]}
    if hangs:
        assert answer.code == 1 and answer.document["status"] == "failed", answer.err
        assert rows["sums"]["verdict"] == "fault" and "no end after 30 s" in rows["sums"]["found"]
        assert "trial" not in rows, "NCCL is not touched again"
    else:
        assert answer.code == 0, answer.err
        assert rows["sums"]["figures"]["us_16_kib"][0] > 0
    assert answer.document["machine"]["seconds"] < 60


@pytest.mark.slow
def test_two_ranks_have_one_screen(tmp_path: Path) -> None:
    answer = on_two(tmp_path, "task.measure=false")
    assert answer.code == 0, answer.err
    assert answer.out.count("host memory") == 1
    assert re.search(r"^sums +ok +over 2 ranks: 16 KiB ", answer.out, re.MULTILINE)
    assert "one thread a rank" in answer.out


ROWS = [
    "gpus", "torch", "memory bandwidth", "launch cost", "cpu", "host memory", "memlock", "shared memory",
    "compiler", "cache folder", "environment", "trial",
]  # fmt: skip
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


@no_gpu
def test_the_screen_of_a_machine_without_gpus(command: Command) -> None:
    answer = command("task=calibrate", "task.measure=false", "out=null")
    head, *rest = answer.out.splitlines()
    assert head.split() == ["checked", "found"]
    assert [line[:18].strip() for line in rest[: len(ROWS)]] == ROWS
    assert "this machine is fit" in rest[-1] and answer.code == 0
    assert len(rest) < 24, "it is one screen"
    assert not os.listdir(), "a check alone writes nothing"


@no_gpu
def test_the_document_has_the_same_rows_by_stable_names(command: Command) -> None:
    answer = command("task=calibrate", "task.measure=false", "out=null", "output=json")
    machine = answer.document["machine"]
    assert machine["fit"] is True and 0 < machine["seconds"] < 60
    assert [row["name"].replace("_", " ") for row in machine["checks"]] == ROWS
    for row in machine["checks"]:
        assert row.keys() == {"name", "verdict", "found", "fix", "ranks", "figures"}
        assert row["verdict"] in ("ok", "note", "fault") and row["ranks"] == [0]
    assert answer.document["plan"] is None


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done: "checked" and "measured"."""
    done = list[str]()
    whole = runner.check_machine

    def checked(run: Any) -> Any:
        done.append("checked")
        return whole(run)

    def measured(*_: object) -> Any:
        done.append("measured")
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "check_machine", checked)
    monkeypatch.setattr(calibrate, "measured", measured)
    return done


def test_a_machine_that_is_not_fit_is_not_measured(
    command: Command, measuring: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "memory_here", lambda: 2**29)
    answer = command("task=calibrate", "out=null", "task.folder=mine")
    assert (answer.code, measuring) == (1, ["checked"])
    assert "this machine is not fit: 1 fault (host memory)" in answer.out
    assert "host memory: end other programs, or raise the limit" in answer.out
    assert answer.document["status"] == "failed" and answer.document["machine"]["fit"] is False
    assert not list(Path("mine").rglob("*.yaml"))


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_place_that_cannot_be_written_is_refused_before_the_check(
    kind: str, command: Command, measuring: list[str]
) -> None:
    if kind == "folder":
        place = "/proc/none"
    else:
        place = "mine"
        Path("mine/cluster/calibrated.yaml").mkdir(parents=True)
    answer = command("task=calibrate", "out=null", f"task.folder={place}")
    assert (answer.code, measuring, len(answer.errors)) == (6, [], 1)
    assert "cannot write the cluster" in answer.errors[0]


def test_constants_that_were_there_stay_until_new_ones_are_measured(
    command: Command, measuring: list[str]
) -> None:
    file = Path("calibrated/cluster/calibrated.yaml")
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    assert command("task=calibrate", "out=null").code == 130
    assert measuring == ["checked", "measured"] and file.read_text() == "mine"


@pytest.mark.parametrize(
    ("passes", "left_s", "is_lasting", "verdict", "found"),
    [
        (True, 20.0, True, Verdict.ok, "give the logits of eager ones"),
        (False, 20.0, True, Verdict.fault, "it failed: off by 0.3; steps run eagerly"),
        (False, 20.0, False, Verdict.note, "no verdict yet: off by 0.3"),
        (False, -3.0, False, Verdict.note, "no verdict yet: off by 0.3"),
    ],
    ids=["passed", "failed", "cut short", "no time left"],
)
def test_the_verdict_of_the_trial_is_told(
    passes: bool, left_s: float, is_lasting: bool, verdict: Verdict, found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of two ranks with GPUs; the trial itself is tests/distributed/test_trial.py's."""
    limits = list[float]()
    attempt = SimpleNamespace(
        passes=lambda limit_s: limits.append(limit_s) or passes,
        is_lasting=is_lasting,
        verdict="off by 0.3",
        file="f",
    )
    monkeypatch.setattr(check, "Trial", lambda **_: attempt)
    monkeypatch.setattr(check, "device_of", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(check, "dtype_of", lambda *_: None)
    told = check.trial(RunConf(), Pretended(), left_s)
    assert limits == [max(left_s, 0.0)]
    assert told.verdict is verdict and found in told.found
    assert ("delete f" in told.fix) == (verdict is Verdict.fault)
