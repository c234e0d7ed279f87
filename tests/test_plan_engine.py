"""The plan's times are those of the engine that will run, and it says where steps run eagerly."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llama_ssp.config import DraftSeat, Dtype, PlacementConf, RunConf, Splitting, Steps
from llama_ssp.distributed.placement import resolve
from llama_ssp.planner.engine import as_run, launching_s, tokens_generated, why_eager
from llama_ssp.planner.fit import LIBRARIES, OUTPUTS, RankMemory
from llama_ssp.planner.plan import make_plan
from llama_ssp.planner.search import PlanRequest, placements
from llama_ssp.planner.speed import forward_s, pass_cost
from llama_ssp.planner.table import drawing
from llama_ssp.planner.workload import MIB, TARGET, Role
from llama_ssp.report.tables import text_of
from tests.conftest import Command
from tests.plans import machine, model, request

H100, CPU = machine("dgx_h100"), machine("cpu", gib=64.0)
ENOUGH = 10**6  # tokens for which compiling pays


@pytest.mark.parametrize(
    ("engine", "tokens", "name", "dtype", "splitting", "on_cpu", "reason"),
    [
        (Steps.compiled, 0, "7B", Dtype.bf16, Splitting.tensor, False, None),
        (Steps.auto, 0, "7B", Dtype.bf16, Splitting.tensor, False, None),
        (Steps.auto, 0, "7B", Dtype.int8, Splitting.tensor, False, None),
        (Steps.compiled, 0, "7B", Dtype.int8, Splitting.tensor, True, None),
        (Steps.auto, ENOUGH, "7B", Dtype.bf16, Splitting.tensor, True, None),
        (Steps.eager, ENOUGH, "7B", Dtype.bf16, Splitting.tensor, False, "engine=eager"),
        (Steps.compiled, ENOUGH, "7B", Dtype.bf16, Splitting.layers, False, "placement.splitting=layers"),
        (Steps.compiled, ENOUGH, "7B", Dtype.bf16, Splitting.deepspeed, False, "deepspeed"),
        (Steps.compiled, ENOUGH, "7B", Dtype.nf4, Splitting.tensor, False, "not in nf4"),
        (Steps.compiled, ENOUGH, "other", Dtype.bf16, Splitting.tensor, False, "other has no row"),
        (Steps.auto, 1, "7B", Dtype.bf16, Splitting.tensor, True, "1 tokens save less than compiling"),
    ],
)  # fmt: skip
def test_why_steps_run_eagerly(
    engine: Steps,
    tokens: int,
    name: str,
    dtype: Dtype,
    splitting: Splitting,
    on_cpu: bool,
    reason: str | None,
) -> None:
    conf = replace(model("7B"), family="other") if name == "other" else model(name)
    found = why_eager(engine, tokens, conf, dtype, splitting, on_cpu, 1)
    assert found is None if reason is None else reason in str(found)


def test_graphs_over_several_gpus_have_to_be_asked_for() -> None:
    """Not those of a draft with a GPU of its own, and not programs on CPUs."""
    auto = replace(request("30B", "7B", machine("dgx_h100", gpus=3)), engine=Steps.auto)
    apart = resolve(PlacementConf(draft=DraftSeat.own), 3, drafts=True)
    assert auto.draft is not None and auto.why_eager(auto.draft, apart) is None
    assert "engine=compiled" in str(auto.why_eager(auto.target, apart))
    assert replace(auto, engine=Steps.compiled).why_eager(auto.target, apart) is None
    assert why_eager(Steps.auto, ENOUGH, model("7B"), Dtype.bf16, Splitting.tensor, True, 2) is None


@pytest.mark.parametrize(("size", "compiled"), [(256, True), (258, False), (127, False)])
def test_heads_that_the_kernel_of_a_cpu_does_not_take(size: int, compiled: bool) -> None:
    """A GPU's kernel takes others."""
    conf = replace(model("7B"), head_dim=size)
    for on_cpu in (True, False):
        found = why_eager(Steps.compiled, 0, conf, Dtype.bf16, Splitting.tensor, on_cpu, 1)
        assert (found is None) is (compiled or not on_cpu)


def on_gpu(engine: Steps, ranks: int = 8, **changes: object) -> PlanRequest:
    return replace(request("30B", None, machine("dgx_h100", gpus=ranks)), engine=engine, **changes)


def test_eager_steps_on_gpus_take_what_the_host_takes() -> None:
    """30B over 8: a graph reads its bytes in a few ms; eagerly 2,715 launches and 122 sums take 62 ms."""
    graphs, eager = (make_plan(on_gpu(how)).options for how in (Steps.compiled, Steps.eager))
    by_world = [{one.placement.world: one.regular_ms for one in each} for each in (graphs, eager)]
    assert by_world[0][8] < 8 < 60 < by_world[1][8] < 65
    bands = {how: make_plan(on_gpu(how)).band for how in Steps}
    assert bands[Steps.eager] > bands[Steps.compiled] == bands[Steps.auto]  # which takes one GPU, with graphs
    assert by_world[1][1] == pytest.approx(max(by_world[0][1], 59.7), rel=0.01)


def test_a_long_pass_is_no_slower_eagerly() -> None:
    """Its arithmetic takes longer than its launches."""
    cost = pass_cost(Role(TARGET, model("30B"), Dtype.bf16), 1)
    long = forward_s(cost, H100.times, 1, 4096, 0)
    assert long > launching_s(cost)
    assert as_run(long, cost, H100.times, True, False) == long


def test_compiled_steps_on_a_cpu_take_less_than_its_constants_say() -> None:
    """Which are of eager steps; never less than the bytes."""
    cost = pass_cost(Role(TARGET, model("7B"), Dtype.bf16), 1)
    eager = forward_s(cost, CPU.times, 1, 1, 64)
    assert as_run(eager, cost, CPU.times, True, True) == eager
    compiled = as_run(eager, cost, CPU.times, False, True)
    assert cost.weights / CPU.times.bytes_per_s <= compiled < eager
    assert as_run(1e-3, cost, CPU.times, False, True) == 1e-3


def test_the_plan_says_which_steps_run_eagerly() -> None:
    said = "steps run eagerly: model, engine=eager"
    assert said in "\n".join(text_of(drawing(make_plan(on_gpu(Steps.eager)))))
    graphs, auto = make_plan(on_gpu(Steps.compiled)), make_plan(on_gpu(Steps.auto))
    assert auto.chosen.placement.world == 1 and not auto.eager
    assert "over several GPUs steps are planned eager: engine=compiled" in "\n".join(text_of(drawing(auto)))
    drawn = "\n".join(text_of(drawing(graphs)))
    assert "eager" not in drawn and graphs.document()["best"]["eager_steps"] == {}


def test_of_a_target_by_layers_the_draft_is_compiled() -> None:
    """Its graphs are on its GPU, the first."""
    two = request("30B", "7B", machine("dgx_h100", gpus=2))
    layers = resolve(PlacementConf(splitting=Splitting.layers), 1, drafts=True)
    assert two.why_eager(two.target, layers) == "placement.splitting=layers"
    assert two.draft is not None and two.why_eager(two.draft, layers) is None
    first, second = two.memories(layers, two.work)
    assert graphs_of(first) == (2, {"draft": 3 * 32000 * 2}) and graphs_of(second) == (0, {})


def graphs_of(memory: RankMemory) -> tuple[float, dict[str, int]]:
    """How many graphs of 25 MiB are counted, and what those of each role keep."""
    constant = sum(
        line.bytes for line in memory.lines if line.name.endswith("CUDA graphs") and line.role == LIBRARIES
    )
    return constant / (25 * MIB), {line.role: line.bytes for line in memory.lines if line.name == OUTPUTS}


@pytest.mark.parametrize(
    ("count", "target_tokens", "draft_tokens", "work"),
    [
        (7, 15, 3, {"k": 4}),
        (19, 156, 3, {"k": 16}),  # the target's 17 tokens are padded to 20
        (16, 105, 3, {"k": 4, "siblings": 2}),
        (37, 136 + 20 + 24 + 28 + 32 + 40, 136, {"k": 4, "rows": 8}),
        (14, 30, 6, {"k": 4, "target_caches": 2, "draft_caches": 2}),
        (36 + 36, 3360, 3360, {"k": 64, "rows": 1000}),  # no graph has more than 512 tokens
    ],
)
def test_graphs_are_counted(count: int, target_tokens: int, draft_tokens: int, work: dict[str, int]) -> None:
    """One for each number of tokens of a step in each cache, with its logits, as `prepare` captures them."""
    on = request("7B", "7B", machine("p4d", gpus=1), **work)
    (place,) = placements(1, True)
    (memory,) = on.memories(place, on.work)
    kept = {"model": target_tokens * 32000 * 2, "draft": draft_tokens * 32000 * 2}
    assert graphs_of(memory) == (count, kept)
    auto, eager = (replace(on, engine=engine) for engine in (Steps.auto, Steps.eager))
    assert graphs_of(auto.memories(place, on.work)[0]) == (count, kept)
    assert graphs_of(eager.memories(place, on.work)[0]) == (0, {})
    on_cpu = replace(on, machine=CPU)
    assert graphs_of(on_cpu.memories(place, on.work)[0]) == (0, {})


def test_a_head_has_no_graphs_and_the_target_keeps_what_it_reads() -> None:
    on = request("7B", "7B", machine("p4d", gpus=1))
    assert on.draft is not None
    head = replace(on.draft, model=replace(on.draft.model, head_inputs=3 * 4096, head_vocab=32000))
    (place,) = placements(1, True)
    (memory,) = replace(on, draft=head).memories(place, on.work)
    assert graphs_of(memory) == (5, {"model": 15 * (32000 + 3 * 4096) * 2})


def test_the_command_plans_with_the_runs_engine(command: Command) -> None:
    run = ("task=plan", "cluster=h200x8", "cluster.gpus=1", "model=7B", "draft=none", "output=json")
    graphs, eager = (json.loads(command(*run, f"engine={how}").out) for how in ("compiled", "eager"))
    assert eager["best"]["ms_per_token"] > 1.5 * graphs["best"]["ms_per_token"]
    assert eager["best"]["eager_steps"] == {"model": "engine=eager"}


def test_what_a_task_generates() -> None:
    run = RunConf(model=model("7B"))
    run.task.max_new_tokens = 64  # type: ignore[attr-defined]
    assert tokens_generated(run) == 64
