"""task=calibrate: constants that are there are found, and what it writes is a cluster that plans use."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml

from llama_ssp.config import ClusterConf, Dtype, TimesConf
from llama_ssp.plan.machine import machine_of
from llama_ssp.tasks import calibrate, timing
from llama_ssp.tasks.calibrate import FITTED, UNITS, cases, fitted, non_negative, predicted
from tests.distributed.test_command import on_ranks
from tests.plans import cluster

TRUE = {
    "layer_us": 500.0,
    "step_us": 90.0,
    "round_us": 70.0,
    "check_us": 300.0,
    "law_ns": 20.0,
    "accept_ns": 9.0,
}


@pytest.mark.parametrize("world", [1, 2])
def test_constants_that_made_the_times_are_found(world):
    times = TimesConf(rows_cost={1: 1.0, 9: 1.5}, all_reduce_us={2: 40.0}, message_us=120.0, **TRUE)
    true = replace(cluster("cpu"), times=times)
    spent = [predicted(case, machine_of(true), Dtype.bf16, world).round_s(case.k) for case in cases()]
    found = fitted(true, spent, Dtype.bf16, world)
    for key in FITTED:
        assert found[key] / UNITS[key[-2:]] == pytest.approx(TRUE[key], rel=1e-6)


def test_noise_moves_them_a_little():
    true = replace(cluster("cpu"), times=TimesConf(rows_cost={1: 1.0, 9: 1.5}, **TRUE))
    noise = np.random.default_rng(0).normal(1, 0.03, len(cases()))
    spent = [
        predicted(case, machine_of(true), Dtype.bf16, 1).round_s(case.k) * factor
        for case, factor in zip(cases(), noise, strict=True)
    ]
    assert fitted(true, spent, Dtype.bf16, 1)["layer_us"] / 1e-6 == pytest.approx(500, rel=0.1)


def test_no_constant_is_negative():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative(matrix, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert non_negative(matrix, np.array([2.0, 3.0, 4.0])) == pytest.approx([1.0, 1.0])
    assert non_negative(matrix, np.array([-1.0, -2.0, -3.0])) == [0.0, 0.0]


def test_figures_are_taken_in_turn_and_the_first_is_dropped():
    said: list[str] = []

    def work(name: str):
        said.append(name)
        return float(len(said))

    found = timing.in_turn([lambda: work("a"), lambda: work("b")], 3)
    assert "".join(said) == "abababab"
    assert found == [3.0, 4.0]


LESS = {
    timing: {"STREAMED": {"cpu": 2**20}, "SIDE": 256},
    calibrate: {"NEW": 4, "DEPTHS": (1, 2), "VOCABULARIES": (300,), "LOOKAHEADS": (0, 2), "ROWS": (1, 3)},
}


@pytest.fixture
def small(monkeypatch):
    """Less of everything, so that it takes a moment."""
    for room, values in LESS.items():
        for name, value in values.items():
            monkeypatch.setattr(room, name, value)


def made_small(_rank: int) -> None:
    """The same, in a process of its own."""
    for room, values in LESS.items():
        for name, value in values.items():
            setattr(room, name, value)


@pytest.mark.slow
def test_two_ranks_measure_what_they_say_to_each_other(tmp_path):
    answers = on_ranks(
        tmp_path / "run", 2, "task=calibrate", "task.repeats=1", "model=tiny", "draft=tiny_draft", "out=null",
        f"task.folder={tmp_path}", fault=made_small,
    )  # fmt: skip
    assert [answer.code for answer in answers] == [0, 0], answers[0].err
    written = yaml.safe_load((tmp_path / "cluster" / "calibrated.yaml").read_text(encoding="utf-8"))
    assert written["gpus"] == 2
    assert written["times"]["all_reduce_us"][2] > 0 and written["times"]["message_us"] > 0


def test_it_writes_a_cluster_that_plans_use(command, small):
    answer = command(
        "task=calibrate", "task.repeats=1", "task.folder=mine", "task.cluster_name=this", "out=null"
    )
    assert answer.code == 0, answer.err
    summary = json.loads(answer.out.splitlines()[-1])
    with open("mine/cluster/this.yaml", encoding="utf-8") as file:
        written = yaml.safe_load(file)
    assert written == summary["cluster"] | {"times": written["times"]} and written["gpu"] == "cpu"
    assert (
        machine_of(ClusterConf(**{**written, "times": TimesConf(**written["times"])})).times.bytes_per_s > 0
    )
    said = command("--config-dir", "mine", "task=plan", "cluster=this", "out=null")
    assert said.code == 0, said.err
    plan = json.loads(said.out.splitlines()[-1])
    assert plan["cluster"]["constants_from"].startswith("task=calibrate, ")
    assert plan["best"]["band"] == 0.2


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("task.repeats=0", "task.repeats is out of range"),
        ("task.cluster_name=../up", "task.cluster_name is no name of a file"),
        ("task.folder=/proc/none", "cannot write the cluster"),
    ],
)
def test_refusals(command, small, word, said):
    answer = command("task=calibrate", "task.repeats=1", word, "out=null")
    assert answer.code in (2, 6) and said in answer.errors[0] and len(answer.errors) == 1
