"""The sbatch script. Readable, complete, and fit to be submitted by hand. No torch."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from llama_ssp import __version__
from llama_ssp.batch.workers import LOGS
from llama_ssp.config import ClusterConf
from llama_ssp.errors import UsageError
from llama_ssp.planner.storage import CPU
from llama_ssp.report.machine import SOURCES

LOG = '"$SLURM_ARRAY_JOB_ID"_"$SLURM_ARRAY_TASK_ID".out'  # behind the job's name; restarts append to it
PLAIN = re.compile(r"[\w./=:,@%+-]+")
BROKEN = """\
trap 'echo "error: a line of the script failed with $?; line $LINENO; found $BASH_COMMAND;" \\
    "correct cluster.slurm.setup, or the nodes; then submit again" >&2; exit 2' ERR
"""
ADDRESS = '"$python" -m llama_ssp.batch.slurm.address'
TRIES, PAUSE_S = 30, 10  # for a controller that is being restarted
HEAD = f"""\
# The ranks of all nodes meet at the first one: at an address that the others reach, and a free port.
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
# Slurm's own commands fail with 1 while its controller is being restarted.
ask() {{
    local answer code left
    for ((left = {TRIES}; left; left--)); do
        answer=$("$@") && echo "$answer" && return
        code=$?
        [ $code = 1 ] || return $code
        echo "Slurm does not answer to $1; $((left - 1)) more tries" >&2
        sleep {PAUSE_S}
    done
    echo "error: Slurm does not answer; $(hostname); found {TRIES} failures of $1, allowed an answer;" \\
        "submit again when scontrol ping says UP" >&2
    return 5
}}
at() {{ ask srun --nodes=1 --ntasks=1 --nodelist="$1" {ADDRESS} "${{@:2}}"; }}
"""
BY_NAME = """\
shown=$(ask scontrol show node --oneliner "${nodes[0]}") || exit
name=$(grep -o ' NodeAddr=[^ ]*' <<<"$shown")  # by which Slurm reaches it
address=$(at "${nodes[1]}" resolve "${name#*=}") || exit
"""
PORT = """\
port=$(at "${nodes[0]}" port) || exit
rendezvous=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$RANDOM  # no other attempt's, no other cluster's
export address port rendezvous
"""
HERE = """bash -c "$(declare -f ranks_here); ranks_here \\"\\$@\\"" ranks_here"""
RENDEZVOUS = """\
--rdzv-backend=c10d --rdzv-id="$rendezvous" --rdzv-endpoint="$address:$port"
--rdzv-conf=is_host=$((SLURM_NODEID == 0)) --local-addr="$own"
"""


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
        logs, threads = shlex.quote(str(self.work / LOGS)), slurm.cpus_per_rank
        lines = [
            "#!/bin/bash",
            f"# Made by llama-ssp {__version__}.",
            *(f"#SBATCH --{option}" for option in self._options()),
            "",
            "# Slurm cannot begin a log in a folder that is not there, so the script begins its own.",
            f"mkdir -p -- {logs} && exec >>{logs}/{shlex.quote(self.name)}-{LOG} 2>&1 || exit 6",
            BROKEN.rstrip(),
            f"cd -- {shlex.quote(str(self.folder))}",
            *slurm.setup,
            f"export python={shlex.quote(slurm.python or sys.executable)}",
            f"export PYTHONPATH={shlex.quote(str(SOURCES))}${{PYTHONPATH:+:$PYTHONPATH}}",
            "export PYTHONSAFEPATH=1  # modules come from there, never from the folder of the data",
            *([f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}}"] if threads else []),
            *self._meeting(),
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
        wanted |= {"mem": slurm.mem, "time": slurm.time, "output": "/dev/null"}
        wanted |= {"signal": f"B:USR1@{slurm.signal_s}"}
        given = [f"{name}={_quoted(str(value))}" for name, value in wanted.items() if value is not None]
        extra = (option.removeprefix("--").partition("=") for option in slurm.options)
        return [*given, "requeue", *(name + sign + (sign and _quoted(value)) for name, sign, value in extra)]

    def _launch(self) -> list[str]:
        """What starts the ranks. A single one needs no torchrun."""
        nodes, slurm = self.cluster.nodes, self.cluster.slurm
        cpus = f" --cpus-per-task={slurm.cpus_per_rank * self._ranks}" if slurm.cpus_per_rank else ""
        srun = f"srun --nodes={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1{cpus}"
        alone = nodes * self._ranks == 1
        return [srun, '"$python" -m llama_ssp' if alone else HERE]

    def _meeting(self) -> list[str]:
        """How the ranks of a node start and find the others: a function, as each node expands its words."""
        nodes, slurm, name = self.cluster.nodes, self.cluster.slurm, self.cluster.slurm.interface
        if nodes * self._ranks == 1:
            return []
        lines, first = [], []
        if nodes > 1:
            by = f'address=$(at "${{nodes[0]}}" interface {name}) || exit\n' if name else BY_NAME
            lines = (HEAD + by + PORT).splitlines()
            found = f'{ADDRESS} here "$address" {name or ""}'.rstrip()
            networks = "GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}"
            networks += f" NCCL_SOCKET_IFNAME={shlex.quote(f'={name}')}" if name else ""
            first = [f"    read -r own interface < <({found}) || exit 5", f"    export {networks}"]
        meeting = [f"--nnodes={nodes}", *RENDEZVOUS.splitlines()] if nodes > 1 else ["--standalone"]
        own = "".join(f" {word}" for word in slurm.torchrun)
        return [
            *lines,
            "# The ranks of one node. It runs there, so what is to be expanded is expanded there.",
            "ranks_here() {",
            *first,
            '    exec "$python" -m torch.distributed.run \\',
            *(f"        {line} \\" for line in meeting),
            f'        --nproc-per-node={self._ranks} --max-restarts=0{own} -m llama_ssp "$@"',
            "}",
        ]


def _quoted(value: str) -> str:
    """A value on an #SBATCH line, which ends with the line and allows single quotes."""
    if PLAIN.fullmatch(value):
        return value
    if "'" in value or "\\" in value or any(ord(c) < 32 for c in value):
        what, allowed = "a value cannot stand in a Slurm script", "one line without quotes and backslashes"
        raise UsageError(what, "", repr(value), allowed, "change cluster.slurm.options")
    return f"'{value}'"
