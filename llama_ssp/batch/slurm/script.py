"""The sbatch script. Readable, complete, and fit to be submitted by hand. No torch."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from llama_ssp import __version__
from llama_ssp.batch.workers import LOGS, SOURCES
from llama_ssp.config import ClusterConf
from llama_ssp.errors import UsageError
from llama_ssp.planner.storage import CPU

LOG_NAME = "%x-%A_%a.out"  # job's name, number, element: restarts append to it
PLAIN = re.compile(r"[\w./=:,@%+-]+")
HEAD = """\
# The ranks of all nodes meet at the first one: at its address, as its name need not resolve, and a free port.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
at_head() { srun --nodes=1 --ntasks=1 --nodelist="$head" "$@"; }
address=$(at_head hostname --ip-address | awk '{print $1}')
port=$(at_head "$python" -c 'import socket; print(socket.create_server(("", 0)).getsockname()[1])')
meeting=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$RANDOM  # not another attempt's, nor another cluster's
"""
MEETING = ("--rdzv-backend=c10d", '--rdzv-id="$meeting"', '--rdzv-endpoint="$address:$port"')


@dataclass(frozen=True)
class Order:
    """All that a script is made of. `words` is the command for one process of a group."""

    name: str
    cluster: ClusterConf
    elements: int
    work: Path
    folder: Path  # the current one
    words: tuple[str, ...]
    retries: int

    @property
    def _ranks(self) -> int:
        """A group's on each of its nodes."""
        return self.cluster.gpus or 1

    def rendered(self) -> str:
        slurm = self.cluster.slurm
        supervisor = f'"$python" -m llama_ssp.batch.slurm.supervisor {shlex.quote(str(self.work))}'
        lines = [
            "#!/bin/bash",
            f"# Made by llama-ssp {__version__}. It needs the folder {_in_comment(self.work / LOGS)}.",
            *(f"#SBATCH --{option}" for option in self._options()),
            "",
            f"cd -- {shlex.quote(str(self.folder))} || exit 6",
            *slurm.setup,
            f"python={shlex.quote(slurm.python or sys.executable)}",
            f"export PYTHONPATH={shlex.quote(str(SOURCES))}${{PYTHONPATH:+:$PYTHONPATH}}",
            "export PYTHONSAFEPATH=1  # modules come from there, never from the folder of the data",
            *([HEAD.rstrip()] if self.cluster.nodes > 1 else []),
            "launch=(",
            *(f"    {word}" for word in self._launch()),
            ")",
            "words=(",
            *(f"    {shlex.quote(word)}" for word in self.words),
            ")",
            "# Stops the ranks before the time limit, and requeues the job when they did not finish.",
            f'exec {supervisor} {self.retries} {slurm.signal_s} "${{launch[@]}}" "${{words[@]}}"',
            "",
        ]
        return "\n".join(lines)

    def _options(self) -> list[str]:
        """sbatch's options, in the order of people's own scripts."""
        cluster, slurm = self.cluster, self.cluster.slurm
        cpus = slurm.cpus_per_rank and slurm.cpus_per_rank * self._ranks
        gpus = f"{slurm.gpu_type}:{self._ranks}" if slurm.gpu_type else self._ranks
        wanted: dict[str, object] = {"job-name": self.name, "partition": slurm.partition}
        wanted |= {"account": slurm.account, "qos": slurm.qos, "constraint": slurm.constraint}
        wanted |= {"array": f"0-{self.elements - 1}", "nodes": cluster.nodes, "ntasks-per-node": 1}
        wanted |= {"cpus-per-task": cpus, "gpus-per-node": None if cluster.gpu == CPU else gpus}
        logs = str(self.work / LOGS).replace("%", "%%")  # for Slurm, a percent sign begins a pattern
        wanted |= {"mem": slurm.mem, "time": slurm.time, "output": f"{logs}/{LOG_NAME}"}
        wanted |= {"open-mode": "append", "signal": f"B:USR1@{slurm.signal_s}"}
        given = [f"{name}={_quoted(str(value))}" for name, value in wanted.items() if value is not None]
        extra = (option.removeprefix("--").partition("=") for option in slurm.options)
        return [*given, "requeue", *(name + sign + (sign and _quoted(value)) for name, sign, value in extra)]

    def _launch(self) -> list[str]:
        """What starts the ranks. A single one needs no torchrun."""
        nodes, slurm = self.cluster.nodes, self.cluster.slurm
        cpus = f" --cpus-per-task={slurm.cpus_per_rank * self._ranks}" if slurm.cpus_per_rank else ""
        lines = [f"srun --nodes={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1{cpus}", '"$python"']
        if nodes * self._ranks > 1:
            meeting = ["--standalone"] if nodes == 1 else [f"--nnodes={nodes}", *MEETING]
            own = (shlex.quote(word) for word in slurm.torchrun)
            ranks = f"--nproc-per-node={self._ranks}"
            lines.append(" ".join(["-m torch.distributed.run", *meeting, ranks, "--max-restarts=0", *own]))
        return [*lines, "-m llama_ssp"]


def _quoted(value: str) -> str:
    """A value on an #SBATCH line, which ends with the line and allows single quotes."""
    if PLAIN.fullmatch(value):
        return value
    if "'" in value or "\\" in value or any(ord(c) < 32 for c in value):
        what, allowed = "a value cannot stand in a Slurm script", "one line without quotes and backslashes"
        raise UsageError(what, "", repr(value), allowed, "choose another task.work")
    return f"'{value}'"


def _in_comment(path: Path) -> str:
    return shlex.quote(str(path)) if str(path).isprintable() else "the work folder"
