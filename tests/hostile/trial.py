"""One command on one hostile folder, in processes of its own, under watch.

The processes are forked from this one, in which all libraries are imported, so that a trial takes the time
of the trial. An audit hook in each tells what Python opened outside the folder and whether anything was
unpickled or started; access times tell what else was read there; what is executed leaves a folder behind;
what waits is killed; and what wants memory without end does not get it.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_ssp.models.kernels import build
from llama_ssp.planner.gpus import gpus_here
from llama_ssp.report.machine import commit
from tests.hostile.damage import EXECUTED, OUTSIDE
from tests.warm import as_launched, launcher_store

LIMIT_S = 10.0
PATIENCE_S = 60.0  # a process that takes so long is killed
FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")
MEMORY_BYTES = 4 * 2**30  # that a process may take beside what is imported
OLD = 10**9  # an access time before any writing: the next reading sets another


@dataclass(frozen=True)
class Result:
    """What a command did: the exit code of each rank, all it said, and what it must not have done."""

    codes: list[int]
    out: str
    err: str
    seconds: float
    misdeeds: list[str]

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]


def run(arguments: Sequence[str], folder: Path, world: int = 1) -> Result:
    """`folder` holds the model's folder, and what is outside of it."""
    # What starts other programs, and is kept: a trial must start none.
    for source in Path(build.__file__).parent.glob("*.cpp") if build.compiler() else ():
        build.load_library(source)
    commit()
    gpus_here()
    outside = sorted((folder / OUTSIDE).glob("*"))
    for file in outside:
        os.utime(file, (OLD, file.stat().st_mtime))
    store = launcher_store()
    began = time.monotonic()
    ranks = [_forked(arguments, folder, rank, world, store.port) for rank in range(world)]
    codes = [_awaited(pid, began) for pid in ranks]
    seconds = time.monotonic() - began
    said = [[(folder / f"{name}{rank}").read_text(errors="replace") for rank in range(world)]
            for name in ("out", "err", "seen")]  # fmt: skip
    misdeeds = "".join(said[2]).splitlines()
    misdeeds += [f"read {file.name} outside" for file in outside if file.stat().st_atime != OLD]
    if (folder / EXECUTED).exists():
        misdeeds.append("executed what the model brought")
    return Result(codes, "".join(said[0]), "".join(said[1]), seconds, misdeeds)


def access_times_tell(folder: Path) -> bool:
    """Whether the file system keeps note of who reads; if not, Python's own opening is all that is seen."""
    probe = folder / "probe"
    probe.write_text("x")
    os.utime(probe, (OLD, probe.stat().st_mtime))
    probe.read_text()
    return probe.stat().st_atime != OLD


def _forked(arguments: Sequence[str], folder: Path, rank: int, world: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        code = _child(arguments, folder, rank, world, port)
    finally:
        os._exit(code)


def _child(arguments: Sequence[str], folder: Path, rank: int, world: int, port: int) -> int:
    import torch

    from llama_ssp import cli

    # Makes torch's pool anew, as in a forked process two threads must not do at once.
    torch.set_num_threads(1)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{name}{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    sys.stdin = io.StringIO()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))
    seen = os.open(folder / f"seen{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.chdir(folder)
    if world > 1:
        os.environ.update(as_launched(rank, world, port))
    outside = str(folder / OUTSIDE)

    def watch(event: str, details: tuple[object, ...]) -> None:
        if event in FORBIDDEN:
            os.write(seen, f"{event} {str(details)[:200]}\n".encode())
        elif event == "open" and str(details[0]).startswith(outside):
            os.write(seen, f"opened {details[0]}\n".encode())

    sys.addaudithook(watch)
    sys.argv = ["llama-ssp", *arguments]
    code = 0
    try:
        cli.main()
    except SystemExit as left:
        code = int(left.code or 0)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _awaited(pid: int, began: float) -> int:
    """The exit code; that of a signal is its number, negative."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - began > PATIENCE_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL
        time.sleep(0.01)
