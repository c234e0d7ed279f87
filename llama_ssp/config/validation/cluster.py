"""What a cluster may be, and what may be asked of its scheduler."""

from __future__ import annotations

import re

from llama_ssp.config import BatchConf, ClusterConf, PlanConf, RunConf, Scheduler, SlurmConf
from llama_ssp.config.validation.values import between
from llama_ssp.errors import UsageError

# How Slurm writes a time: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S.
SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
WORDS = {
    "partition": re.compile(r"[\w.,+@:-]+"),
    "account": re.compile(r"[\w.+@:-]+"),
    "qos": re.compile(r"[\w.+@:-]+"),
    "constraint": re.compile(r"[\w.,:+&|*()\[\]{}-]+"),
    "time": SLURM_TIME,
    "mem": re.compile(r"\d+[KMGT]?"),
    "gpu_type": re.compile(r"[\w.-]+"),
    "job_name": re.compile(r"[\w.+=@-]{1,100}"),
}
# What the script itself decides: a second value would break the restarts, or hide the logs.
OWN_OPTIONS = (
    "array", "chdir", "error", "export", "gpus", "gpus-per-node", "kill-on-bad-exit", "no-requeue", "nodes",
    "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "test-only", "wait",
    "wrap",
)  # fmt: skip


def check_cluster(cluster: ClusterConf) -> None:
    between("cluster.reserve", cluster.reserve, 0.0, 0.9)
    between("cluster.nodes", cluster.nodes, 1, 1024)
    between("cluster.groups", cluster.groups, 1, 100_000)
    if cluster.gpus is not None:
        between("cluster.gpus", cluster.gpus, 1, 1024, "null is what there is")
    for name in ("gib", "gb_s", "tflops", "link_gb_s"):
        if (value := getattr(cluster, name)) is not None:
            between(f"cluster.{name}", value, 0.0, 2.0**20, "null looks it up", above=True)
    for name in ("context_mib", "cublas_mib", "nccl_mib", "graph_mib"):
        if (value := getattr(cluster, name)) is not None:
            between(f"cluster.{name}", value, 0.0, 2.0**20)
    times = cluster.times
    for name in ("bandwidth_share", "flops_share"):
        if (value := getattr(times, name)) is not None:
            between(f"cluster.times.{name}", value, 0.0, 2.0, above=True)
    for name in ("layer_us", "step_us", "round_us", "check_us", "law_ns", "accept_ns", "message_us"):
        if (value := getattr(times, name)) is not None:
            between(f"cluster.times.{name}", value, 0.0, 1e9)
    for name in ("all_reduce_us", "rows_cost"):
        for count, value in getattr(times, name).items():
            between(f"cluster.times.{name} count", count, 1, 2**20)
            between(f"cluster.times.{name}", value, 0.0, 1e9)
    _check_slurm(cluster.slurm)


def check_sharing(run: RunConf) -> None:
    """Only a batch job can be shared, and only a scheduler takes one; a plan is about one group anyway."""
    cluster, task = run.cluster, run.task
    for key, value, usual in (("scheduler", cluster.scheduler.value, "none"), ("groups", cluster.groups, 1)):
        if value != usual and not isinstance(task, BatchConf | PlanConf):
            raise UsageError(
                f"cluster.{key} is for task=batch", found=f"{value}, task={task.name}",
                fix=f"it would run here and now: leave cluster.{key} out if that is what you want",
            )  # fmt: skip
    if isinstance(task, BatchConf) and task.submit and cluster.scheduler is Scheduler.none:
        raise UsageError(
            "task.submit=true needs a scheduler", found="cluster.scheduler=none", fix="use cluster=slurm"
        )
    if cluster.scheduler is Scheduler.slurm and cluster.gpus is None:
        raise UsageError(
            "cluster.gpus is missing: how many ranks a node of the job gets", where="cluster.scheduler=slurm",
            fix="write cluster.gpus=N; with cluster.gpu=cpu they are N processes",
        )  # fmt: skip


def _check_slurm(slurm: SlurmConf) -> None:
    """Every word becomes part of a line that sbatch reads: none may end it, or begin another option."""
    for name, shape in WORDS.items():
        if (value := getattr(slurm, name)) is not None and not shape.fullmatch(value):
            raise UsageError(
                f"cluster.slurm.{name} cannot be used", found=repr(value), allowed=shape.pattern,
                fix="see man sbatch, or leave it out",
            )  # fmt: skip
    between("cluster.slurm.signal_s", slurm.signal_s, 1, 65535, "seconds to stop before the time limit")
    if slurm.cpus_per_rank is not None:
        between("cluster.slurm.cpus_per_rank", slurm.cpus_per_rank, 1, 4096)
    if slurm.time is not None and seconds_of(slurm.time) <= slurm.signal_s:
        raise UsageError(
            "cluster.slurm.time leaves no time to work", found=f"{slurm.time}, of which the last"
            f" {slurm.signal_s} s are for stopping", fix="raise it, or lower cluster.slurm.signal_s",
        )  # fmt: skip
    for option in slurm.options:
        name = option.partition("=")[0].removeprefix("--")
        if not option.startswith("--") or name in OWN_OPTIONS or not _is_plain(option):
            raise UsageError(
                "a cluster.slurm.options entry cannot be used", found=repr(option),
                allowed="--OPTION or --OPTION=VALUE, on one line and without ', none of: "
                + ", ".join(OWN_OPTIONS), fix="see man sbatch; the script sets these itself",
            )  # fmt: skip
    for key in ("setup", "torchrun"):
        for line in getattr(slurm, key):
            if not line.strip() or any(ord(c) < 32 for c in line):
                raise UsageError(
                    f"a cluster.slurm.{key} entry is not one line", found=repr(line),
                    fix=f"write 'cluster.slurm.{key}=[\"one\",\"another\"]'",
                )  # fmt: skip


def _is_plain(text: str) -> bool:
    return "'" not in text and all(ord(c) >= 32 for c in text)


def seconds_of(time: str) -> int:
    """What Slurm means by it."""
    found = SLURM_TIME.fullmatch(time)
    assert found is not None, time
    parts = [int(found[name]) if found[name] else 0 for name in ("first", "second", "third")]
    if found["days"] is not None or found["third"] is not None:  # hours first
        hours, minutes, seconds = parts
        return ((int(found["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return parts[0] * 60 + parts[1]
