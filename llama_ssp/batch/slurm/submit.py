"""task=batch on Slurm: prints the script or submits it, and reads the queue. No torch."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

from llama_ssp.batch.atomic_files import replace_whole, storing
from llama_ssp.batch.job import Job
from llama_ssp.batch.slurm.script import sbatch_script
from llama_ssp.batch.workers import LOGS, share, words_of_one
from llama_ssp.config import BatchConf, Output, RunConf
from llama_ssp.errors import OK, DistributedError, UsageError, one_line
from llama_ssp.report.console import Console

log = logging.getLogger(__name__)

FOLDER, SCRIPT = "slurm", ".sbatch"  # in the job's folder: each script that was submitted, by its number
PATIENCE_S = 60.0  # a controller that is down keeps its commands waiting
# What squeue tells of an element that waits or runs; `number` is SLURM_JOB_ID in its processes.
QUEUED = {"job": "%i", "number": "%A", "state": "%T", "reason": "%r", "spent": "%M", "nodes": "%N"}


def execute(run: RunConf, folders: list[Path], words: list[str]) -> int:
    """Prints the script or submits it; `words` are the command's own. Returns the exit code."""
    cluster, task = run.cluster, run.task_as(BatchConf)
    assert cluster.gpus is not None
    job, summary = share(run, folders, cluster.nodes * cluster.gpus)
    if (task.retry_errors or job.corrected) and not (task.submit or job.is_new):
        what, fix = "a printed script cannot take answers back", "add task.submit=true"
        raise UsageError(what, "task.retry_errors, corrected lines", fix=fix)
    job.reopen()
    if not job.missing:
        job.journal.merge(job.output)
        log.info("nothing is missing: %s is whole", job.output)
        Console().document({**summary, "status": "done", "job": None}, run.output)
        return OK
    elements = min(cluster.groups, job.missing)
    if elements < cluster.groups:
        shards = "1 shard is" if job.missing == 1 else f"{job.missing} shards are"
        log.info("an array of %d, not of cluster.groups=%d: %s missing", elements, cluster.groups, shards)
    script = sbatch_script(job, elements, words_of_one(words, job.seed, *job.drafts))
    if task.submit:
        number = _submit(job, script)
        log.info("submitted: job %s, array of %d, logs in %s", number, elements, job.work / LOGS)
        summary |= {"status": "submitted", "job": number, "elements": elements}
    elif run.output is Output.json:
        summary |= {"status": "printed", "script": script}
    else:
        Console().write(script)
        return OK
    Console().document(summary, run.output)
    return OK


def keep_submission(work: Path, job: str, text: str) -> None:
    with storing(work / FOLDER):
        (work / FOLDER).mkdir(parents=True, exist_ok=True)
    replace_whole(work / FOLDER / f"{job}{SCRIPT}", text.encode())


def submissions(work: Path) -> list[str]:
    """The jobs that were submitted, by Slurm's numbers, oldest first."""
    jobs = [path.stem for path in (work / FOLDER).glob(f"*{SCRIPT}")]
    return sorted(jobs, key=lambda job: (len(job), job))


def queue_of(jobs: list[str]) -> list[dict[str, str]]:
    """Returns the elements of these jobs that wait or run; none of jobs that have ended."""
    if not jobs:
        return []
    form = f"--format={'|'.join(QUEUED.values())}"
    done = _run("squeue", "--noheader", "--array", f"--jobs={','.join(jobs)}", form)
    if done.returncode != 0 and "Invalid job id" not in done.stderr:  # printed also for a job of long ago
        raise _silent(done.stderr)
    lines = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == len(QUEUED) - 1]
    return [dict(zip(QUEUED, line, strict=True)) for line in lines]


def _submit(job: Job, script: str) -> str:
    """Submits the script; returns the job's number. Raises UsageError for a job that is in the queue."""
    ping = _run("scontrol", "ping")
    if " UP" not in ping.stdout:
        raise _silent(ping.stdout or ping.stderr)
    work, holders = job.work, {str(holder.get("job")) for holder in job.journal.holders()}
    if waiting := queue_of([*submissions(work), *filter(str.isdecimal, holders)]):
        found = f"job {waiting[0]['job']}, {waiting[0]['state']}"
        fix = "follow it with task.status=true, or cancel it with scancel first"
        raise UsageError("this job is in the queue already", where=work, found=found, fix=fix)
    done = _run("sbatch", "--parsable", script=script)
    number = done.stdout.strip().partition(";")[0]  # a federation adds the name of the cluster
    if done.returncode == 0 and number.isdecimal():
        keep_submission(work, number, script)
        job.index.save(work)  # before the first element has started
        return number
    said, fix = one_line(done.stderr.replace("sbatch:", "")), "correct cluster.slurm.*, nodes and gpus"
    raise UsageError("Slurm refuses the job", found=said, fix=fix)


def _run(*command: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except FileNotFoundError:
        what, fix = "this machine has none of Slurm's commands", "print the script: task.submit=false"
        raise DistributedError(what, found=f"no {command[0]}", fix=fix) from None
    except subprocess.TimeoutExpired:
        raise _silent(f"{command[0]} said nothing for {PATIENCE_S:g} s") from None


def _silent(found: str) -> DistributedError:
    fix = "try scontrol ping; is SLURM_CONF right?"
    return DistributedError("Slurm does not answer", found=one_line(found), fix=fix)
