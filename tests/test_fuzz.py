"""A few hundred inputs of `python -m tests.fuzz`, and that it finds what there is."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.__main__ import faults


def test_files_of_prompts(tmp_path: Path) -> None:
    assert list(faults(7, range(300), tmp_path)) == []
