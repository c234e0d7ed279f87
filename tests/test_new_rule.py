"""A new verification rule needs a class in verification.py, a name in the config's enum, and a preset."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow

RULE = '''
class HalfRule(TokenRule):
    """Accepts every draft half as often as the token rule; the correction makes up for it."""

    name = "half"

    def accept_chances(self, block: DraftBlock) -> Array:
        return super().accept_chances(block) / 2

    def correction_probs(self, block: DraftBlock, accepted_B: Array) -> Array:
        target_BV, draft_BV = _probs_after(block, accepted_B)
        return _probs_of(target_BV - smaller(target_BV, draft_BV) / 2, target_BV, block, accepted_B)

RULES: dict'''
SMALL = ("task.samples=12", "task.max_new_tokens=3", "task.law_tokens=8", "task.law_rounds=8",
         "task.greedy_tokens=6", 'task.prompts=["hello there", "def f"]')  # fmt: skip


def checkout(place: Path) -> Path:
    """A copy of the sources with one rule more."""
    for folder in ("llama_ssp", "conf", "launch"):
        copytree(ROOT / folder, place / folder, symlinks=True)
    for file, before, after in (
        ("llama_ssp/speculative/verification.py", "\nRULES: dict", RULE),
        ("llama_ssp/speculative/verification.py", "TokenRule(), ", "TokenRule(), HalfRule(), "),
        ("llama_ssp/config/schema.py", '"block", "token"]', '"block", "token", "half"]'),
    ):
        source = (place / file).read_text(encoding="utf-8")
        assert source.count(before) == 1
        (place / file).write_text(source.replace(before, after), encoding="utf-8")
    (place / "conf/speculation/half.yaml").write_text("k: 3\nverification: half\n", encoding="utf-8")
    return place


def document(checkout: Path, *overrides: str) -> dict:
    """The last line of a run of the copy."""
    words = ("speculation=half", "seed=1", "out=null", "output=json", *overrides)
    command = [sys.executable, "launch/run.py", *words]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_a_new_rule_is_certified(tmp_path: Path) -> None:
    found = document(checkout(tmp_path), "task=certify", *SMALL)
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    by_rounds = ["law", "filters", "decisions"]
    assert [outcomes[name] for name in by_rounds] == ["passed"] * len(by_rounds)
