"""task=agree: the same as asking both models token by token, and what is said where they part."""

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.config import SamplingConfig
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.tasks.agree import Fork, agreements
from tests.conftest import Command
from tests.proofs.toy import Toy, toy
from tests.rig import GREEDY, contrary, engine_of

VOCAB, NEW = 7, 10
END = frozenset({0})


def agreed(
    target: CausalModel, draft: CausalModel, prompts: list[Prompt], chunk: int = 4,
    ends: frozenset[int] = END,
) -> tuple[State, list[Fork | None]]:  # fmt: skip
    engine = engine_of(target, draft, "token", sampling=GREEDY, ends=ends)
    return agreements(engine, prompts, chunk, NEW, ends)


def logits(model: CausalModel, text: list[int]) -> Tensor:
    found: Tensor = model.module(torch.tensor([text])).logits[0, -1]
    return found


def naive(target: CausalModel, draft: CausalModel, prompt: Prompt, ends: frozenset[int]) -> tuple[Any, ...]:
    """Both models asked token by token: what they agree on, why no more, and the fork."""
    text = list(prompt.token_ids)
    for _ in range(NEW):
        one, other = (int(logits(model, text).argmax()) for model in (target, draft))
        if one != other:
            return text[len(prompt.token_ids) :], "fork", (one, other)
        text.append(one)
        if one in ends:
            return text[len(prompt.token_ids) :], "eos", None
    return text[len(prompt.token_ids) :], "length", None


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_equals_asking_token_by_token(chunk: int) -> None:
    """50 prompts of 1 to 12 tokens in ragged batches, in fp64: the draft is the target, slightly moved."""
    chance = random.Random(chunk)
    target, moved = toy(VOCAB, 3), Toy(VOCAB, 3)
    generator = torch.Generator().manual_seed(chunk)
    noise = torch.randn(moved.head.weight.shape, generator=generator, dtype=torch.float64)
    moved.head.weight.data += 0.3 * noise
    draft = CausalModel(moved, "moved")
    prompts = [
        Prompt(str(n), tuple(chance.randrange(VOCAB) for _ in range(chance.randint(1, 12))))
        for n in range(50)
    ]
    reasons = set()
    for first in range(0, 50, 8):
        part = prompts[first : first + 8]
        state, forks = agreed(target, draft, part, chunk)
        for row, prompt in enumerate(part):
            tokens, reason, fork = naive(target, draft, prompt, END)
            assert (state.generated(row), state.finished[row]) == (tokens, reason)
            assert forks[row] == fork
            reasons.add(reason)
    assert reasons == {"fork", "eos", "length"}


AGREED = [Prompt("a", (1, 2, 3)), Prompt("b", (4,))]


def test_a_draft_that_is_the_target_never_parts() -> None:
    state, forks = agreed(toy(VOCAB, 3), toy(VOCAB, 3), AGREED, ends=frozenset())
    assert [len(state.generated(row)) for row in range(2)] == [NEW] * 2
    assert (state.finished, forks) == (["length"] * 2, [None] * 2)


def test_a_contrary_draft_parts_at_once() -> None:
    target = toy(VOCAB, 3)
    state, forks = agreed(target, contrary(CausalModel(Toy(VOCAB, 3), "contrary")), AGREED[:1])
    best = int(logits(target, [1, 2, 3]).argmax())
    assert (state.generated(0), state.finished) == ([], ["fork"])
    assert forks == [(best, (best + 1) % VOCAB)]


def test_an_end_that_both_choose_is_the_last_token() -> None:
    """What both would write behind it is not asked for: the naive course would go on to disagree or not."""
    target = toy(VOCAB, 3)
    text = [1, 2]
    for _ in range(3):
        text.append(int(logits(target, text).argmax()))
    ends = frozenset({text[-1]})
    first_end = next(i for i, token in enumerate(text[2:]) if token in ends)
    state, _ = agreed(target, toy(VOCAB, 3), [Prompt("a", (1, 2))], chunk=8, ends=ends)
    assert (state.generated(0), state.finished) == (text[2 : 3 + first_end], ["eos"])


def test_one_forward_a_chunk() -> None:
    engine = engine_of(toy(VOCAB, 3), toy(VOCAB, 3), "token", sampling=GREEDY)
    agreements(engine, [Prompt("a", (1, 2, 3))], 5, NEW, frozenset())
    assert engine.target.forwards == 1 + NEW // 5  # the prompt, then ten tokens by fives


def test_penalties_hold_for_both() -> None:
    """A ban moves both argmaxes: two equal models agree all the same, on other tokens."""
    target = toy(VOCAB, 3)
    best = int(logits(target, [1, 2, 3]).argmax())
    banned = SamplingConfig(temperature=0.0, bad_tokens=[best])
    engine = engine_of(target, toy(VOCAB, 3), "token", sampling=banned)
    state, _ = agreements(engine, [Prompt("a", (1, 2, 3))], 4, NEW, frozenset())
    assert state.finished == ["length"] and best not in state.generated(0)


def test_the_command(command: Command, tmp_path: Path) -> None:
    """The synthetic pair on a file of prompts: table, summary and document say the same."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "one", "prompt": "hello"}\n{"id": "two", "prompt": "a longer prompt"}\n')
    answer = command("task=agree", "seed=1", f"task.prompt_file={file}", "task.max_new_tokens=12")
    assert (answer.code, answer.errors) == (0, [])
    head, one, two, summary = answer.out.splitlines()
    assert head.split()[:2] == ["prompt", "agreed"]
    found = answer.document
    assert (found["task"], found["status"]) == ("agree", "done")
    assert [row["id"] for row in found["prompts"]] == ["one", "two"]
    assert [line.split()[:2] for line in (one, two)] == [
        [row["id"], str(row["agreed_tokens"])] for row in found["prompts"]
    ]
    assert f"{found['tokens_agreed']} tokens agreed on in 2 prompts" in summary
    for row in found["prompts"]:
        assert row["agreed_tokens"] == len(row["token_ids"]) <= 12
        assert (row["fork"] is not None) == (row["finish_reason"] == "fork")
        if row["fork"]:
            assert row["fork"]["target"]["token_id"] != row["fork"]["draft"]["token_id"]


@pytest.mark.slow
def test_the_picture(command: Command) -> None:
    pytest.importorskip("matplotlib")
    answer = command("task=agree", "seed=1", "task.max_new_tokens=6", "task.plot=agree.svg", "out=null")
    assert answer.document["plot"] == "agree.svg"
    assert "<svg" in Path("agree.svg").read_text()


@pytest.mark.parametrize("without", ["draft=none", "speculation=ngram"])
def test_it_takes_two_models(command: Command, without: str) -> None:
    answer = command("task=agree", without)
    assert answer.code == 2 and "two models" in answer.errors[0]


def test_no_plot_without_matplotlib(
    command: Command, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llama_ssp.report.plots.find_spec", lambda _: None)
    caplog.set_level(logging.INFO)
    words = ("task=agree", "seed=1", "task.max_new_tokens=6")
    answer = command(*words)
    assert (answer.code, answer.document["plot"]) == (0, None)
    assert "no plot: matplotlib is not installed" in caplog.text
    asked = command(*words, "task.plot=a.png")
    assert asked.code == 2
    assert "needs matplotlib" in asked.errors[0]
