"""The plan of a run: where the draft goes, what is refused, and predicted beside measured."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from llama_ssp.config import (
    MAX_K,
    ClusterConf,
    Drafting,
    DraftSeat,
    Dtype,
    GenerateConf,
    PlacementConf,
    PlanningConf,
    RunConf,
    SpeculationConfig,
    Steps,
)
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import DistributedError
from llama_ssp.planner.advice import largest
from llama_ssp.planner.memory import rank_work, tensor_lines
from llama_ssp.planner.resolve import choose_placement
from llama_ssp.planner.run_plan import (
    Bytes,
    Prediction,
    RunMeasurement,
    compare_with_plan,
    counted,
    predict,
    request_of,
    require_fit,
)
from llama_ssp.planner.search import option, round_times, search
from llama_ssp.planner.workload import GIB, TARGET, Workload
from llama_ssp.report.tables import text_of
from llama_ssp.report.task_tables import plan_against_actual
from tests.plans import cluster, model

SLOTS = 1536 + 128


def run(**changes) -> RunConf:
    task = GenerateConf(name="generate", max_new_tokens=128, batch_size=1)
    roles = {
        "model": replace(model("65B"), dtype=Dtype.bf16),
        "draft": replace(model("7B"), dtype=Dtype.bf16),
    }
    return RunConf(**{**roles, "cluster": cluster("p4d"), "task": task, **changes})


def predicted(conf: RunConf, world: int, **what) -> Prediction:
    found = predict(conf, choose_placement(conf, world), slots=SLOTS, **what)
    assert found is not None
    return found


def test_the_request_is_the_runs_own():
    """One function makes it for every caller: models, formats, workload."""
    request = request_of(run(), slots=SLOTS)
    assert request.work == Workload(1, 1536, 128, k=4) and request.k_max == 16
    assert [role.dtype for role in request.roles] == [Dtype.bf16, Dtype.bf16]
    assert request_of(run(), rows=3, slots=SLOTS, caches=(2, 1)).work == Workload(
        3, 1536, 128, k=4, target_caches=2
    )
    assert request_of(run()).work.prompt_tokens == 512, "before prompts are read"
    assert request_of(run(), dtypes=[Dtype.int8, Dtype.fp16]).target.dtype is Dtype.int8
    assert request_of(run(), on_cpu=True).machine.gpu == "A100-40", "a named GPU takes precedence"
    assert request_of(run(cluster=ClusterConf()), on_cpu=True).machine.is_cpu


def test_auto_is_the_fastest_that_fits():
    """Also by the engine: eager steps take as long on few ranks as on many, so the draft is apart."""
    for how, words in (
        (Steps.compiled, "target 0-7, draft 0-7 (split)"),
        (Steps.eager, "target 0-6, draft 7 (own)"),
    ):
        asked = run(engine=how)
        place = choose_placement(asked, 8)
        assert place == search(request_of(asked), [8])[0].placement
        assert place.in_words() == words


@pytest.mark.parametrize(
    "conf", [PlacementConf(draft=DraftSeat.leader), PlacementConf(draft=DraftSeat.own, draft_degree=2)]
)
def test_what_was_asked_for_stays(conf):
    draft = choose_placement(run(placement=conf), 8).draft
    assert draft == ((0,) if conf.draft is DraftSeat.leader else (6, 7))


def test_one_rank_and_no_plan_have_nothing_to_choose():
    unknown = replace(cluster("p4d"), name="mine", gpu="RTX 4090", gb_s=None)
    assert choose_placement(run(cluster=unknown), 4).in_words() == "target 0-3, draft 0 (whole)"
    assert choose_placement(run(), 1).world == 1


def test_what_does_not_fit_is_refused_with_advice():
    conf = run(cluster=cluster("p4d", gpus=4), placement=PlacementConf(draft=DraftSeat.leader))
    with pytest.raises(DistributedError) as refused:
        require_fit(predicted(conf, 4), enforce=True)
    said = str(refused.value)
    assert "do not fit; rank 0 of target 0-3, draft 0 (whole)" in said
    assert "placement=sharded on 4 ranks" in said and "plan.enforce=false" in said and "\n" not in said


def test_a_refusal_can_be_waved_through(caplog):
    with caplog.at_level(logging.WARNING):
        require_fit(predicted(run(cluster=cluster("p4d", gpus=1)), 1), enforce=False)
    assert "it may not fit: rank 0" in caplog.text


def test_what_fits_is_not_talked_about(caplog):
    with caplog.at_level(logging.WARNING):
        require_fit(predicted(run(), 8), enforce=True)
        require_fit(None, enforce=True)
    assert caplog.text == ""


def test_the_measured_capacity_counts():
    """What the device has left when the run starts, not what its data sheet says."""
    conf = run(cluster=cluster("p4d", gib=None), model=model("7B"), draft=None)
    with pytest.raises(DistributedError, match=r"allowed 10\.00 GiB"):
        require_fit(predicted(conf, 1, capacity=10 * GIB), enforce=True)


def test_an_unknown_gpu_is_not_planned(caplog):
    conf = run(cluster=replace(cluster("p4d"), name="mine", gpu="RTX 4090", gb_s=None))
    with caplog.at_level(logging.INFO):
        assert predict(conf, choose_placement(conf, 2), slots=SLOTS) is None
    assert "not planned: the GPU's figures are not known" in caplog.text


def test_other_architectures_are_not_planned():
    conf = run(model=replace(model("65B"), family="gptj"))
    assert predict(conf, choose_placement(conf, 1), slots=SLOTS) is None


def test_predicted_beside_measured():
    prediction = predicted(run(), 8)
    _, ms = prediction.ms_per_token(1, 4, 0.7)
    said = counted(prediction.option.ranks[0])
    slow = RunMeasurement("speculative", prediction, 1, 4, 2 * ms, 0.7)
    half: Bytes = {name: size // 2 for name, size in said.items()}
    plan = compare_with_plan([slow, replace(slow, name="regular", k=0, ms_per_token=None)], [half])
    assert plan is not None and plan["verdict"] == "fits"
    assert plan["ways"][0]["ms_per_token"]["predicted_over_measured"] == pytest.approx(0.5)
    assert plan["ways"][1]["ms_per_token"]["measured"] is None
    assert plan["memory"][0]["device_bytes"]["predicted_over_measured"] == pytest.approx(2)
    table = plan_against_actual({"plan": plan})
    assert table is not None
    _, first, *rest = text_of([table])
    assert first.startswith("speculative, ms/token ") and first.endswith("0.50")
    assert rest[0].startswith("rank 0, weights and caches, MiB") and len(rest) == 4
    assert all(line.endswith("2.00") for line in rest)
    assert 0 < said["held_bytes"] < said["tensor_bytes"] < said["reserved_bytes"] < said["device_bytes"]
    assert said["device_bytes"] == prediction.option.ranks[0].total


def test_a_run_without_a_plan_has_nothing_beside_it():
    assert compare_with_plan([], []) is None
    assert compare_with_plan([RunMeasurement("regular", None, 1, 0, 1.0, None)], [{}]) is None


def test_adaptive_ways_are_predicted_at_their_best_k():
    prediction = predicted(run(), 8)
    request = replace(prediction.request, work=replace(prediction.request.work, rows=2))
    times = round_times(request, prediction.option.placement)
    best = times.best_k(0.9)
    assert prediction.ms_per_token(2, None, 0.9) == (best, times.ms_per_token(0.9, best))


def test_of_several_pairs_the_one_that_needs_most_counts():
    small, large = predicted(run(), 8), predicted(run(), 4)
    ways = [RunMeasurement(name, one, 1, 0, 1.0, None) for name, one in (("a", small), ("b", large))]
    fullest = large.option.ranks[0]
    plan = compare_with_plan(ways, [dict.fromkeys(counted(fullest))])
    assert plan is not None and plan["placement"] == large.option.placement.in_words()
    assert plan["memory"][0]["device_bytes"]["predicted"] == fullest.total


def test_caches_of_other_engines_are_counted():
    placement = predicted(run(), 8).option.placement
    one, three = (
        tensor_lines(rank_work(request.target, request.draft, placement, request.work, 0))
        for request in (request_of(run(), slots=SLOTS, caches=(n, 1)) for n in (1, 3))
    )
    cache, caches = (
        next(line.bytes for line in lines if (line.role, line.name) == (TARGET, "cache"))
        for lines in (one, three)
    )
    assert caches == 3 * cache
    assert sum(line.bytes for line in three) - sum(line.bytes for line in one) == 2 * cache


def test_adaptive_runs_are_planned_at_their_largest_k():
    conf = run(speculation=SpeculationConfig(adaptive=True, k=0, k_max=3), plan=PlanningConf(acceptance=0.95))
    assert predicted(conf, 8).option.k == 3


def test_text_drafts():
    conf = run(speculation=SpeculationConfig(drafter=Drafting.ngram, k=8), draft=None)
    found = predicted(conf, 8)
    assert found.request.text_drafts and found.option.times.draft == 0 and found.option.k == 8


def test_siblings_follow_from_k():
    """The plan takes the best K, not the configured one, and no K that a run refuses."""
    request = request_of(run(speculation=SpeculationConfig(k=4, siblings=8)), slots=SLOTS)
    assert request.k_max == MAX_K // 9
    place = resolve(PlacementConf(), 8, drafts=True)
    held = [counted(option(request, place, k).ranks[0])["held_bytes"] for k in (1, 7)]
    layers, heads, head_dim = 80, 8, 128
    assert held[1] - held[0] == 2 * layers * heads * head_dim * 2 * 6 * 8  # 6 drafts more, 8 siblings each
    chosen = option(request, place)
    assert largest(request, chosen).k <= MAX_K // 9
