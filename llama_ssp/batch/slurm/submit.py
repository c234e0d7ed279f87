"""task=batch on Slurm: the script of an array, printed or submitted; and the queue. No torch."""

import logging
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote

from llama_ssp import __version__
from llama_ssp.batch.atomic_files import replace_whole
from llama_ssp.batch.job import Job
from llama_ssp.batch.workers import LOGS, share, words_of_one
from llama_ssp.config import BatchConf, ClusterConf, Output, RunConf
from llama_ssp.distributed.launcher import SOURCES
from llama_ssp.errors import OK, DistributedError, UsageError, one_line
from llama_ssp.planner.storage import CPU
from llama_ssp.report.console import Console

log = logging.getLogger(__name__)

FOLDER, SCRIPT = "slurm", ".sbatch"  # in the job's folder: each script that was submitted, by its number
PATIENCE_S = 60.0  # a controller that is down keeps its commands waiting
CORES = 8  # of a rank: for Python, NCCL's threads and what compiles
# What squeue tells of an element that waits or runs; `number` is SLURM_JOB_ID in its processes.
QUEUED = {"job": "%i", "number": "%A", "state": "%T", "reason": "%r", "spent": "%M", "nodes": "%N"}
NO_TIME = "# No --time: the partition's own limit. cluster.slurm.time=4:00:00 sets another."
NO_CORES = "# No --cpus-per-task: the cluster's own default. cluster.slurm.cpus_per_rank=8 sets another."
TEMPLATE = Path(__file__).with_name("element.sh")
# The nodes of a group meet at the first one. The port is below those that the system deals out.
NODES = 'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))'
MEETING = (
    '--rdzv-backend=c10d --rdzv-endpoint="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"',
    '--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
)


def execute(run: RunConf, folders: list[Path], words: list[str]) -> int:
    """Prints the script or submits it; `words` are the command's own. Returns the exit code."""
    task = run.task_as(BatchConf)
    run = replace(run, cluster=with_cores(run.cluster))
    cluster = run.cluster
    job, summary = share(run, folders, cluster.nodes * (cluster.gpus or 1))
    if (task.retry_errors or job.corrected) and not (task.submit or job.is_new):
        what, fix = "a printed script cannot take answers back", "add task.submit=true"
        raise UsageError(what, "task.retry_errors, corrected lines", fix=fix)
    job.reopen()
    if missing := job.missing:
        elements = min(cluster.groups, missing)
        if elements < cluster.groups:
            said = "an array of %d, not of cluster.groups=%d: so many shards are missing"
            log.info(said, elements, cluster.groups)
        script = sbatch_script(job, elements, words_of_one(words, *job.words))
        if task.submit:
            number = _submit(job, script)
            log.info("submitted: job %s, array of %d, logs in %s/%s", number, elements, summary["work"], LOGS)
            summary |= {"status": "submitted", "job": number, "elements": elements}
        else:
            summary |= {"status": "printed", "script": script}
            if run.output is not Output.json:
                Console().write(script)
    else:
        job.journal.merge(job.output)
        log.info("nothing is missing: %s is whole", job.output)
        summary |= {"status": "done", "job": None}
    Console().document(summary, run.output)
    return OK


def with_cores(cluster: ClusterConf) -> ClusterConf:
    """Returns the cluster with the CPU cores of a rank, if the user has not said how many."""
    slurm, cores = cluster.slurm, 1
    if slurm.cpus_per_rank is not None:
        return cluster
    if cluster.gpu != CPU:
        cores, told, sizes = CORES, "", ""
        with suppress(DistributedError):  # the script may be for another machine
            told = _run("scontrol", "show", "config").stdout
            told += _run("scontrol", "show", "partition", *filter(None, [slurm.partition])).stdout
            sizes = _run("sinfo", "-ho%c", *([f"-p{slurm.partition}"] if slurm.partition else [])).stdout
        cores = min([cores, *(int(size) // (cluster.gpus or 1) for size in re.findall(r"\d+", sizes))])
        cores = 0 if "DefCpuPerGPU=" in told else max(cores, 1)
    return replace(cluster, slurm=replace(slurm, cpus_per_rank=cores))


def sbatch_script(job: Job, elements: int, words: tuple[str, ...]) -> str:
    """Returns the script of an array; `words` are the command of one process of a group."""
    cluster = job.run.cluster
    slurm, ranks, work = cluster.slurm, cluster.gpus or 1, job.journal.folder.absolute()
    name = slurm.job_name or re.sub(r"[^\w.+=@-]", "_", f"llama-ssp-{job.output.stem}")[:100]
    gpus = f"{slurm.gpu_type}:{ranks}" if slurm.gpu_type else ranks
    cpus = (slurm.cpus_per_rank or 0) * ranks or None
    # Values hold no quotes, backslashes or line breaks (config/validation).
    options: dict[str, object] = {"job-name": name, "partition": slurm.partition, "account": slurm.account}
    options |= {"qos": slurm.qos, "constraint": slurm.constraint, "array": f"0-{elements - 1}"}
    options |= {"nodes": cluster.nodes, "ntasks-per-node": 1, "cpus-per-task": cpus}
    options |= {"gpus-per-node": None if cluster.gpu == CPU else gpus, "mem": slurm.mem, "time": slurm.time}
    options |= {"signal": f"B:USR1@{slurm.signal_s}", "requeue": "", "output": "/dev/null"}
    options |= {key: value for key, _, value in (option[2:].partition("=") for option in slurm.options)}
    given = {key: str(value) for key, value in options.items() if value is not None}
    lines = [f"#SBATCH --{key}{value and '=' + quote(value)}" for key, value in given.items()]
    lines += [*([] if "time" in given else [NO_TIME]), *([] if cpus else [NO_CORES])]
    first, *meeting = [f"--nnodes={cluster.nodes}", *MEETING] if cluster.nodes > 1 else ["--standalone"]
    torchrun = [f"-m torch.distributed.run --nproc-per-node={ranks} --max-restarts=0 {first}", *meeting]
    more = [f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{slurm.cpus_per_rank}}}"] * bool(cpus)
    more += [NODES] * (cluster.nodes > 1)
    paths = {"logs": work / LOGS, "here": Path.cwd(), "python": slurm.python or sys.executable}
    values = {name: quote(str(path)) for name, path in (paths | {"sources": SOURCES, "work": work}).items()}
    values |= {"version": __version__, "options": "\n".join(lines), "setup": "\n".join(slurm.setup)}
    values |= {"words": "\n".join(f"    {quote(word)}" for word in words), "more": "\n".join(more)}
    values |= {"signal_s": str(slurm.signal_s), "cpus": f" --cpus-per-task={cpus}" if cpus else ""}
    values["torchrun"] = "".join(f"{line} \\\n    " for line in torchrun) if cluster.nodes * ranks > 1 else ""
    return re.sub(r"@(\w+)@", lambda place: values[place[1]], TEMPLATE.read_text(encoding="ascii"))


def _submit(job: Job, script: str) -> str:
    """Submits the script; returns the job's number. Raises UsageError for a job that is in the queue."""
    ping = _run("scontrol", "ping")
    if " UP" not in ping.stdout:
        raise _silent(ping.stdout or ping.stderr)
    holders = {str(holder.get("job")) for holder in job.journal.holders()}
    if waiting := queue_of([*submissions(job.journal.folder), *filter(str.isdecimal, holders)]):
        found = f"job {waiting[0]['job']}, {waiting[0]['state']}"
        fix = "follow it with task.status=true, or cancel it with scancel first"
        raise UsageError("this job is in the queue already", where=job.journal.folder, found=found, fix=fix)
    done = _run("sbatch", "--parsable", script=script)
    number = done.stdout.strip().partition(";")[0]  # a federation adds the name of the cluster
    if done.returncode != 0 or not number.isdecimal():
        said, fix = one_line(done.stderr.replace("sbatch:", "")), "correct cluster.slurm.*, nodes and gpus"
        raise UsageError("Slurm refuses the job", found=said, fix=fix)
    job.index.save(job.journal.folder)  # before the first element has started
    replace_whole(job.journal.folder / FOLDER / f"{number}{SCRIPT}", script.encode())
    return number


def submissions(work: Path) -> list[str]:
    """The jobs that were submitted, by Slurm's numbers, oldest first."""
    jobs = [path.stem for path in (work / FOLDER).glob(f"*{SCRIPT}")]
    return sorted(jobs, key=lambda job: (len(job), job))


def queue_of(jobs: list[str]) -> list[dict[str, str]]:
    """Returns the elements of these jobs that wait or run; none of jobs that have ended."""
    if not jobs:
        return []
    form = f"--format={'|'.join(QUEUED.values())}"
    done = _run("squeue", "--noheader", "--array", f"--jobs={','.join(jobs)}", form)
    if done.returncode != 0 and "Invalid job id" not in done.stderr:  # printed also for a job of long ago
        raise _silent(done.stderr)
    lines = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == len(QUEUED) - 1]
    return [dict(zip(QUEUED, line, strict=True)) for line in lines]


def _run(*command: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except FileNotFoundError:
        what, fix = "this machine has none of Slurm's commands", "print the script: task.submit=false"
        raise DistributedError(what, found=f"no {command[0]}", fix=fix) from None
    except subprocess.TimeoutExpired:
        raise _silent(f"{command[0]} said nothing for {PATIENCE_S:g} s") from None


def _silent(found: str) -> DistributedError:
    fix = "try scontrol ping; is SLURM_CONF right?"
    return DistributedError("Slurm does not answer", found=one_line(found), fix=fix)
