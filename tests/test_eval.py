"""task=eval: its questions, what is scored, what is said, and what remains of a run that was stopped."""

import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.config import ModelConf
from llama_ssp.config.compose import composed
from llama_ssp.models.interface import Model
from llama_ssp.models.passes import Pass
from llama_ssp.pair import assembly as pair
from llama_ssp.pair.requests import Reply
from llama_ssp.pair.run import Run
from llama_ssp.pair.session import PairSession
from llama_ssp.placing.pairs import pair_specs
from llama_ssp.report import console as report
from llama_ssp.tasks import arithmetic
from llama_ssp.tasks.arithmetic import LARGEST, Question, questions
from tests.conftest import Command
from tests.warm import Answer

ROW = {
    "pair", "target", "draft", "mode", "prompts_per_seed", "prompts", "correct", "score", "score_low",
    "score_high", "ms_per_token", "tokens_per_target_forward", "acceptance_rate",
    "target_forwards", "draft_forwards", "tokens_committed", "prefill_ms", "decode_ms",
}  # fmt: skip
DIFFERENCE = {
    "pair", "prompts_per_seed", "prompts", "correct_speculative_only", "correct_regular_only",
    "difference", "difference_low", "difference_high", "includes_zero",
}  # fmt: skip
EVAL = ("task=eval", "seed=1")
OPEN_LINE = re.compile(r"(\d+) \* (\d+) = (\d*)$")


@dataclass
class Sheet:
    """The stub's cache: the tokens themselves."""

    token_BS: Tensor

    def clear(self, row: int) -> None:
        self.token_BS[row] = 0

    def resumable(self, row: int, length: int) -> int:
        return length


class Calculator(Model):
    """A model of bytes that knows multiplication; `knows` tells which questions it gets right."""

    vocab, context, device, dtype = 256, 1024, torch.device("cpu"), torch.float32
    held_bytes = 0

    def __init__(self, model: ModelConf, knows: Callable[[int, int], bool]) -> None:
        self.name, self._knows = model.name, knows

    def new_cache(self, rows: int, capacity: int, rewinds: int = 0) -> Sheet:
        return Sheet(torch.zeros(rows, capacity, dtype=torch.int64))

    def logits(self, token_BW: Tensor, pass_: Pass, cache: Sheet) -> Tensor:
        logit_BWV = torch.full((*token_BW.shape, self.vocab), -50.0)
        for line, (row, start, count) in enumerate(pass_.spans):
            cache.token_BS[row, start : start + count] = token_BW[line, :count]
            text = bytes(cache.token_BS[row, : start + count].tolist()).decode("latin-1")
            for column in range(count):
                logit_BWV[line, column, ord(self._next(text[: start + column + 1]))] = 50.0
        return logit_BWV

    def _next(self, text: str) -> str:
        found = OPEN_LINE.search(text)
        if not found:
            return "\n"
        a, b, written = int(found[1]), int(found[2]), found[3]
        answer = f"{a * b if self._knows(a, b) else 0}\n"
        return answer[len(written)] if answer.startswith(written) else "\n"


@pytest.fixture
def calculators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models that know multiplication; a draft only with an even number. The names of those loaded."""
    loaded: list[str] = []

    def load(model: ModelConf, *how: Any) -> Calculator:
        role = how[3]
        loaded.append(f"{role} {model.name}")
        return Calculator(model, lambda a, b: role == "model" or a * b % 2 == 0)

    monkeypatch.setattr(pair, "load", load)
    return loaded


@pytest.fixture
def quick(once: Callable[..., Answer]) -> Answer:
    """The synthetic pair: two modes of the same distribution on ten prompts."""
    answer = once(*EVAL, "task.quick=true")
    assert (answer.code, answer.errors) == (0, [])
    return answer


def test_scores_are_a_table(quick: Answer) -> None:
    head, regular, speculative, difference = quick.out.splitlines()
    assert head.split()[:5] == ["pair", "sampling", "prompts", "right", "score"]
    assert regular.split()[:3] == ["tiny/tiny_draft", "regular", "10"]
    assert speculative.split()[:3] == ["tiny/tiny_draft", "speculative", "10"]
    assert len(head) == len(regular) == len(speculative)
    assert "less regular" in difference and "holds zero" in difference


def test_an_evaluation_has_a_row_for_each_mode(quick: Answer) -> None:
    document = quick.document
    assert (document["task"], document["status"]) == ("eval", "done")
    assert [row["mode"] for row in document["rows"]] == ["regular", "speculative"]
    assert all(row.keys() >= ROW for row in document["rows"])
    assert [row["draft"] for row in document["rows"]] == [None, "tiny_draft"]


def test_the_difference_of_one_distribution_includes_zero(quick: Answer) -> None:
    assert [one.keys() for one in quick.document["differences"]] == [DIFFERENCE]
    assert quick.document["differences"][0]["includes_zero"] is True


def test_only_the_speculative_mode_drafts(quick: Answer) -> None:
    regular, speculative = quick.document["rows"]
    assert (
        regular["tokens_committed"] == speculative["tokens_committed"] == 60
    )  # no end token: the same limit
    assert regular["tokens_per_target_forward"] == 1 < speculative["tokens_per_target_forward"]
    assert (regular["draft_forwards"], regular["acceptance_rate"]) == (0, None)


def test_models_that_know_multiplication(command: Command, calculators: list[str]) -> None:
    answer = command(*EVAL, "task.seeds=[0,7]", "task.sizes=[30]", "task.batch_size=8")
    assert (answer.code, answer.errors) == (0, [])
    found = answer.document
    assert [(row["correct"], row["score"], row["score_high"]) for row in found["rows"]] == [(60, 1, 1)] * 2
    assert found["rows"][0]["finish_reasons"] == {"stop": 60}
    assert 0 < found["rows"][1]["acceptance_rate"] < 1  # the draft is wrong where the product is odd
    assert found["differences"][0]["correct_regular_only"] == 0
    assert calculators == ["model tiny", "draft tiny_draft"]


def test_a_model_that_knows_the_even_products(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "load", lambda m, *_: Calculator(m, lambda a, b: a * b % 2 == 0))
    found = command(*EVAL, "draft=none", "task.seeds=[0]", "task.sizes=[40]", "output=json").document
    even = sum(int(question.answer) % 2 == 0 for question in arithmetic.questions(0, 40, 4))
    assert [row["correct"] for row in found["rows"]] == [even]
    assert found["differences"] == []


@pytest.fixture(scope="module")
def several_runs() -> list[tuple[dict[str, Any], list[str]]]:
    """The one run of `several`, once a test has asked for it."""
    return []


@pytest.fixture
def several(
    command: Command, calculators: list[str], several_runs: list[tuple[dict[str, Any], list[str]]]
) -> tuple[dict[str, Any], list[str]]:
    """The document of three pairs with two sizes, and the models that were loaded."""
    if not several_runs:
        answer = command(
            *EVAL, "task.pairs=[tiny,tiny/tiny_draft,tiny_draft]", "task.sizes=[20,5]", "task.seeds=[0]",
            "output=json",
        )  # fmt: skip
        assert (answer.code, answer.errors) == (0, [])
        (line,) = answer.out.splitlines()
        several_runs.append((json.loads(line), [*calculators]))
    return several_runs[0]


@pytest.mark.slow
def test_each_pair_is_scored_with_each_size(several: tuple[dict[str, Any], list[str]]) -> None:
    document, _ = several
    rows = [(row["pair"], row["mode"], row["prompts"]) for row in document["rows"]]
    assert rows == [
        (name, mode, size)
        for name, mode in [
            ("tiny", "regular"), ("tiny/tiny_draft", "regular"), ("tiny/tiny_draft", "speculative"),
            ("tiny_draft", "regular"),
        ]
        for size in (5, 20)
    ]  # fmt: skip
    assert [one["prompts"] for one in document["differences"]] == [5, 20]
    assert document["devices"].keys() == {"tiny", "tiny/tiny_draft", "tiny_draft"}


@pytest.mark.slow
def test_what_pairs_share_is_not_loaded_twice(several: tuple[dict[str, Any], list[str]]) -> None:
    _, loaded = several
    assert loaded == ["model tiny", "draft tiny_draft", "model tiny_draft"]


@pytest.mark.slow
def test_a_smaller_size_is_the_beginning_of_a_larger_one(several: tuple[dict[str, Any], list[str]]) -> None:
    document, _ = several
    assert [row["row_rounds"] for row in document["rows"][:2]] == [
        sum(len(q.answer) + 1 for q in arithmetic.questions(0, n, 4)) for n in (5, 20)
    ]


@pytest.mark.parametrize(
    ("settings", "name", "modes"),
    [
        ("draft=none", "tiny", ["regular"]),
        ("speculation=none", "tiny", ["regular"]),
        ("speculation.k=0", "tiny", ["regular"]),
        ("draft=none speculation=ngram", "tiny/ngram", ["regular", "speculative"]),
    ],
)
def test_without_a_drafter_there_is_one_mode(
    settings: str, name: str, modes: list[str], command: Command, calculators: list[str]
) -> None:
    rows = command(*EVAL, *settings.split(), "task.quick=true").document["rows"]
    assert [(row["pair"], row["mode"]) for row in rows] == [(name, mode) for mode in modes]
    assert calculators == ["model tiny"]


def test_a_target_alone_drafts_from_n_grams() -> None:
    words = ["task=eval", "task.pairs=[tiny,tiny/none]"]
    for settings, names in (([], ["tiny", "tiny"]), (["speculation=ngram"], ["tiny/ngram", "tiny/ngram"])):
        assert [spec.name for spec in pair_specs(composed([*words, *settings]), [], 1)] == names


def test_modes_draw_from_streams_of_their_own(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids that name the streams: never the same in both modes, and never twice."""
    seen: list[str] = []
    requests = PairSession.requests

    def spied(self: PairSession, prompts: list[Any], *how: Any) -> Any:
        seen.extend(prompt.id for prompt in prompts)
        return requests(self, prompts, *how)

    monkeypatch.setattr(PairSession, "requests", spied)
    assert command(*EVAL, "task.quick=true").code == 0
    assert len(seen) == len(set(seen)) == 20


def test_what_was_finished_is_reported(
    command: Command, calculators: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 24 of regular sampling; of the speculative mode the first size, and half the rest."""
    ended, left = Run.ended, [24 + 8 + 8]

    def stopped(self: Run) -> Iterator[Reply]:
        for reply in ended(self):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            yield reply

    monkeypatch.setattr(Run, "ended", stopped)
    run = (*EVAL, "task.seeds=[0,1]", "task.sizes=[4,12]", "task.batch_size=8")
    answer = command(*run)
    assert answer.code == 130 and "stopped by a signal" in answer.errors[0]
    assert len([line for line in answer.out.splitlines() if line.startswith("tiny/tiny_draft ")]) == 4
    found = answer.document
    assert found["status"] == "interrupted"
    assert [(row["mode"], row["prompts"]) for row in found["rows"]] == [
        ("regular", 8), ("regular", 24), ("speculative", 8), ("speculative", 16),
    ]  # fmt: skip
    assert found["rows"][2]["row_rounds"] < found["rows"][3]["row_rounds"]
    assert [one["prompts"] for one in found["differences"]] == [8, 16]
    (summary,) = Path("outputs").rglob("summary.json")
    assert json.loads(summary.read_text())["rows"] == found["rows"]
    at_once = command(*run)
    assert (at_once.code, at_once.out) == (130, "")


def test_damaged_logits_end_the_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Calculator):
        def logits(self, token_BW: Tensor, pass_: Pass, cache: Sheet) -> Tensor:
            return super().logits(token_BW, pass_, cache) * torch.nan

    monkeypatch.setattr(pair, "load", lambda m, *_: Broken(m, lambda a, b: True))
    answer = command(*EVAL, "task.quick=true")
    assert answer.code == 4
    assert "not numbers" in answer.errors[0] and "10 of 10" in answer.errors[0]


def test_the_time_left_is_shown_once_it_can_be_foreseen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(report.Progress, "LOG_EVERY_S", 0.0)
    clock = iter(float(n) for n in range(1000))
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(clock))
    with report.Progress("a", 100, "texts") as progress:
        for _ in range(10):
            progress.advance(1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("a: 1 of 100 texts, ")
    assert ["s left" in line for line in lines[:10]] == [False] * 4 + [True] * 6
    assert lines[4].endswith(", 95 s left")  # a second a step


def test_progress_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with report.Progress("a", 20, "prompts") as progress:
        progress.advance(10)
        progress.advance(10)
        report.Console().line("a row")  # goes above the bar, not into its line
    shown = capsys.readouterr()
    assert shown.out == "a row\n"
    assert "20 of 20" in shown.err and shown.err.endswith("\x1b[2K")


LINE = re.compile(r"(\d+) \* (\d+) = (\d+)")
OPEN = re.compile(r"(\d+) \* (\d+) = ")
FIRST = ("0-0", "90 * 88 = 7920\n94 * 34 = 3196\n74 * 55 = ", "4070")


def parts(question: Question) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The worked lines' numbers, and the open line's."""
    *lines, last = question.text.split("\n")
    worked = [LINE.fullmatch(line) for line in lines]
    asked = OPEN.fullmatch(last)
    assert asked and all(worked)
    return [tuple(map(int, match.groups())) for match in worked if match], tuple(map(int, asked.groups()))


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    return questions(3, 2000, 4)


def test_every_line_is_right(asked: list[Question]) -> None:
    for question in asked:
        worked, (a, b) = parts(question)
        assert len(worked) == 4, question
        assert all(x * y == product for x, y, product in worked), question
        assert question.answer == str(a * b)


def test_no_line_gives_the_answer_away(asked: list[Question]) -> None:
    for question in asked:
        worked, (a, b) = parts(question)
        assert all({x, y} != {a, b} for x, y, _ in worked), question


def test_all_numbers_are_asked_for(asked: list[Question]) -> None:
    assert {number for question in asked for number in parts(question)[1]} == set(range(1, LARGEST + 1))


def test_a_seed_gives_its_questions_again() -> None:
    """Published scores name their seeds; these must not come to mean other prompts."""
    state = random.getstate()
    assert questions(5, 20, 4) == questions(5, 20, 4)
    assert questions(5, 20, 4) == questions(5, 50, 4)[:20]
    assert questions(5, 20, 4)[0].text != questions(6, 20, 4)[0].text
    assert random.getstate() == state
    first = questions(0, 1, 2)[0]
    assert (first.id, first.text, first.answer) == FIRST


def test_what_is_an_answer() -> None:
    asked, right = Question(0, 0, "6 * 7 = ", "42"), ("42", "42\n7 * 7", "42 ", " 42", "42\n")
    wrong = "", "\n42", "4", "420", "4 2", "42.", "042", "42 = 6 * 7", "forty-two"
    assert [text for text in (*right, *wrong) if asked.is_answered_by(text)] == [*right]
