"""A rank's memory while it loads: its share, and what Python and torch take. By the benchmark's command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# MiB beyond its share: modules that are imported while it loads, one weight on its way, what malloc keeps.
BESIDES = 300


@pytest.mark.long
def test_a_rank_never_holds_more_than_its_share():
    """Of a model, from files and from a seed, that would not fit beside the bound if it were held whole."""
    command = ["bench/load_memory.py", "gib=0.9", "ranks=2", "ways=files:bf16,seed:bf16"]
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [line.split("|")[1:-1] for line in ran.stdout.splitlines() if ":bf16 |" in line]
    assert len(rows) == 2 * 2
    whole = 0.9 * 1024
    for cells in rows:
        share, before, most, after, allowed = (float(cell) for cell in cells[2:7])
        bound = before + 1.15 * share + BESIDES
        assert after <= most <= min(bound, allowed) < before + whole
