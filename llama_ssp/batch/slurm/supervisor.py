"""The supervisor of one element of a job, on its first node.

    ... -m llama_ssp.batch.slurm.supervisor WORK RETRIES SIGNAL_S COMMAND...

    USR1    the time limit is near: the ranks stop at a record's end, then the job is requeued
    TERM    Slurm takes the nodes away (preemption, requeue, scancel): it has signalled the ranks itself
    else    the ranks have ended: done, or requeued, or given up, by their exit code

If only the daemon of a lost node died, the supervisor lives on: then Slurm has started a successor, which
must not be requeued. The number of restarts tells. No torch.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from llama_ssp.batch.history import BY_NOBODY, BY_SLURM, BY_TIME, FOLDER, End, ends, fruitless, keep_end
from llama_ssp.batch.journal import count_finished
from llama_ssp.batch.slurm.script import PAUSE_S, TRIES
from llama_ssp.batch.workers import code_of, is_given_up
from llama_ssp.distributed.signals import CODE_FILE
from llama_ssp.errors import OK, exit_code_of

log = logging.getLogger("supervisor")

LOOK_S = 0.1
KILLED_WITHIN_S = 180.0  # by Slurm, after a requeue
SUPERSEDED = OK  # this code is not read: the job number is a successor's now


@dataclass
class Supervisor:
    """One run of an element of the array."""

    work: Path
    retries: int
    signal_s: float
    command: list[str]
    job: str
    restart: int
    stopped_by: str = BY_NOBODY

    def run(self) -> int:
        """The exit code of the job, unless Slurm requeues it and kills this process."""
        signal.signal(signal.SIGUSR1, self._time_is_near)
        signal.signal(signal.SIGTERM, self._taken_away)
        code = self._run_ranks()
        log.info("ended with %d%s", code, f", stopped by {self.stopped_by}" if self.stopped_by else "")
        if self.stopped_by == BY_SLURM:
            return code  # Slurm decides whether the job runs again
        idle = fruitless(ends(self.work, self.job))
        if code != OK and not is_given_up(code, idle, self.retries):
            return self._again(code)
        if code != OK:
            why = f"it ended with {code}, and {idle} runs in a row finished no record"
            log.error("error: not started again; %s; see above for the error, then submit again", why)
        return code

    def _run_ranks(self) -> int:
        """Runs the command to its end, and records that; the ranks' exit code."""
        began, finished = time.monotonic(), count_finished(self.work)
        file = self.work / FOLDER / f"{self.job}.{self.restart}.code"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        ranks = subprocess.Popen(self.command, env={**os.environ, CODE_FILE: str(file)})
        code = code_of(self._wait(ranks), file)
        file.unlink(missing_ok=True)
        records, seconds = (finished, count_finished(self.work)), time.monotonic() - began
        end = End(self.job, self.restart, socket.gethostname(), code, self.stopped_by, *records, seconds)
        keep_end(self.work, end)
        return code

    @property
    def _element(self) -> str:
        """This job for Slurm's commands: the last element of an array has the number of the whole array."""
        array, own = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
        return f"{array}_{own}" if array and own else self.job

    def _wait(self, ranks: subprocess.Popen[bytes]) -> int:
        """The return code of the ranks. If they do not stop in time, the requeue will kill them."""
        stopping_since = None
        while (returned := ranks.poll()) is None:
            if self.stopped_by == BY_TIME and stopping_since is None:
                stopping_since = time.monotonic()
                log.info("the time limit is near: stopping the ranks")
                # Not through srun, which would have them killed.
                subprocess.run(["scancel", "--signal=TERM", self._element], check=False)
            if stopping_since is not None and time.monotonic() - stopping_since > self.signal_s / 2:
                log.warning("the ranks have not stopped in half of the time left")
                return -signal.SIGKILL
            time.sleep(LOOK_S)
        return returned

    def _time_is_near(self, _number: int, _frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or BY_TIME

    def _taken_away(self, _number: int, _frame: FrameType | None) -> None:
        self.stopped_by = BY_SLURM

    def _again(self, code: int) -> int:
        """Requeues the job, if it is still this one; the exit code."""
        show, requeue = (
            ["scontrol", "show", "job", "-o", self._element],
            ["scontrol", "requeue", self._element],
        )
        for left in range(TRIES, 0, -1):
            shown = subprocess.run(show, capture_output=True, text=True, check=False)
            found = re.search(r"\bRestarts=(\d+)", shown.stdout)
            if found and int(found[1]) != self.restart:
                log.info("superseded: Slurm has started this job again already")
                return SUPERSEDED
            if found and subprocess.run(requeue, check=False).returncode == 0:
                log.info("requeued")
                until = time.monotonic() + KILLED_WITHIN_S
                while self.stopped_by != BY_SLURM and time.monotonic() < until:
                    time.sleep(LOOK_S)  # a job that ended before Slurm takes it away would count as failed
                return code
            log.warning("Slurm does not answer; %d more tries", left - 1)
            time.sleep(PAUSE_S)
        return code


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    work, retries, signal_s, *command = arguments
    job, restart = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    log.info("job %s, restart %d, on %s", job, restart, os.environ.get("SLURM_JOB_NODELIST"))
    return exit_code_of(Supervisor(Path(work), int(retries), float(signal_s), command, job, restart).run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
