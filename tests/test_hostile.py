"""The hostile corpus in processes under watch; `python -m tests.hostile` does all rows by every engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Saved
from tests.hostile.__main__ import INSTALLED, tried, wrong
from tests.hostile.corpus import CORPUS, ESCAPES, Case, harmless
from tests.hostile.damage import OUTSIDE, both, code, linked_outside, replaced
from tests.hostile.trial import access_times_tell

pytestmark = pytest.mark.slow

EACH_NAMES = (
    "armed-beside", "auto-map", "link", "missing-tensor", "pipe-model.safetensors", "plan-number",
    "sound-int4",
)  # fmt: skip
EACH = [row for row in CORPUS if row.name in EACH_NAMES]
ONE_PROCESS = [row for row in CORPUS if (not row.code or row in ESCAPES) and row not in EACH]


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("row", "engine"),
    [*((row, engine) for row in EACH for engine in INSTALLED), *((row, "own") for row in ONE_PROCESS)],
    ids=str,
)
def test_nothing_is_run_or_read_elsewhere(row: Case, engine: str, saved: Saved, tmp_path: Path) -> None:
    """Some rows by each engine; what runs after all, and templates that want to escape, in one process."""
    found = tried(row, engine, saved.whole, saved.sharded, tmp_path / "trial")
    assert wrong(row, engine, found) == []


def test_the_watch_sees_what_it_should(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of links a file outside is read, and the trial says so; so it does of code."""
    assert access_times_tell(tmp_path)
    monkeypatch.setattr("llama_ssp.models.folder.require_inside", lambda *_: None)
    row = harmless("link", linked_outside("tokenizer.json"))
    found = tried(row, "own", saved.whole, saved.sharded, tmp_path / "trial")
    assert wrong(row, "own", found) == ["read tokenizer.json outside"]
    monkeypatch.setattr("llama_ssp.cli.main", lambda: __import__("evil"))
    monkeypatch.syspath_prepend(tmp_path / "again" / "model")
    row = harmless("code", both(code("evil.py"), replaced(f"{OUTSIDE}.txt", "")))
    found = tried(row, "own", saved.whole, saved.sharded, tmp_path / "again")
    assert "executed what the model brought" in found.misdeeds
