"""The plan's bound against the allocator's own events, on models that run for real (tests/plan_bytes.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llama_ssp.config import Dtype
from llama_ssp.models import steps
from llama_ssp.models.kernels import coded, linear
from llama_ssp.planner import activations, engine, memory, storage
from llama_ssp.planner.workload import DRAFT, TARGET
from llama_ssp.speculative import model_runner as runner
from tests.plan_bytes import CASES, PHASES, Case, planned

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
def test_every_case_is_bounded() -> None:
    """Both roles, all phases, three number formats, one and two ranks.

    Never below what runs allocate, and above by 5 % of the total or 64 MiB at most. In a process of its own,
    because it forks one for every rank of every case.
    """
    command = [sys.executable, "-m", "tests.plan_bytes"]
    rows = json.loads(subprocess.run(command, cwd=ROOT, check=True, timeout=400, capture_output=True).stdout)
    assert len(rows) == sum(case.world for case in CASES) == 54
    off = {name: plan - real for name, plan, real, allowed in rows if not 0 <= plan - real <= allowed}
    assert not off


def test_the_plans_numbers_are_the_engines() -> None:
    """The plan loads no torch, so it has numbers of its own."""
    assert activations.LAG == runner.LAG and memory.STEP == steps.WIDEST
    assert storage.BLOCK == linear.BLOCK
    kernel = (Path(linear.__file__).parent / "attention.cpp").read_text()
    assert f" MOST = {engine.WIDEST_HEAD};" in kernel
    assert storage.WORD == {storage.CPU: coded.WORD, storage.CUDA: coded.LEAST}


def test_the_cases_differ() -> None:
    """No two phases of a role are planned alike by accident."""
    for role in (TARGET, DRAFT):
        found = [planned(Case(role, phase, Dtype.fp32, 1), 0) for phase in PHASES]
        assert len(set(found)) == len(PHASES)
