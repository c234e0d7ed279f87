"""The rehearsal of bench/gpu.py: parts that fail, each in another way, and what has to come of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bars import Bar

if TYPE_CHECKING:
    from gpu import Asked, Call, How, Part

REAL = "machine,products"  # parts that take a few seconds on a CPU
STATES = {
    "ends": "ended", "killed": "killed", "raises": "raised", "full": "raised", "hangs": "stopped",
    "lacks": "skipped",
}  # fmt: skip
LEFT = {name: state for name, state in STATES.items() if name != "ends"}
AGAIN = ["lacks", "killed", "raises", "full", "hangs"]  # what a second call runs, in this order
SESSION = "a process with a session of its own"


def ends(_: How) -> Iterator[Bar]:
    """Prints something that is no figure, too."""
    print("no figure")
    print('{"what": "no figure"')
    yield Bar("figures", 1)


def killed(_: How) -> Iterator[Bar]:
    yield Bar("before it is killed", 1)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(_: How) -> Iterator[Bar]:
    """Together with a process that has left its group and holds its output."""
    waiting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield Bar(SESSION, waiting.pid)
    time.sleep(600)


def raises(_: How) -> Iterator[Bar]:
    yield Bar("before it raises", 1)
    raise RuntimeError("the GPU has fallen off the bus")


def full(_: How) -> Iterator[Bar]:
    yield Bar("before the disk is full", 1)
    Path("/dev/full").write_text("results")


def rehearse(asked: Asked) -> list[str]:
    """Makes a call with parts that fail, one that goes on, one with a full disk; returns what was wrong."""
    from gpu import FAULTY, PARTS, called, due, records_in

    folder, real = Path(tempfile.mkdtemp()), (asked.parts or REAL).split(",")
    given = [part for part in PARTS if part.name in real]

    def made(number: int, name: str, parts: list[Part]) -> Call:
        files = {"folder": str(folder / name), "archive": str(folder / f"{name}.tar.gz")}
        return called(replace(asked, small=True, call=number, seconds=asked.seconds or 600, **files), parts)

    wrong = list[str]()
    first = made(1, "run", [*given, *FAULTY])
    for name, state in {**{part.name: "ended" for part in given}, **STATES}.items():
        if (seen := first.states()[name]) != state:
            wrong.append(f"{name}: {seen}, not {state}")
    (pid,) = [bar["found"] for record in first.records for bar in record["bars"] if bar["what"] == SESSION]
    if Path(f"/proc/{pid}").exists() and b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes():
        wrong.append("a process is left of the part that hangs")
    left = due(2, records_in(folder / "run"), [*given, *FAULTY])[1:]
    if [part.name for part in left] != AGAIN or made(2, "run", left).states() != LEFT:
        wrong.append(f"the second call ran {', '.join(part.name for part in left)}, not {', '.join(AGAIN)}")
    with tarfile.open(folder / "run.tar.gz") as archive:
        if not {"run/parts.jsonl", "run/figures.jsonl"} <= set(archive.getnames()):
            wrong.append("the archive lacks results")
    (folder / "full").mkdir()
    for name in ("figures.jsonl", "parts.jsonl", "ends.err", "../full.tar.gz.part"):
        (folder / "full" / name).symlink_to("/dev/full")
    last = made(1, "full", FAULTY[:2])
    if {record["part"]: len(record["bars"]) for record in last.records} != {"ends": 1, "killed": 2}:
        wrong.append("with a full disk parts have no figures")
    shutil.rmtree(folder)
    return wrong
