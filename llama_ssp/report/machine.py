"""Says where a run takes place: host, processor, and the program's commit. No torch."""

import platform
import subprocess
from functools import cache
from pathlib import Path

from llama_ssp.distributed.cores import cores_here
from llama_ssp.distributed.launcher import SOURCES


@cache
def host() -> dict[str, str | int | None]:
    """Returns the machine's name, system, processor and the cores that this process may use."""
    return {
        "name": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(),
        "cores": cores_here(),
    }


@cache
def processor_name() -> str:
    """Returns the processor's name, if the system reports it."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@cache
def commit() -> str | None:
    """Returns the commit of the checkout that runs, `-dirty` with changes; None for an installed package."""
    if not (SOURCES / ".git").exists():
        return None
    name = said_by_git(SOURCES, "describe", "--always", "--exclude=*")
    if not name:
        return None
    # describe --dirty locks the index whatever the flags are.
    changed = said_by_git(SOURCES, "status", "--porcelain", "--untracked-files=no")
    return f"{name}-dirty" if changed else name


def said_by_git(folder: Path, *words: str) -> str:
    """Returns what git prints; nothing where it fails or is not installed.

    It takes no lock of the index: a commit that the user makes meanwhile would fail on it.
    """
    command = ["git", "--no-optional-locks", *words]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
