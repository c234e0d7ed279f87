"""The plan of a run: where the draft goes, what is refused, and predicted beside measured."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from llama_ssp.config import (
    Drafting,
    DraftSeat,
    Dtype,
    PlacementConf,
    PlanningConf,
    RunConf,
    SpeculationConfig,
)
from llama_ssp.errors import DistributedError
from llama_ssp.planner.comparison import Memory, RunMeasurement, beside, counted, in_words
from llama_ssp.planner.memory import tensor_lines
from llama_ssp.planner.room import GIB
from llama_ssp.planner.run_plan import Prediction, asked_of_run, placed, predict, require_fit
from llama_ssp.planner.search import best_placement
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from tests.plans import cluster, model

WORK = Workload(rows=1, prompt_tokens=1536, new_tokens=128, k=4)
ROLES = (Role(TARGET, model("65B"), Dtype.bf16), Role(DRAFT, model("7B"), Dtype.bf16))


def run(**changes) -> RunConf:
    return RunConf(**{"model": ROLES[0].model, "draft": ROLES[1].model, "cluster": cluster("p4d"), **changes})


def test_auto_is_the_fastest_that_fits():
    asked = asked_of_run(run(), ROLES, WORK)
    place = placed(PlacementConf(), asked, 8, drafts=True)
    assert place == best_placement(asked, 8).placement
    assert place.in_words() == "target 0-7, draft 0-7 (split)"


@pytest.mark.parametrize(
    "conf", [PlacementConf(draft=DraftSeat.leader), PlacementConf(draft=DraftSeat.own, draft_degree=2)]
)
def test_what_was_asked_for_stays(conf):
    asked = asked_of_run(run(), ROLES, WORK)
    assert placed(conf, asked, 8, drafts=True).draft == ((0,) if conf.draft is DraftSeat.leader else (6, 7))


def test_one_rank_and_no_plan_have_nothing_to_choose():
    assert placed(PlacementConf(), None, 4, drafts=True).in_words() == "target 0-3, draft 0 (whole)"
    asked = asked_of_run(run(), ROLES, WORK)
    assert placed(PlacementConf(), asked, 1, drafts=True).world == 1


def test_what_does_not_fit_is_refused_with_advice():
    conf = run(cluster=cluster("p4d", gpus=4))
    asked = asked_of_run(conf, ROLES, WORK)
    prediction = predict(conf, asked, placed(PlacementConf(draft=DraftSeat.leader), asked, 4, drafts=True))
    with pytest.raises(DistributedError) as refused:
        require_fit(prediction, enforce=True)
    said = str(refused.value)
    assert "do not fit; rank 0 of target 0-3, draft 0 (whole)" in said
    assert "placement=sharded on 4 ranks" in said and "plan.enforce=false" in said and "\n" not in said


def test_a_refusal_can_be_waved_through(caplog):
    conf = run(cluster=cluster("p4d", gpus=1))
    asked = asked_of_run(conf, ROLES, WORK)
    with caplog.at_level(logging.WARNING):
        require_fit(predict(conf, asked, placed(PlacementConf(), asked, 1, drafts=True)), enforce=False)
    assert "it may not fit: rank 0" in caplog.text


def test_what_fits_is_not_talked_about(caplog):
    asked = asked_of_run(run(), ROLES, WORK)
    with caplog.at_level(logging.WARNING):
        require_fit(predict(run(), asked, placed(PlacementConf(), asked, 8, drafts=True)), enforce=True)
        require_fit(None, enforce=True)
    assert caplog.text == ""


def test_the_measured_capacity_counts():
    """What the device has left when the run starts, not what its data sheet says."""
    conf, alone = run(cluster=cluster("p4d", gib=None)), (Role(TARGET, model("7B"), Dtype.bf16), None)
    asked = asked_of_run(conf, alone, WORK, capacity=10 * GIB)
    prediction = predict(conf, asked, placed(PlacementConf(), asked, 1, drafts=False))
    with pytest.raises(DistributedError, match=r"allowed 10\.00 GiB"):
        require_fit(prediction, enforce=True)


def test_an_unknown_gpu_is_not_planned(caplog):
    conf = run(cluster=replace(cluster("p4d"), name="mine", gpu="RTX 4090", gb_s=None))
    with caplog.at_level(logging.INFO):
        assert asked_of_run(conf, ROLES, WORK) is None
    assert "not planned: the GPU's figures are not known" in caplog.text
    assert predict(conf, None, placed(PlacementConf(), None, 2, drafts=True)) is None


def prediction_of(conf: RunConf, world: int = 8) -> Prediction:
    asked = asked_of_run(conf, ROLES, WORK)
    found = predict(conf, asked, placed(PlacementConf(), asked, world, drafts=True))
    assert found is not None
    return found


def test_predicted_beside_measured():
    prediction = prediction_of(run())
    pace, bill = prediction.pace(1), prediction.option.bills[0]
    said = counted(bill)
    slow = RunMeasurement("speculative", prediction, 1, 4, 2 * pace.ms_per_token(0.7, 4), 0.7)
    half = Memory(0, {name: size // 2 for name, size in said.items()})
    plan = beside([slow, replace(slow, name="regular", k=0, ms_per_token=None)], [half])
    assert plan is not None and plan["verdict"] == "fits"
    assert plan["ways"][0]["ms_per_token"]["predicted_over_measured"] == pytest.approx(0.5)
    assert plan["ways"][1]["ms_per_token"]["measured"] is None
    assert plan["memory"][0]["device_bytes"]["predicted_over_measured"] == pytest.approx(2)
    first, last = in_words(plan)
    assert first.startswith("plan against actual: speculative, ms/token ") and first.endswith("(0.50x)")
    assert "rank 0, weights and caches" in last and last.count("(2.00x)") == 4
    assert 0 < said["held_bytes"] < said["tensor_bytes"] < said["reserved_bytes"] < said["device_bytes"]
    assert said["device_bytes"] == bill.total


def test_a_run_without_a_plan_has_nothing_beside_it():
    assert beside([], []) is None
    assert beside([RunMeasurement("regular", None, 1, 0, 1.0, None)], [Memory(0, {})]) is None


def test_adaptive_ways_are_predicted_at_their_best_k_and_counted_rounds_as_they_were():
    prediction = prediction_of(run())
    pace = prediction.pace(2)
    k, ms = RunMeasurement("adaptive", prediction, 2, None, 1.0, 0.9).predicted(prediction)
    assert (k, ms) == (pace.best_k(0.9), pace.ms_per_token(0.9, pace.best_k(0.9)))
    _, by_round = RunMeasurement("agreeing", prediction, 2, 8, 1.0, None, tokens_per_round=5.0).predicted(
        prediction
    )
    assert by_round == pytest.approx(1000 * pace.round_s(8, 0.7) / 5)


def test_of_several_pairs_the_one_that_needs_most_counts():
    small, large = prediction_of(run()), prediction_of(run(), 4)
    ways = [RunMeasurement(name, one, 1, 0, 1.0, None) for name, one in (("a", small), ("b", large))]
    plan = beside(ways, [Memory(0, dict.fromkeys(counted(large.option.bills[0])))])
    assert plan is not None and plan["placement"] == large.option.placement.in_words()
    assert plan["memory"][0]["device_bytes"]["predicted"] == large.option.bills[0].total


def test_caches_of_other_engines_are_billed():
    one, three = (
        tensor_lines(*ROLES, prediction_of(run()).option.placement, replace(WORK, target_caches=n), 0)
        for n in (1, 3)
    )
    cache, caches = (
        next(line.bytes for line in lines if (line.role, line.name) == (TARGET, "cache"))
        for lines in (one, three)
    )
    assert caches == 3 * cache
    assert sum(line.bytes for line in three) - sum(line.bytes for line in one) == 2 * cache


def test_adaptive_runs_are_billed_at_their_largest_k():
    conf = run(speculation=SpeculationConfig(adaptive=True, k=0, k_max=3), plan=PlanningConf(acceptance=0.95))
    asked = asked_of_run(conf, ROLES, WORK)
    prediction = predict(conf, asked, placed(PlacementConf(), asked, 8, drafts=True))
    assert prediction is not None and prediction.option.k == 3


def test_text_drafts():
    conf = run(speculation=SpeculationConfig(drafter=Drafting.ngram, k=8), draft=None)
    asked = asked_of_run(conf, (ROLES[0], None), WORK)
    assert asked is not None and asked.text_drafts
    place = placed(PlacementConf(), asked, 8, drafts=False)
    assert predict(conf, asked, place).option.pace.draft == 0
