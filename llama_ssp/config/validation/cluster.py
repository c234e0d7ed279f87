"""Checks of the cluster and of its scheduler's options."""

from __future__ import annotations

from collections.abc import Sequence

from llama_ssp.config import BatchConf, PlanConf, RunConf, Scheduler
from llama_ssp.errors import UsageError


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
