"""Checks of the cluster and of its scheduler's options."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llama_ssp.config import BatchConf, ClusterConf, PlanConf, RunConf, Scheduler
from llama_ssp.config.schema import SLURM_TIME
from llama_ssp.errors import UsageError

# The script sets these itself: a second value would break restarts, or hide the logs.
OWN_OPTIONS = (
    "array", "chdir", "error", "export", "gpus", "gpus-per-node", "kill-on-bad-exit", "no-requeue", "nodes",
    "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "test-only", "wait",
    "wrap",
)  # fmt: skip


def check_sharing(run: RunConf, words: Sequence[str] = ()) -> None:
    """Refuses groups and schedulers for other tasks than a batch job, or a plan, which is about one group.

    Refuses settings of Slurm among the `words`, too, if nothing says which scheduler is meant.
    """
    cluster, task = run.cluster, run.task
    for key, value, usual in (("scheduler", cluster.scheduler.value, "none"), ("groups", cluster.groups, 1)):
        if value != usual and not isinstance(task, BatchConf | PlanConf):
            what, found = f"cluster.{key} is for task=batch", f"{value}, task={task.name}"
            preset = f" and cluster={value}" * (key == "scheduler")
            fix = f"it would run here and now: leave cluster.{key}{preset} out if that is what you want"
            raise UsageError(what, found=found, fix=fix)
    keys = [word.lstrip("+").partition("=")[0] for word in words]
    unused = [key for key in keys if key.startswith("cluster.slurm.")]
    if unused and cluster.scheduler is Scheduler.none and "cluster.scheduler" not in keys:
        fix = "write cluster=slurm, or leave it out"
        raise UsageError(f"{unused[0]} is given, and Slurm starts nothing", fix=fix)
    if isinstance(task, BatchConf) and task.submit and cluster.scheduler is Scheduler.none:
        what = "task.submit=true needs a scheduler"
        raise UsageError(what, found="cluster.scheduler=none", fix="use cluster=slurm")
    if cluster.scheduler is not Scheduler.none and cluster.gpus is None:
        what = "cluster.gpus is missing: how many ranks a node of the job gets"
        fix = "write cluster.gpus=N; with cluster.gpu=cpu they are N processes"
        raise UsageError(what, f"cluster.scheduler={cluster.scheduler}", fix=fix)


def check_cluster(cluster: ClusterConf) -> None:
    """Refuses a time limit that leaves no time to work, and options that the script sets itself."""
    slurm = cluster.slurm
    if slurm.time is not None and seconds_of(slurm.time) <= slurm.signal_s:
        found = f"{slurm.time}, of which the last {slurm.signal_s} s are for stopping"
        fix = "raise it, or lower cluster.slurm.signal_s"
        raise UsageError("cluster.slurm.time leaves no time to work", found=found, fix=fix)
    for option in slurm.options:
        name = option.partition("=")[0].removeprefix("--")
        odd = any(ord(c) < 32 or c in "'\\" for c in option)
        if not option.startswith("--") or name in OWN_OPTIONS or odd:
            own = ", ".join(OWN_OPTIONS)
            allowed = f"--OPTION or --OPTION=VALUE, on one line and without ' and \\, none of: {own}"
            what, fix = "a cluster.slurm.options entry cannot be used", "see man sbatch"
            raise UsageError(what, "", repr(option), allowed, fix)


def seconds_of(time: str) -> int:
    """The seconds of a time as Slurm writes it."""
    found = re.fullmatch(SLURM_TIME, time)
    assert found is not None, time
    parts = [int(found[name]) if found[name] else 0 for name in ("first", "second", "third")]
    if found["days"] is not None or found["third"] is not None:  # hours first
        hours, minutes, seconds = parts
        return ((int(found["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return parts[0] * 60 + parts[1]
