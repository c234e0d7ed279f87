"""On a device that is not the host, a round has the host wait once (tests/far.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_a_round_has_the_host_wait_once_and_gives_the_same_texts():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.far"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 6
    for case in cases:
        assert case["same"], case
        seen = case["seen"]
        assert seen.pop("sent, queued") > 0
        assert seen == {"read, waiting": case["rounds"]}, case
