"""The script, without a cluster: what it asks for, and that no value can become an option or a command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.batch.slurm.script import Order
from llama_ssp.config import BatchConf, ClusterConf, GenerateConf, RunConf, Scheduler, SlurmConf
from llama_ssp.config.validation.cluster import check_cluster, check_sharing, seconds_of
from llama_ssp.config.validation.values import check_values
from llama_ssp.errors import UsageError

# Words that would do harm, were they ever read by a shell or by sbatch.
HOSTILE = (
    "task.system=a, b; touch broken", "$(touch broken)", "`touch broken`", "${HOME}", "it's \"quoted\"",
    "two\nlines\n#SBATCH --nodes=9\ntouch broken", "#SBATCH --nodes=9", "back\\slash", "*", "", "-n",
    "task.stop=[',']", "é \u2028 \t",
)  # fmt: skip


ON_CPU = ClusterConf(gpu="cpu", gpus=1)


def order(**changes: Any) -> Order:
    plain = Order(
        name="llama-ssp-answers", cluster=ClusterConf(gpus=2), elements=4,
        work=Path("/data/answers.work"), folder=Path("/home/me"),
        words=("task=batch", "seed=1"), retries=3,
    )  # fmt: skip
    return replace(plain, **changes)


def options(script: str) -> list[str]:
    """What sbatch reads: the comments before the first command."""
    lines = script.splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    return [line.removeprefix("#SBATCH --") for line in lines[:first] if line.startswith("#SBATCH")]


def test_what_is_asked_of_slurm():
    site_default = ClusterConf(gpus=2, slurm=SlurmConf(cpus_per_rank=None))
    slurm = SlurmConf(
        partition="gpu", account="lab", qos="low", time="4:00:00", mem="200G", cpus_per_rank=8,
        gpu_type="a100", signal_s=90, options=["--exclusive", "--comment=for the paper"],
    )  # fmt: skip
    assert options(order(cluster=ClusterConf(gpus=2, slurm=slurm)).rendered()) == [
        "job-name=llama-ssp-answers", "partition=gpu", "account=lab", "qos=low", "array=0-3", "nodes=1",
        "ntasks-per-node=1", "cpus-per-task=16", "gpus-per-node=a100:2", "mem=200G", "time=4:00:00",
        "output=/dev/null", "signal=B:USR1@90", "requeue", "exclusive", "comment='for the paper'",
    ]  # fmt: skip
    assert "cpus-per-task=2" in options(order().rendered())  # the ranks of a node
    assert not any("cpus" in one for one in options(order(cluster=site_default).rendered()))


def test_groups_meet_as_their_size_wants():
    many = order(cluster=ClusterConf(nodes=2, gpus=4)).rendered()
    assert "--nnodes=2" in many and "--nproc-per-node=4 --max-restarts=0" in many
    assert "rendezvous=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$RANDOM" in many
    assert "--standalone" in order().rendered() and "--nproc-per-node=2" in order().rendered()
    alone = order(cluster=ON_CPU).rendered()
    assert "torch.distributed" not in alone and "gpus-per-node" not in alone
    for script in (many, alone):
        assert "--kill-on-bad-exit=1" in script


def stand_ins(folder: Path, setup: tuple[str, ...] = (), **slurm: Any) -> SlurmConf:
    """Commands of Slurm's in `folder`/bin that start what they are given; a python that prints its words."""
    (folder / "bin").mkdir()
    commands = {
        "teller": f'''case "$*" in
            *supervisor*) shift 5; exec "$@";;
            *address\\ resolve\\ 10.9.9.1) echo "[fd00::1]";;
            *address\\ here*) echo fd00::2 ib0;;
            *address\\ port) echo 20539;;
            *) exec {sys.executable} -c "import json, sys, os
print(json.dumps([sys.argv[1:], os.environ.get('GLOO_SOCKET_IFNAME'), os.environ['PYTHONPATH']]))" "$@";;
            esac''',
        "scontrol": 'case "$*" in *hostnames*) echo n1 n2;; *) echo "NodeName=n1 NodeAddr=10.9.9.1 X";; esac',
        "srun": 'while case "$1" in --*) true;; *) false;; esac; do shift; done; SLURM_NODEID=1 exec "$@"',
    }  # fmt: skip
    for name, text in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return SlurmConf(python=str(folder / "bin" / "teller"), setup=list(setup), **slurm)


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs it as the first element of job 77, as Slurm would: nothing is there but the script."""
    job = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "76", "SLURM_ARRAY_TASK_ID": "0"}
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]", **job}
    return subprocess.run(["bash"], input=script, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("cluster", [ON_CPU, ClusterConf(gpus=2), ClusterConf(nodes=2, gpus=2)])
@pytest.mark.parametrize("named", ["work", "50%d done", "it's \\", "a\n#SBATCH --nodes=9\ntouch broken"])
def test_words_reach_the_command_as_they_were_given(cluster: ClusterConf, named: str, tmp_path: Path):
    """The script is run, and begins its own log, whatever the name of the folder."""
    slurm = stand_ins(tmp_path, torchrun=["--log-dir=$((4 + 3))", "--tee='a b'"])
    whole = order(
        words=HOSTILE, cluster=replace(cluster, slurm=slurm), folder=tmp_path, work=tmp_path / named
    )
    done = run_script(whole.rendered(), tmp_path)
    log = tmp_path / named / "logs" / "llama-ssp-answers-76_0.out"
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), log.read_text()
    told, network, _ = json.loads(log.read_text())
    assert tuple(told[-len(HOSTILE) :]) == HOSTILE and told[-len(HOSTILE) - 1] == "llama_ssp"
    many = cluster.nodes > 1
    assert ("--log-dir=7" in told and "--tee=a b" in told) == (cluster.gpus == 2)  # a shell's words
    assert ("--rdzv-endpoint=[fd00::1]:20539" in told and "--local-addr=fd00::2" in told) == many
    assert ("--rdzv-conf=is_host=0" in told) == many and network == ("ib0" if many else None)
    assert any(re.fullmatch(r"--rdzv-id=77\.0\.\d+", word) for word in told) == many
    assert not list(tmp_path.rglob("broken"))


def test_the_first_line_that_fails_ends_the_script(tmp_path: Path):
    slurm = stand_ins(tmp_path, setup=("true", "no_such_module load cuda", "touch broken"))
    whole = order(cluster=ClusterConf(gpus=2, slurm=slurm), folder=tmp_path, work=tmp_path / "work")
    assert run_script(whole.rendered(), tmp_path).returncode == 2
    said = (tmp_path / "work" / "logs" / "llama-ssp-answers-76_0.out").read_text()
    assert "error: a line of the script failed with 127" in said and "found no_such_module load cuda" in said
    assert not (tmp_path / "broken").exists() and "distributed" not in said


@pytest.mark.parametrize(("silent", "tries"), [(2, 3), (9, 4)])
def test_a_controller_that_is_being_restarted_is_asked_again(tmp_path: Path, silent: int, tries: int):
    """At the look-up of the nodes: no element ends as if a setting were wrong."""
    slurm = stand_ins(tmp_path)
    srun, asked = tmp_path / "bin" / "srun", tmp_path / "asked"
    fails = f"echo >> {asked}; [ $(wc -l < {asked}) -gt {silent} ] || exit 1"
    srun.write_text(srun.read_text().replace("\n", f"\n{fails}\n", 1))
    cluster = ClusterConf(nodes=2, gpus=2, slurm=slurm)
    whole = order(cluster=cluster, folder=tmp_path, work=tmp_path / "work")
    script = whole.rendered().replace("left = 30", "left = 4").replace("sleep 10", "sleep 0")
    code = run_script(script, tmp_path).returncode
    said = (tmp_path / "work" / "logs" / "llama-ssp-answers-76_0.out").read_text()
    assert said.count("Slurm does not answer to srun") == min(silent, tries)
    assert (code, "error: Slurm does not answer; " in said) == ((0, False) if silent < 4 else (5, True)), said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition", "gpu\n#SBATCH --nodes=9"), ("partition", "a b"), ("account", "$HOME"), ("qos", "`id`"),
        ("account", 'a"b'), ("job_name", "a/b"), ("job_name", "#SBATCH"), ("job_name", "%j\n"),
        ("time", "4 hours"), ("time", ""), ("mem", "12 GB"), ("gpu_type", "a100:8"), ("constraint", "a;b"),
        ("options", ["-N9"]), ("options", ["--nodes=9"]), ("options", ["--comment=it's"]),
        ("options", ["--wrap=id"]), ("options", ["--x\n#SBATCH --nodes=9"]), ("setup", ["a\nb"]),
        ("interface", "ib0; id"), ("interface", "a" * 16),
        ("setup", [" "]), ("torchrun", ["a\0b"]), ("signal_s", 0), ("cpus_per_rank", 0),
    ],
)  # fmt: skip
def test_values_that_are_refused(key: str, value: object):
    with pytest.raises(UsageError, match=f"cluster.slurm.{key}"):
        cluster = ClusterConf(slurm=replace(SlurmConf(), **{key: value}))
        check_values(cluster, "cluster.")
        check_cluster(cluster)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("5", 300), ("5:30", 330), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400), ("1-02:03:04", 93784)],
)
def test_times_mean_what_slurm_means(time: str, seconds: int):
    assert seconds_of(time) == seconds


def test_a_time_that_is_all_spent_on_stopping():
    with pytest.raises(UsageError, match="leaves no time to work"):
        check_cluster(ClusterConf(slurm=SlurmConf(time="2", signal_s=120)))


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (RunConf(cluster=ClusterConf(scheduler=Scheduler.slurm, gpus=1), task=GenerateConf(name="generate")),
         "cluster.scheduler is for task=batch"),
        (RunConf(cluster=ClusterConf(groups=2), task=GenerateConf(name="generate")), "cluster.groups is for"),
        (RunConf(task=BatchConf(name="batch", submit=True)), "needs a scheduler"),
        (RunConf(cluster=ClusterConf(scheduler=Scheduler.slurm), task=BatchConf(name="batch")),
         "cluster.gpus is missing"),
    ],
)  # fmt: skip
def test_what_nobody_could_share(run: RunConf, said: str):
    with pytest.raises(UsageError, match=said):
        check_sharing(run)
