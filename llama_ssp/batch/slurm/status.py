"""task=batch task.status=true: how far a job is, by its files, and what of it waits or runs. No torch."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from llama_ssp.batch.job import folders_of
from llama_ssp.batch.journal import NOTHING, Journal
from llama_ssp.batch.slurm import client
from llama_ssp.batch.slurm.history import ends, submissions
from llama_ssp.batch.workers import LOGS, counted, table
from llama_ssp.config import Output, RunConf
from llama_ssp.errors import OK, DistributedError
from llama_ssp.report.console import Console
from llama_ssp.report.tables import aligned, figure
from llama_ssp.speculative.stats import ratio

log = logging.getLogger(__name__)


def execute(run: RunConf) -> int:
    """Prints the job's state; the exit code."""
    work, output = folders_of(run)
    jobs = submissions(work)
    begun = Journal.held(work) is not None
    standing = Journal.find(work).standing() if begun or not jobs else NOTHING
    try:
        queued = client.queued(jobs)
    except DistributedError as silent:  # the files tell what is done all the same
        log.warning("%s", silent)
        queued = []
    ended, counts = ends(work), counted((work / LOGS).glob("*.out"))
    merged = standing.whole and begun and output.is_file()
    summary: dict[str, Any] = {
        "task": run.task.name,
        "status": "done" if merged else "running" if queued else "unfinished",
        **asdict(standing),
        "failures": sum(end.failed for end in ended),
        "jobs": jobs,
        "queue": [vars(one) for one in queued],
        "tokens_committed": counts["tokens_committed"],
        "acceptance_rate": ratio(counts["tokens_accepted"], counts["tokens_drafted"]),
        "tokens_per_s_per_group": ratio(counts["tokens_committed"], counts["wall_s"]),
        "output": str(output),
        "work": str(work),
    }
    console = Console()
    if run.output is not Output.json:
        lines = table(summary, f"{figure(summary['tokens_per_s_per_group'], 1)} a second and group")
        if queued:
            rows = [[one.job, one.state, one.spent, one.nodes or one.reason] for one in queued]
            lines += ["", *aligned([["job", "state", "time", "nodes or reason"], *rows], words=4)]
        if failed := [end for end in ended if end.failed][-5:]:  # their logs say why
            rows = [[end.job, str(end.restart), end.host, str(end.code)] for end in failed]
            lines += ["", *aligned([["failed", "restart", "host", "code"], *rows], words=4)]
        console.write("\n".join([*lines, ""]))
    console.document(summary, run.output is Output.json)
    return OK
