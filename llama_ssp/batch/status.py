"""task=batch task.status=true: how far a job is, by its folder, and what of it waits or runs. No torch."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from llama_ssp.batch.attempt_log import lines_in
from llama_ssp.batch.history import End, ends, submissions
from llama_ssp.batch.job import folders_of
from llama_ssp.batch.journal import GROUPS, NOTHING, Journal, Piece, Standing
from llama_ssp.batch.slurm.submit import queue_of
from llama_ssp.batch.workers import LOGS, counted, table
from llama_ssp.config import Output, RunConf
from llama_ssp.errors import OK, DistributedError
from llama_ssp.report.console import Console
from llama_ssp.report.tables import aligned, figure
from llama_ssp.speculative.stats import ratio

log = logging.getLogger(__name__)

SILENT = "the controller does not answer"
SHOWN = 20  # groups that are listed for people
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
    standing, at, groups = NOTHING, Pace(0, None, None, None), list[dict[str, Any]]()
    status = "unknown" if queued is None else "running" if queued else "unfinished"
    if journal:
        standing, pieces = journal.survey()
        at = pace(pieces, standing, time.time())
        groups = groups_of(journal.folder / GROUPS, pieces)
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
        "gpu_hours": sum(group["hours"] * group["ranks"] for group in groups),
        "groups": groups,
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


def pace(pieces: list[Piece], standing: Standing, now: float) -> Pace:
    """The job's pace at the time `now`, by the clocks of the nodes: they may differ by seconds."""
    tokens, since = sum(piece.tokens for piece in pieces), now - RECENT_S
    recent = [piece for piece in pieces if piece.at >= since and piece.records]
    seconds = now - max(since, min((piece.began for piece in recent), default=now))
    if seconds <= 0:
        return Pace(tokens, None, None, None)
    # A piece that began earlier counts by the share of its time that is in the last minutes.
    shares = [(one.at - max(one.began, since)) / max(one.at - one.began, 1e-3) for one in recent]
    shares = [share if one.began < since else 1.0 for one, share in zip(recent, shares, strict=True)]
    records, written = (
        sum(share * getattr(one, name) for one, share in zip(recent, shares, strict=True)) / seconds
        for name in ("records", "tokens")
    )
    left = standing.records - standing.records_finished
    return Pace(tokens, written, records, left / records if records else None)


def groups_of(folder: Path, pieces: list[Piece]) -> list[dict[str, Any]]:
    """Each process that has worked on the job: where, how long, and what it has finished."""
    result = []
    for path in sorted(folder.glob("*.jsonl")):
        entries = list(lines_in(path))
        head = next((entry for entry in entries if "node" in entry), {"node": "", "ranks": 1, "began": 0.0})
        ours = [piece for piece in pieces if piece.group == path.stem]
        last = max([head["began"], *(entry.get("at", 0.0) for entry in entries), *(one.at for one in ours)])
        counts = {name: sum(getattr(one, name) for one in ours) for name in ("records", "failed", "tokens")}
        hours = (last - head["began"]) / 3600
        about = {"group": path.stem, "node": head["node"], "ranks": head["ranks"], "hours": hours}
        result.append({**about, **counts, "last_at": last})
    return result


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
        lines.append(f"at this pace it ends in {timedelta(seconds=round(summary['eta_s']))}")
    rows = [
        [g["group"], g["node"], figure(g["hours"], 2), str(g["records"]), str(g["failed"])]
        for g in summary["groups"]
    ]
    if rows:
        lines += ["", *aligned([["group", "node", "hours", "records", "errors"], *rows[-SHOWN:]], words=2)]
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
