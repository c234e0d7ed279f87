"""task=batch with cluster.scheduler=kubernetes: the manifest is checked, and submitted. No torch."""

from __future__ import annotations

import logging
import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_ssp.batch.attempt_log import SYNC_S
from llama_ssp.batch.history import PODS, keep_submission
from llama_ssp.batch.job import Job
from llama_ssp.batch.kubernetes.manifest import IndexedJob
from llama_ssp.batch.submission import groups_for
from llama_ssp.config import BatchConf, home_expanded
from llama_ssp.errors import DistributedError, UsageError, one_line

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
STOP_S = 30.0  # torchrun waits as long for its ranks
ABSENT = ("connection", "Unable to connect", "timeout", "timed out", "no such host", "context")


@dataclass
class KubernetesSubmission:
    """An Indexed Job."""

    job: Job
    manifest: IndexedJob

    def __post_init__(self) -> None:
        self.text = self.manifest.rendered()

    def checked(self) -> str:
        """Of the API server, which creates nothing."""
        return _kubectl("create", "--dry-run=server", "--filename=-", text=self.text)

    def submit(self) -> dict[str, Any]:
        """Raises UsageError while a Job of this name is there."""
        name = self.manifest.name
        _kubectl("create", "--filename=-", text=self.text)
        keep_submission(self.manifest.work, name, self.text, PODS)
        log.info("submitted: Job %s, %d groups", name, self.manifest.groups)
        log.info("see task.status=true, or kubectl get pods --selector=job-name=%s", name)
        return {"job": name, "elements": self.manifest.groups * self.manifest.cluster.nodes}


def submission(job: Job, words: tuple[str, ...], summary: dict[str, Any]) -> KubernetesSubmission:
    """What Kubernetes is given for a job; `words` are the command for one process of a group."""
    cluster, task = job.run.cluster, job.run.task
    assert isinstance(task, BatchConf) and task.input is not None
    conf, folder = cluster.kubernetes, Path.cwd()
    usual = re.sub(r"[^a-z0-9-]+", "-", f"llama-ssp-{job.output.stem.lower()}")[:52].strip("-")
    work, output = job.work.absolute(), job.output.absolute()
    files = {"task.work": work, "task.output": output, "task.input": home_expanded(task.input).absolute()}
    for key, path in {**files, "the current folder": folder}.items():
        if not path.is_relative_to(conf.mount):
            what, allowed = "the pods would not see this", f"a path below {conf.mount}"
            fix = "work on the volume, mounted here under cluster.kubernetes.mount"
            raise UsageError(what, key, path, allowed, fix)
    grace_s = conf.grace_s or math.ceil(STOP_S + SYNC_S + (summary["round_s"] or 0.0))
    plan = conf.job_name or usual, cluster, groups_for(job), work, output, folder, words
    return KubernetesSubmission(job, IndexedJob(*plan, task.retries, grace_s))


def _kubectl(*words: str, text: str) -> str:
    """What kubectl prints. Raises DistributedError where it has no cluster, UsageError if that refuses."""
    try:
        done = subprocess.run(
            ["kubectl", *words], input=text, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except FileNotFoundError:
        fix = "run it where kubectl is, or print the manifest: task.submit=false"
        raise DistributedError("this machine has no kubectl", fix=fix) from None
    except subprocess.TimeoutExpired:
        raise _silent(f"kubectl said nothing for {PATIENCE_S:.0f} s") from None
    said = one_line(done.stderr).partition("; if you choose to ignore")[0]  # no advice against checks
    if done.returncode == 0:
        return one_line(done.stdout)
    refused = done.stderr.strip().splitlines()  # a taken name is found after all checks
    if "--dry-run=server" in words and all("AlreadyExists" in line for line in refused):
        log.warning("a Job of this name is there already: %s", said)
        return said
    if "AlreadyExists" in said:
        fix = "follow it with task.status=true, or delete it first: kubectl delete job NAME"
        raise UsageError("a Job of this name is there already", "", said, fix=fix)
    if any(word in said for word in ABSENT):
        raise _silent(said)
    raise UsageError("Kubernetes refuses the job", "", said, fix="correct cluster.kubernetes.*")


def _silent(found: str) -> DistributedError:
    return DistributedError("Kubernetes does not answer", "", found, fix="try kubectl version")
