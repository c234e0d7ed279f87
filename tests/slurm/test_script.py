"""The script, without a cluster: what it asks for, and that no value can become an option or a command."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.batch.job import Job
from llama_ssp.batch.journal import Journal, Manifest
from llama_ssp.batch.slurm.submit import sbatch_script, with_cores
from llama_ssp.batch.workers import words_of_one
from llama_ssp.config import BatchConf, ClusterConf, ModelConf, RunConf, SlurmConf
from llama_ssp.config.validation import check_values
from llama_ssp.errors import UsageError
from llama_ssp.models.folder import fingerprint
from llama_ssp.models.staged import STAGED
from tests.slurm.jobs import EMPTY, executable

# Words that would do harm, were they ever read by a shell or by sbatch.
HOSTILE = (
    "task.system=a, b; touch broken", "$(touch broken)", "`touch broken`", "${HOME}", "it's \"quoted\" $5",
    "two\nlines\n#SBATCH --nodes=9\ntouch broken", "#SBATCH --nodes=9", "back\\slash", "*", "", "-n",
    "task.stop=[',']", "é \u2028 \t",
)  # fmt: skip


ON_CPU = ClusterConf(gpu="cpu", gpus=1)


def script(cluster: ClusterConf, work: str | Path = "/data/answers.work", words: tuple[str, ...] = ()) -> str:
    """The script of four groups."""
    run = RunConf(cluster=cluster, task=BatchConf(name="batch"))
    job = Job(run, Journal(Path(work), Manifest("", 0, {}, ())), Path("answers.jsonl"), EMPTY)
    return sbatch_script(job, 4, words or ("task=batch", "seed=1"))


def options(script: str) -> list[str]:
    """What sbatch reads: the comments before the first command."""
    lines = script.splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    return [line.removeprefix("#SBATCH --") for line in lines[:first] if line.startswith("#SBATCH")]


def test_what_is_asked_of_slurm():
    slurm = SlurmConf(
        partition="gpu", account="lab", qos="low", time="4:00:00", mem="200G", cpus_per_rank=8,
        gpu_type="a100", signal_s=90, constraint="a100&ib",
        options=["--exclusive", "--comment=for the paper"],
    )  # fmt: skip
    asked = options(script(ClusterConf(gpus=2, slurm=slurm)))
    assert asked == [
        "job-name=llama-ssp-answers", "partition=gpu", "account=lab", "qos=low", "constraint='a100&ib'",
        "array=0-3", "nodes=1", "ntasks-per-node=1", "cpus-per-task=16", "gpus-per-node=a100:2", "mem=200G",
        "time=4:00:00", "signal=B:USR1@90", "requeue", "output=/dev/null", "exclusive",
        "comment='for the paper'",
    ]  # fmt: skip
    site_default = script(ClusterConf(gpus=2, slurm=SlurmConf(cpus_per_rank=0)))
    assert "cpus-per-task=" not in site_default and "OMP" not in site_default
    assert "# No --cpus-per-task: the cluster's own default" in site_default


@pytest.mark.parametrize(
    ("told", "sizes", "cores"),
    [
        ("JobDefaults = (null)", "128+", 8),
        ("JobDefaults = (null)", "128\n12", 6),
        ("JobDefaults = (null)", "1", 1),
        ("JobDefaults = DefCpuPerGPU=16", "128", 0),
    ],
    ids=["many cores", "the smallest node", "one core", "a default"],
)
def test_cores_are_the_clusters_own_or_eight(
    told: str, sizes: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of two ranks a node; elsewhere than on the cluster eight, of ranks on CPUs one."""
    executable(tmp_path, scontrol=f"echo '{told}'", sinfo=f"printf '{sizes}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert with_cores(ClusterConf(gpus=2)).slurm.cpus_per_rank == cores
    asked = options(script(with_cores(ClusterConf(gpus=2))))
    assert [entry for entry in asked if "cpus" in entry] == [f"cpus-per-task={2 * cores}"] * (cores > 0)
    given = ClusterConf(gpus=2, slurm=SlurmConf(cpus_per_rank=3))
    assert with_cores(given) == given and with_cores(ON_CPU).slurm.cpus_per_rank == 1
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert with_cores(ClusterConf(gpus=2)).slurm.cpus_per_rank == 8


@pytest.mark.parametrize("cpus_per_rank", [8, 0])
def test_the_users_own_cores_go_to_srun_too(cpus_per_rank: int):
    """As an option of sbatch, of two ranks a node."""
    slurm = SlurmConf(cpus_per_rank=cpus_per_rank, options=["--cpus-per-task=6"])
    text = script(ClusterConf(gpus=2, slurm=slurm))
    assert [entry for entry in options(text) if "cpus" in entry] == ["cpus-per-task=6"]
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=6 " in text and "# No --cpus-per-task" not in text
    assert "OMP_NUM_THREADS:-3}" in text


def test_only_a_script_without_a_time_limit_says_so():
    assert "# No --time" in script(ON_CPU)
    with_time = script(replace(ON_CPU, slurm=SlurmConf(options=["--time=5"])))
    assert "# No --time" not in with_time


def test_an_option_that_is_given_twice_is_asked_for_once():
    slurm = SlurmConf(partition="gpu", options=["--partition=other", "--time=5"])
    asked = options(script(replace(ON_CPU, slurm=slurm)))
    assert "partition=other" in asked and "partition=gpu" not in asked


def test_groups_meet_as_their_size_wants():
    many = script(ClusterConf(nodes=2, gpus=4))
    assert "--nproc-per-node=4 --max-restarts=0 --nnodes=2" in many and "--standalone" not in many
    two = script(ClusterConf(gpus=2))
    assert "--nproc-per-node=2 --max-restarts=0 --standalone" in two and "nodes[0]" not in two
    alone = script(ON_CPU)
    assert "torch.distributed" not in alone and "gpus-per-node" not in alone
    for text in (many, two, alone):
        assert "srun --kill-on-bad-exit=1 " in text


def test_a_key_that_is_given_twice_stands_once():
    """The last value counts; texts that end an answer add up, and are quoted."""
    given = ["batch", "7B", "k=2", "stop=a b", "-n", "5", "seed=1", "--k", "4", "task.stop=it's", "seed=2"]
    words = words_of_one([*given, "max_new_tokens=6"], "seed=3")
    listed = script(ON_CPU, words=words).partition("words=(\n")[2].partition("\n)")[0]
    assert [line.strip() for line in listed.splitlines()] == [
        "batch", "7B", "k=4", "'stop=a b'", "max_new_tokens=6", "seed=3", shlex.quote("task.stop=it's"),
        "cluster.scheduler=none", "cluster.groups=1", "task.submit=false", "task.retry_errors=false",
    ]  # fmt: skip


def stand_ins(folder: Path, setup: tuple[str, ...] = ()) -> SlurmConf:
    """Commands of Slurm's in `folder`/bin that start what they are given; a python that prints its words."""
    teller = f"""case "$*" in
        *supervisor*) shift 4; exec "$@";;
        *) exec {shlex.quote(sys.executable)} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@";;
        esac"""
    srun = 'while case "$1" in --*) true;; *) false;; esac; do shift; done; exec "$@"'
    executable(folder / "bin", teller=teller, scontrol="echo n1; echo n2", srun=srun)
    return SlurmConf(python=str(folder / "bin" / "teller"), setup=list(setup))


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs it as the first element of job 77, as Slurm would: nothing is there but the script."""
    job = {
        "JOB_ID": "77",
        "ARRAY_JOB_ID": "76",
        "ARRAY_TASK_ID": "0",
        "JOB_NAME": "a",
        "JOB_NODELIST": "n[1-2]",
    }
    env = {f"SLURM_{name}": text for name, text in job.items()} | {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    return subprocess.run(["bash"], input=text, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "cluster",
    [ON_CPU, ClusterConf(gpus=2), ClusterConf(nodes=2, gpus=2)],
    ids=["a CPU", "two GPUs", "two nodes"],
)
@pytest.mark.parametrize("named", ["work", "50%d done", "it's \\", "a\n#SBATCH --nodes=9\ntouch broken"])
def test_words_reach_the_command_as_they_were_given(
    cluster: ClusterConf, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The script is run, and begins its own log, whatever the name of the folder."""
    monkeypatch.chdir(tmp_path)
    whole = script(replace(cluster, slurm=stand_ins(tmp_path)), tmp_path / named, HOSTILE)
    done = run_script(whole, tmp_path)
    log = tmp_path / named / "logs" / "a-76_0.out"
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), log.read_text()
    told = json.loads(log.read_text())
    assert tuple(told[-len(HOSTILE) :]) == HOSTILE and told[-len(HOSTILE) - 1] == "llama_ssp"
    meeting = {"--rdzv-backend=c10d", "--rdzv-endpoint=n1:20077", "--rdzv-id=77.0", "--nnodes=2"}
    assert meeting & set(told) == (meeting if cluster.nodes > 1 else set())
    assert not list(tmp_path.rglob("broken"))


def test_the_first_line_that_fails_ends_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    slurm = stand_ins(tmp_path, setup=("true", "no_such_module load cuda", "touch broken"))
    assert run_script(script(ClusterConf(gpus=2, slurm=slurm), tmp_path / "work"), tmp_path).returncode == 2
    said = (tmp_path / "work" / "logs" / "a-76_0.out").read_text()
    assert re.search(r"error: line \d+ failed with 127: no_such_module load cuda", said)
    assert not (tmp_path / "broken").exists() and "distributed" not in said


def staging_script(model: Path, slurm: SlurmConf, folder: Path) -> str:
    """The script of a group of two nodes whose model has files."""
    cluster = ClusterConf(nodes=2, gpus=2, slurm=slurm)
    run = RunConf(model=ModelConf(name="m", path=str(model)), cluster=cluster, task=BatchConf(name="batch"))
    job = Job(run, Journal(folder / "work", Manifest("", 0, {}, ())), Path("answers.jsonl"), EMPTY)
    return sbatch_script(job, 1, ("task=batch",))


def test_models_are_copied_to_the_node_before_its_ranks_start(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Once a node, by srun; the ranks learn where, and variables are those of the node."""
    monkeypatch.chdir(tmp_path)
    slurm = stand_ins(tmp_path)
    real = f"""case "$*" in
        *slurm.stage*) exec {shlex.quote(sys.executable)} "$@";;
        *supervisor*) echo "ranks read ${STAGED}";;
        esac"""
    executable(tmp_path / "bin", teller=real)
    disk = tmp_path / "job 77"
    slurm = replace(slurm, stage=f"{tmp_path}/job $SLURM_JOB_ID")
    whole = staging_script(saved.whole, slurm, tmp_path)
    assert whole.index("slurm.stage") < whole.index("slurm.supervisor") and whole.count("slurm.stage") == 1
    assert run_script(whole, tmp_path).returncode == 0
    said = (tmp_path / "work" / "logs" / "a-76_0.out").read_text()
    assert f"{saved.whole} is copied to {disk}" in said
    assert f"ranks read {tmp_path}/job $SLURM_JOB_ID" in said
    (copy,) = disk.glob(f"*/{saved.whole.name}")
    assert fingerprint(copy) == fingerprint(saved.whole)
    assert "slurm.stage" not in staging_script(saved.whole, replace(slurm, stage=None), tmp_path)


def test_a_job_goes_on_where_nothing_can_be_copied(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    slurm = replace(stand_ins(tmp_path), stage="/proc/nothing")
    executable(tmp_path / "bin", teller='case "$*" in *slurm.stage*) exit 3;; *) echo ranks;; esac')
    assert run_script(staging_script(saved.whole, slurm, tmp_path), tmp_path).returncode == 0
    said = (tmp_path / "work" / "logs" / "a-76_0.out").read_text().splitlines()
    assert said == ["the models are read from where they are", "ranks"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition", "gpu\n#SBATCH --nodes=9"), ("account", "$HOME"), ("qos", "`id`"), ("job_name", "a/b"),
        ("time", "4 hours"), ("mem", "12 GB"), ("gpu_type", "a100:8"), ("constraint", "a;b"),
        ("options", ["-N9"]), ("options", ["--nodes=9"]), ("options", ["--comment=it's"]),
        ("options", ["--wrap=id"]), ("options", ["--x\n#SBATCH --nodes=9"]), ("setup", ["a\nb"]),
        ("options", ["--comment=a\\b"]), ("signal_s", 0), ("cpus_per_rank", -1),
    ],
)  # fmt: skip
def test_values_that_are_refused(key: str, value: object):
    with pytest.raises(UsageError, match=f"cluster.slurm.{key}"):
        cluster = ClusterConf(slurm=replace(SlurmConf(), **{key: value}))
        check_values(cluster, "cluster.")


@pytest.mark.parametrize("time", ["5", "5:30", "2:00:00", "1-0", "1-2:30", "1-02:03:04"])
def test_values_that_slurm_reads_are_taken(time: str):
    slurm = SlurmConf(time=time, options=["--exclusive", "--nodefile=a"], setup=["module load a; b='c'"])
    check_values(ClusterConf(slurm=slurm), "cluster.")
