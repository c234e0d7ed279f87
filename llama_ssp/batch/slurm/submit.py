"""task=batch with cluster.scheduler=slurm: the script, what Slurm says of it, its submission. No torch."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_ssp.batch.history import keep_submission, submissions
from llama_ssp.batch.job import Job
from llama_ssp.batch.slurm import client
from llama_ssp.batch.slurm.script import Order
from llama_ssp.batch.submission import groups_for
from llama_ssp.batch.workers import LOGS
from llama_ssp.config import BatchConf
from llama_ssp.config.validation.cluster import seconds_of
from llama_ssp.errors import UsageError

log = logging.getLogger(__name__)

UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")


@dataclass
class SlurmSubmission:
    """An array of jobs, each a group of ranks."""

    job: Job
    order: Order

    def __post_init__(self) -> None:
        self.text = self.order.rendered()

    def checked(self) -> str:
        client.require_slurm()
        conf = self.order.cluster.slurm
        if conf.time is not None:
            require_time(conf.time, conf.partition, client.partitions())
        said = client.dry_run(self.text)
        log.info("%s", said)
        return said

    def submit(self) -> dict[str, Any]:
        """Raises UsageError while an earlier submission is in the queue, or one that people submitted."""
        work = self.order.work
        own, others = submissions(work), {holder.get("job") for holder in self.job.journal.holders()}
        alive = client.queued([*own, *(job for job in others if isinstance(job, str) and job.isdecimal())])
        if alive:
            found = f"job {alive[0].job}, {alive[0].state}"
            fix = "follow it with task.status=true, or cancel it with scancel first"
            what = "this job is in the queue already, or is worked on by hand"
            raise UsageError(what, work, found, fix=fix)
        self.job.journal.release_jobs()
        number, elements = client.submit(self.text), self.order.elements
        keep_submission(work, number, self.text)
        log.info("submitted: job %s, array of %d, logs in %s", number, elements, work / LOGS)
        log.info("see task.status=true, or squeue --jobs=%s", number)
        return {"job": number, "elements": elements}


def submission(job: Job, words: tuple[str, ...], _: dict[str, Any]) -> SlurmSubmission:
    """What Slurm is given for a job; `words` are the command for one process of a group."""
    cluster, task = job.run.cluster, job.run.task
    assert isinstance(task, BatchConf)
    usual = re.sub(r"[^\w.+=@-]", "_", f"llama-ssp-{job.output.stem}")[:100]
    name, work = cluster.slurm.job_name or usual, job.work.absolute()
    return SlurmSubmission(job, Order(name, cluster, groups_for(job), work, Path.cwd(), words, task.retries))


def require_time(asked: str, names: str | None, partitions: list[dict[str, str]]) -> None:
    """Raises UsageError for a time limit beyond that of every partition named, or of the default one.

    `sbatch --test-only` accepts it where EnforcePartLimits=NO, which is Slurm's default, and the job would be
    queued for ever. sbatch itself refuses everything else that can never start.
    """
    named = names.split(",") if names else []
    limits = [
        one.get("MaxTime", "")
        for one in partitions
        if (one["PartitionName"] in named if names else one.get("Default") == "YES")
    ]
    if limits and all(one not in UNLIMITED and seconds_of(asked) > seconds_of(one) for one in limits):
        what, allowed = "the job could never start", f"at most {max(limits, key=seconds_of)}"
        fix = "ask for less: an element that reaches its limit is requeued and goes on"
        raise UsageError(what, "cluster.slurm.time", asked, allowed, fix)
