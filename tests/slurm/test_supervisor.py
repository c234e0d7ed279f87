"""The supervisor by itself: commands of Slurm's that write down what they are asked."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.batch.atomic_files import append_line
from llama_ssp.batch.journal import Journal, Manifest, shards_of
from llama_ssp.batch.slurm import supervisor
from llama_ssp.batch.slurm.supervisor import BY_SLURM, BY_TIME, End, ends, fruitless
from llama_ssp.distributed.signals import CODE_FILE
from tests.processes import wait_for
from tests.slurm.jobs import executable
from tests.warm import ROOT

SCONTROL = """
echo "scontrol $*" >> asked
case "$1" in
    show) cat restarts ;;
    requeue*) kill -TERM $PPID ;;
esac
"""
SCANCEL = 'echo "scancel $*" >> asked\nkill -TERM $(cat rank)\n'
# The last element of an array has the array's number, which is all elements for Slurm's commands.
ELEMENT = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
ASKED = ["scontrol show job -o 7_1", "scontrol requeue 7_1"]
# A rank that obeys signals, as ours do.
PATIENT = (
    f"echo $$ > rank; trap 'echo 143 > ${CODE_FILE}; exit 1' TERM; touch up; while :; do sleep 0.05; done"
)


def end(**changes: object) -> End:
    return replace(End(job="7", restart=0, host="n1", code=1, stopped_by="", finished=0), **changes)  # type: ignore[arg-type]


class Node:
    """A folder with a job's work in it, and a supervisor to start."""

    def __init__(self, home: Path) -> None:
        self.home, self.work = home, home / "work"
        self.work.mkdir()
        executable(home, scontrol=SCONTROL, scancel=SCANCEL)
        self.restarts(0)

    def restarts(self, count: int) -> None:
        said = f"JobId=7 JobState=RUNNING Requeue=1 Restarts={count} BatchFlag=1\n"
        (self.home / "restarts").write_text(said)

    def start(self, command: str, signal_s: float = 120) -> subprocess.Popen[str]:
        """The supervisor of a shell command."""
        words = ["-m", "llama_ssp.batch.slurm.supervisor", self.work, signal_s, "sh", "-c", command]
        env = {**os.environ, "PATH": f"{self.home}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **ELEMENT}
        env.pop("SLURM_RESTART_COUNT", None)
        return subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=self.home, env=env, stderr=subprocess.PIPE, text=True
        )

    def start_patient(self, **how: Any) -> subprocess.Popen[str]:
        """And waits for its rank."""
        process = self.start(**{"command": PATIENT, **how})
        wait_for((self.home / "up").exists)
        return process

    def run(self, command: str) -> tuple[int, str]:
        process = self.start(command)
        _, said = process.communicate(timeout=60)
        return process.returncode, said

    @property
    def asked(self) -> list[str]:
        file = self.home / "asked"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def leaves(code: int) -> str:
    """A command whose ranks leave with a code; torchrun's own is 1."""
    return f"echo {code} > ${CODE_FILE}; exit 1"


@pytest.mark.parametrize(
    ("command", "restarts", "ended", "code", "asked", "said"),
    [
        ("true", 0, 0, 0, [], ""),
        # It waits until Slurm takes it away: the exit code of a job that Slurm requeues is not read.
        (leaves(5), 0, 5, -signal.SIGTERM, ASKED, "ended with 5"),
        (
            leaves(6),
            0,
            6,
            -signal.SIGTERM,
            [ASKED[0], "scontrol requeuehold 7_1"],
            "held: mend the error above",
        ),
        *((leaves(code), 0, code, code, [], "not started again") for code in (2, 3, 4)),
        ("exit 1", 1, 1, 0, ASKED[:1], "superseded"),
    ],
    ids=["done", "5: again", "6: held", "2: kept", "3: kept", "4: kept", "superseded"],
)
def test_what_follows_an_end(
    node: Node, command: str, restarts: int, ended: int, code: int, asked: list[str], said: str
):
    node.restarts(restarts)
    left, text = node.run(command)
    assert left == code and node.asked == asked and said in text
    assert [(end.code, end.failed) for end in ends(node.work)] == [(ended, ended > 0)]


def test_a_broken_installation_is_not_requeued_for_ever(node: Node):
    for go in range(4):
        node.run("exit 127")
        requeued = [line for line in node.asked if "requeue" in line]
        assert len(requeued) == min(go + 1, 3)
    assert "not started again after 127" in node.run("exit 127")[1]
    excluded = [line for line in node.asked if "ExcNodeList" in line]
    assert excluded == [f"scontrol update JobId=7_1 ExcNodeList={socket.gethostname()}"]


def test_near_the_time_limit_a_stopped_job_is_requeued(node: Node):
    process = node.start_patient()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == -signal.SIGTERM
    assert node.asked == ["scancel --signal=TERM 7_1", *ASKED]
    assert [(end.code, end.stopped_by) for end in ends(node.work)] == [(143, BY_TIME)]


def test_ranks_that_do_not_stop_are_left_to_the_requeue(node: Node):
    deaf = f"trap '' TERM; {PATIENT.partition(';')[0]}; touch up; sleep 60"
    process = node.start_patient(command=deaf, signal_s=0.2)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == -signal.SIGTERM
    assert node.asked[-1] == ASKED[-1] and [end.code for end in ends(node.work)] == [137]
    os.kill(int((node.home / "rank").read_text()), signal.SIGKILL)


def test_what_slurm_takes_away_is_not_requeued_twice(node: Node):
    """Preemption and scancel tell the ranks, too."""
    process = node.start_patient()
    process.send_signal(signal.SIGTERM)
    os.kill(int((node.home / "rank").read_text()), signal.SIGTERM)
    assert process.wait(60) == 143
    assert node.asked == [] and [one.stopped_by for one in ends(node.work)] == [BY_SLURM]


@pytest.mark.parametrize(("failures", "requeued"), [(2, True), (9, False)])
def test_a_controller_that_is_being_restarted_is_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch, failures: int, requeued: bool
):
    down = f'echo "scontrol $*" >> asked\n[ $(wc -l < asked) -gt {failures} ] && cat restarts'
    executable(node.home, scontrol=down)
    monkeypatch.chdir(node.home)
    monkeypatch.setenv("PATH", f"{node.home}:{os.environ['PATH']}")
    for name, value in (("TRIES", 5), ("PAUSE_S", 0.0), ("KILLED_WITHIN_S", 0.0)):
        monkeypatch.setattr(supervisor, name, value)
    for name, text in ELEMENT.items():
        monkeypatch.setenv(name, text)
    assert supervisor.Supervisor(str(node.work), "120", ["false"])._requeue(1, "requeue") == 1
    assert (node.asked[-1] == ASKED[-1]) is requeued
    assert len(node.asked) == (failures + 2 if requeued else 5)


def test_a_full_disk_is_said(node: Node):
    (node.work / "slurm").write_text("no folder")
    code, said = node.run("true")
    assert code == 6 and said.splitlines()[-1].startswith("error: ")


def test_fruitless_runs_are_counted_by_node_from_the_last_that_was_not():
    assert fruitless([]) == {}
    assert fruitless([end(), end(host="n2"), end()]) == {"n1": 2, "n2": 1}
    assert fruitless([end(), end(finished=3), end()]) == {"n1": 1}
    assert fruitless([end(finished=3)]) == {}
    assert fruitless([end(stopped_by=BY_SLURM), end(stopped_by=BY_TIME)]) == {"n1": 1}


def test_an_element_counts_its_own_records(node: Node):
    """What healthy groups finish meanwhile does not keep a broken one alive."""
    journal = Journal.begin(node.work, Manifest("ab" * 32, 10, {}, shards_of(10, 5)))
    counts = {"shard": "00000", "at": 1.0, "records": 5, "failed": 0, "tokens": 9}
    (journal.folder / "done").mkdir()
    (journal.folder / "done" / "00000.jsonl").touch()
    for name, finished in (("8-0-1", 0), ("7-0-1", 5)):
        append_line(node.work / "counts", counts)
        node.run(
            f"mkdir -p work/groups; rm -f work/groups/*; mv work/counts work/groups/{name}.jsonl; exit 1"
        )
        assert ends(node.work)[-1].finished == finished
