"""The command with LoRA adapters: the texts of the models with the sums as their weights, on every number of
ranks; another adapter is another job, and the plan is that of the model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints
from tests.adapters import ATTENTION, FILES, MLP, summed_by_hand, written
from tests.checkpoints import edit_tensors
from tests.conftest import Command
from tests.warm import Started

pytestmark = pytest.mark.slow

FP32 = ("model.dtype=fp32", "draft.dtype=fp32", "output=json", "out=null", "seed=3", "speculation.k=3")
GREEDY = ('task.prompts=["hello","def f(x):","a quick brown"]', "task.max_new_tokens=20", "sampling=greedy")


@dataclass(frozen=True)
class Folders:
    """A target and a draft, an adapter of each, and copies of both with the sums."""

    target: Path
    draft: Path
    of_target: Path
    of_draft: Path
    whole_target: Path
    whole_draft: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Models whose heads, columns and vocabulary 2 and 3 ranks divide unevenly, with varied texts.

    With its adapter the draft is much like the target with its own, so that it agrees with it often.
    """
    base = tmp_path_factory.mktemp("adapters")
    target = checkpoints.save(
        base / "target", hidden_size=80, intermediate_size=160, num_attention_heads=10, num_key_value_heads=5
    )
    edit_tensors(target, lambda kept: kept.update({n: 8 * t if t.ndim > 1 else t for n, t in kept.items()}))
    draft = checkpoints.copied(target, base / "draft")
    of_target = written(target, base / "of_target", [*ATTENTION, *MLP], strength=0.2)
    of_draft = written(draft, base / "of_draft", [*ATTENTION, *MLP], strength=0.202)
    return Folders(
        target=target,
        draft=draft,
        of_target=of_target,
        of_draft=of_draft,
        whole_target=summed_by_hand(target, of_target, base / "whole_target"),
        whole_draft=summed_by_hand(draft, of_draft, base / "whole_draft"),
    )


def texts(document: dict[str, Any]) -> list[list[int]]:
    return [output["token_ids"] for output in document["outputs"]]


def passes(document: dict[str, Any]) -> tuple[int, int]:
    """How often both models ran: the fewer, the more drafts were accepted."""
    return document["target_forwards"], document["draft_forwards"]


def test_texts_are_those_of_the_sums(command: Command, folders: Folders) -> None:
    """Of target and draft, each with its adapter; controls: either one left out is seen."""
    words = f"model={folders.target}", f"draft={folders.draft}", *FP32, *GREEDY
    target, draft = f"model.adapter={folders.of_target}", f"draft.adapter={folders.of_draft}"
    whole = f"model={folders.whole_target}", f"draft={folders.whole_draft}", *FP32, *GREEDY
    expected = command(*whole).document
    found = command(*words, target, draft).document
    assert texts(found) == texts(expected) and passes(found) == passes(expected)
    assert texts(command(*words, draft).document) != texts(expected)
    without = command(*words, target).document
    assert texts(without) == texts(expected) and passes(without) != passes(expected)


@pytest.mark.few(3)
@pytest.mark.parametrize("placement", ["sharded", "leader"])
@pytest.mark.parametrize("world", [2, 3])
def test_on_ranks_the_texts_are_the_same(
    world: int, placement: str, command: Command, folders: Folders, tmp_path: Path
) -> None:
    words = (
        f"model={folders.target}", f"draft={folders.draft}", f"model.adapter={folders.of_target}",
        f"draft.adapter={folders.of_draft}", *FP32, *GREEDY,
    )  # fmt: skip
    expected = command(*words).document
    leader, *others = Started(tmp_path, world, *words, f"placement={placement}").finish()
    assert leader.code == 0, leader.err
    assert [other.code for other in others] == [0] * (world - 1)
    assert texts(leader.document) == texts(expected) and passes(leader.document) == passes(expected)
    assert f"over {world} ranks" in leader.document["devices"]["model"]


def test_deepspeed_cuts_the_sums(command: Command, folders: Folders, tmp_path: Path) -> None:
    how = "draft=none", *FP32[:1], *FP32[2:5], *GREEDY
    expected = command(f"model={folders.whole_target}", *how).document
    words = f"model={folders.target}", f"model.adapter={folders.of_target}", "placement=deepspeed", *how
    leader, other = Started(tmp_path, 2, *words).finish()
    assert (leader.code, other.code) == (0, 0), leader.err
    assert texts(leader.document) == texts(expected)


def test_ranks_with_other_adapters_are_refused(folders: Folders, tmp_path: Path) -> None:
    """Each rank sees a file of its own by the same path, as on machines without a common folder."""
    for rank in ("0", "1"):
        checkpoints.copied(folders.of_target, tmp_path / rank)
    edit_tensors_of_adapter(tmp_path / "1")
    link = tmp_path / "link"
    words = f"model={folders.target}", "draft=none", f"model.adapter={link}", *FP32[:1], *GREEDY, "out=null"
    started = Started(tmp_path / "run", 2, *words, fault=OnRank(link, tmp_path))
    ended = started.finish()
    assert {answer.code for answer in ended} == {5}
    assert "the models' files" in "".join(answer.err for answer in ended)


class OnRank:
    """Has a rank see its own folder in place of the link."""

    def __init__(self, link: Path, folders: Path) -> None:
        self._link, self._folders = link, folders

    def __call__(self, rank: int) -> None:
        from llama_ssp.models import adapter

        plain, link, own = adapter.home_expanded, str(self._link), self._folders / str(rank)
        adapter.home_expanded = lambda name: own if name == link else plain(name)  # type: ignore[assignment]


def edit_tensors_of_adapter(folder: Path) -> None:
    """Changes one number."""
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, file)


def test_another_adapter_is_another_job(command: Command, folders: Folders, tmp_path: Path) -> None:
    """The same one elsewhere is not; neither is the job without one the same."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("hello", "def f")))
    words = (
        "task=batch", f"task.input={tmp_path / 'in.jsonl'}", f"task.output={tmp_path / 'out.jsonl'}",
        f"model={folders.target}", "draft=none", "seed=3", "task.max_new_tokens=3", "out=null",
    )  # fmt: skip
    adapter = f"model.adapter={folders.of_target}"
    assert command(*words, adapter).code == 0
    moved = checkpoints.copied(folders.of_target, tmp_path / "moved")
    assert command(*words, f"model.adapter={moved}").code == 0
    edit_tensors_of_adapter(moved)
    for other in ((f"model.adapter={moved}",), ()):
        answer = command(*words, *other)
        assert answer.code == 3 and "another job" in answer.errors[0] and "model.adapter=" in answer.errors[0]


def test_a_plan_has_the_bytes_of_the_model(command: Command, folders: Folders) -> None:
    sizes = "task.prompt_tokens=9", "task.max_new_tokens=9"
    words = "task=plan", f"model={folders.target}", "draft=none", *sizes, "output=json", "out=null"
    plain = command(*words).document
    adapted = command(*words, f"model.adapter={folders.of_target}").document
    assert adapted["per_gpu"][0]["lines"] == plain["per_gpu"][0]["lines"]
    assert adapted["per_gpu"][0]["total_bytes"] == plain["per_gpu"][0]["total_bytes"] > 0
    refused = command(*words, f"model.adapter={FILES / 'plain'}")
    assert refused.code == 4 and "the adapter does not fit the model" in refused.errors[0]
    run = command(*words[1:3], *GREEDY, "out=null", f"model.adapter={FILES / 'plain'}")
    assert refused.errors == run.errors


def test_a_plan_by_layers_refuses_what_a_run_refuses(command: Command, folders: Folders) -> None:
    """transformers quantises while it reads; in bf16 both are well."""
    words = f"model={folders.target}", "draft=none", f"model.adapter={folders.of_target}", "placement=layers"
    sizes = "task.prompt_tokens=9", "task.max_new_tokens=9"
    planned = command("task=plan", *words, *sizes, "model.dtype=int8", "out=null")
    run = command(*words, *GREEDY, "model.dtype=int8", "out=null")
    assert (planned.code, run.code) == (4, 4) and planned.errors == run.errors
    assert "a model that transformers runs" in run.errors[0] and "dtype=int8" in run.errors[0]
    expected = command(f"model={folders.whole_target}", "draft=none", *FP32[:1], *FP32[2:5], *GREEDY).document
    found = command(*words, *FP32[:1], *FP32[2:5], *GREEDY).document
    assert texts(found) == texts(expected)


def test_an_adapter_of_no_model(command: Command, folders: Folders) -> None:
    for words, says in (
        ((f"model={folders.of_target}", "draft=none"), "an adapter (LoRA).*model.adapter="),
        ((f"model.adapter={folders.of_target}",), "model.adapter is given, and no model is named"),
        (("model=tiny", "draft=none", f"model.adapter={folders.of_target}"), "found synthetic weights"),
    ):
        answer = command.line(*words, *GREEDY, "out=null")
        assert answer.code in (2, 4) and len(answer.errors) == 1
        assert all(part in answer.errors[0] for part in says.split(".*")), answer.errors


def test_the_run_folder_names_the_adapter(command: Command, folders: Folders, tmp_path: Path) -> None:
    words = f"model={folders.target}", "draft=none", f"model.adapter={folders.of_target}", *GREEDY
    assert command(*words, f"out={tmp_path / 'runs'}").code == 0
    (config,) = (tmp_path / "runs").glob("*/*/config.yaml")
    assert f"adapter: {folders.of_target}" in config.read_text()
