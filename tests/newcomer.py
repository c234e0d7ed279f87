"""A newcomer's first hour: the README's commands, word by word and in their order, in a fresh clone.

    python -m tests.newcomer [skip='make test'] [write=FILE.md]

The clone is of the last commit, in an empty folder; of this environment only PATH and HOME are there. The
commands run as they stand, by a shell in which `.venv` is active once it is there. What needs files of the
reader's own, a network or a scheduler is not run, and said so. Leaves with 1 where a command fails.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.surroundings import surroundings, write
from bench.words import Words

ROOT = Path(__file__).resolve().parents[1]
LONGEST_S = 3600
TYPED = "def hello\n"  # where a command asks for a prompt
PLACEHOLDERS = re.compile(r"/models/|<.*>|model=\.\.\.|(^|\s)\.\.\.(\s|$)")


@dataclass
class Newcomer(Words):
    """The command line."""

    skip: str = ""
    write: str = ""


@dataclass(frozen=True)
class Told:
    """What came of a command; `why` it was not run, if it was not."""

    command: str
    code: int | None = None
    seconds: float = 0.0
    last: str = ""
    why: str = ""

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0)


def commands(readme: str) -> Iterator[str]:
    """Every line of every block that is a command, without what is said of it."""
    for block in re.findall(r"^```\n(.*?)^```", readme, re.M | re.S):
        for line in block.splitlines():
            command = re.split(r"\s+#\s", line)[0].strip()
            if re.match(r"(git|make|python|torchrun|llama-ssp|printf)\b", command):
                yield command


def needs(command: str, folder: Path) -> str:
    """What of the reader's own the command needs, that is not here."""
    if PLACEHOLDERS.search(command):
        return "a place of the reader's"
    if "download=true" in command:
        return "a network"
    if "task.submit=true" in command and not _has_scheduler():
        return "a scheduler"
    files = re.findall(r"(?:task\.input|prompt_file)=(\S+)", command)
    absent = [name for name in files if not (folder / name).exists()]
    if absent:
        return f"the reader's {absent[0]}"
    if "task.status=true" in command and not list(folder.glob("on_slurm*")):
        return "a job that was submitted"
    return ""


def _has_scheduler() -> bool:
    """One that answers."""
    return bool(shutil.which("sbatch")) and not subprocess.run(["sinfo"], capture_output=True).returncode


def run(command: str, folder: Path) -> Told:
    """In a shell as a newcomer has one."""
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    active = "if [ -e .venv/bin/activate ]; then . .venv/bin/activate; fi; "
    began = time.perf_counter()
    try:
        done = subprocess.run(
            ["bash", "-c", active + command], cwd=folder, env=env, capture_output=True, text=True,
            errors="replace", input=TYPED, timeout=LONGEST_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Told(command, -1, LONGEST_S, "still running")
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = said[-1].replace(str(folder), ".")[:100] if said else ""
    return Told(command, done.returncode, time.perf_counter() - began, last)


def transcript(told: list[Told]) -> str:
    head = [
        "# A newcomer's first hour",
        "",
        *surroundings({}),
        "",
        f"{sum(one.code == 0 for one in told)} commands of the README ended well, "
        f"{sum(one.failed for one in told)} did not, {sum(one.code is None for one in told)} were not run.",
        "",
        "| command | exit code | seconds | its last line |",
        "|---|---|---|---|",
    ]
    for one in told:
        last = one.last.replace("|", "\\|")
        code, seconds = ("", "") if one.code is None else (str(one.code), f"{one.seconds:.1f}")
        said = f"not run: needs {one.why}" if one.why else last
        head.append(f"| `{one.command.replace('|', chr(92) + '|')}` | {code} | {seconds} | {said} |")
    return "\n".join([*head, ""])


def main() -> int:
    asked = Newcomer.of(sys.argv[1:])
    told: list[Told] = []
    with tempfile.TemporaryDirectory() as empty:
        folder = Path(empty) / "llama-ssp"
        cloned = run(f"git clone -q {shlex.quote(str(ROOT))} {folder}", Path(empty))
        told.append(replace(cloned, command="git clone <this repository> && cd llama-ssp"))
        for command in commands((ROOT / "README.md").read_text(encoding="utf-8")):
            if command.startswith("git clone"):
                continue  # done, from here
            why = "to be asked for" if command == asked.skip else needs(command, folder)
            told.append(Told(command, why=why) if why else run(command, folder))
            print(f"{told[-1].code} {told[-1].seconds:.1f} s {command} {why}", file=sys.stderr, flush=True)
    text = transcript(told)
    print(text)
    if asked.write:
        write(asked.write, text)
    return int(any(one.failed for one in told))


if __name__ == "__main__":
    sys.exit(main())
