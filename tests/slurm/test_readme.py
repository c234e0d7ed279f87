"""The guide's first section on batch jobs, word by word, and its script of one's own, on a real Slurm."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.jobs import COMMAND, Batches
from tests.slurm.lab import Lab
from tests.warm import LAUNCH, ROOT

pytestmark = [pytest.mark.long, pytest.mark.slurm]

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
SECTION = "## Try it: the small pair, without GPUs"


def test_the_section_as_a_new_user_would(lab: Lab, tmp_path: Path):
    section = PAGE.partition(SECTION)[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
    lines, said = [line for block in blocks for line in block.splitlines()], ""
    assert any("task.submit=true" in line for line in lines) and "task.status=true" in lines[-1]
    for line in lines:
        if "task.status" in line:
            lab.wait_empty()
            line = line.replace("task.status=true", "task.status=true output=json")
        run = ["bash", "-c", line.replace("llama-ssp ", f"'{sys.executable}' '{LAUNCH}' ")]
        env = {**lab.env, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        said = done.stdout
    told = json.loads(said)
    assert told["status"] == "done" and told["records_finished"] == told["records"] == 2
    answers = (tmp_path / "on_slurm.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(answer)["id"] for answer in answers] == ["a", "b"]
    assert (tmp_path / "job.sbatch").read_text(encoding="utf-8").startswith("#!/bin/bash\n#")


def test_a_script_of_one_s_own(batches: Batches, lab: Lab, expected: bytes):
    """Requeued once, with the small pair, a rank a node, and no GPU."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)    batch ", PAGE, flags=re.DOTALL)
    for there, here in (
        ("=8", "=1"), ("=4:00:00", "=20"), ("--cpus-per-task=32 ", ""),
        ("torchrun ", f"{sys.executable} -m torch.distributed.run "),
    ):  # fmt: skip
        assert there in script
        script = script.replace(there, here)
    (batches.home / "own.sbatch").write_text(f"{script}    {' '.join(COMMAND)}\n")
    env = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1"]
    options = ["--parsable", f"--chdir={batches.home}", "--output=own.log"]
    job = lab.run(*env, "sbatch", *options, str(batches.home / "own.sbatch"))
    with batches.paused(job):
        lab.run("scontrol", "requeue", job)
        lab.wait_taken_away(job)
    assert batches.whole() == expected
    assert "Restarts=1" in lab.run("scontrol", "show", "job", job)
