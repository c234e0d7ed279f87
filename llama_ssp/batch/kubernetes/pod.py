"""The first process of a pod: runs the ranks, and tells Kubernetes by its exit code what to do next.

    python -m llama_ssp.batch.kubernetes.pod WORK OUTPUT RETRIES NODES RANKS SERVICE WORDS...

    0              nothing is left for this group to do
    AGAIN          the ranks failed: a new pod of this index may go on; not counted
    130, 143       stopped by a signal; the same
    2, 3, 4        the input, a setting or a model is wrong: the index has failed
    GIVEN_UP       RETRIES + 2 runs in a row finished no record: the index has failed

TERM reaches every rank: they leave between two rounds. No torch.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from llama_ssp.batch.element import GROUP, POD_UID
from llama_ssp.batch.history import BY_KUBERNETES, BY_NOBODY, PODS, End, ends, fruitless, keep_end
from llama_ssp.batch.journal import Journal, count_finished
from llama_ssp.batch.workers import LASTING, LOGS, code_of, is_given_up
from llama_ssp.distributed.signals import CODE_FILE
from llama_ssp.errors import OK, exit_code_of

log = logging.getLogger("pod")

INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes sets it
JOB_UID, POD_IP = "LLAMA_SSP_JOB_UID", "LLAMA_SSP_POD_IP"  # set by the manifest, as POD_UID
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
AGAIN, GIVEN_UP = 75, 70  # in sysexits.h: try again later; an internal error
PORT = 29500  # each pod has an address of its own
LOOK_S = 0.1


@dataclass
class Pod:
    """One pod of a group. `group` and `node` say which."""

    work: Path
    output: Path
    retries: int
    nodes: int
    ranks: int
    service: str
    words: list[str]
    job: str
    uid: str
    index: int
    stopped: bool = False

    @property
    def group(self) -> str:
        """The same for all pods of a group, and for those that replace them."""
        return f"{self.job}.{self.index // self.nodes}"

    def run(self) -> int:
        """The exit code for Kubernetes."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        if self._is_over():
            return OK
        code = self._run_ranks()
        idle = fruitless(ends(self.work, self._element))
        log.info("ranks ended with %d%s", code, ", stopped by a signal" if self.stopped else "")
        if self.stopped:
            return STOPPED[-1]
        if code == OK or code in LASTING:
            return code
        if is_given_up(code, idle, self.retries):
            log.error("error: given up; %d runs in a row finished no record; see above", idle)
            return GIVEN_UP
        return AGAIN

    @property
    def _element(self) -> str:
        return f"{self.job}.{self.index}"

    def _is_over(self) -> bool:
        """Whether every shard is done; then writes the output if a killed leader has not."""
        if Journal.held(self.work) is None:
            return False
        journal = Journal.find(self.work)
        if journal.standing().whole:
            journal.merge(self.output)
            return True
        return False

    def _run_ranks(self) -> int:
        """Runs the ranks of this pod to their end, and records that; their exit code."""
        began, finished = time.monotonic(), count_finished(self.work)
        file = self.work / PODS / f"{self._element}.{self.uid}.code"
        (self.work / LOGS).mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        own = {CODE_FILE: str(file), GROUP: self.group, POD_UID: self.uid}
        with (self.work / LOGS / f"{self.service}-{self.index}.out").open("ab") as out:
            ranks = subprocess.Popen(
                self.command(), env={**os.environ, **own}, stdout=out, start_new_session=True
            )
        code = code_of(self._wait(ranks), file)
        file.unlink(missing_ok=True)
        records, seconds = (finished, count_finished(self.work)), time.monotonic() - began
        by = BY_KUBERNETES if self.stopped else BY_NOBODY
        end = End(self._element, self.uid, socket.gethostname(), code, by, *records, seconds)
        keep_end(self.work, end, PODS)
        return code

    def command(self) -> list[str]:
        """What starts the ranks of this pod. A single one needs no torchrun."""
        own = [sys.executable, "-u"]
        if self.nodes * self.ranks > 1:
            own += ["-m", "torch.distributed.run", f"--nproc-per-node={self.ranks}", "--max-restarts=0"]
            own += self._rendezvous() if self.nodes > 1 else ["--standalone"]
        return [*own, "-m", "llama_ssp", *self.words]

    def _rendezvous(self) -> list[str]:
        """At the group's first pod, by its name: a pod that replaces it has another address."""
        first, node = self.index - self.index % self.nodes, self.index % self.nodes
        return [
            f"--nnodes={self.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={self.group}",
            f"--rdzv-endpoint={self.service}-{first}.{self.service}:{PORT}",
            f"--rdzv-conf=is_host={int(node == 0)}",
            f"--local-addr={os.environ[POD_IP]}",
        ]

    def _wait(self, ranks: subprocess.Popen[bytes]) -> int:
        """The return code of the ranks; a signal is passed on to all of them, once."""
        told = False
        while (returned := ranks.poll()) is None:
            if self.stopped and not told:
                told = True
                log.info("stopping the ranks")
                os.killpg(ranks.pid, signal.SIGTERM)
            time.sleep(LOOK_S)
        return returned

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopped = True


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    work, output, retries, nodes, ranks, service, *words = arguments
    sizes = int(retries), int(nodes), int(ranks)
    job, uid, index = os.environ[JOB_UID], os.environ[POD_UID], int(os.environ[INDEX])
    log.info("index %d of job %s, pod %s, on %s", index, job, uid, socket.gethostname())
    return exit_code_of(Pod(Path(work), Path(output), *sizes, service, words, job, uid, index).run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
