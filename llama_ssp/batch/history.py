"""What a job's work folder keeps about schedulers: submissions, and how their elements ended. No torch.

slurm/1234.sbatch       the script of a submission
slurm/1236.ends.jsonl   how the runs of one element ended, a line each, appended by its supervisor
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llama_ssp.batch.atomic_files import replace_whole, storing
from llama_ssp.batch.attempt_log import append_line, lines_in

FOLDER = "slurm"
SCRIPT, ENDS = ".sbatch", ".ends.jsonl"
BY_TIME, BY_SLURM, BY_NOBODY = "time", "slurm", ""


@dataclass(frozen=True)
class End:
    """How one run of an element ended; it finished `finished` - `began` records itself."""

    job: str
    restart: int
    host: str
    code: int
    stopped_by: str  # BY_TIME, BY_SLURM, or BY_NOBODY: then a code that is not 0 is a failure
    began: int
    finished: int
    seconds: float
    at: float = field(default_factory=time.time, compare=False)

    @property
    def failed(self) -> bool:
        return self.code != 0 and not self.stopped_by


def keep_submission(work: Path, job: str, text: str) -> None:
    with storing(work / FOLDER):
        (work / FOLDER).mkdir(parents=True, exist_ok=True)
    replace_whole(work / FOLDER / f"{job}{SCRIPT}", text.encode())


def submissions(work: Path) -> list[str]:
    """The jobs that were submitted, by Slurm's numbers, oldest first."""
    jobs = [path.stem for path in (work / FOLDER).glob(f"*{SCRIPT}")]
    return sorted(jobs, key=lambda job: (len(job), job))


def keep_end(work: Path, end: End) -> None:
    """One write: a lost node can make two supervisors of one element, and their lines must not mix."""
    append_line(work / FOLDER / f"{end.job}{ENDS}", asdict(end))


def ends(work: Path, job: str = "*") -> list[End]:
    """In the order they were written; a torn line is left out."""
    found = []
    for path in sorted((work / FOLDER).glob(f"{job}{ENDS}")):
        for entry in lines_in(path):
            with suppress(TypeError):
                found.append(End(**entry))
    return found


def fruitless(ends: list[End]) -> Counter[str]:
    """How many runs at the end of the list finished no record, by node; not those that Slurm stopped."""
    counts = Counter[str]()
    for end in ends:
        if end.stopped_by != BY_SLURM:
            counts = Counter() if end.finished > end.began else counts + Counter([end.host])
    return counts
