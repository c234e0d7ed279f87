"""Which element of a scheduler's job this process is: a Slurm array's, or a Kubernetes Job's. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

# Kubernetes sets the index; the manifest in docs/cluster.md sets the others, from the pod's metadata.
JOB_UID, INDEX, POD_UID = "LLAMA_SSP_JOB_UID", "JOB_COMPLETION_INDEX", "LLAMA_SSP_POD_UID"


@dataclass(frozen=True)
class Element:
    """`job` stays the same when the element is started again; `restart` does not.

    In Slurm they are the job's number and a count; in Kubernetes the Job's uid with the index, and the pod's.
    """

    job: str
    restart: int | str

    def replaces(self, job: object, restart: object) -> bool:
        """Whether an element with these has ended, since this one was started in its place."""
        if job != self.job:
            return False
        if isinstance(self.restart, int):
            return isinstance(restart, int) and restart < self.restart
        return restart != self.restart  # Kubernetes replaces a pod only when it has ended


def own_element() -> Element | None:
    """Returns this process's element; None if no scheduler has named it."""
    if job := os.environ.get("SLURM_JOB_ID"):
        return Element(job, int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    uid, index, pod = (os.environ.get(name) for name in (JOB_UID, INDEX, POD_UID))
    return Element(f"{uid}.{index}", pod) if uid and index and pod else None
