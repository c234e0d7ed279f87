"""task=plan as a command, and the plan of a run: what is refused, and predicted beside measured."""

import io
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console as rich_screen
from rich.table import Table as RichTable

from llama_ssp.config import Dtype, RunConf
from llama_ssp.config.compose import composed
from llama_ssp.distributed.placement import Placement
from llama_ssp.errors import DistributedError
from llama_ssp.models.checkpoint import SHIPPED_FOLDER
from llama_ssp.placing import prediction as predicting
from llama_ssp.placing.decision import decide
from llama_ssp.placing.prediction import Prediction, RunMeasurement, compare_with_plan, predict, require_fit
from llama_ssp.placing.request import Known, PairFiles, request_of
from llama_ssp.planner.search import round_times
from llama_ssp.planner.table import drawing
from llama_ssp.planner.workload import GIB, Workload
from llama_ssp.report.tables import fitted, text_of
from llama_ssp.report.task_tables import plan_against_actual
from llama_ssp.tasks import plan as planning
from tests import checkpoints
from tests.checkpoints import renumber
from tests.conftest import Answer, Command, Saved

PAIR = ("task=plan", "model=65B", "draft=7B", "cluster=p4d", "engine=compiled", "out=null")
TARGET = ("task=plan", "model=7B", "draft=none", "cluster=p4d", "out=null")
TWO_GPUS = ("task=plan", "model=demo", "cluster=p4d", "cluster.gpus=2", "out=null")
HEAD = ("model=demo", "draft=demo_head", "cluster.gpus=2")


def document(answer: Answer) -> dict[str, Any]:
    assert answer.code == 0, answer.err
    return answer.document


@pytest.fixture
def planned(once: Callable[..., Answer]) -> dict[str, Any]:
    """The document of a plan that fits."""
    return document(once(*PAIR))


@pytest.fixture
def said(once: Callable[..., Answer]) -> str:
    """The text of a plan that fits."""
    return once(*PAIR).out


def test_a_plan_that_fits_says_so(planned: dict[str, Any]) -> None:
    assert planned["task"] == "plan" and planned["status"] == "done" and planned["verdict"] == "fits"


def test_a_plan_has_the_memory_of_each_gpu(planned: dict[str, Any]) -> None:
    assert [gpu["rank"] for gpu in planned["per_gpu"]] == list(range(8))
    for gpu in planned["per_gpu"]:
        assert gpu["total_bytes"] == sum(line["bytes"] for line in gpu["lines"].values()), gpu["rank"]
        assert gpu["capacity_bytes"] - gpu["total_bytes"] == gpu["margin_bytes"] > 0, gpu["rank"]


def test_a_plan_says_how_it_knows_each_size(planned: dict[str, Any]) -> None:
    for gpu in planned["per_gpu"]:
        assert {line["kind"] for line in gpu["lines"].values()} <= {"exact", "bound", "constant"}
        constants = [line for line in gpu["lines"].values() if line["kind"] == "constant"]
        assert all(line["source"] for line in constants), gpu["rank"]


def test_a_plan_says_the_models_licences(said: str) -> None:
    assert "licences: 65B and 7B: LLaMA, for non-commercial research alone" in said.splitlines()


def test_the_best_placement_comes_first(planned: dict[str, Any]) -> None:
    best, first = planned["best"], planned["placements"][0]
    assert best["placement"] == "target 0-7, draft 0-7 (split)" == first["placement"]
    assert best["ms_per_token"] == first["ms_per_token"]
    assert len(planned["placements"]) == 71


def test_the_speed_up_is_over_regular_sampling(planned: dict[str, Any]) -> None:
    best = planned["best"]
    assert best["speedup"] == pytest.approx(best["ms_per_token_regular"] / best["ms_per_token"])


def test_a_plan_has_the_speed_by_acceptance(planned: dict[str, Any]) -> None:
    assert [row["acceptance"] for row in planned["by_acceptance"]] == [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    assert 0 < planned["break_even_acceptance"] < 0.8


def test_a_plan_has_the_largest_context(planned: dict[str, Any]) -> None:
    assert planned["largest"]["context_tokens"] == 2048


def test_without_a_terminal_a_plan_has_no_colours(said: str) -> None:
    assert "\x1b[" not in said


def test_the_text_of_a_plan_begins_with_what_is_planned(said: str) -> None:
    assert "65B bf16 (65.3B) + 7B bf16 (6.74B) on p4d: 8 x A100-40, 39.4 GiB each, NVLink3" in said
    assert "target 0-7, draft 0-7 (split)" in said and "GPU 0" in said


def test_the_text_of_a_plan_ends_with_its_verdict(said: str) -> None:
    assert "It fits, target 0-7" in said and "drafting does not pay" in said
    assert "fewest GPUs that it fits on: 4 (target 0-3, draft 0-3 (split))" in said


def test_a_plan_is_made_where_nothing_can_be_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning; a place that the user names is needed."""
    monkeypatch.chdir(tmp_path)
    Path("outputs").write_text("a file in the folder's place")
    answer = command(*PAIR[:-1])
    assert answer.code == 0 and "It fits, target 0-7" in answer.out
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("the plan is not kept: cannot write the run folder: ")
    assert document(command(*PAIR[:-1], "output=json"))["run_folder"] is None

    Path("mine").write_text("")
    assert command(*PAIR[:-1], "out=mine").code == 6


@pytest.mark.parametrize("width", [40, 60])
def test_a_plan_is_readable_on_a_narrow_terminal(width: int, planned: dict[str, Any]) -> None:
    """No figure is cut, and none is missing."""
    plan = planning.plan("65B", "7B", cluster="p4d", overrides=["engine=compiled"])
    screen = rich_screen(file=io.StringIO(), width=width, color_system=None, _environ={})
    for item in drawing(plan, width):
        screen.print(fitted(item, width) if isinstance(item, RichTable) else item)
    assert isinstance(screen.file, io.StringIO)
    said = screen.file.getvalue()
    assert "…" not in said and "placement" in said
    words = {*said.split()}
    for row in planned["by_acceptance"]:
        assert {f"{row['acceptance']:g}", f"{row['ms_per_token']:.2f}", f"{row['speedup']:.2f}x"} <= words


def test_a_plan_in_json_is_one_line(command: Command) -> None:
    assert len(command(*PAIR, "output=json").out.splitlines()) == 1


def test_the_text_where_it_does_not_fit(command: Command) -> None:
    """What is lacking and what would help come last; how fast it would be is left out."""
    answer = command(*PAIR, "cluster.gpus=2")
    said, plan = answer.out.splitlines(), document(answer)
    assert said[-1].startswith("It does not fit: 69.8 GiB needed where there are 39.4 (target 0,1, draft 0,1")
    assert said[-1].endswith("would make it fit.") and "model.dtype=int8 draft.dtype=int8" in said[-1]
    assert not any(line.startswith(("acceptance ", "regular ", "times ")) for line in said)
    speeds = {name for name in plan["best"] if name.endswith("_ms") or name.startswith(("ms_", "speedup"))}
    assert len(speeds) == 6 and all(plan["best"][name] is None for name in speeds)
    assert {(one["ms_per_token"], one["speedup"]) for one in plan["placements"]} == {(None, None)}
    assert plan["by_acceptance"] == [] and plan["break_even_acceptance"] is None


def test_the_text_of_several_nodes(command: Command) -> None:
    """What the network costs is said; of one node nothing."""
    said = command(*PAIR, "cluster.gpus=2", "cluster.nodes=2").out
    assert "on p4d: 4 x A100-40" in said and "on 2 nodes" in said
    assert "between nodes: 50 us more for each all-reduce, 12 GB/s" in said
    assert "each pass of the target crosses the network 162 times" in said
    assert "between nodes" not in command(*PAIR, "cluster.gpus=4").out


def test_the_text_of_a_cpu(command: Command) -> None:
    said = command("task=plan", "cluster.gpu=cpu", "out=null").out
    assert "\nCPU 0 " in said and "GPU" not in said.partition("\n{")[0]
    assert "a run measures this machine when it ends, and llama-ssp calibrate does so more exactly" in said


def test_one_placement(command: Command) -> None:
    leader = document(command(*PAIR, "placement=leader"))
    (only,) = leader["placements"]
    assert only["placement"] == "target 0-7, draft 0 (whole)" and only["overrides"] == "placement=leader"
    layers = document(command(*PAIR, "placement=layers"))  # one process, one GPU at a time
    best = layers["best"]
    assert best["placement"] == "target by layers, draft on the first"
    assert best["overrides"] == "placement=layers" and layers["verdict"] == "fits"
    assert best["speedup"] > 1, "over regular sampling by layers, as that is what was asked for"
    assert best["ms_per_token_regular"] > leader["best"]["ms_per_token_regular"]
    assert best["ms_per_token"] > 1.5 * leader["best"]["ms_per_token"]


@pytest.mark.parametrize(
    ("words", "k"),
    [(TARGET, 0), ((*PAIR, "speculation=none"), 0), ((*TARGET, "speculation=ngram"), 8)],
    ids=["draft=none", "speculation=none", "ngram"],
)
def test_without_a_draft_model(words: tuple[str, ...], k: int, command: Command) -> None:
    plan = document(command(*words))
    assert plan["best"]["k"] == k and plan["best"]["draft_step_ms"] == 0
    assert (plan["best"]["speedup"] == 1) == (plan["by_acceptance"] == []) == (k == 0)


def test_a_draft_of_another_tokenizer_is_planned_on_the_leader(command: Command, tmp_path: Path) -> None:
    other = f"draft={renumber(SHIPPED_FOLDER / 'demo_draft', tmp_path / 'other', tokens=600)}"
    refused = command(*TWO_GPUS, other, "placement=own")
    assert refused.code == 2 and "another tokenizer is on the leader, whole" in refused.errors[0]
    plan = document(command(*TWO_GPUS, other))
    assert plan["vocabulary"]["bridge"] and {one["ranks"] for one in plan["placements"]} == {1, 2}
    assert {one["overrides"] for one in plan["placements"]} == {"placement=leader"}


def test_it_is_kept(command: Command) -> None:
    plan = document(command(*PAIR, "out=outputs", "task.batch_size=8", "task.prompt_tokens=1000"))
    folder = Path(plan["run_folder"])
    assert json.loads((folder / "summary.json").read_text()) == plan
    assert yaml.safe_load((folder / "config.yaml").read_text())["cluster"]["name"] == "p4d"
    k = plan["best"]["k"]
    assert plan["workload"] == {
        "rows": 8, "prompt_tokens": 1000, "new_tokens": 128, "k": k, "prefill_chunk": 2048, "acceptance": 0.8,
        "acceptance_from": None,
    }  # fmt: skip


@pytest.mark.parametrize(("gib", "code", "verdict"), [(39, 0, "fits"), (1, 1, "does_not_fit")])
def test_require_fit_is_for_scripts(command: Command, gib: int, code: int, verdict: str) -> None:
    answer = command(*TARGET, "cluster.gpus=1", f"cluster.gib={gib}", "task.require_fit=true")
    assert answer.code == code and answer.errors == []
    assert answer.document["verdict"] == verdict
    assert command(*TARGET, "cluster.gpus=1", f"cluster.gib={gib}").code == 0


def test_a_plan_fits_only_if_its_last_rank_does(command: Command) -> None:
    """The draft is larger than the target, on a GPU of its own; the target's GPU has room."""
    pair = ("task=plan", "model=7B", "draft=13B", "placement=own", "out=null")
    plan = document(command(*pair, "cluster=p4d", "cluster.gpus=2", "cluster.gib=20"))
    assert [gpu["verdict"] for gpu in plan["per_gpu"]] == ["fits", "does_not_fit"]
    assert plan["verdict"] == plan["placements"][0]["verdict"] == "does_not_fit"


def test_only_config_json_is_read(command: Command, saved: Saved, tmp_path: Path) -> None:
    """Of a preset not even that need be here; but a folder that contradicts it is refused."""
    shutil.copy(saved.whole / "config.json", tmp_path)
    short = ("task.prompt_tokens=32", "task.max_new_tokens=32", "engine=eager")
    whole, bare = (document(command(*TARGET, f"model={path}", *short)) for path in (saved.whole, tmp_path))
    assert whole["per_gpu"] == bare["per_gpu"] and whole["best"]["eager_steps"] == {"model": "engine=eager"}
    assert document(command(*PAIR, "model.path=/no/such/folder"))["verdict"] == "fits"
    answer = command(*PAIR, f"model.path={saved.whole}")
    assert answer.code == 4 and "the checkpoint is not a 65B" in answer.errors[0]


REFUSED = [
    (["cluster=p5d"], 2, "there is no cluster=p5d"),
    (["cluster=local", "cluster.gpu=H900"], 2, "the GPU's figures are not known"),
    (["cluster.gpu=H200"], 2, "not that cluster's"),
    (["task.prompt_tokens=2000"], 2, "context of 2048 tokens, prompt included"),
    (["placement.target_ranks=[0,9]"], 5, "placement.target_ranks does not fit the ranks"),
    (["placement=deepspeed"], 5, "what DeepSpeed holds is not planned"),
    (["placement=sharded", "placement.draft_degree=9"], 5, "exceeds the target's ranks"),
    (["cluster.nodes=9", "placement=sharded"], 5, "heads cannot be split over the ranks"),
    (["model=nobody/nothing"], 4, "config.json is not at hand"),
    (["nodes=[1,1]"], 2, "nodes is gone since 0.2; a plan has the fewest GPUs"),
    (["nodes=1,2"], 2, "nodes is gone since 0.2; a plan has the fewest GPUs that hold the pair"),
    ([*HEAD, "placement=layers"], 2, "a head drafts only for a target that is split by tensors"),
    ([*HEAD, "placement=own"], 2, "it is on the leader"),
    (["speculation.overlap=ahead", "placement=leader"], 2, "ranks of its own only"),
]


@pytest.mark.few(8)
@pytest.mark.parametrize(("words", "code", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
def test_refused_in_one_line(command: Command, words: list[str], code: int, said: str) -> None:
    names = {word.partition("=")[0] for word in words}
    answer = command(*(word for word in PAIR if word.partition("=")[0] not in names), *words)
    assert answer.code == code and said in answer.errors[0]
    assert len(answer.errors) == 1 and answer.out == ""


@pytest.mark.parametrize(("world", "rank", "code"), [("4", "0", 5), ("8", "3", 0)])
def test_under_torchrun(
    world: str, rank: str, code: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks must be the cluster's, and those but the first say and keep nothing."""
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("RANK", rank)
    answer = command(*PAIR, "out=outputs")
    assert (answer.code, answer.out) == (code, "") and not Path("outputs").exists()
    assert code == 0 or "the number of ranks is not the cluster's" in answer.errors[0]


SLOTS = 1536 + 128
UNKNOWN = ("cluster=local", "cluster.gpu=H900", "cluster.gpus=8")


def run(*words: str) -> RunConf:
    task = ("task=generate", "task.max_new_tokens=128", "task.batch_size=1")
    return composed([*task, "cluster=p4d", "model=65B", "draft=7B", *words])


def place_of(conf: RunConf, world: int) -> Placement:
    _, decision = decide(PairFiles(conf, None, None), [world], least_k=1)
    return decision.placement.value


def predicted(conf: RunConf, world: int, **what: Any) -> Prediction:
    found = predict(conf, place_of(conf, world), Known(slots=SLOTS, **what))
    assert found is not None
    return found


def test_the_request_is_the_runs_own() -> None:
    """One function makes it for every caller: models, formats, workload."""
    request = request_of(run(), Known(slots=SLOTS))
    assert request.work == Workload(rows=1, prompt_tokens=1536, new_tokens=128, k=4, prefill_chunk=2048)
    assert request.k_max == 16
    assert [role.dtype for role in request.roles] == [Dtype.bf16, Dtype.bf16]
    other = request_of(run(), Known(rows=3, slots=SLOTS, caches=(2, 1)))
    assert other.work == replace(request.work, rows=3, target_caches=2)
    assert request_of(run()).work.prompt_tokens == 512, "before prompts are read"
    assert (
        request_of(run(), Known(formats={"model": Dtype.int8, "draft": Dtype.fp16})).target.dtype
        is Dtype.int8
    )
    assert request_of(run(), Known(on_cpu=True)).machine.gpu == "A100-40", "a named GPU takes precedence"
    on_cpu = request_of(run("cluster=local"), Known(on_cpu=True))
    assert on_cpu.machine.is_cpu and on_cpu.work.prefill_chunk == 512
    given = request_of(run("task.prefill_chunk=64"))
    assert given.work.prefill_chunk == 64 and request.least_chunk == 512 and given.least_chunk is None


@pytest.mark.parametrize(
    ("words", "world", "place"),
    [
        pytest.param(["engine=compiled"], 8, "target 0-7, draft 0-7 (split)", id="compiled"),
        # Eager steps take as long on few ranks as on many, so the draft is apart.
        pytest.param(["engine=eager"], 8, "target 0-6, draft 7 (own)", id="eager"),
        pytest.param(UNKNOWN, 4, "target 0-3, draft 0 (whole)", id="unknown GPU"),
        pytest.param([], 1, "target 0, draft 0 (whole)", id="one rank"),
    ],
)
def test_auto_is_the_fastest_that_fits(words: list[str], world: int, place: str) -> None:
    assert place_of(run(*words), world).in_words() == place


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["placement=leader"], "target 0-7, draft 0 (whole)"),
        (["placement=own", "placement.draft_degree=2"], "target 0-5, draft 6,7 (own)"),
    ],
    ids=["leader", "own"],
)
def test_the_placement_that_was_asked_for_stays(words: list[str], place: str) -> None:
    assert place_of(run(*words), 8).in_words() == place


def test_what_does_not_fit_is_refused_with_advice(caplog: pytest.LogCaptureFixture) -> None:
    """Or waved through with a warning; what fits is not talked about."""
    conf = run("cluster.gpus=4", "placement=leader")
    with pytest.raises(DistributedError) as refused:
        require_fit(predicted(conf, 4), enforce=True)
    said = str(refused.value)
    assert "do not fit; rank 0 of target 0-3, draft 0 (whole)" in said
    assert "placement=sharded ranks=4" in said and "plan.enforce=false" in said and "\n" not in said
    free = run("cluster.gib=null", "model=7B", "draft=none")  # as measured when the run starts
    with pytest.raises(DistributedError, match=r"allowed 10\.20 GiB"):
        require_fit(predicted(free, 1, measured=10 * GIB), enforce=True)
    with caplog.at_level(logging.WARNING):
        require_fit(predicted(run(), 8), enforce=True)
        require_fit(None, enforce=True)
        assert caplog.text == ""
        require_fit(predicted(conf, 4), enforce=False)
    assert "it may not fit: rank 0" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "rows", "lines"),
    [("nf4", 4, 0), ("int8", 4, 1), ("int8", 1, 1), ("bf16", 4, 0)],
    ids=lambda value: str(value),
)
def test_a_run_warns_once(dtype: str, rows: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    """A format has one rate; that of LLM.int8 on a CPU is of several tokens, and one is faster."""
    here = ("cluster=cpu", "cluster.gib=64", "model=7B", "draft=none", "engine=eager")
    conf = run(*here, f"model.dtype={dtype}", f"task.batch_size={rows}")
    with caplog.at_level(logging.WARNING):
        predicting.warn_of_codes(predicted(conf, 1))
    said = [line for line in caplog.messages if "slower than bf16" in line]
    assert len(said) == lines == sum(f"model.dtype={dtype} saves memory" in line for line in said)


def test_what_is_not_known_is_not_planned(caplog: pytest.LogCaptureFixture) -> None:
    family = run()
    family.model.family = "gptj"
    with caplog.at_level(logging.INFO):
        for conf in (family, run("placement=layers"), run(*UNKNOWN)):
            assert predict(conf, place_of(conf, 1), Known(slots=SLOTS)) is None
    assert "not planned: the GPU's figures are not known" in caplog.text
    assert compare_with_plan([], []) is None
    unplanned = RunMeasurement(
        name="regular", prediction=None, rows=1, k=0, ms_per_token=1.0, acceptance=None
    )
    assert compare_with_plan([unplanned], [{}]) is None


@pytest.fixture(scope="module")
def fitting() -> Prediction:
    return predicted(run(), 8)


def halved(prediction: Prediction) -> predicting.Bytes:
    """Measured bytes: half of those that the plan has for the first rank."""
    return {name: size // 2 for name, size in predicting.counted(prediction.option.ranks[0]).items()}


def slower(prediction: Prediction) -> RunMeasurement:
    """A run that took twice the time that the plan has for it."""
    _, ms = prediction.ms_per_token(1, 4, 0.7)
    return RunMeasurement(
        name="speculative", prediction=prediction, rows=1, k=4, ms_per_token=2 * ms, acceptance=0.7
    )


@pytest.fixture
def compared(fitting: Prediction) -> dict[str, Any]:
    """Predicted beside measured, of a run, and of one without speculation that took no time."""
    slow = slower(fitting)
    regular = replace(slow, name="regular", k=0, ms_per_token=None)
    plan = compare_with_plan([slow, regular], [halved(fitting)])
    assert plan is not None and plan["verdict"] == "fits"
    return plan


def test_rounds_that_drafted_less_are_planned_as_such(fitting: Prediction) -> None:
    """N-grams: of ten rounds five had the four drafts, and the others none."""
    run = replace(slower(fitting), drafts_a_round=2.0, tokens_a_round=1.5)
    plan = compare_with_plan([run], [halved(fitting)])
    assert plan is not None
    times = fitting.times(1)
    found = plan["ways"][0]["ms_per_token"]["predicted"]
    assert found == pytest.approx(1000 * times.round_s(2, 0.7) / 1.5)
    between = (times.round_s(2, 0.7) + times.round_s(3, 0.7)) / 2
    assert times.mean_round_s(2.5, 0.7) == pytest.approx(between)
    most = len(times.verify) - 1
    assert times.mean_round_s(most + 3.0, 0.7) == times.round_s(most, 0.7)


def test_the_time_is_predicted_beside_measured(compared: dict[str, Any]) -> None:
    assert compared["ways"][0]["ms_per_token"]["predicted_over_measured"] == pytest.approx(0.5)
    assert compared["ways"][1]["ms_per_token"]["measured"] is None


def test_predicted_beside_measured_is_a_table(compared: dict[str, Any]) -> None:
    table = plan_against_actual({"plan": compared})
    assert table is not None
    _, first, *rest = text_of([table])
    assert first.startswith("speculative, ms/token ") and first.endswith("0.50")
    assert rest[0].startswith("rank 0, weights and caches, MiB") and len(rest) == 4
    assert all(line.endswith("2.00") for line in rest)


def test_counted_bytes_grow_with_what_is_counted(fitting: Prediction) -> None:
    """From what is held to what the device has taken."""
    counted = predicting.counted(fitting.option.ranks[0])
    order = ("held_bytes", "tensor_bytes", "reserved_bytes", "device_bytes")
    held, tensors, reserved, device = (counted[name] for name in order)
    assert 0 < held < tensors < reserved < device
    assert device == fitting.option.ranks[0].total


def test_of_several_pairs_the_one_that_needs_most_counts(fitting: Prediction) -> None:
    slow, other = slower(fitting), predicted(run(), 4)
    plan = compare_with_plan([slow, replace(slow, prediction=other)], [halved(fitting)])
    assert plan is not None and plan["placement"] == other.option.placement.in_words()
    assert plan["memory"][0]["device_bytes"]["predicted"] == other.option.ranks[0].total


def test_k_of_a_run() -> None:
    """Adaptive runs are planned at their largest K, and predicted at their best one."""
    prediction = predicted(run(), 8)
    request = replace(prediction.request, work=replace(prediction.request.work, rows=2))
    times = round_times(request, prediction.option.placement)
    best = times.best_k(0.9)
    assert prediction.ms_per_token(2, None, 0.9) == (best, times.ms_per_token(0.9, best))
    adaptive = run("speculation=adaptive", "speculation.k_max=6", "plan.acceptance=0.95")
    assert predicted(adaptive, 8).option.k == 6
    found = predicted(run("speculation=ngram", "speculation.k=8", "draft=none"), 8)
    assert found.request.text_drafts and found.option.times.draft == 0 and found.option.k == 8


PROMPTS = """task.prompts=["a b c","d e f g"]"""
EIGHT = (PROMPTS, "task.max_new_tokens=8")
WAYS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "generate": (EIGHT, ["speculative"]),
    "generate, regular": ((*EIGHT, "speculation=none"), ["regular"]),
    "eval": (("task.quick=true",), ["tiny/tiny_draft, regular", "tiny/tiny_draft, speculative"]),
    "compare": (EIGHT, ["regular", "speculative"]),
    "measure": ((*EIGHT, "task.repeats=1", "task.ks=[2,3]"), ["target alone", "pair, K = 2", "pair, K = 3"]),
    "certify": (
        (PROMPTS, "task.max_new_tokens=4", "task.samples=20", "task.law_rounds=4", "task.greedy_tokens=8"),
        ["regular", "speculative, greedy", "regular, greedy"],
    ),
}
MARKS = {"certify": [pytest.mark.long], "eval": [pytest.mark.long], "measure": [pytest.mark.slow]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in WAYS])
def test_every_task_keeps_predicted_beside_measured(
    command: Command, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    words, ways = WAYS[name]
    tiny = ("model=tiny", "draft=tiny_draft", "seed=3", "output=json")
    answer = command("-v", f"task={name.partition(',')[0]}", *tiny, *words)
    assert answer.errors == [], answer.err
    plan = answer.document["plan"]
    assert json.loads(Path(answer.document["run_folder"], "summary.json").read_text())["plan"] == plan
    assert plan["verdict"] == "fits" and plan["placement"].startswith("target 0")
    assert [way["name"] for way in plan["ways"]] == ways
    for way in plan["ways"]:
        both = way["ms_per_token"]
        assert both["predicted"] / both["measured"] == pytest.approx(both["predicted_over_measured"]), way[
            "name"
        ]
    (memory,) = plan["memory"]
    held, everything = memory["held_bytes"], memory["device_bytes"]
    assert 0 < held["measured"] <= held["predicted"]
    assert name == "certify" or held["measured"] == held["predicted"], "weights and caches, to the byte"
    assert held["measured"] < everything["measured"]
    assert memory["tensor_bytes"]["measured"] is None, "a CPU does not tell"
    assert "plan against actual" in caplog.text and "rank 0, weights and caches, MiB" in caplog.text


def test_what_would_have_fitted_counts_what_the_plan_did_not_know() -> None:
    """Where as much was free as the plan needs, and more was taken, other plans are as far off."""
    free = run("cluster.gib=null", "model=7B", "draft=none", "task.batch_size=16", "speculation.k=0")
    prediction = predicted(free, 1, measured=34 * GIB, rows=16)
    worst = prediction.option.worst
    assert prediction.option.runs
    rows = []
    for beyond in (0, 4 * GIB, 8 * GIB):
        planned, fix = predicting.fitting(
            prediction, 0, worst.total - 4 * GIB, worst.total - 4 * GIB + beyond
        )
        assert planned == worst.total, beyond
        rows.append(int(re.findall(r"(\d+) rows? instead of 16", fix)[0]))
    assert 16 > rows[0] > rows[2] > 0


def test_what_a_run_refuses_a_plan_refuses_with_the_same_line(command: Command, tmp_path: Path) -> None:
    """NVFP4 as modelopt writes it: config.json does not say how the weights are quantised."""
    folder = checkpoints.save(tmp_path / "nvfp4")
    scales = {f"model.layers.0.{name}.weight_scale": torch.ones(4) for name in ("self_attn.q_proj",)}
    checkpoints.edit_tensors(folder, lambda tensors: tensors.update(scales))
    words = (f"model={folder}", "draft=none")
    planned = command("task=plan", *words, "cluster=p4d")
    run = command("task=generate", *words, "prompt=a")
    assert planned.code == run.code == 4
    assert planned.errors == run.errors and "config.json does not say how" in planned.err
