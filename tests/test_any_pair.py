"""Pairs of any tokenizers through the command: what is said, what comes out, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.config import DraftSeat, PlacementConf
from llama_ssp.errors import UsageError
from llama_ssp.models.checkpoint import SHIPPED_FOLDER
from llama_ssp.pair.placements import model_placements, tokens_of
from llama_ssp.placing.pairs import pair_specs
from tests import checkpoints
from tests.checkpoints import renumber
from tests.conftest import Command, Saved
from tests.distributed.pairs import entry_of
from tests.warm import Started

DRAFT = SHIPPED_FOLDER / "demo_draft"
ALONE = ("model.dtype=fp32", "seed=1", "output=json", "out=null")
FP32 = (*ALONE, "draft.dtype=fp32")
DEMO = ("model=demo", "task.max_new_tokens=24")
PROMPTS = 'task.prompts=["def hello","7 * 8 = 56\\n12 * 34 = "]'
BRIDGED = "speculation.bridge=intersection"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """600 of the shipped draft's 4,096 tokens, under other ids: three quarters of a text are shared."""
    return f"draft={renumber(DRAFT, tmp_path_factory.mktemp('other') / 'x', tokens=600)}"


def summary(answer: Any) -> dict[str, Any]:
    assert (answer.code, answer.errors) == (0, []), answer.err
    document: dict[str, Any] = answer.document
    return document


def vocabulary(document: dict[str, Any]) -> tuple[str, str | None]:
    return document["vocabulary"]["verdict"], document["vocabulary"]["bridge"]


def texts(document: dict[str, Any]) -> list[list[int]]:
    return [output["token_ids"] for output in document["outputs"]]


def refusal(answer: Any) -> str:
    assert answer.code == 4
    (error,) = answer.errors
    return str(error)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "overrides", [(), ("speculation=adaptive",), ("task.batch_size=1",)], ids=["plain", "adaptive", "one row"]
)
def test_greedy_texts_are_the_target_s(
    overrides: tuple[str, ...], other: str, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if K changes, and batches come and go. Rounds of a plain draft cost less, and are not measured."""
    plain = summary(command(PROMPTS, *DEMO, "draft=none", *ALONE, "sampling=greedy"))
    run = summary(command(PROMPTS, *DEMO, *FP32, other, "sampling=greedy", *overrides))
    assert texts(run) == texts(plain) and run["tokens_accepted"] > 0
    assert vocabulary(run) == ("different", "intersection")
    assert max(max(ids) for ids in texts(run)) >= 600, "tokens that the draft lacks come from the target"
    assert "adaptive: a round takes" not in caplog.text


def test_what_is_refused(other: str, command: Command, tmp_path: Path) -> None:
    """A pair that shares too little, unless the user wants it all the same; any, if the user says so."""
    few = f"draft={renumber(DRAFT, tmp_path / 'few', tokens=270)}"
    error = refusal(command(PROMPTS, *DEMO, *FP32, few))
    for part in ("share too little", "% of a sample text's tokens", "50% or more", "speculation=ngram"):
        assert part in error
    assert summary(command(PROMPTS, *DEMO, *FP32, few, BRIDGED))["tokens_accepted"] > 0
    assert "different tokenizers" in refusal(command(PROMPTS, *DEMO, *FP32, other, "speculation.bridge=off"))


def test_agreement_of_other_tokenizers(other: str, command: Command) -> None:
    """Where they part, each takes another of the target's tokens."""
    document = summary(command("task=agree", *DEMO, *FP32, other, "task.prompts=['def hello','12 * 34 = ']"))
    forks = [prompt["fork"] for prompt in document["prompts"] if prompt["fork"]]
    assert forks and all(fork["target"] != fork["draft"] for fork in forks)


def test_plans_say_it(other: str, command: Command) -> None:
    for draft, *said in ((other, "different", "intersection"), ("draft=demo_draft", "same", None)):
        assert [*vocabulary(summary(command("task=plan", "model=demo", draft, "output=json")))] == said
    answer = command("task=plan", "model=demo", other)
    assert "vocabularies: different, 600 of the target's 4096 tokens" in answer.out
    assert summary(command("task=plan", "model=13B", "draft=7B", "output=json"))["vocabulary"] is None


def test_a_plan_says_what_a_run_would_be_refused_for(command: Command, saved: Saved, tmp_path: Path) -> None:
    """As many tokens, two of which have changed their ids; the run is refused with the same words."""
    other = checkpoints.save(tmp_path / "other")

    def change(content: dict[str, Any]) -> None:
        ids = content["model"]["vocab"]
        ids["a"], ids["b"] = ids["b"], ids["a"]

    checkpoints.edit(other / "tokenizer.json", change)
    pair = (f"model={saved.whole}", f"draft={other}", "task.max_new_tokens=8")
    planned = summary(command("task=plan", *pair, "task.prompt_tokens=16", "output=json"))["vocabulary"]
    assert planned["verdict"] == "same size but different"
    assert refusal(command("prompt=hello", *pair)) == f"error: {planned['refused']}"
    assert "'a': " in planned["refused"] and "'b': " in planned["refused"]
    assert command("prompt=hello", *pair, BRIDGED).code == 0


def test_on_several_ranks_the_draft_of_another_tokenizer_sits_with_the_leader(other: str) -> None:
    run = entry_of(SHIPPED_FOLDER / "demo", Path(other.removeprefix("draft=")), PlacementConf(), 1).run
    (entry,) = pair_specs(run, [], 2)
    assert entry.placement.draft == (0,) and len(entry.placement.target) == 2
    assert tokens_of(model_placements(entry)).paired is not None
    with pytest.raises(UsageError, match=r"is on the leader.*placement=leader"):
        pair_specs(replace(run, placement=PlacementConf(draft=DraftSeat.sharded)), [], 2)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sampling", [(), ("sampling=nucleus", "sampling.repetition_penalty=1.2")], ids=["plain", "nucleus"]
)
def test_other_ids_cost_nothing(sampling: tuple[str, ...], command: Command, tmp_path: Path) -> None:
    """The shipped draft with its ids shuffled drafts the same tokens and gives the same text."""
    shuffled = f"draft={renumber(DRAFT, tmp_path / 'other')}"
    plain = summary(command(PROMPTS, *DEMO, *FP32, *sampling, "draft=demo_draft"))
    run = summary(command(PROMPTS, *DEMO, *FP32, *sampling, shuffled, BRIDGED))
    assert vocabulary(run)[0] == "same size but different" and vocabulary(plain) == ("same", None)
    assert run["vocabulary"]["shared_tokens"] == 4096 and run["tokens_accepted"] > 0
    assert texts(run) == texts(plain) and run["accepted_by_position"] == plain["accepted_by_position"]


@pytest.mark.slow
def test_two_ranks_give_one_process_s_texts(other: str, command: Command, tmp_path: Path) -> None:
    """The target is split, the draft of another tokenizer drafts on the leader, which alone translates."""
    run = (PROMPTS, *DEMO, *FP32, other, "sampling=greedy")
    alone = summary(command(*run))
    leader, second = Started(tmp_path / "two", 2, *run, "output=json").finish()
    assert (leader.code, second.code) == (0, 0), leader.err + second.err
    both = json.loads(leader.out.splitlines()[-1])
    assert texts(both) == texts(alone) and both["tokens_accepted"] == alone["tokens_accepted"]
    assert "over 2 ranks" in both["devices"]["model"] and "over" not in both["devices"]["draft"]
