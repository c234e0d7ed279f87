"""Multiplication prompts: their text, their seeds, and what counts as an answer."""

from __future__ import annotations

import random
import re

import pytest

from llama_ssp.tasks.arithmetic import LARGEST, Question, questions

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


def test_the_text_is_what_the_pair_was_trained_on() -> None:
    assert re.fullmatch(r"(\d+ \* \d+ = \d+\n){2}\d+ \* \d+ = ", questions(0, 1, 2)[0].text)
    assert re.fullmatch(r"\d+ \* \d+ = ", questions(0, 1, 0)[0].text)


def test_every_line_is_right_and_none_gives_the_answer_away() -> None:
    seen = set()
    for question in questions(3, 2000, 4):
        worked, (a, b) = parts(question)
        assert len(worked) == 4
        assert all(x * y == product for x, y, product in worked)
        assert all({x, y} != {a, b} for x, y, _ in worked)
        assert question.answer == str(a * b)
        seen |= {a, b}
    assert seen == set(range(1, LARGEST + 1))


def test_a_seed_gives_its_questions_again() -> None:
    state = random.getstate()
    assert questions(5, 20, 4) == questions(5, 20, 4)
    assert questions(5, 20, 4) == questions(5, 50, 4)[:20]
    assert questions(5, 20, 4)[0].text != questions(6, 20, 4)[0].text
    assert random.getstate() == state


def test_the_questions_stay_what_they_were() -> None:
    """Published scores name their seeds; these must not come to mean other prompts."""
    first = questions(0, 1, 2)[0]
    assert (first.id, first.text, first.answer) == FIRST


@pytest.mark.parametrize("written", ["42", "42\n7 * 7", "42 ", " 42", "42\n"])
def test_an_answer(written: str) -> None:
    assert Question(0, 0, "6 * 7 = ", "42").is_answered_by(written)


@pytest.mark.parametrize("written", ["", "\n42", "4", "420", "4 2", "42.", "042", "42 = 6 * 7", "forty-two"])
def test_no_answer(written: str) -> None:
    assert not Question(0, 0, "6 * 7 = ", "42").is_answered_by(written)
