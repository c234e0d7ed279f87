"""The hostile corpus in processes under watch; `python -m tests.hostile` does all rows by every engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.conftest import Saved
from tests.hostile.__main__ import ENGINES, tried, wrong
from tests.hostile.corpus import CORPUS, TEMPLATES, Hostile, harmless
from tests.hostile.damage import OUTSIDE, both, code, linked_outside, replaced
from tests.hostile.trial import Result, access_times_tell

pytestmark = pytest.mark.slow

THERE = [name for name in ENGINES if name != "deepspeed" or importlib.util.find_spec("deepspeed")]
EACH_NAMES = ("armed-beside", "auto-map", "link", "missing-tensor", "pipe", "plan-number", "sound-int4")
EACH = [row for row in CORPUS if row.name in EACH_NAMES]
RUNS = [row for row in CORPUS if not row.code and row not in (*EACH, *TEMPLATES)]  # with what must not be run


def by(row: Hostile, engine: str, saved: Saved, folder: Path) -> Result:
    return tried(row, engine, saved.whole, saved.sharded, folder / "trial")


@pytest.mark.few(5)
@pytest.mark.parametrize("engine", THERE)
@pytest.mark.parametrize("row", EACH, ids=str)
def test_each_engine(row: Hostile, engine: str, saved: Saved, tmp_path: Path) -> None:
    assert wrong(row, engine, by(row, engine, saved, tmp_path)) == []


@pytest.mark.few(4)
@pytest.mark.parametrize("row", RUNS, ids=str)
def test_what_runs_after_all(row: Hostile, saved: Saved, tmp_path: Path) -> None:
    assert wrong(row, "own", by(row, "own", saved, tmp_path)) == []


@pytest.mark.few(3)
@pytest.mark.parametrize("row", TEMPLATES, ids=str)
def test_templates(row: Hostile, saved: Saved, tmp_path: Path) -> None:
    assert wrong(row, "own", by(row, "own", saved, tmp_path)) == []


def test_the_watch_sees_what_it_should(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of links a file outside is read, and the trial says so; so it does of code."""
    assert access_times_tell(tmp_path)
    monkeypatch.setattr("llama_ssp.models.folder.require_inside", lambda *_: None)
    row = harmless(0, "link", linked_outside("tokenizer.json"))
    assert wrong(row, "own", by(row, "own", saved, tmp_path)) == ["read tokenizer.json outside"]
    monkeypatch.setattr("llama_ssp.cli.main", lambda: __import__("evil"))
    monkeypatch.syspath_prepend(tmp_path / "again" / "model")
    row = harmless(0, "code", both(code("evil.py"), replaced(f"{OUTSIDE}.txt", "")))
    found = tried(row, "own", saved.whole, saved.sharded, tmp_path / "again")
    assert "executed what the model brought" in found.misdeeds
