"""Slurm's own commands, asked and read. Every answer is waited for, but not for ever. No torch."""

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
    """A job, or an element of an array, that waits or runs. `number` is what its own processes know."""

    job: str
    number: str
    state: str
    reason: str
    spent: str
    nodes: str


class Slurm:
    """The cluster whose commands are on the search path."""

    def require(self) -> None:
        """Refuses to go on where there is no Slurm, or no controller of it answers."""
        said = self._run(PING_S, "scontrol", "ping")
        if " UP" not in said.stdout:
            raise _silent(one_line(said.stdout or said.stderr) or "no answer to scontrol ping")

    def partitions(self) -> list[dict[str, str]]:
        return _table(self._ask("scontrol", "show", "partition", "-o"))

    def test(self, script: str) -> str:
        """What sbatch would do with it: when it would start, and where."""
        done = self._run(PATIENCE_S, "sbatch", "--test-only", script=script)
        said = one_line(done.stderr.replace("sbatch:", ""))
        if done.returncode != 0:
            raise _refused(said)
        return said

    def submit(self, script: str) -> str:
        """The number of the job."""
        done = self._run(PATIENCE_S, "sbatch", "--parsable", script=script)
        number = done.stdout.strip().partition(";")[0]
        if done.returncode != 0:
            raise _refused(one_line(done.stderr))
        if not number.isdecimal():
            raise DistributedError(
                "sbatch did not say the job's number", found=repr(done.stdout.strip()), fix="see squeue --me",
            )  # fmt: skip
        return number

    def queued(self, jobs: list[str]) -> list[Queued]:
        """What waits or runs of these; a job that has ended is not among them."""
        if not jobs:
            return []
        form = "--format=%i|%A|%T|%r|%M|%N"
        done = self._run(PATIENCE_S, "squeue", "--noheader", "--array", f"--jobs={','.join(jobs)}", form)
        if done.returncode != 0 and "Invalid job id" not in done.stderr:  # so it calls one long gone
            raise _silent(one_line(done.stderr))
        return [Queued(*line.split("|")) for line in done.stdout.splitlines() if line.count("|") == 5]

    def _ask(self, *command: str) -> str:
        done = self._run(PATIENCE_S, *command)
        if done.returncode != 0:
            raise _silent(one_line(done.stderr))
        return done.stdout

    def _run(
        self, patience_s: float, *command: str, script: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command, input=script, capture_output=True, text=True, timeout=patience_s, check=False
            )
        except FileNotFoundError:
            raise DistributedError(
                "this machine has none of Slurm's commands", found=f"no {command[0]}",
                fix="run it where sbatch is, or print the script there: task.submit=false",
            ) from None  # fmt: skip
        except subprocess.TimeoutExpired:
            raise _silent(f"{command[0]} said nothing for {patience_s:.0f} s") from None


def _table(text: str) -> list[dict[str, str]]:
    return [dict(PAIR.findall(line)) for line in text.splitlines() if "=" in line]


def _silent(found: str) -> DistributedError:
    return DistributedError(
        "Slurm does not answer", found=found, fix="try scontrol ping; is SLURM_CONF right?"
    )


def _refused(said: str) -> UsageError:
    return UsageError("Slurm refuses the job", found=said, fix="correct cluster.slurm.*, nodes and gpus")
