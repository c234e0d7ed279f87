"""How often the host would wait for a GPU over ranks, counted on an emulated device (tests/far.py)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def over_ranks() -> list[dict[str, Any]]:
    """What tests/far.py says of two ranks, by the draft's seat."""
    words = [sys.executable, "-m", "tests.far", "ranks"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_over_ranks_texts_are_those_of_one_process(over_ranks: list[dict[str, Any]]):
    assert [case["seat"] for case in over_ranks] == ["leader", "copies", "split", "leader"]
    for case in over_ranks:
        assert case["same"], case


def test_over_ranks_a_round_has_the_host_wait_once_at_most(over_ranks: list[dict[str, Any]]):
    """The leader for the decision, a rank with a copy of the draft to compare it; nobody for the drafts."""
    for case in over_ranks:
        leader, follower = case["leader"], case["follower"]
        assert leader["pageable"] == follower["pageable"] == 0, case
        # Where sums go through the host, the drafts do, too. The last round may have none.
        leader_waits = (1.5, 2) if case["through_host"] else (1, 1)
        follower_waits = (0.5, 1) if case["seat"] == "copies" else (0, 0)
        assert leader_waits[0] <= leader["waits"] <= leader_waits[1], case
        assert follower_waits[0] <= follower["waits"] <= follower_waits[1], case
