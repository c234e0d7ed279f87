"""task=batch on a cluster: prints what its scheduler would be given, or gives it. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from llama_ssp.batch.job import Job
from llama_ssp.batch.workers import share, words_of_one
from llama_ssp.config import BatchConf, Output, RunConf
from llama_ssp.errors import OK, DistributedError
from llama_ssp.report.console import Console

log = logging.getLogger(__name__)


class Submission(Protocol):
    """What a scheduler is given for a job."""

    text: str

    def checked(self) -> str:
        """What the scheduler says of it. Raises DistributedError without one, UsageError if it refuses."""

    def submit(self) -> dict[str, Any]:
        """Submits it; the figures for the summary. Raises as `checked`."""


# Of a job, of the words for one process of a group, and of the summary so far.
Make = Callable[[Job, tuple[str, ...], dict[str, Any]], Submission]


def execute(run: RunConf, folders: list[Path], words: list[str], make: Make) -> int:
    """Prints the submission or submits it; `words` are the command's own. Returns the exit code."""
    cluster, task = run.cluster, run.task
    assert isinstance(task, BatchConf) and cluster.gpus is not None
    job, summary = share(run, folders, cluster.nodes * cluster.gpus)
    console, is_json = Console(), run.output is Output.json
    if not job.missing:
        job.journal.merge(job.output)
        log.info("nothing is missing: %s is whole", job.output)
        console.document({**summary, "status": "done", "job": None}, is_json)
        return OK
    one = words_of_one(words, job.seed, f"cluster.nodes={cluster.nodes}", f"cluster.gpus={cluster.gpus}")
    submission, said = make(job, one, summary), None
    try:
        said = submission.checked()
    except DistributedError as absent:
        if task.submit:
            raise
        log.warning("not checked against a cluster: %s", absent)  # the text can be made anywhere
    if task.submit:
        found = {"test_only": said, "status": "submitted", **submission.submit()}
    elif not is_json:
        console.write(submission.text)
        return OK
    else:
        found = {"status": "printed", "script": submission.text, "test_only": said}
    console.document({**summary, **found}, is_json)
    return OK


def groups_for(job: Job) -> int:
    """How many groups the job gets: no more than it has shards that are missing."""
    groups, missing = job.run.cluster.groups, job.missing
    if missing < groups:
        log.info("%d groups: no more shards are missing", missing)
    return min(groups, missing)
