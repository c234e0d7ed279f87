"""task=plan as a command: what it prints, keeps, draws and refuses, with no weights and no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llama_ssp.models.checkpoint import SHIPPED_FOLDER
from tests.renumbered import renumber
from tests.test_process import ROOT, RUN, WATCHED, environment, errors

PAIR = ("task=plan", "model=65B", "draft=7B", "cluster=p4d", "engine=compiled")
TWO_GPUS = ("task=plan", "model=demo", "cluster=p4d", "cluster.gpus=2", "out=null")


def document(answer):
    assert answer.code == 0, answer.err
    return answer.document


def test_the_document(command):
    plan = document(command(*PAIR, "out=null"))
    assert plan["task"] == "plan" and plan["status"] == "done" and plan["verdict"] == "fits"
    assert len(plan["config_sha256"]) == 64 and "torch" in plan["versions"]
    assert [gpu["rank"] for gpu in plan["per_gpu"]] == list(range(8))
    for gpu in plan["per_gpu"]:
        assert gpu["total_bytes"] == sum(line["bytes"] for line in gpu["lines"].values())
        assert gpu["capacity_bytes"] - gpu["total_bytes"] == gpu["margin_bytes"] > 0
        assert {line["kind"] for line in gpu["lines"].values()} <= {"exact", "bound", "constant"}
        assert all(line["source"] for line in gpu["lines"].values() if line["kind"] == "constant")
    best = plan["best"]
    assert best["placement"] == "target 0-7, draft 0-7 (split)" == plan["placements"][0]["placement"]
    assert best["ms_per_token"] == plan["placements"][0]["ms_per_token"]
    assert best["speedup"] == pytest.approx(best["ms_per_token_regular"] / best["ms_per_token"])
    assert len(plan["placements"]) == 71
    assert [row["acceptance"] for row in plan["by_acceptance"]] == [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    assert 0 < plan["break_even_acceptance"] < 0.8
    assert plan["largest"]["context_tokens"] == 2048


def test_the_text(command):
    said = command(*PAIR, "out=null").out
    assert "65B bf16 (65.3B) + 7B bf16 (6.74B) on p4d: 8 x A100-40, 39.4 GiB each, NVLink3" in said
    assert "target 0-7, draft 0-7 (split)" in said and "GPU 0" in said
    assert "It fits, target 0-7" in said and "drafting does not pay" in said
    assert max(len(line) for line in said.splitlines()[:-1]) < 160
    assert "fewest GPUs that it fits on: 4 (target 0-3, draft 0-3 (split))" in said
    assert not any(line.endswith(" ") for line in said.splitlines())
    only = command(*PAIR, "out=null", "output=json").out
    assert len(only.splitlines()) == 1


def test_the_text_where_it_does_not_fit(command):
    """What is lacking and what would help come last; how fast it would be is left out."""
    answer = command(*PAIR, "cluster.gpus=2", "out=null")
    said, plan = answer.out.splitlines(), document(answer)
    assert said[-2].startswith("It does not fit: 69.4 GiB needed where there are 39.4 (target 0,1, draft 0,1")
    assert said[-2].endswith("would make it fit.") and "model.dtype=nf4" in said[-2]
    assert not any(line.startswith(("acceptance ", "regular ", "times ")) for line in said)
    speeds = {name for name in plan["best"] if name.endswith("_ms") or name.startswith(("ms_", "speedup"))}
    assert len(speeds) == 6 and all(plan["best"][name] is None for name in speeds)
    assert {(one["ms_per_token"], one["speedup"]) for one in plan["placements"]} == {(None, None)}
    assert plan["by_acceptance"] == [] and plan["break_even_acceptance"] is None


def test_between_nodes_no_time_is_promised(command):
    """All-reduce is known within a node only."""
    said = command(*PAIR, "cluster.gpus=2", "cluster.nodes=2", "out=null").out
    assert "on p4d: 4 x A100-40" in said and "on 2 nodes" in said
    assert "between nodes they are slower" in said
    assert "between nodes" not in command(*PAIR, "cluster.gpus=4", "out=null").out


def test_the_text_of_a_cpu(command):
    said = command("task=plan", "cluster.gpu=cpu", "out=null").out
    assert "\nCPU 0 " in said and "GPU" not in said.partition("\n{")[0]
    assert "task=calibrate measures this machine's own" in said


def test_one_placement(command):
    plan = document(command(*PAIR, "placement=leader", "out=null"))
    (only,) = plan["placements"]
    assert only["placement"] == "target 0-7, draft 0 (whole)" and only["overrides"] == "placement=leader"
    degree = document(command(*PAIR, "placement=own", "placement.draft_degree=2", "out=null"))
    assert degree["best"]["placement"] == "target 0-5, draft 6,7 (own)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["draft=demo_head", "placement=layers"], "a head drafts only for a target that is split by tensors"),
        (["draft=demo_head", "placement=own"], "it is on the leader"),
        (["draft=demo_draft", "speculation.overlap=ahead", "placement=leader"], "ranks of its own only"),
    ],
)
def test_a_placement_that_every_run_refuses(command, words, said):
    answer = command(*TWO_GPUS, *words)
    assert answer.code == 2 and said in answer.errors[0]


def test_a_draft_of_another_tokenizer_is_planned_on_the_leader(command, tmp_path):
    other = f"draft={renumber(SHIPPED_FOLDER / 'demo_draft', tmp_path / 'other', tokens=600)}"
    refused = command(*TWO_GPUS, other, "placement=own")
    assert refused.code == 2 and "another tokenizer is on the leader, whole" in refused.errors[0]
    plan = document(command(*TWO_GPUS, other))
    assert plan["vocabulary"]["bridge"] and {one["ranks"] for one in plan["placements"]} == {1, 2}
    assert {one["overrides"] for one in plan["placements"]} == {"placement=leader"}


def test_layers_over_the_gpus_of_a_node(command):
    """One process, one GPU at a time: each holds its layers, and the draft sits on the first."""
    plan = document(command(*PAIR, "placement=layers", "out=null"))
    assert plan["best"]["placement"] == "target by layers, draft on the first"
    assert plan["best"]["overrides"] == "placement=layers"
    assert len(plan["per_gpu"]) == 8 and plan["verdict"] == "fits"
    assert [any("draft" in name for name in gpu["lines"]) for gpu in plan["per_gpu"]] == [True] + 7 * [False]
    split = document(command(*PAIR, "placement=leader", "out=null"))
    assert plan["best"]["speedup"] > 1, "over regular sampling by layers, as that is what was asked for"
    assert plan["best"]["ms_per_token_regular"] > split["best"]["ms_per_token_regular"]
    assert plan["best"]["ms_per_token"] > 1.5 * split["best"]["ms_per_token"]


def test_without_a_draft(command):
    for words in (("draft=none",), ("speculation=none",), ("speculation.k=0",)):
        plan = document(
            command(*(w for w in PAIR if w != "draft=7B" or words[0] != "draft=none"), *words, "out=null")
        )
        assert plan["best"]["k"] == 0 and plan["best"]["speedup"] == 1 and plan["by_acceptance"] == []


def test_ngram_drafts(command):
    plan = document(
        command("task=plan", "model=7B", "draft=none", "speculation=ngram", "cluster=p4d", "out=null")
    )
    assert plan["best"]["k"] > 0 and plan["best"]["draft_step_ms"] == 0


def test_it_is_kept(command):
    answer = command(*PAIR)
    plan = document(answer)
    folder = Path(plan["run_folder"])
    assert json.loads((folder / "summary.json").read_text()) == plan
    assert yaml.safe_load((folder / "config.yaml").read_text())["cluster"]["name"] == "p4d"


@pytest.mark.parametrize(("gib", "code", "verdict"), [(39, 0, "fits"), (1, 1, "does_not_fit")])
def test_require_fit_is_for_scripts(command, gib, code, verdict):
    pair = ("task=plan", "model=7B", "draft=none", "cluster=p4d", "cluster.gpus=1")
    answer = command(*pair, f"cluster.gib={gib}", "task.require_fit=true", "out=null")
    assert answer.code == code and answer.errors == []
    assert answer.document["verdict"] == verdict
    assert command(*pair, f"cluster.gib={gib}", "out=null").code == 0


@pytest.mark.slow
def test_the_recorded_draft_of_a_batch(command):
    plan = document(command(*PAIR, "task.batch_size=8", "task.prompt_tokens=1000", "out=null"))
    assert plan["workload"] == {
        "rows": 8, "prompt_tokens": 1000, "new_tokens": 128, "k": plan["best"]["k"], "prefill_chunk": 512,
        "acceptance": 0.8,
    }  # fmt: skip


def test_only_config_json_is_read(command, saved, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(saved.whole / "config.json", folder)
    short = ("task.prompt_tokens=32", "task.max_new_tokens=32")
    with_weights, without = (
        document(
            command(
                "task=plan",
                f"model={path}",
                "draft=none",
                "cluster=p4d",
                "out=null",
                *short,
            )
        )
        for path in (saved.whole, folder)
    )
    assert with_weights["per_gpu"] == without["per_gpu"]


def test_a_presets_folder_need_not_be_here(command):
    assert document(command(*PAIR, "model.path=/no/such/folder", "out=null"))["verdict"] == "fits"


def test_a_folder_that_contradicts_its_preset_is_refused(command, saved):
    answer = command(*PAIR, f"model.path={saved.whole}", "out=null")
    assert answer.code == 4 and "the checkpoint is not a 65B" in answer.errors[0]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["cluster=p5d"], 2, "there is no cluster=p5d"),
        (["cluster=local", "cluster.gpu=H900"], 2, "the GPU's figures are not known"),
        (["cluster.gpu=H200"], 2, "not that cluster's"),
        (["task.prompt_tokens=2000"], 2, "context of 2048 tokens, prompt included"),
        (["placement.target_ranks=[0,9]"], 5, "placement.target_ranks does not fit the ranks"),
        (["placement=deepspeed"], 5, "what DeepSpeed holds is not planned"),
        (["placement=sharded", "placement.draft_degree=9"], 5, "exceeds the target's ranks"),
        (["cluster.nodes=9", "placement=sharded"], 5, "heads cannot be split over the ranks"),
        (["model=nobody/nothing"], 4, "config.json is not at hand"),
    ],
)
def test_refused_in_one_line(command, words, code, said):
    answer = command(
        *(w for w in PAIR if w.partition("=")[0] not in {x.partition("=")[0] for x in words}), *words
    )
    assert answer.code == code and said in answer.errors[0]
    assert len(answer.errors) == 1 and answer.out == ""


def test_a_world_that_is_not_the_clusters_is_refused(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    answer = command(*PAIR, "out=null")
    assert answer.code == 5 and "the number of ranks is not the cluster's" in answer.errors[0]


def test_other_ranks_say_nothing(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    answer = command(*PAIR)
    assert (answer.code, answer.out) == (0, "")
    assert not Path("outputs").exists()


@pytest.mark.slow
def test_torch_stays_out(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *PAIR, "out=null"], capture_output=True, text=True, timeout=60,
        env=environment(), cwd=tmp_path, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "heavy: []" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_colours_are_for_terminals(tmp_path):
    """Through a pseudo-terminal, as a person sees it."""
    import pty

    seen: list[bytes] = []

    def keep(terminal: int) -> bytes:
        data = os.read(terminal, 65536)
        seen.append(data)
        return data

    code = os.waitstatus_to_exitcode(pty.spawn([*RUN, *PAIR, "out=null"], keep))
    assert code == 0
    said = b"".join(seen).decode()
    assert "\x1b[" in said and "█" in said
    assert '"verdict"' not in said, "a person at a terminal reads no JSON"
    piped = subprocess.run(
        [*RUN, *PAIR, "out=null"], capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=60
    )
    shown = json.loads(piped.stdout.splitlines()[-1])
    assert shown["verdict"] == "fits" and {"best", "per_gpu", "placements"} <= shown.keys()
    assert "\x1b[" not in piped.stdout and errors(piped.stderr) == []
