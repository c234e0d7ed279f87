"""task=batch with cluster.scheduler=slurm: the script, printed or handed over. No torch."""

from __future__ import annotations

import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

from llama_ssp.config import BatchConf, Output, RunConf
from llama_ssp.errors import OK, DistributedError, UsageError
from llama_ssp.journal import Journal
from llama_ssp.journal.files import storing
from llama_ssp.plan.machine import CPU
from llama_ssp.report import Console
from llama_ssp.sharing import LOGS, Share, share, words_of_one
from llama_ssp.slurm.ask import Slurm
from llama_ssp.slurm.limits import Demand, require_startable
from llama_ssp.slurm.records import Submission, keep_submission, submissions
from llama_ssp.slurm.script import GroupSize, Order

log = logging.getLogger(__name__)


def execute(run: RunConf, folders: list[Path], words: list[str]) -> int:
    """Prints the script, or submits it; `words` are the command's own."""
    cluster, task = run.cluster, run.task
    assert isinstance(task, BatchConf) and cluster.gpus is not None
    size = GroupSize(cluster.nodes, cluster.gpus, cluster.gpu != CPU)
    shared = share(run, folders, size.world)
    console, summary = Console(), shared.summary()
    if not shared.missing:
        journal = shared.journal
        assert journal is not None
        journal.merge(shared.job.output)
        log.info("nothing is missing: %s is whole", shared.job.output)
        console.document({**summary, "status": "done", "job": None})
        return OK
    order = _order(shared, size, words)
    script, demand = order.rendered(), Demand(size, order.elements, cluster.slurm)
    if not task.submit:
        summary |= {"status": "printed", "script": script, **_looked_over(demand, script)}
        if run.output is Output.json:
            console.document(summary)
        else:
            console.write(script)
        return OK
    slurm = Slurm()
    slurm.require()
    summary |= _checked(slurm, demand, script)
    submission = _submitted(slurm, order, script)
    log.info(
        "submitted: job %s, %d element%s, logs in %s; see task.status=true, or squeue --jobs=%s",
        submission.job, order.elements, "s" * (order.elements > 1), order.work / LOGS, submission.job,
    )  # fmt: skip
    console.document({**summary, "status": "submitted", "job": submission.job, "elements": order.elements})
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


def _looked_over(demand: Demand, script: str) -> dict[str, Any]:
    """What Slurm says of it, where there is one; a script can be made anywhere."""
    slurm = Slurm()
    try:
        slurm.require()
    except DistributedError as absent:
        log.warning("not checked against a cluster: %s", absent)
        return {"checks": None, "test_only": None}
    return _checked(slurm, demand, script)


def _checked(slurm: Slurm, demand: Demand, script: str) -> dict[str, Any]:
    checks = require_startable(demand, slurm.partitions(), slurm.nodes(), slurm.config())
    said = slurm.test(script)
    log.info("%s; %s", checks, said)
    return {"checks": checks, "test_only": said}


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
