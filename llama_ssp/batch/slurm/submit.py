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
from llama_ssp.config import BatchConf, ClusterConf, Output, RunConf, Weights
from llama_ssp.config.arguments import divided
from llama_ssp.distributed.launcher import SOURCES
from llama_ssp.errors import OK, DistributedError, UsageError, one_line
from llama_ssp.models.checkpoint import find
from llama_ssp.models.staged import STAGED
from llama_ssp.planner.storage import CPU
from llama_ssp.report.console import Console

log = logging.getLogger(__name__)

# In the job's folder: each script that was submitted, as slurm/NUMBER.sbatch.
FOLDER = "slurm"
SCRIPT_SUFFIX = ".sbatch"
PATIENCE_S = 60.0  # a controller that is down keeps its commands waiting
CORES = 8  # of a rank with a GPU: for Python, NCCL's threads and what compiles
# What squeue tells of an element that waits or runs; `number` is SLURM_JOB_ID in its processes.
QUEUED = {"job": "%i", "number": "%A", "state": "%T", "reason": "%r", "spent": "%M", "nodes": "%N"}
NO_TIME = "# No --time: the partition's own limit. cluster.slurm.time=4:00:00 sets another."
NO_CORES = "# No --cpus-per-task: the cluster's own default. cluster.slurm.cpus_per_rank=8 sets another."
ADDED = "not of the command: one group of this job, with the seed and the drafts that all have"
TEMPLATE = Path(__file__).with_name("element.sh")  # @name@ stands for a value of `sbatch_script`
# The nodes of a group meet at the first one, at a port from 20000 to 29999. Linux gives out ports from 32768
# on by itself, so it is free.
NODES = 'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))'
MEETING = (
    '--rdzv-backend=c10d --rdzv-endpoint="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"',
    '--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
)


def execute(run: RunConf, folders: list[Path], words: list[str]) -> int:
    """Prints the script or submits it. Returns the exit code.

    `words` is the command line that the user gave, without the program's name.
    """
    task = run.task_as(BatchConf)
    run = replace(run, cluster=with_cores(run.cluster))
    cluster = run.cluster
    job, summary = share(run, folders, cluster.nodes * (cluster.gpus or 1))
    takes_back = not job.is_new and bool(task.retry_errors or job.corrected)
    if takes_back and not task.submit:
        raise UsageError(
            "a printed script cannot take answers back",
            where="task.retry_errors, corrected lines",
            fix="add task.submit=true",
        )
    if takes_back:
        _require_not_queued(job)  # or they would be gone, and the submission is refused
    job.reopen()  # where only a script is printed, at most the index is renewed: lines have moved
    if missing := job.missing:  # shards
        elements = min(cluster.groups, missing)
        if elements < cluster.groups:
            said = "an array of %d, not of cluster.groups=%d: so many shards are missing"
            log.info(said, elements, cluster.groups)
        one = words_of_one(words, *job.words)
        given, flags = divided(words)
        script = sbatch_script(job, elements, one, frozenset(one) - {*given, *flags})
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
    """Returns the cluster with the CPU cores of a rank, if the user has not said how many.

    0 stands for no --cpus-per-task: the cluster has a default for each GPU.
    """
    slurm = cluster.slurm
    if slurm.cpus_per_rank is not None:
        return cluster

    if cluster.gpu == CPU:
        cores = 1  # as Slurm gives a task by itself; more are for the user to ask for
    else:
        has_default, cores_of_nodes = _told_by_slurm(slurm.partition)
        ranks_of_node = cluster.gpus or 1
        cores = min([CORES, *(count // ranks_of_node for count in cores_of_nodes)])
        cores = 0 if has_default else max(cores, 1)
    return replace(cluster, slurm=replace(slurm, cpus_per_rank=cores))


def _told_by_slurm(partition: str | None) -> tuple[bool, list[int]]:
    """Returns whether the cluster counts cores by GPU itself, and the cores of its nodes, each size once.

    Without a partition this is about all of them. On a machine without Slurm it is False, [].
    """
    defaults = ""
    sizes = ""  # such as 128+
    with suppress(DistributedError):  # the script may be for another machine
        defaults = _run("scontrol", "show", "config").stdout
        defaults += _run("scontrol", "show", "partition", *([partition] if partition else [])).stdout
        sizes = _run("sinfo", "-ho%c", *([f"-p{partition}"] if partition else [])).stdout
    return "DefCpuPerGPU=" in defaults, [int(size) for size in re.findall(r"\d+", sizes)]


def sbatch_script(
    job: Job, elements: int, words: tuple[str, ...], added: frozenset[str] = frozenset()
) -> str:
    """Returns the script of an array; `words` are the command of one process of a group.

    Those `added` by this program are the last ones, under a line that says why they are there.
    """
    cluster = job.run.cluster
    slurm = cluster.slurm
    ranks = cluster.gpus or 1  # on each node
    work = job.journal.folder.absolute()
    name = slurm.job_name or re.sub(r"[^\w.+=@-]", "_", f"llama-ssp-{job.output.stem}")[:100]
    gpus = f"{slurm.gpu_type}:{ranks}" if slurm.gpu_type else ranks
    cpus = slurm.cpus_per_rank * ranks if slurm.cpus_per_rank else None

    # No value holds a quote, a backslash or a line break (config/validation): `quote` is enough below.
    options: dict[str, object] = {
        "job-name": name,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "array": f"0-{elements - 1}",
        "nodes": cluster.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "gpus-per-node": None if cluster.gpu == CPU else gpus,
        "mem": slurm.mem,
        "time": slurm.time,
        "signal": f"B:USR1@{slurm.signal_s}",  # to the script itself (B), so long before the time limit
        "requeue": "",  # an option without a value
        "output": "/dev/null",  # the script opens its log itself
    }
    for option in slurm.options:
        key, _, value = option.removeprefix("--").partition("=")
        options[key] = value
    given = {key: str(value) for key, value in options.items() if value is not None}
    # srun does not take this over from sbatch, and refuses more than sbatch got.
    cores_of_node = given.get("cpus-per-task", "")
    cores_of_rank = int(cores_of_node) // ranks if cores_of_node.isdecimal() else 0
    lines = []
    for key, value in given.items():
        lines.append(f"#SBATCH --{key}={quote(value)}" if value else f"#SBATCH --{key}")
    if "time" not in given:
        lines.append(NO_TIME)
    if not cores_of_node:
        lines.append(NO_CORES)

    # Each item of `torchrun` is a line of the script; one rank needs none.
    several_nodes = cluster.nodes > 1
    meeting = [f"--nnodes={cluster.nodes}", *MEETING] if several_nodes else ["--standalone"]
    launcher = f"-m torch.distributed.run --nproc-per-node={ranks} --max-restarts=0 {meeting[0]}"
    torchrun = [launcher, *meeting[1:]] if cluster.nodes * ranks > 1 else []
    more = []
    if cores_of_rank:
        more.append(f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{cores_of_rank}}}")
    if several_nodes:
        more.append(NODES)
    cpus_of_srun = f" --cpus-per-task={quote(cores_of_node)}" if cores_of_node else ""
    more += _staging(job.run, cpus_of_srun)

    given_words = [f"    {quote(word)}" for word in words if word not in added]
    added_words = [f"    {quote(word)}" for word in words if word in added]
    values = {
        "version": __version__,
        "options": "\n".join(lines),
        "logs": quote(str(work / LOGS)),
        "here": quote(str(Path.cwd())),
        "setup": "\n".join(slurm.setup),
        "python": quote(str(slurm.python or sys.executable)),
        "sources": quote(str(SOURCES)),
        "more": "\n".join(more),
        "words": "\n".join([*given_words, *([f"    # {ADDED}", *added_words] if added_words else [])]),
        "work": quote(str(work)),
        "signal_s": str(slurm.signal_s),
        "cpus": cpus_of_srun,
        "torchrun": "".join(f"{line} \\\n    " for line in torchrun),
    }
    return re.sub(r"@(\w+)@", lambda place: values[place[1]], TEMPLATE.read_text(encoding="ascii"))


def _staging(run: RunConf, cpus: str) -> list[str]:
    """Returns the lines of the script that copy the models to each node's own disk; none without `stage`."""
    stage = run.cluster.slurm.stage
    if stage is None:
        return []
    roles = {"model": run.model, "draft": run.draft if run.has_draft_model else None}
    models = [
        find(model, role).absolute()
        for role, model in roles.items()
        if model is not None and model.weights is Weights.checkpoint
    ]
    if not models:
        return []
    return [
        f"export {STAGED}={quote(stage)}",
        f'srun{cpus} "$python" -m llama_ssp.batch.slurm.stage {quote(stage)} \\',
        f"    {' '.join(quote(str(model)) for model in models)} \\",
        "    || echo 'the models are read from where they are' >&2",
    ]


def _submit(job: Job, script: str) -> str:
    """Submits the script; returns the job's number. Raises UsageError for a job that is in the queue."""
    _require_not_queued(job)
    done = _run("sbatch", "--parsable", script=script)
    number = done.stdout.strip().partition(";")[0]  # a federation adds the name of the cluster
    if done.returncode != 0 or not number.isdecimal():
        raise UsageError(
            "Slurm refuses the job",
            found=one_line(done.stderr.replace("sbatch:", "")),
            fix="correct cluster.slurm.*, nodes and gpus",
        )
    job.index.save(job.journal.folder)  # an element that starts before this makes it itself
    replace_whole(job.journal.folder / FOLDER / f"{number}{SCRIPT_SUFFIX}", script.encode())
    return number


def _require_not_queued(job: Job) -> None:
    """Raises UsageError if elements of the job wait or run, DistributedError if Slurm does not answer."""
    ping = _run("scontrol", "ping")
    if " UP" not in ping.stdout:
        raise _no_answer(ping.stdout or ping.stderr)
    # Processes that hold a shard may be of a job that was submitted by hand, or of none.
    holders = {str(holder.get("job")) for holder in job.journal.holders()}
    if waiting := queue_of([*submissions(job.journal.folder), *filter(str.isdecimal, holders)]):
        raise UsageError(
            "this job is in the queue already",
            where=job.journal.folder,
            found=f"job {waiting[0]['job']}, {waiting[0]['state']}",
            fix="follow it with task.status=true, or cancel it with scancel first",
        )


def submissions(work: Path) -> list[str]:
    """Returns Slurm's numbers of the jobs that were submitted, oldest first."""
    jobs = [path.stem for path in (work / FOLDER).glob(f"*{SCRIPT_SUFFIX}")]
    return sorted(jobs, key=lambda job: (len(job), job))  # as numbers: 99 before 100


def queue_of(jobs: list[str]) -> list[dict[str, str]]:
    """Returns the elements of these jobs that wait or run; none of jobs that have ended."""
    if not jobs:
        return []
    form = f"--format={'|'.join(QUEUED.values())}"
    done = _run("squeue", "--noheader", "--array", f"--jobs={','.join(jobs)}", form)
    if done.returncode != 0 and "Invalid job id" not in done.stderr:  # printed also for a job of long ago
        raise _no_answer(done.stderr)
    lines = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == len(QUEUED) - 1]
    return [dict(zip(QUEUED, line, strict=True)) for line in lines]


def _run(*command: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command of Slurm's; `script` is its standard input. Raises DistributedError."""
    try:
        return subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except FileNotFoundError:
        raise DistributedError(
            "this machine has none of Slurm's commands",
            found=f"no {command[0]}",
            fix="print the script: task.submit=false",
        ) from None
    except subprocess.TimeoutExpired:
        raise _no_answer(f"{command[0]} said nothing for {PATIENCE_S:g} s") from None


def _no_answer(found: str) -> DistributedError:
    fix = "try scontrol ping; is SLURM_CONF right?"
    return DistributedError("Slurm does not answer", found=one_line(found), fix=fix)
