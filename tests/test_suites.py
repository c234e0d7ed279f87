"""Suites: published question files, by category."""

import gc
import json
import random
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp.config import MeasureConf, ModelConf
from llama_ssp.errors import DataError
from llama_ssp.pair.assembly import ModelCache
from llama_ssp.report.statistics import ratio_of_sums
from llama_ssp.tasks.measure import MeasuredPair
from llama_ssp.text.prompts import TextPrompt, read_prompts
from tests.conftest import Command
from tests.test_chat import tokens

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["def hello", "and now"], "reference": []},
    {"question_id": 82, "category": "coding", "turns": ["class Stack:"]},
    {"question_id": 201, "category": "translation", "turns": ["import os"]},
    {"question_id": 202, "category": "translation", "turns": ["7 * 8 ="]},
]
HUMANEVAL = [{"task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "entry_point": "add", "test": ""}]
GSM8K = [{"question": "What is 7 * 8?", "answer": "#### 56"}]


MEASURE = ("task=measure", "task.ks=[2]", "task.repeats=1", "task.max_new_tokens=6", "seed=1")


def written(folder: Path, lines: list[dict[str, Any]]) -> str:
    file = folder / "question.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(file)


def test_each_format_is_told_by_its_keys(tmp_path: Path):
    for lines, wanted in (
        (SPEC_BENCH, ("81", "def hello", "writing", ["and now"])),
        (HUMANEVAL, ("HumanEval/0", "def add(a, b):\n", "humaneval", [])),
        (GSM8K, ("line-1", "What is 7 * 8?", "gsm8k", [])),
    ):
        first = read_prompts(MeasureConf(suite=written(tmp_path, lines))).prompts[0]
        assert (first.id, first.text, first.category, first.later) == wanted


@pytest.mark.parametrize(
    "line",
    [{"text": "hello"}, {"turns": []}, {"turns": ["a", 3], "question_id": 1}, {"task_id": "a"}],
    ids=["no turns", "no turn", "a number", "no text"],
)
def test_another_file_is_one_error(line: dict[str, Any], tmp_path: Path):
    with pytest.raises(DataError, match="question"):
        read_prompts(MeasureConf(suite=written(tmp_path, [line])))


def test_a_suite_by_category(command: Command, tmp_path: Path):
    answer = command(*MEASURE, f"task.suite={written(tmp_path, SPEC_BENCH)}")
    assert (answer.code, answer.errors) == (0, [])
    assert "by category" in answer.out and "translation" in answer.out
    found = answer.document
    (pair,) = found["pair"]
    rows = {row["category"]: row for row in pair["by_category"]}
    assert {name: row["questions"] for name, row in rows.items()} == {
        "mt_bench": 2, "translation": 2, "overall": 4,
    }  # fmt: skip
    assert rows["overall"]["tokens_per_round"] == pytest.approx(pair["tokens_per_target_forward"])
    assert rows["overall"]["acceptance_by_position"] == pair["acceptance_by_position"]
    assert rows["overall"]["speedup"] == pytest.approx(pair["speedup"])
    assert all(row["speedup_low"] <= row["speedup"] <= row["speedup_high"] for row in rows.values())


def test_a_later_turn_follows_the_contender_s_own_answer(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy answers of target and pair are the same, those of the draft alone are others."""
    follow_up, seen = MeasuredPair._follow_up, list[tuple[str, str]]()

    def noted(pair: MeasuredPair, question: Any, text: str, number: int, answers: list[str]) -> Any:
        prompt = follow_up(pair, question, text, number, answers)
        seen.append((*answers, pair.pair.tokens.decode(list(prompt.token_ids))))
        return prompt

    monkeypatch.setattr(MeasuredPair, "_follow_up", noted)
    pair = ("model=demo", "draft=demo_draft", "sampling=greedy", "output=json")
    command(*MEASURE, *pair, f"task.suite={written(tmp_path, SPEC_BENCH[:1])}")
    answer = command("task=generate", *pair, "task.max_new_tokens=6", 'task.prompts=["def hello"]')
    text = answer.document["outputs"][0]["text"]
    answers = [answer for answer, _ in seen]  # of a warm-up and a repeat
    assert len(answers) == 6 and answers.count(text) == 4
    assert all(whole == f"def hello\n\n{answer}\n\nand now" for answer, whole in seen)


def test_a_later_turn_of_a_chat_is_a_conversation(tmp_path: Path):
    known = tokens(tmp_path)
    run = SimpleNamespace(
        task=MeasureConf(chat=True, system="be kind"), model=ModelConf(vocab=400, context=200)
    )
    pair = MeasuredPair.__new__(MeasuredPair)
    pair.pair, pair._task = SimpleNamespace(tokens=known, run=run), run.task  # type: ignore[assignment]
    question = TextPrompt("81", "hello", "", "writing", ["and now", "and then"])
    found = pair._follow_up(question, "and then", 2, ["fine", "later"])
    said = [("system", "be kind"), ("user", "hello"), ("assistant", "fine"), ("user", "and now")]
    said += [("assistant", "later"), ("user", "and then")]
    assert found.id == "81 turn 3"
    assert list(found.token_ids) == known.chat([{"role": role, "content": text} for role, text in said])


def test_several_pairs_in_one_table(command: Command, monkeypatch: pytest.MonkeyPatch):
    """The models of a pair are freed before the next one's are loaded."""
    opened, targets = ModelCache.open, list[Any]()

    def watched(cache: ModelCache, placements: Any) -> Any:
        found = opened(cache, placements)
        gc.collect()
        assert all(one() is None for one in targets)
        targets.append(weakref.ref(found.target))
        return found

    monkeypatch.setattr(ModelCache, "open", watched)
    answer = command(*MEASURE, 'task.prompts=["a b"]', "task.pairs=[tiny_draft,tiny/tiny_draft]")
    assert (answer.code, answer.errors) == (0, [])
    found = answer.document
    assert [one["name"] for one in found["pairs"]] == ["tiny_draft", "tiny/tiny_draft"]
    assert [[row["k"] for row in one["pair"]] for one in found["pairs"]] == [[], [2]]
    table = answer.out.split("\n\n")[0]
    names = [line.split("  ")[0] for line in table.splitlines()[1:]]
    assert names == ["tiny_draft", "tiny", "tiny/tiny_draft, K = 2"] and len(targets) == 2


def test_an_interval_of_a_ratio_holds_the_true_one():
    """Of 400 draws of 40 items, 380 intervals of 95 % are to hold it; the bounds are three deviations off."""
    held = narrow = 0
    for seed in range(400):
        draw = random.Random(seed)
        under = [1 + draw.random() for _ in range(40)]
        over = [2 * one * (0.5 + draw.random()) for one in under]
        found = ratio_of_sums([over], [under])
        held += found.includes(2.0)
        reach = (found.high - found.low) / 8  # a control: a quarter of it is too narrow
        narrow += abs(found.value - 2.0) <= reach
    assert 360 <= held <= 393 and narrow < 300
