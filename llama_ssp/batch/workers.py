"""A batch job that several groups of ranks share: its plan, and when a group is started again. No torch.

Each group runs the same command, on shards that no other group works on; they share only the job's folder.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from llama_ssp.batch.job import Job, chosen_seed, job_of, longest_in
from llama_ssp.config import Output, RunConf
from llama_ssp.config.arguments import divided, each_key_once
from llama_ssp.config.environment import rank_environment
from llama_ssp.errors import DATA, MODEL, OK, USAGE, UsageError
from llama_ssp.planner.resolve import pair_files, placed
from llama_ssp.planner.run_plan import predict, require_fit
from llama_ssp.report.console import Console
from llama_ssp.report.run_folder import config_sha256, versions
from llama_ssp.report.tables import aligned, figure

LOGS = "logs"  # in the job's folder
BYTES_PER_TOKEN = 4  # of usual text: for a plan that is made without the tokenizer
LASTING = (USAGE, DATA, MODEL)  # exit codes that another run would end with again


def share(run: RunConf, folders: list[Path], world: int) -> tuple[Job, dict[str, Any]]:
    """The job, and how every summary of it begins. Raises RunError for what does not fit `world` ranks."""
    if (ranks := rank_environment().world) > 1:
        what, where = "groups are started by the command itself", f"cluster.groups={run.cluster.groups}"
        raise UsageError(what, where, f"{ranks} ranks of torchrun", fix="start it without torchrun")
    pair = placed(pair_files(run, folders)[0], [world])
    job = job_of(pair.run, pair.files, chosen_seed(run, is_job=True))
    # By the figures of the cluster that is named; None where it says too little.
    prediction = predict(pair.run, pair.placement, slots=min(_slots(job), pair.run.model.context))
    require_fit(prediction, run.plan.enforce)
    return job, {
        "task": run.task.name,
        "config_sha256": config_sha256(job.run),
        "seed": job.seed,
        "versions": versions(),
        "records": len(job.index),
        "shards": len(job.manifest.shards),
        "shards_missing": job.missing,
        "verdict": prediction.option.verdict.value if prediction else None,
        "output": str(job.output),
        "work": str(job.work),
    }


def words_of_one(words: list[str], seed: int, *more: str) -> tuple[str, ...]:
    """Returns the command for one group: its own words replace the job's, and each key stands once."""
    off = ("cluster.scheduler=none", "cluster.groups=1", "task.submit=false", "task.retry_errors=false")
    own = each_key_once([*off, f"seed={seed}", *more])
    given, flags = divided(words)
    left_out = ("cluster.slurm.", "ranks")
    kept = {key: word for key, word in each_key_once(given).items() if not key.startswith(left_out)}
    return (*(kept | own).values(), *flags)


def show(summary: dict[str, Any], output: Output, *more: str) -> None:
    """Prints how far a job is: for people, with more lines, or as JSON."""
    console, accepted = Console(), summary["acceptance_rate"]
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


def _slots(job: Job) -> int:
    """Tokens of the longest text: as counted when the job began, else by its bytes."""
    if not job.is_new:
        return longest_in(job.journal)
    rows = job.index.rows
    return int((rows["bytes"] // BYTES_PER_TOKEN + 1 + rows["new"]).max(initial=2))


def code_of(returned: int, file: Path | None = None) -> int:
    """How a group ended: 0, the code that a rank wrote, or that of the process that started the ranks.

    torchrun exits with 1 whatever its ranks exit with, so a rank writes its code into a file (`leave_code`).
    """
    if returned != OK and file is not None:
        with suppress(OSError, ValueError):
            return int(file.read_text(encoding="ascii"))
    return 128 - returned if returned < 0 else returned
