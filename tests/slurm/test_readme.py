"""The guide's first section on batch jobs, word by word, on a real Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.jobs import COMMAND, ROOT, Batches
from tests.slurm.lab import Lab

SECTION = "## Try it: the small pair, without GPUs"


def commands() -> list[str]:
    """The lines of the section's code blocks."""
    text = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    section = text.partition(SECTION)[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.long
@pytest.mark.slurm
def test_the_section_as_a_new_user_would(lab: Lab, tmp_path: Path):
    lines, said = commands(), ""
    assert any("task.submit=true" in line for line in lines) and "task.status=true" in lines[-1]
    for line in lines:
        if "task.status" in line:
            lab.wait_empty()
        run = line.replace("llama-ssp ", f"'{sys.executable}' '{ROOT}/launch/run.py' ")
        done = subprocess.run(
            ["bash", "-c", run], cwd=tmp_path, env={**lab.env, "OMP_NUM_THREADS": "1"}, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stderr}"
        said = done.stdout
    told = json.loads(said.splitlines()[-1])
    assert told["status"] == "done" and told["records_finished"] == told["records"] == 2
    answers = (tmp_path / "on_slurm.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(answer)["id"] for answer in answers] == ["a", "b"]
    assert (tmp_path / "job.sbatch").read_text(encoding="utf-8").startswith("#!/bin/bash\n#")


OWN = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=32 --time=4:00:00
#SBATCH --requeue --open-mode=append --signal=TERM@120
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
srun --kill-on-bad-exit=1 torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 --max-restarts=0 \\
    --rdzv-backend=c10d --rdzv-endpoint="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))" \\
    --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" -m llama_ssp \\
    batch /models/65B /models/7B task.input=prompts.jsonl task.output=answers.jsonl seed=7
"""


@pytest.mark.long
@pytest.mark.slurm
def test_a_script_of_one_s_own(batches: Batches, lab: Lab, expected: bytes):
    """Requeued once, with the small pair, a rank a node, and no GPU."""
    script = OWN.partition("    batch ")[0].replace("=8", "=1").replace("=4:00:00", "=20")
    script = script.replace("--cpus-per-task=32 ", "")
    script = script.replace("torchrun ", f"{sys.executable} -m torch.distributed.run ")
    (batches.home / "own.sbatch").write_text(f"{script}    {' '.join(COMMAND)}\n")
    env = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1"]
    options = ["--parsable", f"--chdir={batches.home}", "--output=own.log"]
    job = lab.run(*env, "sbatch", *options, str(batches.home / "own.sbatch"))
    with batches.paused(job):
        lab.run("scontrol", "requeue", job)
        lab.wait_taken_away(job)
    assert batches.whole() == expected
    assert "Restarts=1" in lab.run("scontrol", "show", "job", job)
