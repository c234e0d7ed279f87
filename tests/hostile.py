"""Tries each hostile model folder of tests/refusals.py with each loading engine, in processes under watch.

    python -m tests.hostile [engine=NAME] [row=NAME]

Without names all rows with all engines that are installed; the exit code is 1 if a trial fails. A trial fails
if a process takes more than 10 s, too: the machine should do nothing else.

An audit hook in each rank tells what Python opened outside the folder and whether anything was unpickled or
started; access times tell what else was read there; what is executed leaves a folder behind; what waits is
killed; and what wants memory without end does not get it.
"""

import importlib.util
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.words import Words
from tests.checkpoints import copied, save
from tests.refusals import CORPUS, EXECUTED, NOT_BY_DEEPSPEED, OUTSIDE, Case
from tests.warm import Started

ENGINES: dict[str, tuple[int, tuple[str, ...]]] = {
    "own": (1, ("placement=cpu",)),
    "cut": (2, ("placement=leader",)),
    "layers": (1, ("placement=layers",)),
    "deepspeed": (2, ("placement=deepspeed",)),
}
INSTALLED = [name for name in ENGINES if name != "deepspeed" or importlib.util.find_spec("deepspeed")]
LIMIT_S, PATIENCE_S = 10.0, 60.0  # a process that takes longer is killed: on a quiet machine, and on any
FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")
MEMORY_BYTES = 4 * 2**30  # that a process may take beside what is imported
OLD = 10**9  # an access time before any writing: the next reading sets another
SEEN = "seen"  # the file of what the hooks saw


def tried(
    row: Case, engine: str, whole: Path, sharded: Path, folder: Path, patience_s: float = PATIENCE_S,
    first: Callable[[], object] | None = None,
) -> list[str]:  # fmt: skip
    """Runs the command on a fresh copy of the sound folder, and returns what is not as it must be.

    `first` is called on each rank.
    """
    folder.mkdir()
    assert row.damage is not None
    row.damage(copied(sharded if row.sharded else whole, folder / "model"))
    outside = sorted((folder / OUTSIDE).glob("*"))
    for file in outside:
        os.utime(file, (OLD, file.stat().st_mtime))
    world, placement = ENGINES[engine]
    answers = Started(folder, world, *row.words, *placement, fault=partial(watched, first)).finish(patience_s)
    problems = (folder / SEEN).read_text().splitlines()
    problems += [f"read {file.name} outside" for file in outside if file.stat().st_atime != OLD]
    if (folder / EXECUTED).exists():
        problems.append("executed what the model brought")
    if engine == "deepspeed" and row in NOT_BY_DEEPSPEED:
        says = "DeepSpeed would lose the scales", "use placement.splitting=tensor"
        row = replace(row, code=5, says=says)
    elif engine in ("layers", "deepspeed") and row.modules:
        row = replace(row, code=4, says=row.modules)
    codes, *said = zip(*(answer[:3] for answer in answers), strict=True)
    return problems + row.problems(codes, *map("".join, said))


def watched(first: Callable[[], object] | None, _rank: int) -> None:
    """Bounds the memory of this process, and notes what it must not do."""
    from llama_ssp.distributed.gpus import gpus_here
    from llama_ssp.models import kept_files
    from llama_ssp.models.kernels import build
    from llama_ssp.report.machine import commit

    # What starts other programs, and is kept: a trial must start none.
    for source in Path(build.__file__).parent.glob("*.cpp") if kept_files.compiler() else ():
        build.load_library(source)
    commit()
    gpus_here()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))
    seen, outside = os.open(SEEN, os.O_CREAT | os.O_WRONLY | os.O_APPEND), str(Path(OUTSIDE).absolute())

    def watch(event: str, details: tuple[object, ...]) -> None:
        if event in FORBIDDEN:
            os.write(seen, f"{event} {str(details)[:200]}\n".encode())
        elif event == "open" and str(details[0]).startswith(outside):
            os.write(seen, f"opened {details[0]}\n".encode())

    sys.addaudithook(watch)
    if first:
        first()


def access_times_tell(folder: Path) -> bool:
    """Whether the file system keeps note of who reads; if not, Python's own opening is all that is seen."""
    probe = folder / "probe"
    probe.write_text("x")
    os.utime(probe, (OLD, probe.stat().st_mtime))
    probe.read_text()
    return probe.stat().st_atime != OLD


@dataclass
class Trials(Words):
    engine: str = ""
    row: str = ""


def main() -> int:
    asked = Trials.of(sys.argv[1:])
    total = failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        if not access_times_tell(base):
            print("the file system keeps no access times: only Python's own opening of files is seen")
        whole, sharded = save(base / "whole"), save(base / "sharded", shard="100KB")
        for row in [row for row in CORPUS if asked.row in ("", row.name)]:
            for engine in [asked.engine] if asked.engine else INSTALLED:
                problems = tried(row, engine, whole, sharded, base / f"{total}", LIMIT_S)
                total, failed = total + 1, failed + bool(problems)
                print(f"{row.name:26} {engine:9} {'; '.join(problems) or 'as it must be'}", flush=True)
    print(f"{failed} of {total} trials failed")
    return int(failed > 0 or not total)


if __name__ == "__main__":
    sys.exit(main())
