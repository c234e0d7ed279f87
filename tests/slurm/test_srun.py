"""The command behind srun: a step of one task, copies that nobody wanted, parts of a job."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from llama_ssp.errors import USAGE
from tests.slurm.jobs import COMMAND, Batches
from tests.slurm.lab import Lab
from tests.warm import LAUNCH

pytestmark = [pytest.mark.long, pytest.mark.slurm]

GENERATE = ("generate", *COMMAND[1:6], "prompt=hello", "max_new_tokens=8", "output=json", "out=null")


def srun(lab: Lab, batches: Batches, *words: str) -> subprocess.CompletedProcess[str]:
    tasks, *words = words
    run = ["srun", "--quiet", "-N", "1", "--overcommit", "-n", tasks, sys.executable, str(LAUNCH), *words]
    env = {**lab.env, "OMP_NUM_THREADS": "1"}
    return subprocess.run(run, cwd=batches.home, env=env, capture_output=True, text=True, timeout=300)


def test_one_task_is_a_run_and_two_are_refused_but_for_a_batch(lab: Lab, batches: Batches, expected: bytes):
    one = srun(lab, batches, "1", *GENERATE, "ranks=2")
    assert one.returncode == 0, one.stderr
    assert "over 2 ranks" in json.loads(one.stdout)["devices"]["model"]
    two = srun(lab, batches, "2", *GENERATE)
    assert two.returncode == USAGE and two.stdout == ""
    assert two.stderr.count("error: ") == 1 + two.stderr.count("srun: error: ") and "ranks=2" in two.stderr
    job = srun(lab, batches, "2", *COMMAND)
    assert job.returncode == 0 and batches.output.read_bytes() == expected, job.stderr
