"""The head of a results file: command, hardware, versions, commit, date."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

from llama_ssp.report.machine import processor, said_by_git
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


def write(place: str, text: str) -> None:
    """Writes the results file; makes its folder."""
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).write_text(text, encoding="utf-8")
