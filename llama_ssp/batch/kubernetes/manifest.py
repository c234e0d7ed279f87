"""The manifest: an Indexed Job, and a headless Service where a group has several pods. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llama_ssp import __version__
from llama_ssp.batch.element import POD_UID
from llama_ssp.batch.kubernetes.pod import AGAIN, GIVEN_UP, JOB_UID, POD_IP, STOPPED
from llama_ssp.batch.workers import LASTING
from llama_ssp.config import ClusterConf
from llama_ssp.planner.storage import CPU

CONTAINER, VOLUME, SHM = "ranks", "data", "shm"
QUEUE = "kueue.x-k8s.io/queue-name"
FIELDS = {POD_UID: "metadata.uid", POD_IP: "status.podIP"}
FIELDS |= {JOB_UID: "metadata.labels['batch.kubernetes.io/controller-uid']"}


@dataclass(frozen=True)
class IndexedJob:
    """All that the manifest is made of. `words` is the command for one process of a group."""

    name: str
    cluster: ClusterConf
    groups: int
    work: Path
    output: Path
    folder: Path  # the current one
    words: tuple[str, ...]
    retries: int
    grace_s: int

    def rendered(self) -> str:
        several = self.cluster.nodes > 1
        documents = [self._job(), *([self._service()] if several else [])]
        texts = [yaml.safe_dump(one, sort_keys=False, allow_unicode=True) for one in documents]
        return f"# Made by llama-ssp {__version__}.\n" + "---\n".join(texts)

    def _job(self) -> dict[str, Any]:
        pods, count = self.cluster.kubernetes, self.groups * self.cluster.nodes
        spec: dict[str, Any] = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimitPerIndex": self.retries + 2,  # pods that ended without a word; pod.py counts others
            "podReplacementPolicy": "Failed",  # one pod of an index at a time
            "podFailurePolicy": {"rules": _rules()},
        }
        if pods.queue is not None:
            spec["suspend"] = True  # Kueue starts it
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata({QUEUE: pods.queue} if pods.queue is not None else {}),
            "spec": {**spec, "template": {"spec": self._pod()}},
        }

    def _metadata(self, labels: dict[str, str]) -> dict[str, Any]:
        namespace = self.cluster.kubernetes.namespace
        where = {"namespace": namespace} if namespace is not None else {}
        return {"name": self.name, **where, "labels": {"app.kubernetes.io/name": "llama-ssp", **labels}}

    def _pod(self) -> dict[str, Any]:
        conf = self.cluster.kubernetes
        volumes: list[dict[str, Any]] = [
            {"name": VOLUME, "persistentVolumeClaim": {"claimName": conf.volume}},
        ]
        if self._ranks > 1:  # ranks of a pod exchange tensors there; the usual 64 MiB are too few for NCCL
            volumes.append({"name": SHM, "emptyDir": {"medium": "Memory"}})
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.grace_s,
            **({"subdomain": self.name} if self.cluster.nodes > 1 else {}),
            **({"nodeSelector": dict(conf.node_selector)} if conf.node_selector else {}),
            "containers": [self._container()],
            "volumes": volumes,
        }

    def _container(self) -> dict[str, Any]:
        conf = self.cluster.kubernetes
        mounts = [{"name": VOLUME, "mountPath": conf.mount}]
        if self._ranks > 1:
            mounts.append({"name": SHM, "mountPath": "/dev/shm"})
        own = [str(self.work), str(self.output), str(self.retries), str(self.cluster.nodes), str(self._ranks)]
        return {
            "name": CONTAINER,
            "image": conf.image,
            "command": [conf.python, "-m", "llama_ssp.batch.kubernetes.pod"],
            # Kubernetes would expand $(NAME); two dollar signs are one.
            "args": [word.replace("$", "$$") for word in (*own, self.name, *self.words)],
            "workingDir": str(self.folder),
            # Modules come from the image, never from the folder of the data.
            "env": [
                {"name": "PYTHONSAFEPATH", "value": "1"},
                {"name": "OMP_NUM_THREADS", "value": str(conf.cpus_per_rank)},
                *(
                    {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                    for name, path in FIELDS.items()
                ),
            ],
            "resources": self._resources(),
            "volumeMounts": mounts,
        }

    def _resources(self) -> dict[str, Any]:
        conf = self.cluster.kubernetes
        memory = {"memory": conf.mem} if conf.mem is not None else {}
        gpus = {} if self.cluster.gpu == CPU else {conf.gpu_resource: self._ranks}
        limits = {**gpus, **memory}
        requests = {"cpu": conf.cpus_per_rank * self._ranks, **limits}
        return {"requests": requests, **({"limits": limits} if limits else {})}

    def _service(self) -> dict[str, Any]:
        """Gives each pod a name, by which the pods of a group find the first of them."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata({}),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": self.name},
            },
        }

    @property
    def _ranks(self) -> int:
        """Of a pod."""
        return self.cluster.gpus or 1


def _rules() -> list[dict[str, Any]]:
    """What Kubernetes does when a pod fails; what no rule names counts against backoffLimitPerIndex."""

    def exits(action: str, codes: tuple[int, ...]) -> dict[str, Any]:
        values = {"containerName": CONTAINER, "operator": "In", "values": sorted(codes)}
        return {"action": action, "onExitCodes": values}

    taken = [{"type": "DisruptionTarget", "status": "True"}]  # preempted, evicted, drained
    return [
        {"action": "Ignore", "onPodConditions": taken},
        exits("Ignore", (AGAIN, *STOPPED)),
        exits("FailIndex", (*LASTING, GIVEN_UP)),
    ]
