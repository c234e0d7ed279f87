"""Calls Slurm's commands and reads what they print; waits for each, for a limited time. No torch."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from llama_ssp.errors import DistributedError, UsageError, one_line

PATIENCE_S = 60.0
PING_S = 15.0  # a controller that is down keeps its commands waiting
PAIR = re.compile(r"(\w[\w/:-]*)=(\S*)")


@dataclass(frozen=True)
class Queued:
    """A job, or an element of an array, that waits or runs. `number` is SLURM_JOB_ID in its processes."""

    job: str
    number: str
    state: str
    reason: str
    spent: str
    nodes: str


def require_slurm() -> None:
    """Raises DistributedError where there is no Slurm, or its controller does not answer."""
    said = _run(PING_S, "scontrol", "ping")
    if " UP" not in said.stdout:
        raise _silent(one_line(said.stdout or said.stderr) or "no answer to scontrol ping")


def partitions() -> list[dict[str, str]]:
    done = _run(PATIENCE_S, "scontrol", "show", "partition", "-o")
    if done.returncode != 0:
        raise _silent(one_line(done.stderr))
    return _table(done.stdout)


def dry_run(script: str) -> str:
    """What sbatch would do with the script: when it would start, and where."""
    return one_line(_sbatch("--test-only", script).stderr.replace("sbatch:", ""))


def submit(script: str) -> str:
    """Submits the script; the number of the job."""
    said = _sbatch("--parsable", script).stdout.strip()
    number = said.partition(";")[0]
    if not number.isdecimal():
        raise DistributedError("sbatch printed no job number", "", repr(said), fix="see squeue --me")
    return number


def queued(jobs: list[str]) -> list[Queued]:
    """The elements of these jobs that wait or run; none of jobs that have ended."""
    if not jobs:
        return []
    form = "--format=%i|%A|%T|%r|%M|%N"
    done = _run(PATIENCE_S, "squeue", "--noheader", "--array", f"--jobs={','.join(jobs)}", form)
    if done.returncode != 0 and "Invalid job id" not in done.stderr:  # printed also for a job of long ago
        raise _silent(one_line(done.stderr))
    return [Queued(*line.split("|")) for line in done.stdout.splitlines() if line.count("|") == 5]


def _sbatch(option: str, script: str) -> subprocess.CompletedProcess[str]:
    done = _run(PATIENCE_S, "sbatch", option, script=script)
    if done.returncode != 0:
        fix = "correct cluster.slurm.*, nodes and gpus"
        raise UsageError("Slurm refuses the job", "", one_line(done.stderr.replace("sbatch:", "")), fix=fix)
    return done


def _run(timeout_s: float, *command: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        fix = "run it where sbatch is, or print the script there: task.submit=false"
        what = "this machine has none of Slurm's commands"
        raise DistributedError(what, "", f"no {command[0]}", fix=fix) from None
    except subprocess.TimeoutExpired:
        raise _silent(f"{command[0]} said nothing for {timeout_s:.0f} s") from None


def _table(text: str) -> list[dict[str, str]]:
    return [dict(PAIR.findall(line)) for line in text.splitlines() if "=" in line]


def _silent(found: str) -> DistributedError:
    return DistributedError("Slurm does not answer", "", found, fix="try scontrol ping; is SLURM_CONF right?")
