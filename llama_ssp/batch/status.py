"""task=batch task.status=true: how far a job is, by its folder, and what of it waits or runs. No torch."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import Any

from llama_ssp.batch.history import End, ends, submissions
from llama_ssp.batch.job import folders_of
from llama_ssp.batch.journal import NOTHING, Journal, Standing
from llama_ssp.batch.responses import output_tokens
from llama_ssp.batch.slurm.submit import queue_of
from llama_ssp.batch.workers import LOGS, counted, table
from llama_ssp.config import Output, RunConf
from llama_ssp.errors import OK, DistributedError
from llama_ssp.report.console import Console
from llama_ssp.report.tables import aligned, figure
from llama_ssp.speculative.stats import ratio

log = logging.getLogger(__name__)

SILENT = "the controller does not answer"
RECENT_S = 600.0  # rates are those of the last minutes


@dataclass(frozen=True)
class Pace:
    """Of all groups together; None where nothing was finished lately. The names are the JSON interface's."""

    tokens_committed: int
    tokens_per_s: float | None
    records_per_s: float | None
    eta_s: float | None


def execute(run: RunConf) -> int:
    """Prints the job's state; the exit code."""
    work, output = folders_of(run)
    jobs = submissions(work)
    has_begun = Journal.held(work) is not None or not jobs
    journal = Journal.find(work) if has_begun else None
    queued, ended, counts = _queued(jobs), ends(work), counted((work / LOGS).glob("*.out"))
    standing, at = NOTHING, Pace(0, None, None, None)
    status = "unknown" if queued is None else "running" if queued else "unfinished"
    if journal:
        standing = journal.standing()
        at = pace(journal, standing, time.time())
        if standing.whole and output.is_file():
            status = "done"
        elif journal.holders():
            status = "running"
    summary: dict[str, Any] = {
        "task": run.task.name,
        "status": status,
        **asdict(standing),
        **asdict(at),
        "eta_s": at.eta_s if status == "running" else None,
        "failures": sum(end.failed for end in ended),
        "jobs": jobs,
        "queue": queued,
        "acceptance_rate": ratio(counts["tokens_accepted"], counts["tokens_drafted"]),
        "tokens_per_s_per_group": ratio(counts["tokens_committed"], counts["wall_s"]),
        "output": str(output),
        "work": str(work),
    }
    console = Console()
    if run.output is not Output.json:
        failed = [end for end in ended if end.failed][-5:]  # their logs say why
        console.write("\n".join([*_lines(summary, queued, failed), ""]))
    console.document(summary, run.output)
    return OK


def pace(journal: Journal, standing: Standing, now: float) -> Pace:
    """The job's pace at the time `now`, by the clocks of the nodes: they may differ by seconds."""
    tokens: dict[int, int] = {}
    recent: dict[int, int] = {}
    since = now
    for attempt in journal.past_attempts():
        fresh = [index for index, at in attempt.times.items() if at >= now - RECENT_S]
        counts = {index: output_tokens(record) for index, record in attempt.finished.items()}
        tokens |= counts
        recent |= {index: counts[index] for index in fresh}
        if fresh and attempt.began_at is not None:
            since = min(since, attempt.began_at)
    seconds = min(now - since, RECENT_S)
    if not recent or seconds <= 0:
        return Pace(sum(tokens.values()), None, None, None)
    rate, left = len(recent) / seconds, standing.records - standing.records_finished
    return Pace(sum(tokens.values()), sum(recent.values()) / seconds, rate, left / rate)


def _queued(jobs: list[str]) -> list[dict[str, str]] | None:
    """What waits or runs; None where the scheduler does not answer."""
    try:
        return queue_of(jobs)
    except DistributedError as silent:  # the files tell what is done all the same
        log.warning("%s", silent)
        return None


def _lines(summary: dict[str, Any], queued: list[dict[str, str]] | None, failed: list[End]) -> list[str]:
    """The summary, for people."""
    lines = table(summary, f"{figure(summary['tokens_per_s'], 1)} a second")
    if summary["eta_s"] is not None:
        lines.append(f"at this pace it ends in {_in_words(summary['eta_s'])}")
    lines += _queue(queued)
    if failed:
        rows = [[end.job, str(end.restart), end.host, str(end.code)] for end in failed]
        lines += ["", *aligned([["failed", "restart", "host", "code"], *rows], words=4)]
    return lines


def _queue(queued: list[dict[str, str]] | None) -> list[str]:
    """The lines about the scheduler's queue."""
    if not queued:
        return [] if queued is not None else ["", f"queue: {SILENT}"]
    rows = [[one["job"], one["state"], one["spent"], one["nodes"] or one["reason"]] for one in queued]
    return ["", *aligned([["job", "state", "time", "nodes or reason"], *rows], words=4)]


def _in_words(seconds: float) -> str:
    """A time as H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
