"""When a group of ranks is started again, and when no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_ssp.batch.workers import code_of, is_given_up
from llama_ssp.distributed.signals import CODE_FILE, leave_code


@pytest.mark.parametrize(
    ("code", "fruitless", "given_up"),
    [
        (2, 0, True), (3, 0, True), (4, 0, True), (1, 0, False), (5, 4, False), (5, 5, True), (6, 1, False),
        (137, 2, False), (143, 0, False),
    ],
)  # fmt: skip
def test_what_follows_a_failure(code: int, fruitless: int, given_up: bool):
    assert is_given_up(code, fruitless, retries=3) is given_up


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
