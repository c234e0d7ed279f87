"""task=compare in a pipe: what it prints, what it counts, what it refuses."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp.distributed.comm import ALONE
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks import compare
from llama_ssp.tasks.compare import CompareTask, Contestant
from llama_ssp.text.prompts import Reading
from tests.conftest import Command, Saved
from tests.warm import Answer

COMPARE = ("task=compare", "task.max_new_tokens=12", "seed=1")
SIDE = {
    "text", "token_ids", "finish_reason", "prompt_tokens", "output_tokens", "prefill_ms", "decode_ms",
    "time_to_first_token_ms", "ms_per_token", "tokens_per_s", "tokens_committed", "acceptance_rate",
}  # fmt: skip


@pytest.fixture
def piped(once: Callable[..., Answer]) -> Answer:
    """What is said of two prompts from a pipe, with an empty line between them."""
    answer = once(*COMPARE, stdin=b"hello\n\na fox\n")
    assert (answer.code, answer.errors) == (0, [])
    return answer


def test_prompts_from_a_pipe_are_one_a_line(piped: Answer) -> None:
    assert [line for line in piped.out.splitlines() if line.startswith("prompt: ")] == [
        "prompt: hello", "prompt: a fox",
    ]  # fmt: skip
    assert [one["id"] for one in piped.document["comparisons"]] == ["line-1", "line-3"]


def test_in_a_pipe_text_is_plain(piped: Answer) -> None:
    assert "\x1b" not in piped.out


def test_both_sides_of_each_prompt_are_shown(piped: Answer) -> None:
    assert piped.out.count("--- regular") == piped.out.count("--- speculative, tiny_draft, K = 4") == 2
    assert len(re.findall(r"--- \d+\.\d\d times as fast: .* prefill excluded", piped.out)) == 2
    for one in piped.document["comparisons"]:
        assert one["regular"]["text"] in piped.out or "\\x" in piped.out


def test_both_sides_are_kept(piped: Answer) -> None:
    document = piped.document
    assert (document["task"], document["status"]) == ("compare", "done")
    for one in document["comparisons"]:
        assert one["regular"].keys() == one["speculative"].keys() >= SIDE


def test_both_sides_write_equally_many_tokens(piped: Answer) -> None:
    """The speculative side drafts, and has fewer rounds."""
    for one in piped.document["comparisons"]:
        regular, speculative = one["regular"], one["speculative"]
        assert regular["tokens_drafted"] == 0 < speculative["tokens_drafted"], one["id"]
        assert regular["tokens_committed"] == speculative["tokens_committed"] == 12, one["id"]
        assert regular["row_rounds"] == 12 > speculative["row_rounds"], one["id"]


@pytest.mark.slow
def test_the_speed_up_is_that_of_all_prompts_together(command: Command) -> None:
    """And the picture is saved without a terminal."""
    answer = command(*COMPARE, 'task.prompts=["a","b"]', "output=json", "task.plot=a.html")
    found = answer.document
    regular, speculative = (
        sum(one[side]["decode_ms"] for one in found["comparisons"]) for side in ("regular", "speculative")
    )
    assert found["speedup"] == pytest.approx(regular / speculative)  # of equally many tokens
    assert len(answer.out.splitlines()) == 1 and found["plot"] == "a.html"
    assert Path("a.html").stat().st_size > 1000


@pytest.mark.slow
def test_stop_strings_end_both_sides(command: Command, saved: Saved) -> None:
    """In fp32 greedy texts are equal to the last token."""
    pair = (f"model={saved.sharded}", f"draft={saved.whole}", "model.dtype=fp32", "draft.dtype=fp32")
    run = (*COMPARE, *pair, "sampling=greedy", "out=null", "task.max_new_tokens=30", "prompt=hello")
    (one,) = command(*run).document["comparisons"]
    whole, stop = one["regular"]["text"], one["regular"]["text"][4:6]
    assert one["speculative"]["token_ids"] == one["regular"]["token_ids"]
    (one,) = command(*run, f"task.stop={json.dumps([stop])}").document["comparisons"]
    for side in (one["regular"], one["speculative"]):
        assert side["finish_reason"] == "stop" and side["text"] == whole[: whole.index(stop)]


@pytest.mark.slow
def test_lookup_drafts_without_a_draft_model(command: Command) -> None:
    answer = command(*COMPARE, "speculation=ngram", "draft=none", stdin=b"one two one two one")
    assert "--- speculative, ngram, K = 8" in answer.out
    assert answer.document["comparisons"][0]["speculative"]["tokens_drafted"] > 0


@pytest.mark.slow
def test_bad_prompts_of_a_pipe_can_be_skipped(command: Command) -> None:
    long = b"word " * 5000
    assert command(*COMPARE, stdin=b"hello\n" + long).code == 3
    answer = command(*COMPARE, "task.on_bad_row=skip", stdin=b"hello\n" + long)
    found = answer.document
    assert len(found["comparisons"]) == 1 and found["rows_skipped"] == 1
    only = command(*COMPARE, "task.on_bad_row=skip", stdin=long)
    assert only.code == 3 and "no usable prompt" in only.err


@pytest.mark.slow
def test_what_was_compared_remains_when_it_is_stopped(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Contestant.begin

    def stopped(side: Contestant, prompt: Any, *rest: Any) -> None:
        if prompt.id == "1":
            raise KeyboardInterrupt
        finish(side, prompt, *rest)

    monkeypatch.setattr(Contestant, "begin", stopped)
    answer = command(*COMPARE, 'task.prompts=["a","b","c"]', "task.plot=a.svg")
    assert answer.code == 130
    found = answer.document
    assert (found["status"], len(found["comparisons"])) == ("interrupted", 1)
    assert "times as fast" in Path("a.svg").read_text().replace("&#160;", " ")


def test_a_typing_slip_does_not_end_the_session(
    command: Command, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = iter(["hello", "word " * 5000, "half \udcff", "a fox"])
    typist = SimpleNamespace(ask=lambda: next(lines, None))
    monkeypatch.setattr(compare, "Terminal", lambda: typist)
    monkeypatch.setattr("llama_ssp.text.prompts.read_prompts", lambda _: Reading([], []))
    with caplog.at_level(logging.WARNING):
        answer = command(*COMPARE)
    assert answer.code == 0
    assert [one["prompt"] for one in answer.document["comparisons"]] == ["hello", "a fox"]
    assert [one["id"] for one in answer.document["comparisons"]] == ["1", "4"]
    assert "fills the model's context" in caplog.text
    assert "not UTF-8, or half a surrogate pair" in caplog.text  # said of prompt 3


def test_a_typed_prompt_is_no_longer_than_was_planned(monkeypatch, caplog) -> None:
    """A longer one is refused in one line, and the next one is answered."""
    monkeypatch.setattr(compare, "TYPED_TOKENS", 5)
    monkeypatch.setattr(compare, "Terminal", lambda: None)
    monkeypatch.setattr(compare, "typed_lines", lambda *_: iter(["12345", "123456", "1"]))
    task: Any = SimpleNamespace(_ranks=ALONE)
    pair: Any = SimpleNamespace(prompt=lambda text: Prompt(text.id, tuple(range(len(text.text)))))
    given = [text.text for text, _ in CompareTask._typed_prompts(task, pair)]
    assert given == ["12345", "1"]
    assert [line for line in caplog.messages if "prompt 2" in line] == [
        "a typed prompt is longer than memory was planned for; prompt 2; found 6 tokens, allowed at most 5; "
        "use task.prompt_file"
    ]
