"""The wheel holds what the program needs, and the README's commands run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


def test_the_wheel_holds_the_configuration(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    shipped = {f"llama_ssp/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    shipped |= {str(path.relative_to(ROOT)) for path in (ROOT / "llama_ssp/shipped").rglob("*.*")}
    assert shipped <= set(names)
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "llama_ssp").rglob("*.py")} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "launch", "bench"))]


def readme_commands() -> list[str]:
    """Every run.py line of the README that needs no files of the reader's and no network."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line.split("  #")[0].strip() for line in text.splitlines()]
    commands = [line for line in lines if re.match(r"(torchrun .*|python )launch/run\.py ", line)]
    others = r"/models/|download=true|(prompts|openings|on_slurm)\.jsonl"
    return [command for command in commands if not re.search(others, command)]


@pytest.mark.parametrize("command", readme_commands())
def test_readme_command(command, tmp_path):
    words = shlex.split(command.removeprefix("python "))
    assert words[0] == "launch/run.py"
    words[0] = str(ROOT / words[0])
    if "task=eval" in words:
        words.append("task.sizes=[5]")  # the command as it stands, on fewer prompts
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, input="def hello\n", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_readme_has_commands():
    assert len(readme_commands()) >= 4


@pytest.mark.slow
def test_the_benchmark_of_make_demo_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "side_by_side.py"), "repeats=1", "new=4", "ks=2", "seed=1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-800:]
    assert "| speculative, K = 2 |" in done.stdout
