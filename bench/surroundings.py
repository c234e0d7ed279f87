"""The head of a results file: command, hardware, versions, commit, date."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

from llama_ssp.report.run_folder import versions

ROOT = Path(__file__).resolve().parents[1]


def surroundings(devices: dict[str, str]) -> list[str]:
    """Lines for the head of a results file. The commit gets `-dirty` if there are uncommitted changes.

    Results files that another benchmark has just written do not count as changes.
    """
    commit = said_by_git(ROOT, "describe", "--always")
    if said_by_git(ROOT, "status", "--porcelain", "--untracked-files=no", ".", ":!bench/results"):
        commit += "-dirty"
    found = versions()
    command = Path(sys.argv[0]).resolve().relative_to(ROOT)
    return [
        f"Command: `python {command} {shlex.join(map(without_folder, sys.argv[1:]))}`",
        f"Hardware: {processor()}, {os.cpu_count()} cores; {devices}",
        f"Versions: python {found['python']}, torch {found['torch']}, transformers {found['transformers']}",
        f"Commit {commit}, {time.strftime('%Y-%m-%d')}.",
    ]


def without_folder(word: str) -> str:
    """The argument, without a folder that only this machine has."""
    key, _, value = word.partition("=")
    return f"{key}=FOLDER" if Path(value).is_absolute() else word


def said_by_git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True).stdout.strip()


def processor() -> str:
    """The processor's name, if the system reports it."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write(place: str, text: str) -> None:
    """Writes the results file; makes its folder."""
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).write_text(text, encoding="utf-8")
