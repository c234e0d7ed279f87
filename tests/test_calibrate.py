"""task=calibrate: constants that are there are found, and what it writes is a cluster that plans use."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from llama_ssp.config import ClusterConf, Dtype, RunConf, Steps, TimesConf
from llama_ssp.config.presets import machines
from llama_ssp.distributed.comm import ALONE
from llama_ssp.errors import ModelError
from llama_ssp.models import loader, steps
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.placing.this_machine import machine_for
from llama_ssp.planner.speed import SUM_S, SUM_S_PER_RANK
from llama_ssp.tasks import calibrate
from llama_ssp.tasks.calibrate import FITTED, Case, cases, fitted, non_negative, predicted, shape
from tests.distributed.faults import Started
from tests.plans import cluster
from tests.warm import ROOT

TRUE = dict(layer_us=500.0, step_us=90.0, round_us=70.0, check_us=300.0, law_ns=20.0, accept_ns=9.0)


def cluster_with(name: str = "cpu", **known) -> ClusterConf:
    return replace(cluster(name), gb_s=10.0, times=TimesConf(flops_share=1.0, **known))


def made(times: dict[str, float], world: int, name: str = "cpu", **known) -> list[float]:
    true = cluster_with(name, bandwidth_share=0.8, **times, **known)
    return [predicted(case, machine_for(true), Dtype.bf16, world).round_s(case.k, 1.0) for case in cases()]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["cpu", "p4d"])
def test_constants_that_made_the_times_are_found(name, world):
    known = {"all_reduce_us": {2: 40.0}, "message_us": 120.0}
    found = fitted(cluster_with(name, **known), cases(), made(TRUE, world, name, **known), Dtype.bf16, world)
    assert found.bandwidth_share == pytest.approx(0.8, rel=0.01)
    assert {key: getattr(found, key) for key in FITTED} == pytest.approx(TRUE, rel=0.01)


def test_noise_moves_them_a_little():
    noise = np.random.default_rng(0).normal(1, 0.03, len(cases()))
    found = fitted(cluster_with(), cases(), list(np.array(made(TRUE, 1)) * noise), Dtype.bf16, 1)
    assert found.layer_us == pytest.approx(500, rel=0.1)
    assert found.bandwidth_share == pytest.approx(0.8, rel=0.2)


def test_compiled_steps_on_a_cpu_take_as_long_as_measured():
    """Of 1, 8 and 32 rows, within 35 %, by constants of eager steps."""
    text = (ROOT / "bench/results/plan_speed_compiled_epyc-2-cores_202611.md").read_text(encoding="utf-8")
    constants = yaml.safe_load(text.split("```")[1].removeprefix("yaml"))
    del constants["times"]["rows_cost"]  # was fitted then, and had no cost
    here = machine_for(ClusterConf(**constants | {"times": TimesConf(**constants["times"])}))
    lines = re.findall(r"^\| (\d+) \| (\d+)x(\d+), vocabulary (\d+) .* ([\d.]+) \| \S+ \|$", text, re.M)
    assert len(lines) >= 3 * 7
    for rows, *sizes, ms in lines:
        case = Case(shape(*map(int, sizes)), rows=int(rows), engine=Steps.compiled)
        planned = predicted(case, here, Dtype.bf16, 1).ms_per_token(0.0, 0)
        assert 1 / 1.35 < planned / float(ms) < 1.35, (rows, sizes)


def test_no_constant_is_negative():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative(matrix, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert non_negative(matrix, np.array([2.0, 3.0, 4.0])) == pytest.approx([1.0, 1.0])
    assert non_negative(matrix, np.array([-1.0, -2.0, -3.0])) == [0.0, 0.0]


@pytest.fixture
def turns() -> tuple[str, list[float]]:
    """The calls of two pieces of work in turn, three times, and their figures: how many calls there were."""
    calls: list[str] = []

    def work(name: str):
        calls.append(name)
        return float(len(calls))

    figures = calibrate.in_turn([lambda: work("a"), lambda: work("b")], 3)
    return "".join(calls), figures


def test_figures_are_taken_in_turn(turns: tuple[str, list[float]]):
    calls, _ = turns
    assert calls == "abababab"


def test_the_first_figures_are_dropped(turns: tuple[str, list[float]]):
    _, figures = turns
    assert figures == [3.0, 4.0]


LESS = dict(DEPTHS=(1, 2), VOCABULARIES=(300,), LOOKAHEADS=(0, 2), WIDTH=64, HEAD=8, WIDE=96, NEW=4)
LESS |= dict(STREAMED={"cpu": 2**20}, SIDE={"cpu": 256})


def less_of_everything(_rank: int = 0, put: Callable[..., None] = setattr) -> None:
    """So that it takes a moment, in this process or another one."""
    for name, value in LESS.items():
        put(calibrate, name, value)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    less_of_everything(put=monkeypatch.setattr)


def written_by_two(folder: Path, begun: Callable[..., None]) -> dict:
    """Returns the cluster that two ranks have written, each of which calls `begun` first."""
    started = Started(
        folder / "run", 2, "task=calibrate", "task.repeats=1", "model=tiny", "draft=tiny_draft", "out=null",
        f"task.folder={folder}", fault=begun,
    )  # fmt: skip
    answers = started.finish()
    assert [answer.code for answer in answers] == [0, 0], answers[0].err
    return yaml.safe_load((folder / "cluster" / "calibrated.yaml").read_text(encoding="utf-8"))


@pytest.mark.long
def test_two_ranks_measure_what_they_say_to_each_other(tmp_path):
    written = written_by_two(tmp_path, less_of_everything)
    assert written["gpus"] == 2
    assert written["times"]["all_reduce_us"][2] > 0 and written["times"]["message_us"] > 0


def on_two_nodes(rank: int) -> None:
    """As torchrun starts one rank on each of two nodes."""
    less_of_everything()
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": str(rank)}


@pytest.mark.long
def test_two_nodes_measure_the_network_between_them(tmp_path):
    """They are written as two nodes, and no sum over them as one of a node."""
    written = written_by_two(tmp_path, on_two_nodes)
    assert (written["nodes"], written["gpus"]) == (2, 1)
    assert written["between_us"] > 0 and written["between_gb_s"] > 0
    assert "all_reduce_us" not in written["times"] and written["times"]["message_us"] > 0


@pytest.mark.parametrize("of_node", [1, 4])
def test_the_network_that_made_the_sums_is_found(of_node):
    """A sum inside of a node is left as it is; what sums over all ranks take more is the network's."""
    latency_s, per_s, small, large = 100e-6, 3e9, 4096, 2**23
    world, inside_s = 2 * of_node, 30e-6 if of_node > 1 else 0.0
    share = 2 * (world - 1) / world
    in_node_s = inside_s or SUM_S + SUM_S_PER_RANK  # as the plan has it for two ranks
    more_s = 2e-3 if of_node > 1 else 0.0  # of a large sum inside of a node
    every_s = [latency_s + share * size / per_s for size in (small, large)]
    network_s = [
        calibrate.CALLS * (in_node_s + every_s[0]),
        calibrate.CALLS * inside_s,
        calibrate.LARGE_CALLS * (inside_s + more_s),
        calibrate.LARGE_CALLS * (in_node_s + more_s + every_s[1]),
    ]
    before = replace(cluster_with(), nodes=2, gpus=of_node)
    found = calibrate.with_network(before, network_s, small, large)
    assert found.between_us == pytest.approx(100, rel=0.01)
    assert found.between_gb_s == pytest.approx(3, rel=0.01)
    assert found.times.all_reduce_us == ({4: 30.0} if of_node > 1 else {})


def test_it_writes_a_cluster_that_plans_use(command, small, caplog):
    caplog.set_level("INFO")
    answer = command("task=calibrate", "task.repeats=1", "task.folder=mi ne", "out=null")
    assert answer.code == 0, answer.err
    assert "--config-dir 'mi ne' cluster=calibrated" in caplog.text
    os.rename("mi ne", "mine")
    summary = answer.document
    assert summary["plan"] is None, "plans are made of what it finds"
    written = yaml.safe_load(Path("mine/cluster/calibrated.yaml").read_text(encoding="utf-8"))
    assert written == summary["cluster"] | {"times": written["times"]} and written["gpu"] == "cpu"
    assert written["times"]["kernel_gb_s"] > 0
    assert written["times"]["kernel_tflops"] > 0
    assert (
        machine_for(ClusterConf(**written | {"times": TimesConf(**written["times"])})).times.bytes_per_s > 0
    )
    said = command("--config-dir", "mine", "task=plan", "cluster=calibrated", "out=null")
    assert said.code == 0, said.err
    assert said.document["cluster"]["constants_from"].startswith("task=calibrate, ")
    assert said.document["best"]["band"] == 0.25


def test_a_folder_that_cannot_be_written_is_refused(command, small):
    answer = command("task=calibrate", "task.repeats=1", "task.folder=/proc/none", "out=null")
    assert answer.code == 6 and "cannot write the cluster" in answer.errors[0] and len(answer.errors) == 1


@pytest.mark.parametrize("why", ["no kernels", "no compiler"])
def test_a_gpu_without_graphs_is_refused(why, small, monkeypatch):
    """Eager rounds would give constants that the plan takes for those of graphs."""

    def fails(*_):
        raise RuntimeError("it does not compile")

    if why == "no kernels":
        monkeypatch.setattr(loader, "has_kernels", lambda *_: False)
    else:
        monkeypatch.setattr(steps, "load_or_compile", fails)
    monkeypatch.setattr(calibrate, "device_of", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(calibrate, "describe", lambda _: "a GPU")
    player = calibrate.Player(RunConf(), ALONE, 4)
    with pytest.raises(ModelError, match="CUDA graphs, and steps run without them here; a GPU"):
        player.play(calibrate.cases()[0])


LAUNCH_S = 5e-6


def test_a_gpu_streams_bytes_not_launches() -> None:
    """On the fastest GPU that is known, each matrix takes three launches' time; 8 MiB took a third of one."""
    fastest = max(preset["gb_s"] for preset in machines().values()) * 1e9
    size = calibrate.SIDE["cuda"] ** 2 * TORCH_DTYPES[Dtype.bf16].itemsize
    assert size / fastest > 3 * LAUNCH_S > 2048**2 * 2 / fastest
    assert calibrate.STREAMED["cuda"] // size > 1  # several, more than a cache holds
