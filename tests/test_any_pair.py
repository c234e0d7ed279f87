"""Pairs of any tokenizers through the command: what is said, what comes out, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llama_ssp.config import DraftSeat, ModelConf, PlacementConf, Weights
from llama_ssp.errors import UsageError
from llama_ssp.models.checkpoint import SHIPPED_FOLDER, folder_at_hand
from llama_ssp.pair.placements import model_placements, tokens_of
from llama_ssp.planner.resolve import pair_specs
from tests import checkpoints
from tests.conftest import Answer, Command, Saved
from tests.distributed.faults import Started
from tests.distributed.pairs import entry_of
from tests.families import build
from tests.renumbered import renumber

FP32 = ("model.dtype=fp32", "draft.dtype=fp32")
OWN = ("seed=1", "output=json", "task.max_new_tokens=24", *FP32)
DEMO = ("model=demo", *OWN)
PROMPTS = 'task.prompts=["def hello","7 * 8 = 56\\n12 * 34 = "]'


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """600 of the shipped draft's 4,096 tokens, under other ids: three quarters of a text are shared."""
    folder = tmp_path_factory.mktemp("other") / "x"
    return f"draft={renumber(SHIPPED_FOLDER / 'demo_draft', folder, tokens=600)}"


def summary(answer: Answer) -> dict[str, Any]:
    assert (answer.code, answer.errors) == (0, [])
    found: dict[str, Any] = answer.document
    return found


def texts(found: dict[str, Any]) -> list[list[int]]:
    return [output["token_ids"] for output in found["outputs"]]


def test_greedy_texts_are_the_target_s(other: str, command: Command) -> None:
    plain = summary(command(PROMPTS, "model=demo", "draft=none", *OWN[:-1], "sampling=greedy"))
    found = summary(command(PROMPTS, *DEMO, other, "sampling=greedy"))
    assert texts(found) == texts(plain)
    assert found["tokens_accepted"] > 0
    assert found["vocabulary"]["verdict"] == "different" and found["vocabulary"]["bridge"] == "intersection"
    assert max(max(ids) for ids in texts(found)) >= 600, "tokens that the draft lacks come from the target"


def test_a_pair_that_shares_too_little_is_refused(command: Command, tmp_path: Path) -> None:
    few = f"draft={renumber(SHIPPED_FOLDER / 'demo_draft', tmp_path / 'few', tokens=270)}"
    answer = command(PROMPTS, *DEMO, few)
    assert answer.code == 4 and len(answer.errors) == 1
    for part in ("share too little", "% of a sample text's tokens", "50% or more", "speculation=ngram"):
        assert part in answer.errors[0]
    assert summary(command(PROMPTS, *DEMO, few, "speculation.bridge=intersection"))["tokens_accepted"] > 0


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("speculation=adaptive",), ("task.batch_size=1",)])
def test_k_changes_and_batches_come_and_go(overrides: tuple[str, ...], other: str, command: Command) -> None:
    found = summary(command(PROMPTS, *DEMO, other, "sampling=greedy", *overrides))
    plain = summary(command(PROMPTS, "model=demo", "draft=none", *OWN[:-1], "sampling=greedy"))
    assert texts(found) == texts(plain)


def test_rounds_of_a_draft_of_another_tokenizer_are_not_measured(
    other: str, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a plain draft cost less: `speculation.cost_ratio` counts."""
    words = ("speculation=adaptive", "task.max_new_tokens=4")
    assert summary(command(PROMPTS, *DEMO, other, *words))
    assert "adaptive: a round takes" not in caplog.text
    assert summary(command(PROMPTS, *DEMO, "draft=demo_draft", words[0]))
    assert "adaptive: a round takes" in caplog.text


def test_the_same_vocabulary_is_said_to_be(command: Command) -> None:
    found = summary(command(PROMPTS, *DEMO, "draft=demo_draft"))
    assert (found["vocabulary"]["verdict"], found["vocabulary"]["bridge"]) == ("same", None)


def test_agreement_of_other_tokenizers(other: str, command: Command) -> None:
    """Where they part, each takes another of the target's tokens."""
    found = summary(command("task=agree", *DEMO, other, "task.prompts=['def hello','12 * 34 = ']"))
    forks = [prompt["fork"] for prompt in found["prompts"] if prompt["fork"]]
    assert forks and all(fork["target"] != fork["draft"] for fork in forks)


def test_other_tokenizers_can_be_refused(other: str, command: Command) -> None:
    answer = command(PROMPTS, *DEMO, other, "speculation.bridge=off")
    assert answer.code == 4 and len(answer.errors) == 1
    assert "different tokenizers" in answer.errors[0] and "speculation.bridge" in answer.errors[0]


def test_plans_say_it(other: str, command: Command) -> None:
    for draft, *said in ((other, "different", "intersection"), ("draft=demo_draft", "same", None)):
        found = summary(command("task=plan", "model=demo", draft, "output=json"))
        assert [found["vocabulary"]["verdict"], found["vocabulary"]["bridge"]] == said
    answer = command("task=plan", "model=demo", other)
    assert "vocabularies: different, 600 of the target's 4096 tokens" in answer.out
    assert summary(command("task=plan", "model=13B", "draft=7B", "output=json"))["vocabulary"] is None
    assert "vocabulary" in summary(command("task=plan", "model=demo", "draft=none", "output=json"))


def test_a_plan_says_what_a_run_would_be_refused_for(command: Command, saved: Saved, tmp_path: Path) -> None:
    """As many tokens, two of which have changed their ids; the run is refused with the same words."""
    other = checkpoints.save(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    pair = (f"model={saved.whole}", f"draft={other}")
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


def test_on_several_ranks_the_draft_of_another_tokenizer_sits_with_the_leader(other: str) -> None:
    target, draft = SHIPPED_FOLDER / "demo", Path(other.removeprefix("draft="))
    run = entry_of(target, draft, PlacementConf(), 1).run
    (entry,) = pair_specs(run, [], 2)
    assert entry.placement.draft == (0,) and len(entry.placement.target) == 2
    assert tokens_of(model_placements(entry)).paired is not None
    elsewhere = replace(run, placement=PlacementConf(draft=DraftSeat.sharded))
    (entry,) = pair_specs(elsewhere, [], 2)
    with pytest.raises(UsageError, match=r"is on the leader.*placement=leader"):
        tokens_of(model_placements(entry))


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [(), ("sampling=nucleus", "sampling.repetition_penalty=1.2")])
def test_other_ids_cost_nothing(sampling: tuple[str, ...], command: Command, tmp_path: Path) -> None:
    """The shipped draft with its ids shuffled drafts the same tokens and gives the same text."""
    shuffled = renumber(SHIPPED_FOLDER / "demo_draft", tmp_path / "other")
    own = (PROMPTS, *DEMO, *sampling)
    plain = summary(command(*own, "draft=demo_draft"))
    found = summary(command(*own, f"draft={shuffled}", "speculation.bridge=intersection"))
    assert found["vocabulary"]["verdict"] == "same size but different"
    assert found["vocabulary"]["shared_tokens"] == 4096
    assert texts(found) == texts(plain)
    assert found["accepted_by_position"] == plain["accepted_by_position"]
    assert found["tokens_accepted"] > 0


def trained(words: list[str], size: int, special: str) -> Tokenizer:
    """A byte-level tokenizer of its own."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[special], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(words, trainer)
    return made


def neo_pair(folder: Path) -> list[str]:
    """GPT-NeoX for GPT-Neo, each with a tokenizer that was trained on other texts."""
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    makers = {
        "gpt_neox": trained([*checkpoints.TEXT, "vehicles gasoline hybrid the and"], 330, "<|endoftext|>"),
        "gpt_neo": trained(["Difference a vehicle is hybrid", "between gas and oil"], 310, "<eot>"),
    }  # fmt: skip
    arguments = []
    for (role, name), made in zip(
        (("model", "gpt_neox"), ("draft", "gpt_neo")), makers.values(), strict=True
    ):
        build(name, vocab_size=made.get_vocab_size() + 16, **ends).save_pretrained(folder / name)
        special = made.id_to_token(0)
        checkpoints.write_tokenizer(folder / name, made, bos_token=special, eos_token=special)
        arguments += [f"{role}={folder / name}"]
    return [*arguments, *FP32, "seed=1", "out=null"]


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("bridge", ["auto", "intersection"])
def test_a_neox_target_with_a_neo_draft(bridge: str, command: Command, tmp_path: Path) -> None:
    """A public write-up's pair, prompt, K and length: traced, lossless, and at its end it stops."""
    prompt = 'task.prompts=["Difference between a gasoline and hybrid vehicles is"]'
    pair = neo_pair(tmp_path)
    asked = (prompt, "speculation.k=4", "task.max_new_tokens=50", f"speculation.bridge={bridge}")
    traced = command(*pair, *asked, "task.trace=true")
    assert (traced.code, traced.errors) == (0, [])
    assert "0 at 0: " in traced.out and "), " in traced.out
    greedy = summary(command(*pair, *asked, "sampling=greedy", "output=json"))
    plain = summary(command(*pair, *asked, "sampling=greedy", "output=json", "speculation=none"))
    assert texts(greedy) == texts(plain)
    assert greedy["outputs"][0]["finish_reason"] in ("length", "eos")
    assert greedy["vocabulary"]["verdict"] == "different"
    ended = summary(command(*pair, *asked, "output=json", "+sampling.logit_bias={0: 8.0}"))
    (output,) = ended["outputs"]
    assert output["finish_reason"] == "eos" and output["token_ids"].count(0) == 1
    small = ("task.samples=16", "task.max_new_tokens=4", "task.law_tokens=8", "task.greedy_tokens=8")
    how = (prompt, f"speculation.bridge={bridge}", "output=json", *small)
    certified = summary(command("task=certify", *pair, *how))
    assert {check["name"]: check["outcome"] for check in certified["checks"]}["law"] == "passed"
    assert certified["verdict"] != "different"


@pytest.mark.slow
def test_two_ranks_give_one_process_s_texts(other: str, command: Command, tmp_path: Path) -> None:
    """The target is split, the draft of another tokenizer drafts on the leader, which alone translates."""
    run = (*DEMO, other, "sampling=greedy", "out=null")
    alone = summary(command(PROMPTS, *run))
    leader, second = Started(tmp_path / "two", 2, PROMPTS, *run).finish()
    assert (leader.code, second.code) == (0, 0), leader.err + second.err
    found = json.loads(leader.out.splitlines()[-1])
    assert texts(found) == texts(alone) and found["tokens_accepted"] == alone["tokens_accepted"]
    assert "over 2 ranks" in found["devices"]["model"] and "over" not in found["devices"]["draft"]
