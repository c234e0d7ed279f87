"""The guide's first section on batch jobs, word by word, on a real Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.jobs import ROOT
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
