"""Batch jobs for the tests: one small input, submitted to a cluster, disturbed, and followed to its end."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from llama_ssp.batch.atomic_files import lines_in
from llama_ssp.batch.attempts import read_part
from llama_ssp.batch.index import ROW, Index
from llama_ssp.batch.journal import Journal, Standing, count_finished
from llama_ssp.batch.slurm.supervisor import End, ends
from tests.processes import kill, stands_still, wait_for
from tests.slurm.lab import Lab
from tests.warm import LAUNCH, Answer, python

RECORDS = 20
EMPTY = Index(sources=[], sha256="", rows=np.empty(0, ROW), refused={})
COMMAND = (
    "task=batch", "model=tiny", "draft=tiny_draft", "model.dtype=fp64", "draft.dtype=fp64", "seed=7",
    "speculation.k=4", "task.input=prompts.txt", "task.output=answers.jsonl", "task.shard_size=5",
    "task.max_new_tokens=48", "task.ignore_eos=true", "task.batch_size=2",
    "placement.target_device=cpu", "placement.draft_device=cpu",
)  # fmt: skip
ON_SLURM = ("cluster=slurm", "cluster.gpu=cpu", "cluster.slurm.time=20", "task.submit=true")
# What a job's processes run.
RANK, TORCHRUN, SUPERVISOR = "llama_ssp", "torch.distributed.run", "llama_ssp.batch.slurm.supervisor"


def executable(folder: Path, **scripts: str) -> None:
    """Stand-ins for commands of Slurm's."""
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


@dataclass
class Batches:
    """The job in a folder of its own."""

    home: Path
    lab: Lab | None = None

    def __post_init__(self) -> None:
        lines = [f"question {number}: how much is {number} times 7?" for number in range(RECORDS)]
        (self.home / "prompts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.output, self.work = self.home / "answers.jsonl", self.home / "answers.jsonl.work"

    def run(self, *overrides: str, command: Sequence[str] = COMMAND) -> Answer:
        """The command, in the job's folder."""
        env = {**(self.lab.env if self.lab else os.environ), "OMP_NUM_THREADS": "1"}
        answer = python([LAUNCH, *command, *overrides], self.home, env)
        assert answer.code == 0, answer.err
        return answer

    def alone(self) -> bytes:
        self.run()
        return self.output.read_bytes()

    def submit(self, *overrides: str) -> str:
        """The number of the job."""
        return str(self.run(*ON_SLURM, *overrides, "output=json").document["job"])

    @property
    def finished(self) -> int:
        """How many records are finished; 0 while there is no job."""
        return count_finished(self.work)

    def wait_for_records(self, count: int) -> None:
        wait_for(lambda: self.finished >= count, self.logs)

    def whole(self) -> bytes:
        """The output, once no job of it is left in the queue."""
        assert self.lab is not None
        self.lab.wait_empty()
        assert self.output.exists(), self.logs()
        return self.output.read_bytes()

    @property
    def ends(self) -> list[End]:
        return ends(self.work)

    def computed(self) -> int:
        """Answers that were computed, those in vain included."""
        parts = (self.work / "parts").glob("*.jsonl")
        published = [entry for path in (self.work / "groups").glob("*.jsonl") for entry in lines_in(path)]
        under_way = sum(path.read_bytes().count(b'{"finished":') for path in parts)
        return under_way + sum(entry.get("records", 0) for entry in published)

    @property
    def standing(self) -> Standing:
        """Attempts that are unended have left without a word: their records count as having killed them."""
        return Journal.find(self.work).standing()

    def logs(self) -> str:
        """For when something went wrong."""
        texts = [path.read_text(errors="replace")[-1500:] for path in (self.work / "logs").glob("*")]
        texts += [self.lab.logs()] if self.lab else []
        return f"{self.finished} records; {'|'.join(texts)}"

    def processes(self, job: str, module: str = RANK) -> list[int]:
        """A job's processes that run a module of Python; ranks in their order."""
        assert self.lab is not None
        found = self.lab.processes(job)
        return [each["pid"] for each in found if ("-m", module) in pairwise(each["cmdline"][:4])]

    @contextmanager
    def paused(self, job: str) -> Iterator[list[int]]:
        """Three more records in, the ranks stand still: a fault finds the job at work, on any machine."""
        self.wait_for_records(self.finished + 3)
        wait_for(lambda: self._stops_at_work(job), self.logs)
        ranks = self.processes(job)
        try:
            yield ranks
        finally:
            kill(*ranks, by=signal.SIGCONT)

    def _stops_at_work(self, job: str) -> bool:
        """Whether the ranks stand still with records under way; between two shards they go on."""
        ranks = self.processes(job)
        kill(*ranks, by=signal.SIGSTOP)
        wait_for(lambda: all(map(stands_still, ranks)), self.logs)
        newest = max((self.work / "parts").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
        if ranks and read_part(newest).failed_at:
            return True
        kill(*ranks, by=signal.SIGCONT)
        return False
