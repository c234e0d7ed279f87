"""Which element of a scheduler's job this process is: a Slurm array's, or an Indexed Job's. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

# What kubernetes/pod.py sets for its ranks, and the manifest for the pod.
GROUP, POD_UID = "LLAMA_SSP_GROUP", "LLAMA_SSP_POD_UID"


@dataclass(frozen=True)
class Element:
    """`job` stays the same when the element is started again; `restart` does not.

    In Slurm they are the job's number and a count; in Kubernetes the Job's uid with the group, and the pod's.
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
    """None where no scheduler has started this process."""
    if job := os.environ.get("SLURM_JOB_ID"):
        return Element(job, int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    if group := os.environ.get(GROUP):
        return Element(group, os.environ[POD_UID])
    return None
