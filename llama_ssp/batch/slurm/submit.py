"""task=batch with cluster.scheduler=slurm: prints the script, or submits it. No torch."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from llama_ssp.batch.atomic_files import storing
from llama_ssp.batch.job import Job
from llama_ssp.batch.journal import Journal
from llama_ssp.batch.slurm import client
from llama_ssp.batch.slurm.history import keep_submission, submissions
from llama_ssp.batch.slurm.script import Order
from llama_ssp.batch.workers import LOGS, share, words_of_one
from llama_ssp.config import BatchConf, ClusterConf, Output, RunConf, SlurmConf
from llama_ssp.config.validation.cluster import seconds_of
from llama_ssp.errors import OK, DistributedError, UsageError
from llama_ssp.report.console import Console

log = logging.getLogger(__name__)

UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")


def execute(run: RunConf, folders: list[Path], words: list[str]) -> int:
    """Prints the script or submits it; `words` are the command's own. Returns the exit code."""
    cluster, task = run.cluster, run.task
    assert isinstance(task, BatchConf) and cluster.gpus is not None
    job, summary = share(run, folders, cluster.nodes * cluster.gpus)
    console, is_json = Console(), run.output is Output.json
    if not job.missing:
        job.journal.merge(job.output)
        log.info("nothing is missing: %s is whole", job.output)
        console.document({**summary, "status": "done", "job": None}, is_json)
        return OK
    order = _order(job, cluster, words)
    script, said = order.rendered(), None
    try:
        client.require_slurm()
        said = _checked(cluster.slurm, script)
    except DistributedError as absent:
        if task.submit:
            raise
        log.warning("not checked against a cluster: %s", absent)  # a script can be made anywhere
    found: dict[str, object] = {"status": "printed", "script": script, "test_only": said}
    if task.submit:
        number = _submitted(order, script, job.journal)
        log.info("submitted: job %s, array of %d, logs in %s", number, order.elements, order.work / LOGS)
        log.info("see task.status=true, or squeue --jobs=%s", number)
        found = {"test_only": said, "status": "submitted", "job": number, "elements": order.elements}
    elif not is_json:
        console.write(script)
        return OK
    console.document({**summary, **found}, is_json)
    return OK


def _order(job: Job, cluster: ClusterConf, words: list[str]) -> Order:
    work, task, elements = job.work.absolute(), job.run.task, min(cluster.groups, job.missing)
    assert isinstance(task, BatchConf)
    if elements < cluster.groups:
        log.info("the array has %d elements: no more shards are missing", elements)
    usual = re.sub(r"[^\w.+=@-]", "_", f"llama-ssp-{job.output.stem}")[:100]
    one = words_of_one(words, job.seed, f"cluster.nodes={cluster.nodes}", f"cluster.gpus={cluster.gpus}")
    name = cluster.slurm.job_name or usual
    return Order(name, cluster, elements, work, Path.cwd(), one, task.retries)


def _checked(conf: SlurmConf, script: str) -> str:
    """What Slurm says of the script. Raises UsageError if the job could never start."""
    if conf.time is not None:
        require_time(conf.time, conf.partition, client.partitions())
    said = client.dry_run(script)
    log.info("%s", said)
    return said


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


def _submitted(order: Order, script: str, journal: Journal) -> str:
    """Submits the job; its number. Raises UsageError while an earlier submission is still in the queue."""
    alive = client.queued(submissions(order.work))
    if alive:
        found = f"job {alive[0].job}, {alive[0].state}"
        fix = "follow it with task.status=true, or cancel it with scancel first"
        raise UsageError("this job is in the queue already", order.work, found, fix=fix)
    journal.release_jobs()
    with storing(order.work):
        (order.work / LOGS).mkdir(parents=True, exist_ok=True)  # Slurm fails a job that cannot write its log
    job = client.submit(script)
    keep_submission(order.work, job, script)
    return job
