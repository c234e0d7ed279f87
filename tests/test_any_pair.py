"""Pairs of any tokenizers through the command: what is said, what comes out, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.checkpoint import SHIPPED_FOLDER, folder_at_hand
from llama_ssp.config import DraftSeat, ModelConf, PlacementConf, Weights
from llama_ssp.entries import entries
from llama_ssp.errors import UsageError
from llama_ssp.tasks.seats import seats, tokens_of
from tests import checkpoints
from tests.conftest import Answer, Command, Saved
from tests.distributed.pairs import entry_of

FP32 = ("model.dtype=fp32", "draft.dtype=fp32")
DEMO = ("model=demo", "draft=demo_bytes", "seed=1", "output=json", "task.max_new_tokens=24", *FP32)
PROMPTS = 'task.prompts=["def hello","7 * 8 = 56\\n12 * 34 = "]'


def summary(answer: Answer) -> dict[str, Any]:
    assert (answer.code, answer.errors) == (0, [])
    found: dict[str, Any] = json.loads(answer.out.splitlines()[-1])
    return found


def texts(found: dict[str, Any]) -> list[list[int]]:
    return [output["token_ids"] for output in found["outputs"]]


@pytest.mark.parametrize("bridge", ["intersection", "text"])
def test_greedy_texts_are_the_target_s(bridge: str, command: Command) -> None:
    plain = summary(command(PROMPTS, "model=demo", "draft=none", *DEMO[2:-1], "sampling=greedy"))
    found = summary(command(PROMPTS, *DEMO, "sampling=greedy", f"speculation.bridge={bridge}"))
    assert texts(found) == texts(plain)
    assert found["tokens_accepted"] > 0
    assert found["vocabulary"]["verdict"] == "different" and found["vocabulary"]["bridge"] == bridge


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("speculation=adaptive",), ("task.batch_size=1",)])
def test_k_changes_and_batches_come_and_go(overrides: tuple[str, ...], command: Command) -> None:
    found = summary(command(PROMPTS, *DEMO, "sampling=greedy", *overrides))
    plain = summary(command(PROMPTS, "model=demo", "draft=none", *DEMO[2:-1], "sampling=greedy"))
    assert texts(found) == texts(plain)


def test_the_same_vocabulary_is_said_to_be(command: Command) -> None:
    found = summary(command(PROMPTS, "model=demo", "draft=demo_draft", *DEMO[2:]))
    assert (found["vocabulary"]["verdict"], found["vocabulary"]["bridge"]) == ("same", None)


def test_a_draft_with_a_larger_vocabulary(command: Command) -> None:
    """The target's tokens are all among the draft's; its other tokens are never drawn."""
    found = summary(command(PROMPTS, "model=demo_bytes", "draft=demo", *DEMO[2:]))
    assert found["vocabulary"]["bridge"] == "intersection"
    assert max(max(ids) for ids in texts(found)) < 258


def test_agreement_of_other_tokenizers(command: Command) -> None:
    """Where they part, only the target's law is one over the target's tokens."""
    found = summary(command("task=agree", *DEMO, "task.prompts=['def hello','12 * 34 = ']"))
    forks = [prompt["fork"] for prompt in found["prompts"] if prompt["fork"]]
    assert forks
    for fork in forks:
        assert fork["target"]["target_probability"] is not None
        assert fork["target"]["draft_probability"] is None


def test_bridges_can_be_switched_off(command: Command) -> None:
    answer = command(PROMPTS, *DEMO, "speculation.bridge=off")
    assert answer.code == 4 and len(answer.errors) == 1
    assert "different tokenizers" in answer.errors[0] and "speculation.bridge" in answer.errors[0]


def test_plans_say_it(command: Command) -> None:
    for draft, verdict, bridge in (("demo_bytes", "different", "text"), ("demo_draft", "same", None)):
        found = summary(command("task=plan", "model=demo", f"draft={draft}", "output=json"))
        assert (found["vocabulary"]["verdict"], found["vocabulary"]["bridge"]) == (verdict, bridge)
    answer = command("task=plan", "model=demo", "draft=demo_bytes")
    assert "vocabularies: different, 258 of the target's 4096 tokens" in answer.out
    assert summary(command("task=plan", "model=13B", "draft=7B", "output=json"))["vocabulary"] is None
    assert "vocabulary" in summary(command("task=plan", "model=demo", "draft=none", "output=json"))


def test_a_plan_says_what_a_run_would_be_refused_for(command: Command, saved: Saved, tmp_path: Path) -> None:
    """As many tokens, two of which have changed their ids; the run is refused with the same words."""
    other = checkpoints.save(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    pair = ("model=local", f"model.path={saved.whole}", "draft=local", f"draft.path={other}")
    planned = summary(
        command("task=plan", *pair, "task.prompt_tokens=16", "task.max_new_tokens=8", "output=json")
    )
    assert planned["vocabulary"]["verdict"] == "same size but different"
    refused = command('task.prompts=["hello"]', "task.max_new_tokens=8", "seed=1", *pair)
    assert refused.code == 4 and refused.errors == [f"error: {planned['vocabulary']['refused']}"]
    assert "'a': " in refused.errors[0] and "'b': " in refused.errors[0]
    bridged = command(
        'task.prompts=["hello"]', "task.max_new_tokens=8", "seed=1", *pair, "speculation.bridge=intersection"
    )
    assert (bridged.code, bridged.errors) == (0, [])


def test_what_is_at_hand() -> None:
    assert folder_at_hand(ModelConf("demo", path="shipped:demo")) == SHIPPED_FOLDER / "demo"
    assert folder_at_hand(ModelConf("local", path="/no/such")) is None
    assert folder_at_hand(ModelConf("tiny", weights=Weights.synthetic)) is None
    assert folder_at_hand(ModelConf("7B", repo="nobody/nothing")) is None


def test_on_several_ranks_the_draft_of_another_tokenizer_sits_with_the_leader() -> None:
    target, draft = SHIPPED_FOLDER / "demo", SHIPPED_FOLDER / "demo_bytes"
    run = entry_of(target, draft, PlacementConf(), 1).run
    (entry,) = entries(run, [], 2)
    assert entry.placement.draft == (0,) and len(entry.placement.target) == 2
    assert tokens_of(seats(entry)).paired is not None
    elsewhere = replace(run, placement=PlacementConf(draft=DraftSeat.sharded))
    (entry,) = entries(elsewhere, [], 2)
    with pytest.raises(UsageError, match=r"sits with the leader.*placement=leader"):
        tokens_of(seats(entry))
