"""task=batch with cluster.scheduler=slurm: prints the script, or submits it. No torch."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from llama_ssp.batch.history import keep_submission, submissions
from llama_ssp.batch.job import Job
from llama_ssp.batch.slurm import client
from llama_ssp.batch.slurm.script import Order
from llama_ssp.batch.workers import LOGS, share, words_of_one
from llama_ssp.config import BatchConf, Output, RunConf
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
    order = _order(job, words)
    script, said = order.rendered(), None
    try:
        said = _checked(order, script)
    except DistributedError as absent:
        if task.submit:
            raise
        log.warning("not checked against a cluster: %s", absent)  # the script can be made anywhere
    if task.submit:
        result = {"test_only": said, "status": "submitted", **_submit(job, order, script)}
    elif not is_json:
        console.write(script)
        return OK
    else:
        result = {"status": "printed", "script": script, "test_only": said}
    console.document({**summary, **result}, is_json)
    return OK


def _order(job: Job, words: list[str]) -> Order:
    """Returns what the script is made of: no more groups than the job has shards that are missing."""
    cluster, task = job.run.cluster, job.run.task
    assert isinstance(task, BatchConf)
    groups = min(cluster.groups, job.missing)
    if groups < cluster.groups:
        log.info("%d groups: no more shards are missing", groups)
    usual = re.sub(r"[^\w.+=@-]", "_", f"llama-ssp-{job.output.stem}")[:100]
    name, work = cluster.slurm.job_name or usual, job.work.absolute()
    command = words_of_one(words, job.seed, f"cluster.nodes={cluster.nodes}", f"cluster.gpus={cluster.gpus}")
    return Order(name, cluster, groups, work, Path.cwd(), command, task.retries)


def _checked(order: Order, script: str) -> str:
    """Returns what Slurm says of the script. Raises DistributedError without it, UsageError if it refuses."""
    client.require_slurm()
    conf = order.cluster.slurm
    if conf.time is not None:
        require_time(conf.time, conf.partition, client.partitions())
    said = client.dry_run(script)
    log.info("%s", said)
    return said


def _submit(job: Job, order: Order, script: str) -> dict[str, Any]:
    """Submits the script; returns the figures for the summary.

    Raises UsageError while an earlier submission is in the queue, or one that people submitted.
    """
    work = order.work
    submitted, others = submissions(work), {holder.get("job") for holder in job.journal.holders()}
    by_hand = (holder for holder in others if isinstance(holder, str) and holder.isdecimal())
    alive = client.queued([*submitted, *by_hand])
    if alive:
        found = f"job {alive[0].job}, {alive[0].state}"
        fix = "follow it with task.status=true, or cancel it with scancel first"
        what = "this job is in the queue already, or is worked on by hand"
        raise UsageError(what, work, found, fix=fix)
    job.journal.release_jobs()
    number, elements = client.submit(script), order.elements
    keep_submission(work, number, script)
    log.info("submitted: job %s, array of %d, logs in %s", number, elements, work / LOGS)
    log.info("see task.status=true, or squeue --jobs=%s", number)
    return {"job": number, "elements": elements}


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
