"""Several groups of ranks on this machine, without a scheduler: task=batch with cluster.groups=N. No torch.

Each group is this very command, with GPUs and a log of its own; they share the job shard by shard. A group
that fails is started again, as long as the job still progresses.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llama_ssp.batch import workers
from llama_ssp.batch.atomic_files import storing
from llama_ssp.batch.job import Job
from llama_ssp.batch.journal import acceptance, count_finished
from llama_ssp.batch.workers import LOGS
from llama_ssp.config import BatchConf, RunConf
from llama_ssp.distributed.launcher import import_path
from llama_ssp.distributed.signals import end_with_parent
from llama_ssp.errors import OK, UsageError
from llama_ssp.planner.gpus import gpus_here
from llama_ssp.planner.storage import CPU
from llama_ssp.report.console import Progress
from llama_ssp.speculative.stats import ratio

log = logging.getLogger(__name__)

LOOK_S, COUNT_S = 0.1, 3.0
STOP_S = 60.0  # for groups to stop after SIGTERM


@dataclass
class WorkerGroup:
    """One group: its process, and how often it has ended without progress of the job."""

    log: Path
    command: list[str]
    devices: list[str] | None = None
    process: subprocess.Popen[bytes] | None = None
    began: int = 0
    fruitless: int = 0
    failures: int = 0
    code: int = OK

    def start(self, finished: int) -> None:
        """Starts the command; `finished` counts the job's finished records."""
        self.began = finished
        environment = import_path()
        if self.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        with storing(self.log), self.log.open("ab") as log_:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log_,
                stderr=log_,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            )

    def has_ended(self, finished: int) -> bool:
        """True once, after the worker has ended; `finished` counts the job's finished records."""
        if self.process is None or (returned := self.process.poll()) is None:
            return False
        self.process, self.code = None, workers.code_of(returned)
        self.fruitless = 0 if finished > self.began else self.fruitless + 1
        self.failures += self.code != OK
        return True

    def is_given_up(self, retries: int) -> bool:
        """Whether it is not started again after it has failed; `fruitless` runs in a row finished no record.

        A record that kills its ranks does so twice among others and `retries` times alone; then it is set
        aside, which counts as finished. So more fruitless runs in a row have another cause.
        """
        return self.code in workers.LASTING or self.fruitless > retries + 1


def execute(run: RunConf, folders: list[Path], words: list[str]) -> int:
    """Runs the groups to the end; the exit code of the first that failed for good."""
    task, began = run.task_as(BatchConf), time.time()
    if run.cluster.nodes > 1:
        what, found = "several groups of several nodes need a scheduler", f"cluster.nodes={run.cluster.nodes}"
        fix = "use cluster.scheduler=slurm, or start torchrun for each group yourself (docs/cluster.md)"
        raise UsageError(what, found=found, fix=fix)
    devices = _dealt(run)
    ranks = run.cluster.gpus or len(devices[0] or [""])
    job, summary = workers.share(run, folders, ranks)
    with storing(job.work):
        (job.work / LOGS).mkdir(parents=True, exist_ok=True)
    job.reopen()
    job.index.save(job.work)
    size = f"cluster.gpus={ranks}", f"ranks={ranks}"
    command = [sys.executable, "-m", "llama_ssp"]
    command += workers.words_of_one(words, job.seed, *job.drafts, *size)
    count = min(run.cluster.groups, max(job.missing, 1))
    logs = [job.work / LOGS / f"group-{number}.log" for number in range(count)]
    groups = [WorkerGroup(path, command, gpus) for path, gpus in zip(logs, devices, strict=False)]
    log.info("groups: %d, with %d ranks each; logs in %s", count, ranks, job.work / LOGS)
    with _stopped_together(groups):
        _run(groups, job, task.retries)
    code = next((group.code for group in groups if group.code != OK), OK)
    summary |= _figures(job, groups, began, code)
    workers.show(summary, run.output)
    return code


def _run(groups: list[WorkerGroup], job: Job, retries: int) -> None:
    finished, counted_at = count_finished(job.work), time.monotonic()
    for group in groups:
        group.start(finished)
    with Progress("batch", job.manifest.records, "records") as bar:
        bar.start(finished)
        while any(group.process for group in groups):
            time.sleep(LOOK_S)
            ended = any(group.process and group.process.poll() is not None for group in groups)
            if ended or time.monotonic() - counted_at >= COUNT_S:
                before, finished, counted_at = finished, count_finished(job.work), time.monotonic()
                bar.advance(finished - before)
            for group in groups:
                if not group.has_ended(finished) or group.code == OK:
                    continue
                if group.is_given_up(retries):
                    log.error("a group gave up with %d; see %s", group.code, group.log)
                else:
                    log.warning("a group ended with %d, started again; %s", group.code, group.log)
                    group.start(finished)


def _figures(job: Job, groups: list[WorkerGroup], began: float, code: int) -> dict[str, Any]:
    """The summary of all groups that this machine has started since then."""
    (standing, done), wall_s, node = job.journal.survey(), time.time() - began, socket.gethostname()
    ours = [group for group in done if group.node == node and group.began >= began]
    status = "done" if job.output.is_file() else "partial"  # others are at work on the rest
    tokens = sum(group.tokens for group in ours)
    return {
        **asdict(standing),
        "shards_missing": job.missing,
        "status": status if code == OK else "error",
        "groups": len(groups),
        "failures": sum(group.failures for group in groups),
        "tokens_committed": tokens,
        "acceptance_rate": acceptance(ours),
        "tokens_per_s": ratio(tokens, wall_s),
        "wall_s": wall_s,
    }


def _dealt(run: RunConf) -> list[list[str] | None]:
    """Each group's GPUs, as CUDA_VISIBLE_DEVICES names them; None where the CPU computes."""
    cluster = run.cluster
    there = [] if CPU in (cluster.gpu, run.placement.target_device) else gpus_here()
    if not there:
        return [None] * cluster.groups
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = hidden.split(",") if hidden else [str(number) for number in range(len(there))]
    each = cluster.gpus or len(names) // cluster.groups
    if each == 0 or each * cluster.groups > len(names):
        what, found = "there are too few GPUs for the groups", f"{cluster.groups} groups of {max(each, 1)}"
        where, fix = "cluster.groups, cluster.gpus", "ask for fewer or smaller groups"
        raise UsageError(what, where, found, f"{len(names)} GPUs in all", fix)
    return [names[number * each : (number + 1) * each] for number in range(cluster.groups)]


@contextmanager
def _stopped_together(groups: list[WorkerGroup]) -> Iterator[None]:
    """However this ends, no group outlives it; each stops at a record's end."""
    try:
        yield
    finally:
        processes = [group.process for group in groups if group.process is not None]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + STOP_S
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
