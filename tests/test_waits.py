"""On a device that is not the host, a round has the host wait once, and launches little (tests/far.py)."""

import json
import os
import subprocess
import sys

import pytest

from tests.warm import ROOT

MOST = 60  # launches of a round of one row and four drafts; each pass is one of them


@pytest.mark.long
def test_a_round_has_the_host_wait_once_launches_little_and_gives_the_same_texts():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.far"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    *cases, counted = [json.loads(line) for line in lines if line.startswith("{")]  # libraries print, too
    assert counted["launches"] <= MOST
    assert len(cases) == 6
    for case in cases:
        assert case["same"], case
        seen = case["seen"]
        assert seen.pop("sent, queued") > 0
        assert seen == {"read, waiting": case["rounds"]}, case
