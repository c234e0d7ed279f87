"""What is printed, checked, refused and submitted, against a real Slurm; and without one."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.batch.slurm import submit
from llama_ssp.batch.slurm.submit import ADDED
from llama_ssp.pair.run import Run
from tests.conftest import Command
from tests.slurm.jobs import COMMAND, ON_SLURM, Batches, executable
from tests.slurm.lab import Lab

JOB = [word for word in COMMAND if not word.startswith(("model=", "draft="))]  # the command's own are small
ASKED = [word for word in ON_SLURM if "time" not in word]
STATUS = ("task=batch", "task.status=true", "task.output=answers.jsonl")
OUTPUT = 'an $HOME %d "out".jsonl'


@pytest.fixture
def here(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands are given in, with an input."""
    return Batches(tmp_path / "run").home


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Stand-ins for commands of Slurm's."""
    executable(folder, **scripts)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def submitted(work: Path, job: str) -> None:
    """Leaves what a submission by this command leaves."""
    (work / "slurm").mkdir(parents=True)
    (work / "slurm" / f"{job}.sbatch").write_text("#!/bin/bash\n")


@pytest.fixture
def at_lab(lab: Lab, here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, lab.env[name])
    yield lab


@pytest.mark.slow
@pytest.mark.slurm
def test_what_the_cluster_could_never_start(at_lab: Lab, command: Command, here: Path):
    for overrides in (
        ["cluster.slurm.partition=gone"],
        ["cluster.gpus=4", "cluster.slurm.cpus_per_rank=1"],
        ['cluster.slurm.options=["--mem-per-gpu=x"]'],
    ):
        answer = command(*JOB, *ON_SLURM, *overrides)
        assert answer.code == 2 and "Slurm refuses the job; found" in answer.errors[0], answer.err
    assert at_lab.queued() == [] and not (here / "answers.jsonl.work").exists()


@pytest.fixture
def without_slurm(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here / "nothing"))


PRINTED = [*JOB, *ON_SLURM[:-1], "cluster.groups=2"]


@pytest.mark.usefixtures("without_slurm")
def test_the_script_is_printed(command: Command, here: Path):
    """Nothing happens."""
    answer = command(*PRINTED)
    assert answer.code == 0 and answer.out.startswith("#!/bin/bash\n")
    listed = answer.out.partition("words=(\n")[2].partition("\n)")[0].splitlines()
    keys = [line.strip().partition("=")[0] for line in listed]
    comment = keys.index(f"# {ADDED}")
    assert "speculation.k" in keys[:comment] and "cluster.groups" in keys[comment:], "what is whose"
    assert len(keys) == len(set(keys)) and not any(key.startswith("cluster.slurm") for key in keys)
    assert not (here / "answers.jsonl.work").exists()


@pytest.mark.usefixtures("without_slurm")
def test_the_document_holds_the_script_that_is_printed(command: Command):
    answer = command(*PRINTED)
    document = command(*PRINTED, "output=json").document
    assert document["script"].replace("    output=json\n", "") == answer.out
    assert document["status"] == "printed" and document["verdict"] == "fits"
    assert document["shards_missing"] == 4


@pytest.mark.parametrize(
    ("groups", "size", "said"),
    [
        (9, 5, "an array of 4, not of cluster.groups=9: so many shards are missing"),
        (2, 20, "an array of 1, not of cluster.groups=2: so many shards are missing"),
    ],
    ids=["small shards", "large shards"],
)
def test_no_more_elements_than_shards_are_missing(
    command: Command, here: Path, caplog: pytest.LogCaptureFixture, groups: int, size: int, said: str
):
    command(*JOB, *ON_SLURM[:-1], f"cluster.groups={groups}", f"task.shard_size={size}")
    assert said in caplog.text


@pytest.mark.slow
@pytest.mark.slurm
def test_a_job_is_in_the_queue_once(at_lab: Lab, command: Command, here: Path):
    """And its state is told. The queue is held, so that the test and not Slurm goes first."""
    at_lab.run("scontrol", "update", "partition=lab", "state=down")
    try:
        urgent = (*JOB, *ASKED, "cluster.slurm.partition=urgent")
        first = command(*urgent, 'cluster.slurm.options=["--begin=now+1hour"]')
        assert first.code == 0, first.err
        job = first.document["job"]
        second = command(*urgent)
        assert second.code == 2 and f"in the queue already; {here.name}" not in second.err
        assert f"found job {job}_0, PENDING" in second.errors[0]
        status = command(*STATUS)
        told = status.document
        assert told["status"] == "running" and told["queue"][0]["state"] == "PENDING"
        assert told["jobs"] == [job] and f"{job}_0" in status.out.splitlines()[-1]
    finally:
        at_lab.run("scontrol", "update", "partition=lab", "state=up")
        at_lab.empty()


@pytest.mark.slow
@pytest.mark.slurm
def test_a_job_is_not_submitted_when_nothing_is_missing(
    at_lab: Lab, command: Command, here: Path, expected: bytes
):
    assert command(*JOB, "placement.target_device=cpu").code == 0
    assert (here / "answers.jsonl").read_bytes() == expected
    whole = command(*JOB, *ON_SLURM)
    assert whole.code == 0 and whole.document["status"] == "done" and whole.document["job"] is None
    assert at_lab.queued() == []
    ended = command(*STATUS).document
    assert ended["status"] == "done" and ended["queue"] == []


@pytest.mark.slow
@pytest.mark.slurm
def test_hostile_names_go_through_slurm_unharmed(batches: Batches, lab: Lab, expected: bytes):
    """Of the input, the output and the folder."""
    name = "in $(touch broken) `touch broken` 'q' #.txt"
    (batches.home / "prompts.txt").rename(batches.home / name)
    job = batches.submit(f"task.input={name}", f"task.output={OUTPUT}", "cluster.slurm.job_name=a=b@c+d.e")
    assert lab.run("squeue", "-h", "-j", job, "-o", "%j %D") == "a=b@c+d.e 1"
    lab.wait_empty()
    work = batches.home / f"{OUTPUT}.work"
    assert (batches.home / OUTPUT).read_bytes() == expected
    assert [path.name for path in (work / "logs").iterdir()] == [f"a=b@c+d.e-{job}_0.out"]
    assert not list(batches.home.rglob("broken"))


SILENT, DOWN = ({"scontrol": act, "sbatch": "echo 8"} for act in ("exec sleep 60", "echo Slurmctld is DOWN"))
REFUSED = {
    "no Slurm": ({}, [*JOB, *ON_SLURM], 5, "this machine has none of Slurm's commands"),
    # The plan comes first: before Slurm is asked.
    "too large": ({}, [*JOB, *ON_SLURM, "cluster.gpu=L4", "cluster.gib=0.01"], 5, "the models do not fit"),
    "sweep": ({}, ["--multirun", *JOB, *ON_SLURM], 2, "sweep"),
    "silence": (SILENT, [*JOB, *ON_SLURM], 5, "Slurm does not answer; found scontrol said nothing"),
    "down": (DOWN, [*JOB, *ON_SLURM], 5, "Slurm does not answer; found Slurmctld is DOWN"),
    "another task": ({}, ["task=generate", "cluster=slurm"], 2, "cluster.scheduler is for task=batch"),
    "groups": ({}, ["task=generate", "cluster.groups=2"], 2, "cluster.groups is for task=batch"),
    "no GPUs": ({}, ["task=batch", "cluster.scheduler=slurm"], 2, "cluster.gpus is missing"),
    "no scheduler": ({}, [*JOB, "task.submit=true"], 2, "needs a scheduler"),
    "no job": ({}, ["task=batch", "task.status=true", "task.output=x"], 3, "there is no job in this folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_writes_nothing(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
):
    scripts, words, code, said = REFUSED[name]
    monkeypatch.setenv("PATH", "/usr/bin:/bin" if scripts else str(tmp_path / "nothing here"))
    commands(tmp_path, monkeypatch, **scripts)
    monkeypatch.setattr(submit, "PATIENCE_S", 0.3)
    answer = command(*words)
    assert answer.code == code and said in answer.errors[0]
    assert not (here / "answers.jsonl.work").exists()


@pytest.mark.slow
@pytest.mark.slurm
def test_a_printed_script_is_submitted_as_it_is(batches: Batches, lab: Lab, expected: bytes):
    """By hand, where no folder of the job is yet; a copy without a seed is the same twice."""
    asked = [word for word in ON_SLURM if "submit" not in word]
    without = [word for word in COMMAND if not word.startswith("seed=")]
    twice = [batches.run(*asked, command=without).out for _ in range(2)]
    assert twice[0] == twice[1] and "    seed=" in twice[0]
    (batches.home / "job.sbatch").write_text(batches.run(*asked).out)
    assert not batches.work.exists()
    lab.run("sbatch", str(batches.home / "job.sbatch"))
    batches.wait_for_records(2)
    status = batches.run("task.status=true", "output=json").document
    assert status["tokens_committed"] >= 2 * 48 and status["tokens_per_s"] > 0
    assert batches.whole() == expected


def test_a_silent_controller_is_no_empty_queue(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    commands(tmp_path, monkeypatch, squeue="echo 'Unable to contact slurm controller' >&2; exit 1")
    submitted(here / "answers.jsonl.work", "7")
    found = command(*STATUS).document
    assert found["status"] == "unknown" and found["queue"] is None
    commands(tmp_path, monkeypatch, squeue="")
    assert command(*STATUS).document["status"] == "unfinished"


def test_errors_stay_where_the_job_is_in_the_queue(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The submission that would answer them again is refused. Control: it is not, when the queue is empty."""
    lines = ['{"prompt": "a"}', '{"prompt": 5}', '{"prompt": "b"}']
    (here / "lines.jsonl").write_text("\n".join(lines) + "\n")
    words = [*(word for word in JOB if not word.startswith("task.input=")), "task.input=lines.jsonl"]
    words.append("task.on_bad_row=skip")
    assert command(*words, "placement.target_device=cpu").document["records_failed"] == 1
    submitted(here / "answers.jsonl.work", "7")

    waits = "echo '7_0|7|PENDING|Priority|0:00|'"
    commands(tmp_path, monkeypatch, squeue=waits, sbatch="echo 8", scontrol="echo UP: is UP")
    refused = command(*words, *ASKED, "task.retry_errors=true")
    assert refused.code == 2 and "found job 7_0, PENDING" in refused.errors[0], refused.err
    assert command(*STATUS).document["records_failed"] == 1

    commands(tmp_path, monkeypatch, squeue="")
    assert command(*words, *ASKED, "task.retry_errors=true").code == 0
    assert command(*STATUS).document["records_failed"] == 0


SQUEUE = "case \"$1 $2 $3\" in *=7,41*) echo '40_1|41|RUNNING|None|0:10|n1';; esac"


def test_what_people_started_themselves_is_seen(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """An array that was submitted by hand; a process that was started by hand, after a submission."""
    commands(tmp_path, monkeypatch, squeue=SQUEUE, sbatch="echo 8", scontrol="echo UP: is UP")
    work, job = here / "answers.jsonl.work", {"host": "n1", "pid": 1, "job": "41", "restart": 0}
    submitted(work, "7")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt(signal.SIGINT)

    with monkeypatch.context() as patch:  # the job has begun
        patch.setattr(Run, "begin", stop)
        assert command(*JOB, "placement.target_device=cpu").code == 130
    claim = work / "claims" / "00000"
    claim.write_text(json.dumps(job))
    refused = command(*JOB, *ASKED)
    assert refused.code == 2 and "found job 40_1, RUNNING" in refused.errors[0], refused.err
    os.utime(claim, (0, 0))  # its process is gone
    assert command(*JOB, *ASKED).code == 0
    assert command(*JOB, "placement.target_device=cpu").code == 0
    (here / "answers.jsonl").unlink()
    assert command(*STATUS).document["status"] == "unfinished"
    claim.write_text(json.dumps({**job, "job": None}))
    assert command(*STATUS).document["status"] == "running"
