"""How many ranks a command starts, on which of eight pretended GPUs, with how many drafts; what it says."""

import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_ssp.config import RunConf
from llama_ssp.config.compose import composed
from llama_ssp.config.environment import READ_BY_LIBRARIES, importing, refuse_copies
from llama_ssp.config.presets import cluster_words
from llama_ssp.distributed.gpus import Gpu
from llama_ssp.errors import DistributedError, UsageError
from llama_ssp.models import checkpoint
from llama_ssp.placing import start, this_machine
from llama_ssp.placing.decision import decide
from llama_ssp.placing.draft_length import Why
from llama_ssp.placing.request import PairFiles, plannable
from llama_ssp.placing.start import Start, command_lines, prepared, to_paste
from llama_ssp.planner.plan import worlds_of
from llama_ssp.planner.search import option
from llama_ssp.planner.workload import MIB
from tests.conftest import Command

FREE, HELD = 81_000 * MIB, 40_000 * MIB


def gpus(*held: int, name: str = "NVIDIA H100 80GB HBM3") -> list[Gpu]:
    sizes = {True: {"free": FREE - HELD, "used": HELD}, False: {"free": FREE, "used": 4 * MIB}}
    return [Gpu(name=name, uuid=f"GPU-{n}", **sizes[n in held]) for n in range(8)]


def run(*words: str) -> RunConf:
    return composed(["task=generate", *words])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a command starts where these GPUs of eight are held by others; nothing is loaded."""

    def of(*words: str, held: tuple[int, ...] = (), here: list[Gpu] | None = None) -> Start:
        there = gpus(*held) if here is None else here
        monkeypatch.setattr(start, "gpus_here", lambda: there)
        monkeypatch.setattr(this_machine, "gpus_here", lambda: there)
        return prepared(run(*words), [], 1, dry=True)[1]

    return of


def shown(ranks: Start) -> list[int]:
    return [int(name.removeprefix("GPU-")) for name in ranks.environment["CUDA_VISIBLE_DEVICES"].split(",")]


def test_one_rank_where_all_fits_one_gpu_else_what_is_fastest(started: Any) -> None:
    alone = started("model=7B", "draft=none")
    assert alone.ranks == 1 and shown(alone) == [0]
    assert alone.notes[0].startswith("7 more GPUs are idle: ranks=8 is planned ")
    for pair in (("model=30B", "draft=llama2-13b"), ("model=65B", "draft=7B")):
        both = started(*pair)
        assert both.ranks == 8 and shown(both) == list(range(8)) and not both.notes, pair


def test_a_gpu_that_others_hold_is_left_out(started: Any) -> None:
    six = started("model=65B", "draft=7B", held=(2, 5))
    assert six.ranks == 6 and shown(six) == [0, 1, 3, 4, 6, 7]
    assert shown(started("model=7B", "draft=none", held=(0,))) == [1]


def test_a_gpu_that_others_hold_is_named(started: Any) -> None:
    assert started("model=65B", "draft=7B", held=(2, 5)).notes[-1].startswith("GPU 2,5: held ")


def test_as_many_ranks_as_are_asked_for_take_gpus_that_others_hold(started: Any) -> None:
    """As the last ones."""
    eight = started("model=65B", "draft=7B", "ranks=8", held=(2, 5))
    assert shown(eight) == [0, 1, 3, 4, 6, 7, 2, 5]


def test_the_ranks_that_are_asked_for_are_started(started: Any) -> None:
    assert started("model=30B", "draft=7B", "ranks=4").ranks == 4
    with pytest.raises(DistributedError, match=r"ranks; found 9, allowed 1\.\.8"):
        started("model=30B", "draft=7B", "ranks=9")


def test_a_placement_that_is_asked_for_counts(started: Any) -> None:
    assert started("model=30B", "draft=7B", "placement=layers").ranks == 1
    assert started("model=7B", "draft=none", "placement=cpu") == Start(ranks=1)
    assert started("model=65B", "draft=7B", "placement=own", "placement.draft_degree=2").ranks == 8


def test_without_gpus_only_ranks_that_are_asked_for_are_started(started: Any) -> None:
    assert started("model=7B", "draft=none", here=[]) == Start(ranks=1)
    assert started("model=7B", "draft=none", "ranks=3", here=[]) == Start(ranks=3)


def test_on_a_gpu_whose_figures_are_not_known_one_rank_is_started(started: Any) -> None:
    assert started("model=65B", "draft=7B", here=gpus(name="Unheard-of 9000")).ranks == 1


def test_a_cluster_that_is_configured_counts(started: Any) -> None:
    assert started("model=65B", "draft=7B", "cluster=p4d", here=[]).ranks == 8
    two = ("model=65B", "draft=7B", "cluster=p4d", "cluster.nodes=2")
    assert started(*two, here=[]).ranks == 8, "the second node is no faster over its network"
    fast = ("cluster.between_us=1", "cluster.between_gb_s=200")
    assert started(*two, *fast, here=[]).ranks == 16


def test_ranks_that_would_only_cost_time_are_not_started(started: Any) -> None:
    few = started("model=demo", "draft=demo_draft", "ranks=8")
    assert few.ranks < 8 and f"ranks={few.ranks} is as fast" in few.notes[-1]


def test_a_calibration_measures_every_rank() -> None:
    """By a plan in which one rank is the fastest."""
    times = "+cluster.times.all_reduce_us={2: 90000}", "cluster.times.message_us=1000000"
    used = [
        prepared(composed([f"task={task}", "cluster=cpu", *times]), [], 2)[1].ranks
        for task in ("generate", "calibrate")
    ]
    assert used == [1, 2]


PAIRS = [
    ("llama3.1-8b", "llama3.2-1b"), ("llama2-13b", "llama2-7b"), ("30B", "7B"), ("65B", "7B"),
    ("llama3.1-70b", "llama3.2-1b"),
]  # fmt: skip


def times_by_ranks(model: str, draft: str, cluster: str) -> list[tuple[float, int]]:
    """ms/token and K of what `auto` runs on 1 to 8 ranks, by the plan; infinite where nothing fits."""
    task = "task.batch_size=1"
    files = PairFiles(run(f"model={model}", f"draft={draft}", f"cluster={cluster}", task), None, None)
    request, found = plannable(files), []
    assert request is not None
    for world in range(1, 9):
        decided, decision = decide(files, worlds_of(world))
        place = decision.placement.value
        asked = request if place.draft else replace(request, draft=None)
        one = option(asked, place, decided.speculation.k)
        found.append((one.ms_per_token if one.runs else float("inf"), one.k))
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize("cluster", ["dgx_h100", "p4d"])
@pytest.mark.parametrize("pair", PAIRS)
def test_more_ranks_never_make_it_slower(pair: tuple[str, str], cluster: str) -> None:
    times = [ms for ms, _ in times_by_ranks(*pair, cluster)]
    assert all(later <= 1.02 * earlier for earlier, later in pairwise(times))
    assert times[-1] < float("inf")


def test_drafts_a_round_are_the_plans_best_unless_they_are_given(caplog: pytest.LogCaptureFixture) -> None:
    """Where drafting does not pay the draft is not loaded, unless the task is about drafts."""

    def chosen(*words: str, least: int = 0) -> tuple[Any, Any]:
        decided, decision = decide(PairFiles(run("cluster=dgx_h100", *words), None, None), [1], least)
        return decision.placement.value, decided.speculation

    place, spec = chosen("model=llama3.1-8b", "draft=llama3.2-1b", "task.batch_size=1")
    assert spec.k > 1 and place.draft == (0,)
    assert chosen("model=llama3.1-8b", "draft=llama3.2-1b", "speculation.k=7")[1].k == 7
    assert chosen("model=llama3.1-8b", "draft=llama3.2-1b", "plan.acceptance=0.95")[1].k > spec.k
    same = ("model=7B", "draft=7B", "task.batch_size=8")
    with caplog.at_level("INFO"):
        place, spec = chosen(*same)
    assert (spec.k, place.draft) == (0, ()) and "drafting does not pay here" in caplog.text
    place, spec = chosen(*same, least=1)
    assert (spec.k, place.draft) == (1, (0,))
    here, _ = decide(PairFiles(run("placement=cpu", "model=7B", "draft=7B"), None, None), [1])
    assert here.speculation.k == 4, "a machine that has not been measured"


def test_adaptive_starts_from_the_plan_where_nothing_is_measured() -> None:
    words = ("model=llama3.1-70b", "draft=llama3.2-1b", "cluster=dgx_h100", "speculation=adaptive")
    for task in ("generate", "batch"):
        files = PairFiles(composed([f"task={task}", *words]), None, None)
        for worlds in ([1], worlds_of(8)):
            assert decide(files, worlds)[0].speculation.cost_ratio is None, "it is measured"
    decided, _ = decide(PairFiles(composed(["task=eval", *words]), None, None), worlds_of(8))
    planned = decided.speculation
    assert planned.cost_ratio == pytest.approx(0.08, abs=0.06) and planned.adaptive


@pytest.mark.parametrize(
    ("words", "ranks", "said"),
    [
        (
            ["plan", "30B", "7B", "cluster=p4d", "acceptance=0.7", "k=3", "-n", "64", "--cluster.gpus", "8"],
            8,
            "run it: llama-ssp generate 30B 7B k=3 max_new_tokens=64 ranks=8",
        ),
        (
            ["batch", "30B", "7B", "input=a b.jsonl", "ranks=2", "-q"], 4,
            "run it: llama-ssp batch 30B 7B 'input=a b.jsonl' ranks=4",
        ),
        (["task=plan", "model=30B"], 1, "run it: llama-ssp generate model=30B ranks=1"),
        (["model=30B"], 1, "run it: llama-ssp generate model=30B ranks=1"),
        (
            ["generate", "65B"], 16,
            "run it on each node; FIRST_NODE is the address of node 0, which leads, prints and writes\n"
            "on node 0: torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=FIRST_NODE "
            "--master-port=29500 -m llama_ssp generate 65B\n"
            "on node 1: torchrun --nnodes=2 --node-rank=1 --nproc-per-node=8 --master-addr=FIRST_NODE "
            "--master-port=29500 -m llama_ssp generate 65B",
        ),
    ],
    ids=["plan", "batch", "task=plan", "no task", "two nodes"],
)  # fmt: skip
def test_the_command_to_paste(words: list[str], ranks: int, said: str) -> None:
    assert to_paste(command_lines(words, ranks, 8)) == said


LARGE = ("model=65B", "draft=7B", "cluster=p4d")


def test_a_dry_run_says_what_starts(command: Command) -> None:
    answer = command("task=generate", *LARGE, "--dry-run")
    said = "run it: llama-ssp generate model=65B draft=7B ranks=8"
    assert answer.code == 0 and answer.out.splitlines()[-1] == said
    assert "target 0-7, draft 0-7 (split)" in answer.out and "GPU 0" in answer.out


def test_a_plan_says_what_to_run(command: Command) -> None:
    planned = command("task=plan", *LARGE, "output=json", "out=null").document["command"]
    assert planned == "llama-ssp generate model=65B draft=7B output=json out=null ranks=8"


def test_a_dry_run_of_what_does_not_fit_ends_with_5(command: Command) -> None:
    lacking = command("task=generate", *LARGE, "cluster.gpus=1", "--dry-run")
    assert lacking.code == 5 and "It does not fit: " in lacking.out and "run it" not in lacking.out


@pytest.mark.parametrize(
    ("count", "number"),
    [
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
    ],
    ids=["srun", "mpirun", "mpiexec"],
)
def test_copies_are_refused(count: str, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one task is one process, and torchrun's ranks are no copies."""
    for variable in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    refuse_copies()
    for alone in ("1", ""):
        monkeypatch.setenv(count, alone)
        refuse_copies()
    monkeypatch.setenv(count, "8")
    monkeypatch.setenv("WORLD_SIZE", "")  # as if it were not set: one process
    monkeypatch.setenv(number, "3")
    with pytest.raises(UsageError, match="ranks=8") as refused:
        refuse_copies()
    assert refused.value.speaks is False
    monkeypatch.setenv("WORLD_SIZE", "8")
    refuse_copies()


def test_what_torchrun_sets_is_not_named_as_a_setting_to_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that fails for another reason fails as it does without torchrun."""
    for name in [*filter(READ_BY_LIBRARIES.match, os.environ)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    with pytest.raises(ValueError, match="of the library"), importing():
        raise ValueError("of the library")
    monkeypatch.setenv("TQDM_MININTERVAL", "x")
    with pytest.raises(UsageError, match="TQDM_MININTERVAL; found"), importing():
        raise ValueError("of the library")


def test_the_script_of_a_job_with_several_tasks_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch --ntasks=8 runs its script once, with these variables; so does a shell of salloc."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    for name, value in (("SLURM_NTASKS", "8"), ("SLURM_NPROCS", "8"), ("SLURM_PROCID", "0")):
        monkeypatch.setenv(name, value)
    refuse_copies()


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("p4d", ["cluster=p4d"]),
        ("A100-80", ["cluster=p4de", "cluster.gpus=1"]),
        ("h200", ["cluster=h200x8", "cluster.gpus=1"]),
        ("8xH100", ["cluster=dgx_h100", "cluster.gpus=8"]),
        ("h100-80gb x4", ["cluster=dgx_h100", "cluster.gpus=4"]),
        ("dgx_h200", ["cluster=h200x8", "cluster.gpus=8"]),
        ("16xH100", ["cluster=dgx_h100", "cluster.gpus=8", "cluster.nodes=2"]),
        ("4x rtx4090", ["cluster=rtx_4090", "cluster.gpus=4"]),
        ("mine", ["cluster=mine"]),
    ],
)
def test_machines_are_known_by_the_names_that_people_type(typed: str, words: list[str]) -> None:
    assert cluster_words(typed) == words


def test_a_gpu_of_several_sizes_is_asked_for_by_its_size() -> None:
    with pytest.raises(UsageError, match="allowed A100-40, A100-80; name one"):
        cluster_words("A100")


def test_each_job_of_a_sweep_says_its_own_command(command: Command) -> None:
    swept = command("task=plan", "-m", *LARGE, "placement=own,leader", "out=null")
    said = [line for line in swept.out.splitlines() if line.startswith("run it")]
    assert [re.findall(r"placement=(\S+)", line) for line in said] == [["own"], ["leader"]]


def test_a_job_that_groups_share_is_started_as_it_was_typed(command: Command, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    words = ["cluster=slurm", "cluster.gpu=A100-40", "cluster.gpus=4", "cluster.groups=8"]
    files = [f"task.input={tmp_path / 'in.jsonl'}", f"task.output={tmp_path / 'out.jsonl'}"]
    dry = command("task=batch", "model=65B", "draft=7B", *words, *files, "--dry-run")
    assert dry.out.splitlines()[-1].startswith(
        "run it: llama-ssp task=batch model=65B draft=7B cluster=slurm"
    )
    assert "cluster.groups=8" in dry.out and "ranks=" not in dry.out.splitlines()[-1]


def test_ranks_that_are_asked_for_are_planned(command: Command) -> None:
    four = command("task=plan", *LARGE, "ranks=4", "output=json", "out=null").document
    assert len(four["per_gpu"]) == 4 and four["cluster"]["gpus_per_node"] == 4
    assert command("task=plan", *LARGE, "ranks=9").code == 5
    uneven = command("task=plan", *LARGE, "cluster.nodes=2", "ranks=9")
    assert uneven.code == 5 and "a multiple of 2, or at most 8" in uneven.err


def test_the_acceptance_that_a_run_is_planned_with_counts_in_a_plan(command: Command) -> None:
    given = command("task=plan", *LARGE, "plan.acceptance=0.6", "out=null")
    assert "at acceptance 0.60" in given.out and "is assumed" not in given.out
    assert "acceptance 0.80 is assumed" in command("task=plan", *LARGE, "out=null").out


def test_a_degree_without_a_split_draft_is_refused(command: Command) -> None:
    refused = command("task=plan", *LARGE, "placement.draft_degree=2")
    assert refused.code == 2 and "add placement=sharded or placement=own" in refused.err


def test_vocabularies_of_two_sizes_are_told_apart_without_their_files(command: Command) -> None:
    """So the draft is planned whole, on the leader, where its text is translated."""
    other = command("task=plan", "model=llama3.1-70b", "draft=mistral-7b", "cluster=p4de", "out=null")
    assert "128,256 and 32,000 tokens not of one tokenizer" in other.out
    assert "draft 0 (whole)" in other.out and "(split)" not in other.out
    same = command("task=plan", *LARGE, "out=null")
    assert "of one tokenizer" not in same.out and "(split)" in same.out


def test_a_single_gpu_that_is_too_small_is_advised_more_of_them(command: Command) -> None:
    small = command("task=plan", "model=llama3.1-70b", "draft=llama3.1-8b", "cluster=rtx_4090", "out=null")
    assert "to make it fit: cluster.gpus=8 instead of 1" in small.out


# What a run does, and who decided it.


def test_a_decision_says_who_made_it(command: Command) -> None:
    dry = command("task=generate", *LARGE, "--dry-run")
    said = {line.split("  ")[0]: line.rsplit("  ", 1)[1] for line in dry.out.splitlines() if "  " in line}
    assert said["ranks"] == said["placement"] == said["K"] == "planned"
    given = command("task=generate", *LARGE, "speculation.k=3", "engine=eager", "--dry-run")
    said = {line.split("  ")[0]: line.rsplit("  ", 1)[1] for line in given.out.splitlines() if "  " in line}
    assert said["K"] == said["model steps"] == "asked"


@pytest.mark.parametrize(
    ("task", "words", "who"),
    [
        ("generate", ["speculation=adaptive"], Why.measured),
        ("eval", ["speculation=adaptive"], Why.planned),
        ("eval", ["speculation=adaptive", "speculation.cost_ratio=0.2"], Why.asked),
        ("batch", [], Why.measured),
        ("generate", ["speculation=ngram"], Why.default),
    ],
)
def test_who_decides_k(task: str, words: list[str], who: Why) -> None:
    pair = ("model=llama3.1-70b", "draft=llama3.2-1b", "cluster=dgx_h100")
    _, decision = decide(PairFiles(composed([f"task={task}", *pair, *words]), None, None), worlds_of(8))
    assert decision.drafts.why is who


def test_what_a_draft_draws_from_is_said_with_who_decided_it() -> None:
    pair = ("model=llama3.1-70b", "draft=llama3.2-1b", "cluster=dgx_h100")
    for words, said in (
        ([], ("all tokens", "default")),
        (["speculation.draft_top=64"], ("its likeliest 64", "asked")),
        (["speculation=ngram", "draft=none"], None),
    ):
        _, decision = decide(PairFiles(composed([*pair, *words]), None, None), worlds_of(8))
        lines = {what: (value, who) for what, value, who in decision.lines()}
        assert lines.get("drafted from") == said
        top = 64 if said == ("its likeliest 64", "asked") else None
        assert decision.document()["drafts"]["draft_top"] == top


def test_a_run_keeps_its_decisions(command: Command, tmp_path: Path) -> None:
    """Before it loads, so that a run that dies has them."""
    run_folder = command("task=generate", "prompt=a", "max_new_tokens=4", f"out={tmp_path}").summary
    assert run_folder is not None
    kept = yaml.safe_load((Path(run_folder["run_folder"]) / "decisions.yaml").read_text(encoding="utf-8"))
    (pair,) = kept.values()
    assert pair["drafts"]["why"] == "default", "no times of this CPU are known"
    assert pair["ranks"] == {"value": 1, "why": "default"}


def test_a_job_s_dry_run_plans_the_rows_that_it_will_have(command: Command, tmp_path: Path) -> None:
    """By its longest text and the memory; what a job under way keeps, it keeps."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n' * 200, encoding="utf-8")
    output = tmp_path / "out.jsonl"
    words = ["task=batch", *LARGE, f"task.input={source}", f"task.output={output}", "--dry-run"]

    def said() -> dict[str, str]:
        lines = command(*words).out.splitlines()
        return {line.split("  ")[0]: line for line in lines if "  " in line}

    new = said()
    rows = int(new["rows"].split()[1])
    assert rows > 8 and new["rows"].endswith("planned") and "adaptive, up to 16" in new["K"]

    work = tmp_path / "out.jsonl.work"
    work.mkdir()
    (work / "rows.json").write_text("5\n", encoding="utf-8")
    (work / "costs.json").write_text('{"k": 2}\n', encoding="utf-8")
    held = said()
    assert held["rows"].split()[1] == "5" and held["K"].split()[1] == "2"
    assert held["rows"].endswith("kept by the job") and held["K"].endswith("kept by the job")


def test_what_does_not_fit_is_refused_before_it_is_fetched(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "find", lambda *_: pytest.fail("it is fetched"))
    answer = command("model=llama3.1-70b", "draft=llama3.2-1b", "download=true", "prompt=x", "cluster.gib=8")
    assert answer.code == 5
    assert "do not fit here, so they are not fetched" in answer.err


def test_a_job_without_its_input_fetches_nothing(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "find", lambda *_: pytest.fail("it is fetched"))
    words = ("model=llama3.1-8b", "download=true", "task.input=none.jsonl", "task.output=out.jsonl")
    answer = command("task=batch", *words)
    assert answer.code == 3
    assert "task.input does not exist" in answer.err
