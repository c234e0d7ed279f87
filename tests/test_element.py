"""Elements of schedulers' jobs, and the Kubernetes manifest in docs/cluster.md that names them."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_ssp.batch.journal import Journal, Manifest, shards_of
from llama_ssp.batch.workers import LASTING
from llama_ssp.config import RunConf
from llama_ssp.distributed import identity
from llama_ssp.distributed.identity import INDEX, Element, own_element
from llama_ssp.distributed.signals import CODE_FILE
from tests.conftest import Command
from tests.processes import wait_for
from tests.slurm.jobs import executable
from tests.warm import ROOT

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
(JOB,) = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
(CONTAINER,) = JOB["spec"]["template"]["spec"]["containers"]
(SCRIPT,) = CONTAINER["args"]


def enter(monkeypatch: pytest.MonkeyPatch, index: int, uid: str) -> None:
    """Sets what the container of a pod gets from the manifest and from Kubernetes."""
    fields = {"metadata.labels['batch.kubernetes.io/controller-uid']": "job-7", "metadata.uid": uid}
    monkeypatch.setenv(INDEX, str(index))
    for item in CONTAINER["env"]:
        value = item["value"] if "value" in item else fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
        monkeypatch.setenv(item["name"], value)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.mark.usefixtures("nowhere")
def test_outside_of_a_job_there_is_no_element():
    assert own_element() is None


@pytest.mark.usefixtures("nowhere")
def test_the_manifest_names_the_element(monkeypatch: pytest.MonkeyPatch):
    """By the job with its index, and by the pod."""
    enter(monkeypatch, 3, "pod-1")
    assert own_element() == Element("job-7.3", "pod-1")


@pytest.mark.usefixtures("nowhere")
def test_slurm_names_the_element_of_its_job(monkeypatch: pytest.MonkeyPatch):
    """Also in a pod."""
    enter(monkeypatch, 3, "pod-1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert own_element() == Element("7", 0)


def test_a_claim_of_a_replaced_pod_is_free_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pods have the host name and the process number of those that they replace, in other namespaces.

    A claim of another index lapses.
    """
    journal = Journal.begin(tmp_path, Manifest("ab" * 32, 4, {"seed": 1}, shards_of(4, 2)))
    held = ExitStack()
    for index, uid in ((0, "u1"), (1, "u2")):
        enter(monkeypatch, index, uid)
        monkeypatch.setattr(identity, "_machine", lambda uid=uid: uid)
        claimed = journal.claim()
        assert claimed is not None and claimed[0].name == f"0000{index}"
        held.enter_context(claimed[1])
    monkeypatch.setattr(identity, "_machine", lambda: "u3")
    enter(monkeypatch, 2, "u3")
    journal = Journal.find(tmp_path)  # of another pod
    assert journal.claim() is None and len(journal.silent()) == 2
    enter(monkeypatch, 0, "u3")
    claimed = journal.claim()
    assert claimed is not None and claimed[0].name == "00000"
    assert journal.claim() is None
    os.utime(tmp_path / "claims" / "00001", (0, 0))
    claimed = journal.claim()
    assert claimed is not None and claimed[0].name == "00001"
    held.close()


def test_what_kubernetes_does_with_exit_codes():
    spec = JOB["spec"]
    rules: list[dict[str, Any]] = spec["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert codes == {"Ignore": [143], "FailIndex": sorted(LASTING)}
    assert spec["completionMode"] == "Indexed" and spec["podReplacementPolicy"] == "Failed"
    assert JOB["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert not re.search(r"\$[$(]", SCRIPT)  # Kubernetes would expand them


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], subprocess.Popen[bytes]]:
    """Starts the container's command, with a shell line as torchrun."""
    enter(monkeypatch, 0, "u")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(CODE_FILE, str(tmp_path / "code"))

    def started(torchrun: str) -> subprocess.Popen[bytes]:
        executable(tmp_path, torchrun=torchrun)
        return subprocess.Popen([*CONTAINER["command"], SCRIPT], cwd=tmp_path)

    return started


@pytest.mark.parametrize(
    ("torchrun", "code"),
    [("exit 0", 0), ("exit 1", 1), (f'echo 3 >"${CODE_FILE}"; exit 1', 3), ("kill -9 $$", 137)],
    ids=["done", "failed", "a code in the file", "killed"],
)
def test_a_pod_ends_with_the_code_of_its_ranks(start: Any, torchrun: str, code: int):
    assert start(torchrun).wait(60) == code


def test_a_pod_waits_for_what_it_passed_term_on_to(start: Any, tmp_path: Path):
    left = f"trap 'sleep 0.2; echo 143 >\"${CODE_FILE}\"; exit 1' TERM"
    pod = start(f"{left}\ntouch up\nwhile :; do sleep 0.05; done")
    wait_for((tmp_path / "up").exists)
    status, caught = Path(f"/proc/{pod.pid}/status"), re.compile(r"SigCgt:\s*(\w+)")
    wait_for(lambda: int(*caught.findall(status.read_text()), 16) >> (signal.SIGTERM - 1) & 1)
    pod.terminate()
    assert pod.wait(60) == 143


def test_the_command_of_a_pod_is_taken(
    command: Command, taken: list[RunConf], monkeypatch: pytest.MonkeyPatch
):
    """The models are on the volume."""
    is_folder = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: str(path).startswith("/data/") or is_folder(path))
    words = SCRIPT.partition("-m llama_ssp ")[2].partition(" &\n")[0].replace("\\\n", "")
    answer = command.line(*shlex.split(words))
    assert answer.code == 0, answer.err
    assert taken[0].task.name == "batch" and taken[0].seed is not None
