"""The supervisor of a job, on its first node.

    ... -m llama_ssp.batch.slurm.supervisor WORK RETRIES SIGNAL_S COMMAND...

    USR1    the time limit is near: the ranks are to stop at a record's end, then the job is requeued
    TERM    Slurm takes the nodes away (preemption, requeue, scancel): it has told the ranks itself
    else    the ranks have ended: done, or requeued, or given up, by what they ended with

A lost node does not end its warden, if only the node's daemon died: then Slurm has started a successor, which
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

from llama_ssp.batch.progress import Progress
from llama_ssp.batch.retries import Next, after, code_of, most_fruitless
from llama_ssp.batch.slurm.history import BY_NOBODY, BY_SLURM, BY_TIME, FOLDER, End, ends, fruitless, keep_end
from llama_ssp.distributed.signals import CODE_FILE
from llama_ssp.errors import INPUT_OUTPUT, OK, RunError

log = logging.getLogger("warden")

LOOK_S = 0.1
TRIES, PAUSE_S = 30, 10.0  # for a controller that is being restarted
KILLED_WITHIN_S = 180.0  # by Slurm, once it has said that it requeues the job
SUPERSEDED = OK  # nobody reads this code: the job number is a successor's now


@dataclass
class Supervisor:
    """One go at an element of the array."""

    work: Path
    retries: int
    signal_s: float
    command: list[str]
    job: str
    restart: int
    stopped_by: str = BY_NOBODY

    def __post_init__(self) -> None:
        self._progress = Progress(self.work)

    def run(self) -> int:
        """The exit code of the job, unless Slurm kills it, having requeued it."""
        signal.signal(signal.SIGUSR1, self._time_is_near)
        signal.signal(signal.SIGTERM, self._taken_away)
        end = self._go()
        log.info("ended with %d%s", end.code, f", stopped by {end.stopped_by}" if end.stopped_by else "")
        if self.stopped_by == BY_SLURM:
            return end.code  # whether there is another go is Slurm's business
        idle = fruitless(ends(self.work, self.job))
        step = after(end.code, idle, self.retries)
        if step is Next.again:
            return self._again(end.code)
        if step is Next.give_up:
            log.error("error: not started again; %s", self._why(end.code, idle))
        return end.code

    def _go(self) -> End:
        began, finished = time.monotonic(), self._progress.finished()
        file = self.work / FOLDER / f"{self.job}.{self.restart}.code"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        ranks = subprocess.Popen(self.command, env={**os.environ, CODE_FILE: str(file)})
        code = code_of(self._wait(ranks), file)
        file.unlink(missing_ok=True)
        end = End(
            self.job, self.restart, socket.gethostname(), code, self.stopped_by, finished,
            self._progress.finished(), time.monotonic() - began,
        )  # fmt: skip
        keep_end(self.work, end)
        return end

    def _wait(self, ranks: subprocess.Popen[bytes]) -> int:
        """What the ranks end with. If they do not stop when told to, the requeue will kill them."""
        told_at = None
        while (returned := ranks.poll()) is None:
            if self.stopped_by == BY_TIME and told_at is None:
                told_at = time.monotonic()
                log.info("the time limit is near: ranks are told to stop")
                # Not through srun, which would have them killed.
                subprocess.run(["scancel", "--signal=TERM", self.job], check=False)
            if told_at is not None and time.monotonic() - told_at > self.signal_s / 2:
                log.warning("they have not stopped in half of the time left")
                return -signal.SIGKILL
            time.sleep(LOOK_S)
        return returned

    def _time_is_near(self, _number: int, _frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or BY_TIME

    def _taken_away(self, _number: int, _frame: FrameType | None) -> None:
        self.stopped_by = BY_SLURM

    def _again(self, code: int) -> int:
        """Requeues the job, if it is still this one."""
        for left in range(TRIES, 0, -1):
            shown = subprocess.run(
                ["scontrol", "show", "job", "-o", self.job], capture_output=True, text=True, check=False
            )
            if found := re.search(r"\bRestarts=(\d+)", shown.stdout):
                if int(found[1]) != self.restart:
                    log.info("superseded: Slurm has started this job again already")
                    return SUPERSEDED
                asked = subprocess.run(["scontrol", "requeue", self.job], check=False)
                if asked.returncode == 0:
                    log.info("requeued")
                    self._wait_for_the_end()
                    return code
            log.warning("Slurm does not answer; %d more tries", left - 1)
            time.sleep(PAUSE_S)
        return code

    def _wait_for_the_end(self) -> None:
        """Slurm takes a requeued job away; one that ended by itself first would count as failed."""
        until = time.monotonic() + KILLED_WITHIN_S
        while self.stopped_by != BY_SLURM and time.monotonic() < until:
            time.sleep(LOOK_S)

    def _why(self, code: int, idle: int) -> str:
        if idle > most_fruitless(self.retries):
            return f"{idle} goes in a row finished no record; see above for their errors, then submit again"
        return f"another go would end with {code} again; see above for the error, then submit again"


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    work, retries, signal_s, *command = arguments
    job, restart = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    log.info("job %s, restart %d, on %s", job, restart, os.environ.get("SLURM_JOB_NODELIST"))
    try:
        return Supervisor(Path(work), int(retries), float(signal_s), command, job, restart).run()
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        print(f"error: {error.strerror}; {error.filename}", file=sys.stderr)
        return INPUT_OUTPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
