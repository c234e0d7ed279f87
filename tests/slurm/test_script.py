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
    slurm = SlurmConf(
        partition="gpu", account="lab", qos="low", time="4:00:00", mem="200G", cpus_per_rank=8,
        gpu_type="a100", signal_s=90, options=["--exclusive", "--comment=for the paper"],
    )  # fmt: skip
    assert options(order(cluster=ClusterConf(gpus=2, slurm=slurm)).rendered()) == [
        "job-name=llama-ssp-answers", "partition=gpu", "account=lab", "qos=low", "array=0-3", "nodes=1",
        "ntasks-per-node=1", "cpus-per-task=16", "gpus-per-node=a100:2", "mem=200G", "time=4:00:00",
        "output=/data/answers.work/logs/%x-%A_%a.out", "open-mode=append", "signal=B:USR1@90", "requeue",
        "exclusive", "comment='for the paper'",
    ]  # fmt: skip


def test_groups_meet_as_their_size_wants():
    many = order(cluster=ClusterConf(nodes=2, gpus=4)).rendered()
    assert "--nnodes=2 --rdzv-backend=c10d" in many and "--nproc-per-node=4 --max-restarts=0" in many
    assert "meeting=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$RANDOM" in many
    assert "--standalone --nproc-per-node=2" in order().rendered()
    alone = order(cluster=ON_CPU).rendered()
    assert "torch.distributed" not in alone and "gpus-per-node" not in alone
    for script in (many, alone):
        assert "--kill-on-bad-exit=1" in script


@pytest.mark.parametrize("cluster", [ON_CPU, ClusterConf(nodes=2, gpus=2)])
def test_words_reach_the_command_as_they_were_given(cluster: ClusterConf, tmp_path: Path):
    """The script is run, with commands of Slurm's that only start what they are given."""
    teller = tmp_path / "teller"
    teller.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import json, sys; '
                      f'print(json.dumps(sys.argv[1:]))" "$@"\n')  # fmt: skip
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho n1\n")
    (tmp_path / "srun").write_text(
        '#!/bin/sh\ncase "$*" in *--nodelist=n1*hostname*) echo 10.0.0.1 ::1;; *socket*) echo 20539;; esac\n'
    )
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    cluster = replace(cluster, slurm=SlurmConf(python=str(teller)))
    script = order(words=HOSTILE, cluster=cluster, folder=tmp_path).rendered()
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(["bash"], input=script, env=env, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert tuple(told[-len(HOSTILE) :]) == HOSTILE
    assert told[:5] == ["-m", "llama_ssp.batch.slurm.supervisor", "/data/answers.work", "3", "120"]
    assert ("--rdzv-endpoint=10.0.0.1:20539" in told) == (cluster.nodes > 1)
    assert any(re.fullmatch(r"--rdzv-id=77\.0\.\d+", word) for word in told) == (cluster.nodes > 1)
    assert not (tmp_path / "broken").exists()


def test_a_percent_sign_is_no_pattern_and_a_space_no_end():
    named = options(order(work=Path("/data/50%d done")).rendered())
    assert "output='/data/50%%d done/logs/%x-%A_%a.out'" in named


@pytest.mark.parametrize("folder", ["/data/a\n#SBATCH --nodes=9", "/data/it's", "/data/a\\b", "/a\rb"])
def test_a_folder_that_no_script_can_name(folder: str):
    with pytest.raises(UsageError, match="cannot stand in a Slurm script"):
        order(work=Path(folder)).rendered()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition", "gpu\n#SBATCH --nodes=9"), ("partition", "a b"), ("account", "$HOME"), ("qos", "`id`"),
        ("account", 'a"b'), ("job_name", "a/b"), ("job_name", "#SBATCH"), ("job_name", "%j\n"),
        ("time", "4 hours"), ("time", ""), ("mem", "12 GB"), ("gpu_type", "a100:8"), ("constraint", "a;b"),
        ("options", ["-N9"]), ("options", ["--nodes=9"]), ("options", ["--comment=it's"]),
        ("options", ["--wrap=id"]), ("options", ["--x\n#SBATCH --nodes=9"]), ("setup", ["a\nb"]),
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
