"""The head of a results file: command, hardware, versions, commit, date, and how busy the machine was."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

from llama_ssp.placing.this_machine import cpu_has_bf16
from llama_ssp.report.machine import processor_name, said_by_git
from llama_ssp.report.run_folder import versions

ROOT = Path(__file__).resolve().parents[1]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def by_all() -> float:
    """Seconds of the processors that all processes took since the machine started, or its host took away."""
    table = Path("/proc/stat")
    if not table.exists():
        return 0.0
    user, nice, system, _, _, *interrupts = map(int, table.read_text("ascii").split("\n")[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / TICKS_PER_S


def by_us() -> float:
    """The same of this process and of all that descend from it, with their children that have ended."""
    parents, ticks = {}, {}
    for table in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = table.read_text("ascii", "replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(table.parent.name)] = int(words[1])
        ticks[int(table.parent.name)] = sum(map(int, words[11:15]))
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks.get(pid, 0) for pid in ours) / TICKS_PER_S


class Watch:
    """How busy the machine is from now on."""

    def __init__(self) -> None:
        self._load, self._began = os.getloadavg()[0], time.monotonic()
        self._others = by_all() - by_us()

    def line(self) -> str:
        """The load average before and now, and what other processes took meanwhile."""
        spent = time.monotonic() - self._began
        others = max(0.0, by_all() - by_us() - self._others) / spent
        return (
            f"Load average {self._load:.1f} before, {os.getloadavg()[0]:.1f} after {spent:.0f} s; "
            f"others took {others:.2f} of {os.cpu_count()} cores."
        )


STARTED = Watch()  # a benchmark imports this module before it measures


def surroundings(devices: dict[str, str], command: str = "", watch: Watch = STARTED) -> list[str]:
    """Lines for the head of a results file; `command` where it is not this process's script and arguments."""
    found, lacks = versions(), "" if cpu_has_bf16() else ", no AVX-512"
    on = "".join(f"; {name}: {device}" for name, device in devices.items())
    return [
        f"Command: `{command or this_command()}`",
        f"Hardware: {processor_name()}, {os.cpu_count()} cores{lacks}{on}",
        f"Versions: python {found['python']}, torch {found['torch']}, transformers {found['transformers']}",
        f"Commit {commit()}, {time.strftime('%Y-%m-%d')}. {watch.line()}",
    ]


def commit() -> str:
    """The checkout's commit, `-dirty` with changes. Files that benchmarks have written do not count."""
    made = (":!bench/results", ":!docs/*.svg")
    changed = said_by_git(ROOT, "status", "--porcelain", "--untracked-files=no", ".", *made)
    return said_by_git(ROOT, "describe", "--always", "--exclude=*") + ("-dirty" if changed else "")


def this_command() -> str:
    """As it is written from the checkout's root."""
    script = Path(sys.argv[0]).resolve()
    script = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    named = str(script)
    if script.parts[0] == "tests":
        named = "-m " + ".".join(script.with_suffix("").parts).removesuffix(".__main__")
    if sys.flags.optimize:
        named = f"-O {named}"
    return f"python {named} {shlex.join(map(without_folder, sys.argv[1:]))}".strip()


def without_folder(word: str) -> str:
    """The argument, without a folder that only this machine has."""
    key, _, value = word.partition("=")
    return f"{key}=FOLDER" if Path(value).is_absolute() else word


def report(place: str, title: str, devices: dict[str, str], *lines: str) -> None:
    """Prints a results file: its title, the surroundings and the lines; writes it if a place is given."""
    text = "\n".join([f"# {title}", "", *surroundings(devices), *lines])
    print(text)
    write(place, f"{text}\n")


def write(place: str, text: str) -> None:
    """Writes the results file and makes its folder, if a place is given."""
    if not place:
        return
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).write_text(text, encoding="utf-8")
