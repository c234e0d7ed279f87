"""Clusters: their figures, what is looked up, and what is refused."""

from __future__ import annotations

import stat
from dataclasses import replace

import pytest

from llama_ssp.config import ClusterConf, Dtype
from llama_ssp.errors import DistributedError, UsageError
from llama_ssp.models import host_memory
from llama_ssp.models.host_memory import memory_here
from llama_ssp.planner.gpus import gpus_here
from llama_ssp.planner.hardware import known, machine_of, matching, require_world
from llama_ssp.planner.workload import GIB
from tests.plans import cluster, machine

NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100-40", "NVIDIA A100-SXM4-80GB": "A100-80",
    "NVIDIA A100 80GB PCIe": "A100-80",
    "NVIDIA H100 80GB HBM3": "H100-80", "NVIDIA H200": "H200", "NVIDIA L4": "L4", "NVIDIA L40S": "L40S",
    "NVIDIA A10G": "A10G", "Tesla V100-SXM2-32GB": "V100-32", "NVIDIA A10": "A10", "NVIDIA L40": "L40",
    "NVIDIA H100 PCIe": "H100-PCIe", "NVIDIA H100 NVL": "H100-NVL", "NVIDIA H20": "H20",
    "NVIDIA B200": "B200", "NVIDIA GH200 480GB": "GH200",
    "NVIDIA GeForce RTX 4090": "RTX-4090", "NVIDIA GeForce RTX 5090": "RTX-5090",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": "A100-40", "NVIDIA H100 80GB HBM3 MIG 3g.40gb": "H100-80",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA GeForce RTX 4080": None, "NVIDIA A40": None,
    "NVIDIA GB200": None, "Tesla V100-SXM2-16GB": None,
}  # fmt: skip


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Puts an nvidia-smi on the path that says what it is told to, and what else for -L."""

    def install(said: str, code: int = 0, listed: str = "") -> None:
        script = tmp_path / "nvidia-smi"
        for name, text in (("figures", said), ("list", listed)):
            (tmp_path / name).write_text(f"{text}\n")
        script.write_text(
            f'#!/bin/sh\n[ "$1" = -L ] && exec cat {tmp_path}/list\ncat {tmp_path}/figures\nexit {code}\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        gpus_here.cache_clear()

    yield install
    gpus_here.cache_clear()


@pytest.mark.parametrize("name", sorted(known()))
def test_every_preset_is_whole(name):
    on = machine(name)
    assert on.capacity > 0 and on.world >= 1 and on.times.bytes_per_s > 0 and on.times.flops_per_s > 0
    assert on.times.source
    assert on.taken["context"] > 0


def test_figures_can_be_edited():
    on = machine("p4d", gpus=4, nodes=2, gib=70.0, gb_s=3110.0)
    assert (on.world, on.capacity) == (8, 70 * GIB)
    assert on.times.bytes_per_s == pytest.approx(2 * machine("p4d").times.bytes_per_s)


@pytest.mark.parametrize(("name", "gpu"), NAMES.items())
def test_a_drivers_name_is_understood(name, gpu):
    assert matching(name, [str(preset["gpu"]) for preset in known().values()]) == gpu


def test_local_gpus_have_their_presets_figures(driver):
    driver("NVIDIA A100-SXM4-40GB, 40000\nNVIDIA A100-SXM4-40GB, 30000")
    on = machine_of(ClusterConf(reserve=0.0))
    assert (on.gpu, on.world, on.capacity) == ("A100-40", 2, 30000 * 2**20)
    assert on.times.bytes_per_s == machine("p4d").times.bytes_per_s
    assert on.taken == machine("p4d").taken


def test_hidden_gpus_are_not_counted(driver, monkeypatch):
    driver("NVIDIA H200, 140000\nNVIDIA H200, 140000")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine_of(ClusterConf()).world == 1


TWO = """NVIDIA A100-SXM4-40GB, 39000, GPU-11aa, Disabled
NVIDIA A100-SXM4-40GB, [N/A], GPU-22bb, Enabled"""
TWO_LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-11aa)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-22bb)
  MIG 3g.20gb     Device  0: (UUID: MIG-3333)
  MIG 1g.5gb      Device  1: (UUID: MIG-4444)"""


@pytest.mark.parametrize(
    ("shown", "gpus", "gigabytes", "reads", "computes"),
    [
        ("0", 1, 39000 * 2**20 / 1e9, 1, 1),
        ("GPU-11aa", 1, 39000 * 2**20 / 1e9, 1, 1),
        ("GPU-11", 1, 39000 * 2**20 / 1e9, 1, 1),
        (None, 1, 20, 20 / 42.3, 3 / 7),
        ("1", 1, 20, 20 / 42.3, 3 / 7),
        ("MIG-4444", 1, 5, 5 / 42.3, 1 / 7),
        ("MIG-4444,MIG-3333", 1, 5, 5 / 42.3, 1 / 7),
        ("0,GPU-99,1", 1, 39000 * 2**20 / 1e9, 1, 1),
    ],
)
def test_gpus_and_parts_of_them_are_found_by_number_and_uuid(
    shown: str | None, gpus: int, gigabytes: float, reads: float, computes: float, driver, monkeypatch
) -> None:
    """As CUDA shows them: one part in all, and nothing behind a name that is none. Never as a CPU."""
    driver(TWO, listed=TWO_LISTED)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    on, whole = machine_of(ClusterConf(reserve=0.0)), machine("p4d").times
    assert (on.gpu, on.world) == ("A100-40", gpus)
    assert on.capacity == pytest.approx(gigabytes * 1e9, rel=1e-6)
    assert on.times.bytes_per_s == pytest.approx(reads * whole.bytes_per_s, rel=1e-3)
    assert on.times.flops_per_s == pytest.approx(computes * whole.flops_per_s)


@pytest.mark.parametrize("said", ["NVIDIA H200, [N/A], GPU-1, Disabled", "NVIDIA H200, [N/A], GPU-1, [N/A]"])
def test_a_gpu_whose_memory_is_not_said_has_its_presets(said: str, driver) -> None:
    driver(said)
    assert machine_of(ClusterConf(reserve=0.0)).capacity == machine("h200x8").capacity


@pytest.mark.parametrize("shown", ["", "-1", "GPU-99", "MIG-99"])
def test_no_gpu_that_is_shown(shown: str, driver, monkeypatch) -> None:
    driver(TWO, listed=TWO_LISTED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert machine_of(ClusterConf()).is_cpu


def test_a_measured_capacity_goes_before_what_the_driver_said(driver):
    driver("NVIDIA H200, 140000")
    assert machine_of(ClusterConf(reserve=0.0), capacity=12345).capacity == 12345
    assert machine_of(ClusterConf(reserve=0.0, gib=2.0), capacity=12345).capacity == 2 * GIB


@pytest.mark.parametrize(("said", "code"), [("", 0), ("NVIDIA-SMI has failed", 9)])
def test_without_gpus_the_cpu_is_planned(driver, said, code):
    driver(said, code)
    on = machine_of(ClusterConf(reserve=0.0))
    assert on.is_cpu and on.world == 1
    assert on.capacity == pytest.approx(memory_here(), rel=0.2)
    assert on.times.band > machine("p4d").times.band  # another machine's constants


def test_ranks_of_a_cpu_share_its_memory():
    on = machine("cpu", gib=16.0, reserve=0.0)
    assert on.capacity_of(4) == 4 * GIB
    assert machine("p4d").capacity_of(4) == machine("p4d").capacity


def test_auto_is_what_the_gpu_computes_in(monkeypatch):
    assert machine("p4d").dtype(Dtype.auto) is Dtype.bf16
    assert machine("v100x8").dtype(Dtype.auto) is Dtype.fp16
    assert machine("cpu", bf16=False).dtype(Dtype.auto) is Dtype.fp32
    assert machine("p4d").dtype(Dtype.int8) is Dtype.int8


def test_unknown_gpus_are_refused(driver):
    driver("NVIDIA GeForce RTX 4080, 16000")
    with pytest.raises(UsageError, match=r"not known; cluster local; found NVIDIA GeForce RTX 4080.*A100-40"):
        machine_of(ClusterConf())
    with pytest.raises(UsageError, match="found H900"):
        machine_of(ClusterConf(gpu="H900", gpus=4))
    with pytest.raises(UsageError, match=r"not that cluster's; found H200, cluster p4d, allowed A100-40"):
        machine_of(cluster("p4d", gpu="H200"))


def test_a_known_gpu_is_enough():
    on = machine_of(ClusterConf(gpu="H200", gpus=2, gib=139.0, reserve=0.0))
    assert (on.world, on.capacity, on.link) == (2, machine("h200x8").capacity, "NVLink4")


def test_an_unknown_gpu_with_all_its_figures_is_taken():
    whole = replace(cluster("p4d"), name="mine", gpu="RTX 4080", gpus=1)
    assert machine_of(whole).gpu == "RTX 4080"


def test_the_number_of_ranks_must_be_the_clusters():
    require_world(machine("p4d"), 1)
    require_world(machine("p4d"), 8)
    with pytest.raises(DistributedError, match="found 4 ranks, allowed 1 nodes x 8 = 8"):
        require_world(machine("p4d"), 4)


def test_memory_is_read_from_the_system(monkeypatch, tmp_path):
    table = tmp_path / "meminfo"
    table.write_text("MemTotal: 100 kB\nMemAvailable:     80 kB\n")
    monkeypatch.setattr(host_memory, "MEMORY_TABLE", table)
    assert memory_here() == 80 * 1024
    monkeypatch.setattr(host_memory, "MEMORY_TABLE", tmp_path / "none")
    assert memory_here() > 2**20


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("place", ["pods/own", "pods", "."])
def test_a_container_has_less_memory_than_its_machine(version, place, monkeypatch, tmp_path):
    """The limit may be of its own group, of one above, or shown as the root's; cached files count as free."""
    (table := tmp_path / "cgroup").write_text(
        ["9:cpu:/\n4:memory:/pods/own\n", "0::/pods/own\n"][version - 1]
    )
    monkeypatch.setattr(host_memory, "GROUPS_TABLE", table)
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path)
    whole = memory_here()
    folder = tmp_path / ("memory" if version == 1 else "") / place
    folder.mkdir(parents=True, exist_ok=True)
    first, limit, used = [
        ("total_", "memory.limit_in_bytes", "memory.usage_in_bytes"), ("", "memory.max", "memory.current")
    ][version - 1]  # fmt: skip
    (folder / "memory.stat").write_text(f"anon 5\n{first}inactive_file 300\n{first}active_file 40\n")
    (folder / limit).write_text("9000\n")
    (folder / used).write_text("1000\n")
    assert memory_here() == 9000 - 1000 + 340
    (folder / used).write_text("10000\n")
    assert memory_here() == 0
    (folder / limit).write_text("max\n")
    assert memory_here() == pytest.approx(whole, rel=0.2)
