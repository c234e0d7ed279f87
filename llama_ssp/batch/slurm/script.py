"""Writes the sbatch script. No torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from shlex import quote

from llama_ssp import __version__
from llama_ssp.batch.job import Job
from llama_ssp.batch.workers import LOGS
from llama_ssp.config import ClusterConf
from llama_ssp.distributed.launcher import SOURCES
from llama_ssp.planner.storage import CPU

NO_TIME = "# No --time: the partition's own limit. cluster.slurm.time=4:00:00 sets another."
ON_ERROR = """trap 'echo "error: line $LINENO failed with $?: $BASH_COMMAND" >&2; exit 2' ERR"""
LOG = '"$logs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out"'
NODES = 'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))'
# The port is below those that the system deals out.
MEETING = (
    '--rdzv-backend=c10d --rdzv-endpoint="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"',
    '--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
)


def sbatch_script(job: Job, elements: int, words: tuple[str, ...]) -> str:
    """Returns the script of an array; `words` are the command of one process of a group."""
    cluster = job.run.cluster
    slurm, ranks, work = cluster.slurm, cluster.gpus or 1, job.work.absolute()
    name = slurm.job_name or re.sub(r"[^\w.+=@-]", "_", f"llama-ssp-{job.output.stem}")[:100]
    torchrun = f"-m torch.distributed.run --nproc-per-node={ranks} --max-restarts=0"
    meeting = (f"{torchrun} --nnodes={cluster.nodes}", *MEETING) if cluster.nodes > 1 else ()
    alone = (f"{torchrun} --standalone",) if ranks > 1 else ()
    cpus = slurm.cpus_per_rank and slurm.cpus_per_rank * ranks
    lines = [
        "#!/bin/bash",
        f"# Made by llama-ssp {__version__}.",
        *_options(name, cluster, elements),
        "",
        "# Slurm opens no log in a folder that does not exist, so the script opens it.",
        f"logs={quote(str(work / LOGS))}",
        f'mkdir -p "$logs" && exec >>{LOG} 2>&1 || exit 6',
        ON_ERROR,
        f"cd -- {quote(str(Path.cwd()))}",
        *slurm.setup,
        f"python={quote(slurm.python or sys.executable)}",
        f"export PYTHONPATH={quote(str(SOURCES))}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export PYTHONSAFEPATH=1  # no module comes from the folder of the data",
        *([f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{slurm.cpus_per_rank}}}"] if cpus else []),
        "\nwords=(",
        *(f"    {quote(word)}" for word in words),
        ")",
        *([NODES] if meeting else []),
        "\n# The supervisor stops the ranks before the time limit, and requeues the job if work is left.",
        'exec "$python" -m llama_ssp.batch.slurm.supervisor \\',
        f"    {quote(str(work))} {slurm.signal_s} \\",
        f'    srun --kill-on-bad-exit=1{f" --cpus-per-task={cpus}" if cpus else ""} "$python" \\',
        *(f"    {line} \\" for line in meeting or alone),
        '    -m llama_ssp "${words[@]}"',
        "",
    ]
    return "\n".join(lines)


def _options(name: str, cluster: ClusterConf, elements: int) -> list[str]:
    """Returns the lines for sbatch. Values hold no quotes, backslashes or line breaks (config/validation)."""
    slurm, ranks = cluster.slurm, cluster.gpus or 1
    gpus = f"{slurm.gpu_type}:{ranks}" if slurm.gpu_type else ranks
    values: dict[str, object] = {"job-name": name, "partition": slurm.partition, "account": slurm.account}
    values |= {"qos": slurm.qos, "constraint": slurm.constraint, "array": f"0-{elements - 1}"}
    values |= {"nodes": cluster.nodes, "ntasks-per-node": 1}
    values |= {"cpus-per-task": slurm.cpus_per_rank and slurm.cpus_per_rank * ranks}
    values |= {"gpus-per-node": None if cluster.gpu == CPU else gpus, "mem": slurm.mem, "time": slurm.time}
    values |= {"signal": f"B:USR1@{slurm.signal_s}", "requeue": "", "output": "/dev/null"}
    values |= {key: value for key, _, value in (option[2:].partition("=") for option in slurm.options)}
    given = {key: str(value) for key, value in values.items() if value is not None}
    lines = [f"#SBATCH --{key}{value and '=' + quote(value)}" for key, value in given.items()]
    return lines if "time" in given else [*lines, NO_TIME]
