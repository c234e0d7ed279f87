"""task=batch with cluster.scheduler=slurm: the script, printed or handed over. No torch."""

from __future__ import annotations

import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

from llama_ssp.batch.atomic_files import storing
from llama_ssp.batch.journal import Journal
from llama_ssp.batch.slurm.client import Slurm
from llama_ssp.batch.slurm.history import Submission, keep_submission, submissions
from llama_ssp.batch.slurm.script import GroupSize, Order
from llama_ssp.batch.workers import LOGS, Share, share, words_of_one
from llama_ssp.config import BatchConf, Output, RunConf, SlurmConf
from llama_ssp.config.validation.cluster import seconds_of
from llama_ssp.errors import OK, DistributedError, UsageError
from llama_ssp.planner.hardware import CPU
from llama_ssp.report.run_folder import Console

log = logging.getLogger(__name__)

UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")


def execute(run: RunConf, folders: list[Path], words: list[str]) -> int:
    """Prints the script, or submits it; `words` are the command's own."""
    cluster, task = run.cluster, run.task
    assert isinstance(task, BatchConf) and cluster.gpus is not None
    size = GroupSize(cluster.nodes, cluster.gpus, cluster.gpu != CPU)
    shared = share(run, folders, size.world)
    console, summary, is_json = Console(), shared.summary(), run.output is Output.json
    if not shared.missing:
        journal = shared.journal
        assert journal is not None
        journal.merge(shared.job.output)
        log.info("nothing is missing: %s is whole", shared.job.output)
        console.document({**summary, "status": "done", "job": None}, is_json)
        return OK
    order = _order(shared, size, words)
    script = order.rendered()
    if not task.submit:
        summary |= {"status": "printed", "script": script, **_looked_over(cluster.slurm, script)}
        if is_json:
            console.document(summary, is_json)
        else:
            console.write(script)
        return OK
    slurm = Slurm()
    slurm.require()
    summary |= _checked(slurm, cluster.slurm, script)
    submission = _submitted(slurm, order, script)
    log.info(
        "submitted: job %s, %d element%s, logs in %s; see task.status=true, or squeue --jobs=%s",
        submission.job, order.elements, "s" * (order.elements > 1), order.work / LOGS, submission.job,
    )  # fmt: skip
    submitted = {"status": "submitted", "job": submission.job, "elements": order.elements}
    console.document({**summary, **submitted}, is_json)
    return OK


def _order(shared: Share, size: GroupSize, words: list[str]) -> Order:
    cluster, task, work = shared.run.cluster, shared.run.task, shared.job.work
    assert isinstance(task, BatchConf)
    elements = min(cluster.groups, shared.missing)
    if elements < cluster.groups:
        log.info("the array has %d: no more shards are missing", elements)
    name = re.sub(r"[^\w.+=@-]", "_", f"llama-ssp-{shared.job.output.stem}")[:100]
    one = [f"cluster.nodes={size.nodes}", f"cluster.gpus={size.ranks}"]
    return Order(
        name=cluster.slurm.job_name or name, size=size, elements=elements, work=work.absolute(),
        folder=Path.cwd(), python=cluster.slurm.python or sys.executable,
        words=words_of_one(words, shared.seed, *one), retries=task.retries, slurm=cluster.slurm,
    )  # fmt: skip


def _looked_over(conf: SlurmConf, script: str) -> dict[str, Any]:
    """What Slurm says of it, where there is one; a script can be made anywhere."""
    slurm = Slurm()
    try:
        slurm.require()
    except DistributedError as absent:
        log.warning("not checked against a cluster: %s", absent)
        return {"test_only": None}
    return _checked(slurm, conf, script)


def _checked(slurm: Slurm, conf: SlurmConf, script: str) -> dict[str, Any]:
    if conf.time is not None:
        require_time(conf.time, conf.partition, slurm.partitions())
    said = slurm.test(script)
    log.info("%s", said)
    return {"test_only": said}


def require_time(asked: str, names: str | None, partitions: list[dict[str, str]]) -> None:
    """Refuses a time limit beyond that of every partition named, or of the default one.

    `sbatch --test-only` accepts this, alone of what can never start, where EnforcePartLimits=NO, which is
    Slurm's default: the job would be queued for ever. sbatch itself refuses a partition that does not exist.
    """
    wanted = [
        partition
        for partition in partitions
        if (partition["PartitionName"] in names.split(",") if names else partition.get("Default") == "YES")
    ]
    limits = [partition.get("MaxTime", "") for partition in wanted]
    if limits and all(one not in UNLIMITED and seconds_of(asked) > seconds_of(one) for one in limits):
        raise UsageError(
            "the job could never start", where="cluster.slurm.time", found=asked,
            allowed=f"at most {max(limits, key=seconds_of)}",
            fix="ask for less: an element that reaches its limit is requeued and goes on",
        )  # fmt: skip


def _submitted(slurm: Slurm, order: Order, script: str) -> Submission:
    """Hands it over, unless an earlier submission is still in the queue: two would only get in their way."""
    alive = slurm.queued([earlier.job for earlier in submissions(order.work)])
    if alive:
        raise UsageError(
            "this job is in the queue already", where=str(order.work),
            found=f"job {alive[0].job}, {alive[0].state}",
            fix="follow it with task.status=true, or cancel it with scancel first",
        )  # fmt: skip
    if Journal.held(order.work) is not None:
        Journal.find(order.work).release_jobs()
    with storing(order.work):
        (order.work / LOGS).mkdir(parents=True, exist_ok=True)  # Slurm fails a job that cannot write its log
    submission = Submission(slurm.submit(script), order.name, order.elements, time.time())
    keep_submission(order.work, submission, script)
    return submission
