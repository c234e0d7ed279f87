"""One cluster for all tests that need a real Slurm; skipped loudly where there is none."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.jobs import Batches
from tests.slurm.lab import PATH, Lab

NEEDED = "LLAMA_SSP_NEED_SLURM"
PROGRAMS = ("slurmctld", "slurmd", "sbatch")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Lab]:
    if absent := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        why = f"no {', '.join(absent)}: install slurm-wlm to run the tests on a real Slurm"
        if os.environ.get(NEEDED) == "1":
            pytest.fail(f"{NEEDED}=1, but {why}")
        pytest.skip(why)
    lab = Lab()
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    """The cluster, idle before and after."""
    cluster.wait_idle()
    yield cluster
    cluster.empty()


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What an undisturbed process answers."""
    return Batches(tmp_path_factory.mktemp("calm")).alone()


@pytest.fixture
def batches(lab: Lab, tmp_path: Path) -> Batches:
    return Batches(tmp_path, lab)
