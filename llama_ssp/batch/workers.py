"""A batch job that several groups of ranks share, and its groups on this machine. No torch.

Each group runs this very command on shards that no other group works on; they share only the job's folder. On
this machine, with cluster.groups=N, a group has GPUs and a log of its own, and is started again as long as
the job progresses. On a cluster Slurm starts them (slurm/).
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llama_ssp.batch.atomic_files import storing
from llama_ssp.batch.job import Job, chosen_seed, job_of
from llama_ssp.batch.journal import acceptance, count_finished
from llama_ssp.batch.preview import longest_text
from llama_ssp.config import BatchConf, Output, RunConf
from llama_ssp.config.arguments import divided, each_key_once
from llama_ssp.config.environment import rank_environment
from llama_ssp.distributed.gpus import gpus_here
from llama_ssp.distributed.launcher import import_path
from llama_ssp.distributed.signals import end_with_parent
from llama_ssp.errors import DATA, MODEL, OK, USAGE, UsageError
from llama_ssp.placing.pairs import pair_files, placed
from llama_ssp.placing.prediction import predict, require_fit
from llama_ssp.placing.request import Known
from llama_ssp.planner.plan import make_plan
from llama_ssp.planner.storage import CPU
from llama_ssp.report.console import Console, Progress
from llama_ssp.report.run_folder import config_sha256, versions
from llama_ssp.report.tables import aligned, figure
from llama_ssp.speculative.stats import ratio

log = logging.getLogger(__name__)

LOGS = "logs"  # in the job's folder
LASTING = (USAGE, DATA, MODEL)  # exit codes that another run would end with again
COUNT_S = 3.0  # between two looks at the job, while no group ends
STOP_S = 60.0  # for groups to stop after SIGTERM


def share(run: RunConf, folders: list[Path], world: int) -> tuple[Job, dict[str, Any]]:
    """The job, and how every summary of it begins. Raises RunError for what does not fit `world` ranks."""
    if (ranks := rank_environment().world) > 1:
        raise UsageError(
            "groups are started by the command itself",
            where=f"cluster.groups={run.cluster.groups}",
            found=f"{ranks} ranks of torchrun",
            fix="start it without torchrun",
        )
    pair = placed(pair_files(run, folders)[0], [world])
    job = job_of(pair.run, pair.files, chosen_seed(run, is_job=True))
    manifest = job.journal.manifest
    slots = longest_text(pair.run, job.index, manifest.longest)
    # By the figures of the cluster that is named; None where it says too little.
    prediction = predict(pair.run, pair.placement, Known(slots=slots))
    require_fit(prediction, run.plan.enforce)
    if run.cluster.nodes > 1 and prediction is not None:
        for line in make_plan(prediction.request, pair.placement).said_of_nodes():
            log.info("%s", line)
    verdict = prediction.option.verdict.value if prediction else None
    summary: dict[str, Any] = {"task": run.task.name, "config_sha256": config_sha256(job.run)}
    summary |= {"seed": manifest.settings["seed"], "records": manifest.records, "verdict": verdict}
    summary |= {"shards": len(manifest.shards), "shards_missing": job.missing, "versions": versions()}
    return job, {**summary, "output": str(job.output), "work": str(job.journal.folder)}


def words_of_one(words: list[str], *more: str) -> tuple[str, ...]:
    """Returns the command for one group: its own words replace the job's, and each key stands once."""
    off = ("cluster.scheduler=none", "cluster.groups=1", "task.submit=false", "task.retry_errors=false")
    own = each_key_once([*off, *more])
    given, flags = divided(words)
    left_out = ("cluster.slurm.", "ranks")
    kept = {key: word for key, word in each_key_once(given).items() if not key.startswith(left_out)}
    return (*(kept | own).values(), *flags)


def show(summary: dict[str, Any], output: Output, *more: str) -> None:
    """Prints how far a job is: for people, with more lines, or as JSON."""
    console = Console()
    accepted = summary["acceptance_rate"]
    share = f" ({100 * summary['records_finished'] // summary['records']} %)" if summary["records"] else ""
    rows = [
        ["status", summary["status"]],
        ["records", f"{summary['records_finished']} of {summary['records']}{share}"],
        ["errors", str(summary["records_failed"])],
        ["tokens", f"{summary['tokens_committed']}, {figure(summary['tokens_per_s'], 1)} a second"],
        *([] if accepted is None else [["acceptance", figure(accepted)]]),
        ["shards", f"{summary['shards_done']} of {summary['shards']}"],
        ["failures", str(summary["failures"])],
        ["output", summary["output"]],
    ]
    if output is not Output.json:
        console.write("\n".join([*aligned(rows, words=2), *more, ""]))
    console.document(summary, output)


def code_of(returned: int, file: Path | None = None) -> int:
    """How a group ended: 0, the code that a rank wrote, or that of the process that started the ranks."""
    if returned != OK and file is not None:  # of torchrun it is 1 whatever its ranks exit with
        with suppress(OSError, ValueError):
            return int(file.read_text(encoding="ascii"))
    return 128 - returned if returned < 0 else returned


@dataclass(kw_only=True)
class WorkerGroup:
    """One group: its process, and in how many runs in a row no record was finished."""

    log: Path
    command: list[str]
    devices: list[str] | None = None
    process: subprocess.Popen[bytes] | None = None
    began: int = 0
    fruitless: int = 0
    failures: int = 0
    code: int = OK

    def start(self, finished: int) -> None:
        """Starts the command; `finished` counts the job's finished records."""
        self.began = finished
        devices = {} if self.devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)}
        with storing(self.log), self.log.open("ab") as log_:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **import_path(), **devices},
                stdin=subprocess.DEVNULL,
                stdout=log_,
                stderr=log_,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            )

    def follow(self, finished: int, retries: int) -> None:
        """Starts the command again where it has failed, unless another run would end as this one.

        A record that kills its ranks does so twice among others and `retries` times alone; then it is set
        aside, which counts as finished. So more runs in a row that finish nothing have another cause.
        """
        if self.process is None or (returned := self.process.poll()) is None:
            return
        self.process = None
        self.code = code_of(returned)
        if self.code == OK:
            return
        self.failures += 1
        self.fruitless = 0 if finished > self.began else self.fruitless + 1
        if self.code in LASTING or self.fruitless > retries + 1:
            log.error("a group gave up with %d; see %s", self.code, self.log)
        else:
            log.warning("a group ended with %d, started again; %s", self.code, self.log)
            self.start(finished)


def execute(run: RunConf, folders: list[Path], words: list[str]) -> int:
    """Runs groups on this machine to the end; the exit code of the first that failed for good."""
    task = run.task_as(BatchConf)
    began = time.time()
    if run.cluster.nodes > 1:
        raise UsageError(
            "several groups of several nodes need a scheduler",
            found=f"cluster.nodes={run.cluster.nodes}",
            fix="use cluster.scheduler=slurm, or start torchrun for each group yourself (docs/cluster.md)",
        )
    devices = _dealt(run)
    ranks = run.cluster.gpus or len(devices[0] or [""])
    job, summary = share(run, folders, ranks)
    logs = job.journal.folder / LOGS
    with storing(logs):
        logs.mkdir(parents=True, exist_ok=True)
    job.reopen()
    job.index.save(job.journal.folder)
    own = words_of_one(words, *job.words, f"cluster.gpus={ranks}", f"ranks={ranks}")
    command = [sys.executable, "-m", "llama_ssp", *own]
    count = min(run.cluster.groups, max(job.missing, 1))
    groups = [
        WorkerGroup(log=logs / f"group-{n}.log", command=command, devices=devices[n]) for n in range(count)
    ]
    log.info("groups: %d, with %d ranks each; logs in %s", count, ranks, logs)
    try:
        finished = count_finished(job.journal.folder)
        for group in groups:
            group.start(finished)
        with Progress("batch", job.journal.manifest.records, "records") as bar:
            bar.start(finished)
            while processes := [group.process for group in groups if group.process]:
                with suppress(subprocess.TimeoutExpired):
                    processes[0].wait(COUNT_S)
                before = finished
                finished = count_finished(job.journal.folder)
                bar.advance(finished - before)
                for group in groups:
                    group.follow(finished, task.retries)
    finally:  # however this ends, no group outlives it; each stops at a record's end
        processes = [group.process for group in groups if group.process is not None]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + STOP_S
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    code = next((group.code for group in groups if group.code != OK), OK)
    show(summary | _figures(job, groups, began, code), run.output)
    return code


def _figures(job: Job, groups: list[WorkerGroup], began: float, code: int) -> dict[str, Any]:
    """The summary of all groups that this machine has started since then."""
    (standing, done) = job.journal.survey()
    wall_s = time.time() - began
    node = socket.gethostname()
    ours = [group for group in done if group.node == node and group.began >= began]
    tokens = sum(group.tokens for group in ours)
    failures = sum(group.failures for group in groups)
    status = "done" if job.output.is_file() else "partial"  # others are at work on the rest
    summary = {**asdict(standing), "shards_missing": job.missing, "status": "error" if code else status}
    summary |= {"groups": len(groups), "failures": failures, "tokens_committed": tokens}
    summary |= {"acceptance_rate": acceptance(ours), "tokens_per_s": ratio(tokens, wall_s), "wall_s": wall_s}
    return summary


def _dealt(run: RunConf) -> list[list[str] | None]:
    """Each group's GPUs, as CUDA_VISIBLE_DEVICES names them; None where the CPU computes."""
    cluster = run.cluster
    there = [] if CPU in (cluster.gpu, run.placement.target_device) else gpus_here()
    if not there:
        return [None] * cluster.groups
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = hidden.split(",") if hidden else [str(number) for number in range(len(there))]
    each = cluster.gpus or len(names) // cluster.groups
    if each == 0 or each * cluster.groups > len(names):
        raise UsageError(
            "there are too few GPUs for the groups",
            where="cluster.groups, cluster.gpus",
            found=f"{cluster.groups} groups of {max(each, 1)}",
            allowed=f"{len(names)} GPUs in all",
            fix="ask for fewer or smaller groups",
        )
    return [names[number * each : (number + 1) * each] for number in range(cluster.groups)]
