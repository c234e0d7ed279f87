"""The supervisor of one element of an array: starts its ranks, and requeues it if work is left. No torch.

    python -m llama_ssp.batch.slurm.supervisor WORK SIGNAL_S COMMAND...

USR1    the time limit is near: the ranks stop between two rounds, then the element is requeued
TERM    Slurm takes the nodes away (preemption, requeue, scancel): it has signalled the ranks itself
else    the ranks have ended: done, or requeued, or given up, by their exit code
"""

import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llama_ssp.batch.atomic_files import append_line, lines_in
from llama_ssp.batch.journal import count_finished
from llama_ssp.batch.slurm.submit import FOLDER
from llama_ssp.batch.workers import LASTING, code_of
from llama_ssp.distributed.signals import CODE_FILE
from llama_ssp.errors import INPUT_OUTPUT, OK, StorageError, exit_code_of

log = logging.getLogger("supervisor")

FRUITLESS = 3  # runs on one node that finished no record: the element is not started there again
# For a controller that is being restarted.
TRIES = 30
PAUSE_S = 10.0
KILLED_WITHIN_S = 180.0  # by Slurm, after a requeue
ENDS = ".ends.jsonl"  # how the runs of one element ended, a line each, in the folder of the scripts
BY_TIME = "time"
BY_SLURM = "slurm"
BY_NOBODY = ""


@dataclass(frozen=True, kw_only=True)
class End:
    """How one run of an element ended; it finished `finished` records itself."""

    job: str
    restart: int
    host: str
    code: int
    stopped_by: str  # BY_TIME, BY_SLURM, or BY_NOBODY: then a code that is not 0 is a failure
    finished: int

    @property
    def failed(self) -> bool:
        return self.code != 0 and not self.stopped_by


def ends(work: Path, job: str = "*") -> list[End]:
    """In the order they were written."""
    paths = sorted((work / FOLDER).glob(f"{job}{ENDS}"))
    return [
        End(
            job=entry["job"],
            restart=entry["restart"],
            host=entry["host"],
            code=entry["code"],
            stopped_by=entry["stopped_by"],
            finished=entry["finished"],
        )
        for path in paths
        for entry in lines_in(path)
    ]


def fruitless(ends: list[End]) -> Counter[str]:
    """How many runs at the end of the list finished no record, by node; not those that Slurm stopped."""
    counts = Counter[str]()
    for end in ends:
        if end.stopped_by != BY_SLURM:
            counts = Counter() if end.finished else counts + Counter([end.host])
    return counts


class Supervisor:
    """One run of an element. Slurm's commands know it by `element`: the last one has the array's number."""

    def __init__(self, work: str, signal_s: str, command: Sequence[str]) -> None:
        self.work = Path(work)
        self.command = command
        self.signal_s = float(signal_s)
        self.node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.job = os.environ["SLURM_JOB_ID"]
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.element = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        self.stopped_by = BY_NOBODY

    def run(self) -> int:
        """Returns the exit code of the element, unless Slurm requeues it and kills this process."""
        log.info("job %s, restart %d, on %s", self.job, self.restart, os.environ.get("SLURM_JOB_NODELIST"))
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._signalled)
        code = self._run_ranks()
        log.info("ended with %d%s", code, f", stopped by {self.stopped_by}" if self.stopped_by else "")
        if code == OK or self.stopped_by == BY_SLURM:
            return code  # Slurm decides whether the element runs again
        if code == INPUT_OUTPUT:
            log.error("held: mend the error above (a full disk?), then scontrol release %s", self.element)
            return self._requeue(code, "requeuehold")
        counts = fruitless(ends(self.work, self.job))
        bad = [node for node, count in counts.items() if count >= FRUITLESS]
        # A second node that finishes nothing shows that nodes are not the cause; so does one that comes back.
        if code not in LASTING and len(bad) < 2 and counts[self.node] <= FRUITLESS:
            return self._requeue(code, "requeue", bad)
        log.error("error: not started again after %d; see above for the error, then submit again", code)
        return code

    def _signalled(self, number: int, _frame: object) -> None:
        self.stopped_by = BY_SLURM if number == signal.SIGTERM else self.stopped_by or BY_TIME

    def _run_ranks(self) -> int:
        """Runs the command to its end and records that; returns the ranks' exit code."""
        until = math.inf
        file = self.work / FOLDER / f"{self.job}.{self.restart}.code"
        file.parent.mkdir(parents=True, exist_ok=True)
        ranks = subprocess.Popen(self.command, env={**os.environ, CODE_FILE: str(file)})
        while (returned := ranks.poll()) is None and time.monotonic() < until:
            if self.stopped_by == BY_TIME and until == math.inf:
                until = time.monotonic() + self.signal_s / 2
                log.info("the time limit is near: stopping the ranks")
                subprocess.call(["scancel", "--signal=TERM", self.element])  # srun would have them killed
            time.sleep(0.1)
        # If they have not stopped in time, the requeue kills them.
        code = code_of(-signal.SIGKILL if returned is None else returned, file)
        file.unlink(missing_ok=True)
        finished = count_finished(self.work, f"{self.job}-{self.restart}-")  # its own, not the job's
        end = End(
            job=self.job,
            restart=self.restart,
            host=self.node,
            code=code,
            stopped_by=self.stopped_by,
            finished=finished,
        )
        try:  # a lost node can make two supervisors of one element
            append_line(file.with_name(f"{self.job}{ENDS}"), asdict(end))
        except StorageError as full:
            log.error("error: %s", full)
            return INPUT_OUTPUT
        return code

    def _requeue(self, code: int, verb: str, excluded: Sequence[str] = ()) -> int:
        """Requeues the element, unless Slurm, which may have given up this node, has started it again.

        A full disk holds it, until someone has made room. It is not started on the `excluded` nodes again:
        Slurm takes that of a job that waits alone, so this process lives on after the requeue to say so.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN if excluded else signal.SIG_DFL)
        show = ["scontrol", "show", "job", "-o", self.element]
        for left in reversed(range(TRIES)):
            shown = subprocess.run(show, capture_output=True, text=True, check=False)
            restarts = re.search(r"\bRestarts=(\d+)", shown.stdout)
            if restarts and int(restarts[1]) != self.restart:
                log.info("superseded: Slurm has started this element again already")
                return OK  # nobody reads it: the element is the successor now
            if restarts and subprocess.call(["scontrol", verb, self.element]) == 0:
                log.info("requeued%s", f", not on {', '.join(excluded)}" if excluded else "")
                if excluded:
                    nodes = f"ExcNodeList={','.join(excluded)}"
                    if subprocess.call(["scontrol", "update", f"JobId={self.element}", nodes]) != 0:
                        log.warning("Slurm does not exclude %s", ", ".join(excluded))
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    os.kill(os.getpid(), signal.SIGTERM)  # as Slurm does
                time.sleep(KILLED_WITHIN_S)  # a job that ends before Slurm takes it away counts as failed
                return code
            log.warning("Slurm does not answer; %d more tries", left)
            time.sleep(PAUSE_S)
        return code


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    work, signal_s, *command = sys.argv[1:]
    sys.exit(exit_code_of(Supervisor(work, signal_s, command).run))
