"""task=batch task.status=true: how far a job is, by its files, and what of it waits or runs. No torch."""

from __future__ import annotations

import logging
from typing import Any

from llama_ssp.batch.job import folders_of
from llama_ssp.batch.journal import Journal, Standing
from llama_ssp.batch.slurm.client import Queued, Slurm
from llama_ssp.batch.slurm.history import End, ends, submissions
from llama_ssp.batch.workers import LOGS, counted
from llama_ssp.config import Output, RunConf
from llama_ssp.errors import OK, DistributedError
from llama_ssp.report.run_folder import Console
from llama_ssp.report.tables import aligned, figure
from llama_ssp.speculative.stats import ratio

log = logging.getLogger(__name__)

NOTHING = Standing(0, 0, 0, 0, 0, 0)


def execute(run: RunConf) -> int:
    work, output = folders_of(run)
    submitted = submissions(work)
    begun = Journal.held(work) is not None
    standing = Journal.find(work).standing() if begun or not submitted else NOTHING
    queued = _queued([submission.job for submission in submitted])
    ended = ends(work)
    counts = counted((work / LOGS).glob("*.out"))
    merged = standing.whole and begun and output.is_file()
    summary: dict[str, Any] = {
        "task": run.task.name,
        "status": "done" if merged else "running" if queued else "unfinished",
        "records": standing.records, "records_finished": standing.finished,
        "shards": standing.shards, "shards_done": standing.shards_done,
        "attempts": standing.attempts, "attempts_unended": standing.attempts_unended,
        "failures": sum(end.failed for end in ended),
        "jobs": [submission.job for submission in submitted],
        "queue": [vars(one) for one in queued or []],
        "tokens_committed": counts["tokens_committed"],
        "acceptance_rate": ratio(counts["tokens_accepted"], counts["tokens_drafted"]),
        "tokens_per_s_per_group": ratio(counts["tokens_committed"], counts["wall_s"]),
        "output": str(output), "work": str(work),
    }  # fmt: skip
    console = Console()
    if run.output is not Output.json:
        console.write("\n".join([*_table(summary), *_jobs(queued), *_failures(ended), ""]))
    console.document(summary, run.output is Output.json)
    return OK


def _queued(jobs: list[str]) -> list[Queued] | None:
    """None where Slurm cannot be asked; the files tell what is done all the same."""
    if not jobs:
        return []
    try:
        return Slurm().queued(jobs)
    except DistributedError as silent:
        log.warning("%s", silent)
        return None


def _table(summary: dict[str, Any]) -> list[str]:
    share = f" ({100 * summary['records_finished'] // summary['records']} %)" if summary["records"] else ""
    speed = summary["tokens_per_s_per_group"]
    return aligned(
        [
            ["status", summary["status"]],
            ["records", f"{summary['records_finished']} of {summary['records']}{share}"],
            ["tokens", f"{summary['tokens_committed']}, {figure(speed, 1)} a second and group"],
            ["acceptance", figure(summary["acceptance_rate"])],
            ["shards", f"{summary['shards_done']} of {summary['shards']}"],
            ["attempts", f"{summary['attempts']}, {summary['attempts_unended']} not ended"],
            ["failures", str(summary["failures"])],
            ["output", summary["output"]],
        ],
        words=2,
    )


def _jobs(queued: list[Queued] | None) -> list[str]:
    if not queued:
        return []
    head = ["job", "state", "time", "nodes or reason"]
    rows = [[one.job, one.state, one.spent, one.nodes or one.reason] for one in queued]
    return ["", *aligned([head, *rows], words=4)]


def _failures(ended: list[End]) -> list[str]:
    """The last few: their logs say why."""
    failed = [end for end in ended if end.failed][-5:]
    if not failed:
        return []
    head = ["failed", "restart", "host", "code"]
    rows = [[end.job, str(end.restart), end.host, str(end.code)] for end in failed]
    return ["", *aligned([head, *rows], words=4)]
