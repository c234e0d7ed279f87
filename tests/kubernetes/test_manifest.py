"""The manifest: what it asks for, and that the published schema of Kubernetes takes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_ssp.batch.kubernetes.manifest import IndexedJob
from llama_ssp.batch.kubernetes.pod import AGAIN, GIVEN_UP
from llama_ssp.config import BatchConf, ClusterConf, KubernetesConf, RunConf, Scheduler
from llama_ssp.config.validation.cluster import check_sharing
from llama_ssp.errors import UsageError
from tests.conftest import Command
from tests.slurm.jobs import COMMAND, Batches

NAMED = KubernetesConf(image="registry/llama-ssp:1", volume="data")
JOB = IndexedJob(
    "llama-ssp-answers", ClusterConf(gpu="H100", gpus=4, kubernetes=NAMED), 3, Path("/data/a.work"),
    Path("/data/a.jsonl"), Path("/data"), ("task=batch", "task.stop=[$(HOME)]"), 3, 40,
)  # fmt: skip
ALL = replace(
    NAMED, namespace="lab", mem="64Gi", queue="gpu", node_selector={"gpu": "h100"}, cpus_per_rank=2,
    mount="/mnt/all",
)  # fmt: skip


def documents(job: IndexedJob) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(job.rendered()))


def test_one_index_a_group():
    (job,) = documents(JOB)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["backoffLimitPerIndex"] == 5 and "suspend" not in spec
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 40
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert container["resources"]["requests"] == {"cpu": 4, "nvidia.com/gpu": 4}
    assert {"name": "PYTHONSAFEPATH", "value": "1"} in container["env"]
    assert container["args"][-1] == "task.stop=[$$(HOME)]"  # of which Kubernetes makes $(HOME)
    actions = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules(job)]
    assert actions == [("Ignore", None), ("Ignore", [AGAIN, 130, 143]), ("FailIndex", [2, 3, 4, GIVEN_UP])]


def rules(job: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = job["spec"]["podFailurePolicy"]["rules"]
    return found


def test_a_group_of_several_pods_has_names():
    cluster = replace(JOB.cluster, nodes=2, kubernetes=ALL)
    job, service = documents(replace(JOB, cluster=cluster))
    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["completions"] == 6 and job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and pod["nodeSelector"] == {"gpu": "h100"}
    assert {job["metadata"]["namespace"], service["metadata"]["namespace"]} == {"lab"}
    on_cpu = replace(cluster, gpu="cpu", gpus=1)
    (container,) = documents(replace(JOB, cluster=on_cpu))[0]["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": 2, "memory": "64Gi"}, "limits": {"memory": "64Gi"}}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("conf", [NAMED, ALL])
def test_the_published_schema_takes_it(nodes: int, conf: KubernetesConf):
    """The control: it does not take a name that is spelled wrong."""
    schema = pytest.importorskip("kubernetes_validate", reason="./machine-install.sh --dev")
    found = documents(replace(JOB, cluster=replace(JOB.cluster, nodes=nodes, kubernetes=conf)))
    for one in found:
        schema.validate(one, "1.33", strict=True)
    found[0]["spec"]["backoffLimitPerIndexes"] = found[0]["spec"].pop("backoffLimitPerIndex")
    with pytest.raises(schema.ValidationError):
        schema.validate(found[0], "1.33", strict=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image": None}, "image is missing"), ({"volume": None}, "volume is missing"),
        ({"image": "a b"}, "image cannot be used"), ({"job_name": "A_b"}, "job_name cannot be used"),
        ({"job_name": "1a"}, "job_name cannot be used"), ({"job_name": "a" * 53}, "job_name cannot be used"),
        ({"mem": "64 GB"}, "mem cannot be used"), ({"mount": "data"}, "mount cannot be used"),
        ({"queue": "a/b"}, "queue cannot be used"), ({"gpu_resource": "gpu"}, "gpu_resource cannot be used"),
    ],
)  # fmt: skip
def test_values_that_are_refused(changes: dict[str, Any], said: str):
    cluster = replace(JOB.cluster, scheduler=Scheduler.kubernetes, kubernetes=replace(NAMED, **changes))
    with pytest.raises(UsageError, match=said):
        check_sharing(RunConf(cluster=cluster, task=BatchConf(name="batch")))


# Takes what it is given, once, as an API server would.
KUBECTL = """#!/bin/sh
cat > "$HOME/given.yaml"
[ -e "$HOME/there" ] && { echo 'Error from server (AlreadyExists)' >&2; exit 1; }
case "$*" in *dry-run*) echo "job.batch/x created (server dry run)"; exit;; esac
touch "$HOME/there"
"""


def test_the_job_is_printed_then_submitted_once(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    Batches(tmp_path / "run")
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    own = [word for word in COMMAND if not word.startswith(("model=", "draft="))]
    pods = ["cluster=kubernetes", "cluster.gpu=cpu", "cluster.groups=2", "cluster.kubernetes.image=x"]
    pods += ["cluster.kubernetes.volume=data", f"cluster.kubernetes.mount={tmp_path}"]
    printed = command(*own, *pods)
    assert printed.code == 0, printed.err
    (job,) = yaml.safe_load_all(printed.out)
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "cluster.scheduler=none" in args and "seed=7" in args and not (tmp_path / "there").exists()
    assert yaml.safe_load((tmp_path / "given.yaml").read_text()) == job
    submitted = command(*own, *pods, "task.submit=true")
    assert submitted.code == 0, submitted.err
    assert submitted.document["job"] == "llama-ssp-answers"
    waiting = command("task=batch", "task.status=true", "task.output=answers.jsonl")
    found = waiting.document
    assert found["jobs"] == ["llama-ssp-answers"] and found["status"] == "unfinished"
    again = command(*own, *pods, "task.submit=true")
    assert again.code == 2 and "a Job of this name is there already" in again.errors[0]
    printed_again = command(*own, *pods)  # the name is taken, but nothing is submitted
    assert printed_again.code == 0 and printed_again.out == printed.out
    elsewhere = command(*own, *pods[:-1])
    assert elsewhere.code == 2 and "the pods would not see this; task.work" in elsewhere.errors[0]
