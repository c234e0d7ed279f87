"""task=batch task.status=true: how far a job is, by its folder, and what of it waits or runs. No torch."""

import logging
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from llama_ssp.batch.job import folders_of
from llama_ssp.batch.journal import GroupWork, Journal, Standing, acceptance
from llama_ssp.batch.slurm.submit import queue_of, submissions
from llama_ssp.batch.slurm.supervisor import ends
from llama_ssp.batch.workers import show
from llama_ssp.config import RunConf
from llama_ssp.errors import OK, DistributedError
from llama_ssp.report.tables import aligned, figure

log = logging.getLogger(__name__)

RECENT_S = 600.0  # a group that has finished something since then is at work


def execute(run: RunConf) -> int:
    """Prints the job's state; the exit code."""
    work, output = folders_of(run)
    jobs = submissions(work)
    journal = Journal.find(work) if Journal.held(work) is not None or not jobs else None
    try:
        queued = queue_of(jobs)
    except DistributedError as silent:  # the files tell what is done all the same
        log.warning("%s", silent)
        queued = None
    standing, groups = journal.survey() if journal else (Standing(), list[GroupWork]())
    if standing.whole and journal and output.is_file():
        status = "done"
    elif queued or (journal and journal.holders()):
        status = "running"
    else:
        status = "unknown" if queued is None else "unfinished"
    summary: dict[str, Any] = {"task": run.task.name, "status": status, **asdict(standing)}
    summary |= pace(groups, standing, time.time())
    summary["eta_s"] = summary["eta_s"] if status == "running" else None
    summary["gpu_hours"] = sum(group.hours * group.gpus for group in groups)
    summary["groups"] = [{**asdict(group), "hours": group.hours} for group in groups]
    failed = [end for end in ends(work) if end.failed]  # their logs say why
    # Of what Slurm runs the supervisor notes the ends; of other processes a group that died shows them.
    noted = tuple(f"{end.job}-{end.restart}-" for end in failed)
    died = [group for group in groups if group.died and not group.group.startswith(noted)]
    summary |= {"failures": len(failed) + len(died), "jobs": jobs, "queue": queued}
    summary |= {"output": str(output), "work": str(work)}
    lines = list[str]()
    if summary["eta_s"] is not None:
        lines.append(f"at this pace it ends in {timedelta(seconds=round(summary['eta_s']))}")
    if groups:  # the last of them
        rows = [
            [g.group, g.node, figure(g.hours, 2), str(g.records), str(g.failed), "yes" if g.died else "-"]
            for g in groups[-20:]
        ]
        head = ["group", "node", "hours", "records", "errors", "died"]
        lines += ["", *aligned([head, *rows], words=2)]
    if queued:
        rows = [[one["job"], one["state"], one["spent"], one["nodes"] or one["reason"]] for one in queued]
        lines += ["", *aligned([["job", "state", "time", "nodes or reason"], *rows], words=4)]
    elif queued is None:
        lines += ["", "queue: the controller does not answer"]
    if failed:
        rows = [[end.job, str(end.restart), end.host, str(end.code)] for end in failed[-5:]]
        lines += ["", *aligned([["failed", "restart", "host", "code"], *rows], words=4)]
    show(summary, run.output, *lines)
    return OK


def pace(groups: list[GroupWork], standing: Standing, now: float) -> dict[str, Any]:
    """The tokens, and how fast the groups are that have finished a record lately, each since its beginning.

    Clocks are those of the nodes: they may differ by seconds. A rate is None where no group is at work.
    """
    working = [group for group in groups if group.records and group.hours and group.last_at > now - RECENT_S]
    tokens = sum(group.tokens / group.hours for group in working) / 3600 or None
    records = sum(group.records / group.hours for group in working) / 3600 or None
    eta_s = (standing.records - standing.records_finished) / records if records else None
    summary = {"tokens_committed": sum(group.tokens for group in groups), "tokens_per_s": tokens}
    return {**summary, "records_per_s": records, "eta_s": eta_s, "acceptance_rate": acceptance(groups)}
