"""Suites: published question files by category, and answers as Spec-Bench's scripts read them."""

from __future__ import annotations

import gc
import json
import random
import weakref
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp.config import MeasureConf, ModelConf
from llama_ssp.errors import DataError
from llama_ssp.pair.assembly import ModelCache
from llama_ssp.report.statistics import ratio_of_sums
from llama_ssp.tasks.measured_pair import MeasuredPair
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
)
def test_another_file_is_one_error(line: dict[str, Any], tmp_path: Path):
    with pytest.raises(DataError, match="question"):
        read_prompts(MeasureConf(suite=written(tmp_path, [line])))


def speed(file: Path, categories: set[str]) -> tuple[float, float]:
    """What Spec-Bench's speed.py reads of an answer file: tokens/s over questions, and mean tokens a step."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    choices = [row["choices"][0] for row in rows if row["category"] in categories]
    rates = [sum(one["new_tokens"]) / sum(one["wall_time"]) for one in choices]
    return mean(rates), mean(length for one in choices for length in one["accept_lengths"])


def test_a_suite_by_category_and_its_answers(command: Command, tmp_path: Path):
    words = ("task=measure", "task.ks=[2]", "task.repeats=1", "task.max_new_tokens=6", "seed=1")
    answer = command(*words, f"task.suite={written(tmp_path, SPEC_BENCH)}")
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
    folder = Path(found["run_folder"])
    names = sorted(file.name for file in folder.glob("answers-*.jsonl"))
    assert names == ["answers-tiny_tiny_draft-K2.jsonl", "answers-tiny_tiny_draft-regular.jsonl"]
    for name in names:
        rows_of = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert [row["question_id"] for row in rows_of] == [81, 82, 201, 202]
        for row in rows_of:
            (choice,) = row["choices"]
            turns = 1 + (row["question_id"] == 81)
            assert [len(choice[key]) for key in ("turns", "decoding_steps", "new_tokens", "wall_time")] == [
                turns
            ] * 4
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) <= 6 * turns
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
    rate, length = speed(folder / names[0], {"translation"})
    assert rate > 0 and length == pytest.approx(rows["translation"]["tokens_per_round"])
    assert speed(folder / names[1], {"translation"})[1] == 1


def test_one_turn_holds_kv_caches_at_a_time(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the plan counts them: those of a question's first turn are freed before its second."""
    make, made, alive = MeasuredPair._engine, list[Any](), list[int]()

    def counted(*rest: Any) -> Any:
        gc.collect()
        alive.append(sum(one() is not None for one in made))
        made.append(weakref.ref(engine := make(*rest)))
        return engine

    monkeypatch.setattr(MeasuredPair, "_engine", counted)
    words = ("task=measure", "task.ks=[2]", "task.repeats=1", "task.max_new_tokens=4")
    assert command(*words, f"task.suite={written(tmp_path, SPEC_BENCH[:1])}").code == 0
    assert len(alive) > 4 and not any(alive)


def test_a_later_turn_follows_the_contender_s_own_answer(command: Command, tmp_path: Path):
    """Greedy answers of both are the same, so their second turns are the same text."""
    pair = ("model=demo", "draft=demo_draft")  # of random weights the next token depends on the last
    words = (
        *pair,
        "task=measure",
        "task.ks=[2]",
        "task.repeats=1",
        "task.max_new_tokens=5",
        "sampling=greedy",
    )
    found = json.loads(
        command(*words, f"task.suite={written(tmp_path, SPEC_BENCH[:1])}", "output=json").out.splitlines()[-1]
    )
    first, second = sorted(Path(found["run_folder"]).glob("answers-*.jsonl"))
    (one,), (other,) = (json.loads(file.read_text())["choices"] for file in (first, second))
    assert one["turns"] == other["turns"] and len(one["turns"]) == 2
    alone = f"def hello\n\n{one['turns'][0]}\n\nand now"
    greedy = (*pair, "task=generate", "task.max_new_tokens=5", "sampling=greedy", "output=json")
    answer = command(*greedy, stdin=json.dumps({"prompt": alone}).encode())
    text = answer.document["outputs"][0]["text"]
    assert text == one["turns"][1]


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


def test_answers_remain_when_a_suite_is_stopped(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, turns = MeasuredPair._turn, list[int]()

    def stopping(pair: MeasuredPair, *rest: Any) -> None:
        turns.append(1)
        if len(turns) == 9:  # after a warm-up of three turns, a question by all, and one by two of them
            raise KeyboardInterrupt
        turn(pair, *rest)

    monkeypatch.setattr(MeasuredPair, "_turn", stopping)
    words = ("task=measure", "task.ks=[2]", "task.repeats=1", "task.max_new_tokens=4", "seed=1")
    answer = command(*words, f"task.suite={written(tmp_path, SPEC_BENCH)}")
    assert answer.code == 130 and "by category" in answer.out
    found = answer.document
    assert [row["questions"] for row in found["pair"][0]["by_category"]] == [1]
    assert len(list(Path(found["run_folder"]).glob("answers-*.jsonl"))) == 2


def test_several_pairs_in_one_table(command: Command, monkeypatch: pytest.MonkeyPatch):
    opened, targets, freed = ModelCache.open, list[Any](), list[bool]()

    def watched(cache: ModelCache, placements: list[Any]) -> Any:
        found = opened(cache, placements)
        gc.collect()
        freed.append(all(one() is None for one in targets))  # those of the pairs before
        targets.append(weakref.ref(found.target))
        return found

    monkeypatch.setattr(ModelCache, "open", watched)
    words = ("task=measure", "task.ks=[2]", "task.repeats=2", "task.max_new_tokens=4", 'task.prompts=["a b"]')
    answer = command(*words, "task.pairs=[tiny_draft,tiny/tiny_draft]")
    assert (answer.code, answer.errors) == (0, [])
    found = answer.document
    assert [one["name"] for one in found["pairs"]] == ["tiny_draft", "tiny/tiny_draft"]
    assert [[row["k"] for row in one["pair"]] for one in found["pairs"]] == [[], [2]]
    assert freed == [True, True]
    table = answer.out.split("\n\n")[0]
    names = [line.split("  ")[0] for line in table.splitlines()[1:]]
    assert names == ["tiny_draft", "tiny", "tiny/tiny_draft, K = 2"]


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
