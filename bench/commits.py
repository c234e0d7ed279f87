"""The files of another commit, which a benchmark runs next to this checkout's."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def unpack(commit: str, folder: Path) -> Path:
    """Writes the commit's files into the folder; returns the folder."""
    archive = subprocess.check_output(["git", "archive", commit], cwd=ROOT)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder
