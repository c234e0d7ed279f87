"""What is kept of a job's jobs in the work folder: which were submitted, how their elements ended. No torch.

slurm/1234.json          a submission: number, when, how many elements
slurm/1234.sbatch        its script
slurm/1236.ends.jsonl    how the goes of one element ended, a line each, appended by its warden
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from llama_ssp.batch.atomic_files import replace_whole, storing

FOLDER = "slurm"
ENDS = ".ends.jsonl"
BY_TIME, BY_SLURM, BY_NOBODY = "time", "slurm", ""


@dataclass(frozen=True)
class Submission:
    """An array that was handed to Slurm; `job` is its number, as sbatch said it."""

    job: str
    name: str
    elements: int
    submitted_at: float


@dataclass(frozen=True)
class End:
    """How one go of an element ended; `began` and `finished`: the whole job's records before and after."""

    job: str
    restart: int
    host: str
    code: int
    stopped_by: str  # its time limit, Slurm, or nobody: then a code that is not 0 is a failure
    began: int
    finished: int
    seconds: float

    @property
    def failed(self) -> bool:
        return self.code != 0 and not self.stopped_by


def keep_submission(work: Path, submission: Submission, script: str) -> None:
    folder = work / FOLDER
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    replace_whole(folder / f"{submission.job}.sbatch", script.encode(), str(os.getpid()))
    kept = json.dumps(asdict(submission), indent=1) + "\n"
    replace_whole(folder / f"{submission.job}.json", kept.encode(), str(os.getpid()))


def submissions(work: Path) -> list[Submission]:
    """Oldest first."""
    found = []
    for path in (work / FOLDER).glob("*.json"):
        with suppress(OSError, ValueError, TypeError):  # half a record, or somebody else's file
            found.append(Submission(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda one: one.submitted_at)


def keep_end(work: Path, end: End) -> None:
    """One write, so that two wardens of one element, which a lost node can make, do not mix lines."""
    folder = work / FOLDER
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps({**asdict(end), "at": time.time()}) + "\n"
        handle = os.open(folder / f"{end.job}{ENDS}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)


def ends(work: Path, job: str = "*") -> list[End]:
    """In the order they were written; a torn line is left out."""
    found = []
    for path in sorted((work / FOLDER).glob(f"{job}{ENDS}")):
        with suppress(OSError):
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, TypeError):
                    body = json.loads(line)
                    body.pop("at", None)
                    found.append(End(**body))
    return found


def fruitless(ends: list[End]) -> int:
    """How many goes at the end of the list brought the job no record further; those that Slurm itself
    stopped say nothing."""
    own = [end for end in ends if end.stopped_by != BY_SLURM]
    gained = [end.finished > end.began for end in own]
    return len(gained) - max((number for number, one in enumerate(gained, start=1) if one), default=0)
