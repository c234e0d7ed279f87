"""The plan's bound against the allocator's own events, on models that run for real (tests/plan_bytes.py)."""

from pathlib import Path

import pytest

from llama_ssp.models.graph_sizes import WIDEST
from llama_ssp.models.kernels import coded, linear
from llama_ssp.models.kernels.kernel_sizes import WIDEST_HEAD
from llama_ssp.planner import storage
from tests.plan_bytes import CASES, rows_of


@pytest.mark.long
def test_every_case_is_bounded() -> None:
    """Both roles, all phases, three number formats, one and two ranks.

    Never below what runs allocate, and above by 5 % of the total or 64 MiB at most.
    """
    rows = [row for case in CASES for row in rows_of(case)]
    assert len(rows) == sum(case.world for case in CASES) == 54
    over = {f"{row.case}, rank {row.rank}": row.planned - row.actual for row in rows}
    assert not [row for row in rows if not 0 <= row.planned - row.actual <= row.allowed], over


def test_the_plans_numbers_are_the_engines() -> None:
    """The plan loads no torch, so it has numbers of its own."""
    kernel = (Path(linear.__file__).parent / "attention.cpp").read_text()
    assert f" MOST = {WIDEST_HEAD};" in kernel and f" STEP = {WIDEST};" in kernel
    assert storage.WORD == {storage.CPU: coded.WORD, storage.CUDA: coded.LEAST}
