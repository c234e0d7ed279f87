"""A few hundred inputs of `python -m tests.fuzz`, and that it finds what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_ssp.text import prompts
from tests.fuzz import faults


def test_files_of_prompts(tmp_path: Path) -> None:
    assert list(faults(7, range(300), tmp_path)) == []


def test_what_is_wrong_with_prompts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading that lets everything through meets a fault in some file."""
    monkeypatch.setattr(prompts, "problem_of", lambda *_: None)
    monkeypatch.setattr("llama_ssp.batch.requests.problem_of", lambda *_: None)
    assert list(faults(7, range(150), tmp_path))
