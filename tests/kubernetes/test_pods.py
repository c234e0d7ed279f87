"""Pods of the printed Job, started and killed as Kubernetes would, under the manifest's own rules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_ssp.batch.atomic_files import require_file_system
from llama_ssp.batch.element import GROUP, POD_UID, Element
from llama_ssp.batch.history import ends
from llama_ssp.batch.journal import Journal
from llama_ssp.batch.kubernetes.pod import AGAIN, GIVEN_UP, JOB_UID, POD_IP, Pod
from llama_ssp.batch.manifest import Manifest, shards_of
from llama_ssp.errors import StorageError
from tests.processes import kill, wait_for
from tests.slurm.jobs import ROOT, Batches

RUNNING, SUCCEEDED, FAILED = "running", "succeeded", "failed"


@dataclass
class Controller:
    """The Job's controller: a process for each index, another one by the rules when it fails."""

    job: dict[str, Any]
    home: Path
    pods: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)
    started: int = 0
    disrupted: set[int] = field(default_factory=set)  # indexes whose pod was taken away

    def start(self, index: int) -> None:
        self.started += 1
        (container,) = self.job["spec"]["template"]["spec"]["containers"]
        words = [word.replace("$$", "$") for word in (*container["command"], *container["args"])]
        own = {JOB_UID: "job-7", POD_UID: f"pod-{self.started}", POD_IP: "127.0.0.1"}
        own |= {"JOB_COMPLETION_INDEX": str(index), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.home / f"pod-{self.started}.log").open("wb") as log:
            self.pods[index] = subprocess.Popen(
                words, cwd=container["workingDir"], env={**os.environ, **own}, stderr=log, stdout=log
            )
        self.states[index] = RUNNING

    def look(self) -> bool:
        """Acts on pods that have ended; whether every index has."""
        spec = self.job["spec"]
        for index, pod in self.pods.items():
            if self.states[index] != RUNNING or pod.poll() is None:
                continue
            action = "" if pod.returncode == 0 else self._action(index, pod.returncode)
            self.counted[index] = self.counted.get(index, 0) + (action == "Count")
            over = action == "FailIndex" or self.counted[index] > spec["backoffLimitPerIndex"]
            self.states[index] = SUCCEEDED if not action else FAILED
            if action and not over:
                self.start(index)
        return RUNNING not in self.states.values()

    def _action(self, index: int, returned: int) -> str:
        code = 128 - returned if returned < 0 else returned
        for rule in self.job["spec"]["podFailurePolicy"]["rules"]:
            if "onPodConditions" in rule and index in self.disrupted:
                self.disrupted.discard(index)
                return str(rule["action"])
            if code in rule.get("onExitCodes", {}).get("values", ()):
                return str(rule["action"])
        return "Count"

    def tree(self, index: int) -> list[int]:
        """The pod's processes, the first one first."""
        found = [self.pods[index].pid]
        for pid in found:
            with suppress(OSError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (thread / "children").read_text().split())
        return found

    def kill(self, index: int) -> None:
        """The node is lost: every process at once."""
        for pid in self.tree(index):
            kill(pid)

    def logs(self) -> str:
        return "".join(path.read_text(errors="replace")[-800:] for path in self.home.glob("pod-*.log"))


@pytest.fixture
def calm(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What an undisturbed process answers."""
    return Batches(tmp_path_factory.mktemp("calm")).alone()


@pytest.mark.slow
def test_pods_are_killed_in_every_way(tmp_path: Path, calm: bytes):
    """A rank; the whole pod, as with its node; TERM, as when it is drained. Nothing is lost or done twice."""
    batches = Batches(tmp_path)
    pods = ["cluster=kubernetes", "cluster.gpu=cpu", "cluster.groups=2", "cluster.kubernetes.image=x"]
    pods += ["cluster.kubernetes.volume=data", f"cluster.kubernetes.mount={tmp_path}"]
    printed = batches.run(*pods, f"cluster.kubernetes.python={sys.executable}")
    assert printed.returncode == 0, printed.stderr
    controller = Controller(yaml.safe_load(printed.stdout), tmp_path)
    try:
        for index in range(controller.job["spec"]["completions"]):
            controller.start(index)
        for how in ("rank", "node", "drained"):
            before = batches.finished
            wait_for(lambda at=before: batches.finished > at or controller.look(), controller.logs)
            index = next((i for i, state in controller.states.items() if state == RUNNING), None)
            if index is None:
                break
            if how == "rank":
                os.kill(controller.tree(index)[-1], signal.SIGKILL)
            elif how == "node":
                controller.disrupted.add(index)
                controller.kill(index)
            else:
                controller.disrupted.add(index)
                controller.pods[index].terminate()
            controller.pods[index].wait(60)
            controller.look()
        wait_for(controller.look, controller.logs)
        assert set(controller.states.values()) == {SUCCEEDED}, controller.logs()
        assert batches.output.read_bytes() == calm
        assert controller.started > 2 and not any(controller.counted.values())
    finally:
        for index in controller.pods:
            controller.kill(index)


def pod(home: Path, words: list[str], **changes: Any) -> Pod:
    """A pod whose ranks are a shell line."""

    class Shell(Pod):
        def command(self) -> list[str]:
            return ["sh", "-c", *self.words]

    plain: dict[str, Any] = {"nodes": 2, "ranks": 1, "index": 3, "retries": 1, "uid": "u1"}
    return Shell(home / "work", home / "out", service="s", words=words, job="j", **{**plain, **changes})


@pytest.mark.parametrize(
    ("line", "code"), [("exit 0", 0), ("exit 1", AGAIN), ("exit 3", 3), ("kill -9 $$", AGAIN)]
)
def test_what_a_pod_tells_kubernetes(tmp_path: Path, line: str, code: int):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert pod(tmp_path, [line]).run() == code
        for count in (1, 2):  # in a row, by whichever pod of the index
            again = pod(tmp_path, ["exit 1"], uid=f"again{count}").run()
        assert again == GIVEN_UP
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert {end.job for end in ends(tmp_path / "work")} == {"j.3"}


def test_ranks_of_several_pods_meet_at_their_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(POD_IP, "10.0.0.9")
    real = Pod(tmp_path, tmp_path, 3, 2, 4, "job", ["a=b"], "j", "u", 3)
    words = real.command()
    assert "--rdzv-endpoint=job-2.job:29500" in words and "--rdzv-conf=is_host=0" in words
    assert "--nproc-per-node=4" in words and "--local-addr=10.0.0.9" in words and words[-1] == "a=b"
    assert real.group == "j.1"


def test_a_claim_of_a_replaced_pod_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pods have the host name and the process number of those that they replace."""
    journal = Journal.begin(tmp_path, Manifest("ab" * 32, 4, {"seed": 1}, shards_of(4, 2)))
    taken = {}
    for group, uid in (("j.0", "u1"), ("j.1", "u2"), ("j.0", "u3")):
        monkeypatch.setenv(GROUP, group)
        monkeypatch.setenv(POD_UID, uid)
        claimed = journal.claim()
        assert claimed is not None
        taken[uid] = claimed[0].name
        claimed[1].__enter__()
    assert taken == {"u1": "00000", "u2": "00001", "u3": "00000"}
    assert Element("7", 2).replaces("7", 1) and not Element("7", 1).replaces("7", 2)
    assert not Element("7", 2).replaces("8", 1) and not Element("j.0", "u").replaces("j.0", "u")


@pytest.mark.parametrize(("lacking", "name"), [("hard links", "link"), ("fsync", "fsync")])
def test_a_file_system_that_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, name: str
):
    def absent(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    require_file_system(tmp_path)
    monkeypatch.setattr(os, name, absent)
    with pytest.raises(StorageError, match=f"cannot be kept on this file system.*found no {lacking}"):
        require_file_system(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_system_whose_links_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Or are copies: then two could publish a shard."""
    monkeypatch.setattr(os, "link", lambda source, path: Path(path).write_bytes(Path(source).read_bytes()))
    with pytest.raises(StorageError, match="found no hard links"):
        require_file_system(tmp_path)
