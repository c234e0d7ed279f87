"""When a group of ranks is started again, and when no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_ssp.batch.workers import Next, after, code_of
from llama_ssp.distributed.signals import CODE_FILE, leave_code


@pytest.mark.parametrize(
    ("code", "fruitless", "step"),
    [
        (0, 0, Next.done), (0, 9, Next.done), (2, 0, Next.give_up), (3, 0, Next.give_up),
        (4, 0, Next.give_up), (1, 0, Next.again), (5, 4, Next.again), (5, 5, Next.give_up),
        (6, 1, Next.again), (137, 2, Next.again), (143, 0, Next.again),
    ],
)  # fmt: skip
def test_what_follows_an_end(code: int, fruitless: int, step: Next):
    assert after(code, fruitless, retries=3) is step


def test_the_first_rank_that_fails_says_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "code"
    monkeypatch.setenv(CODE_FILE, str(file))
    for code in (0, 3, 5):
        leave_code(code)
    assert code_of(1, file) == 3  # torchrun leaves with 1 whatever it was
    assert code_of(0, file) == 0


def test_without_a_word_the_process_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(CODE_FILE, raising=False)
    leave_code(3)
    (tmp_path / "torn").write_text("")
    assert code_of(-9, tmp_path / "none") == 137
    assert code_of(1, tmp_path / "torn") == 1


def test_a_code_that_cannot_be_kept_is_no_second_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CODE_FILE, str(tmp_path / "no folder" / "code"))
    leave_code(6)
