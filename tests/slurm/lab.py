"""A real Slurm on this host: four nodes, two partitions, a private munge; up in a second, without root.

Everything is a child of this process and lives in one folder. A node is a slurmd of its own, so that a test
can kill it, with its tasks or without them.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.processes import kill, kill_all, living, parent, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = 4
AGAIN_S = 2.0
SAVED_S = 6.0  # the controller writes down what it knows every five seconds
PORTS = range(21000, 32000, 10)  # below those that the system deals out

CONF = """\
ClusterName=lab
FirstJobId={job}
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmdPort={slurmd}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={home}/jobcomp.log
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
EnforcePartLimits=ALL
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
KillWait=30
OverTimeLimit=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=127.0.0.[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first}-{last} CPUs=2 Boards=1 \
SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:4 State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 DefMemPerCPU=200 PriorityTier=1 \
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=60 DefaultTime=5 DefMemPerCPU=200 PriorityTier=9 PreemptMode=OFF
"""
GPUS = "AutoDetect=off\nNodeName=127.0.0.[1-{nodes}] Name=gpu Flags=nvidia_gpu_env File={home}/gpu[0-3]\n"


def missing() -> list[str]:
    """The programs that this needs and that are not here."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


class Lab:
    """The cluster. `env` is what its commands need."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="slurm-lab-"))
        self.env = {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.home / "slurm.conf")}
        self._mark = f"SLURM_CONF={self.env['SLURM_CONF']}"  # in the environment of all that is ours
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        host, port = socket.gethostname().split(".")[0], _free_ports()
        names = {
            "host": host, "user": getpass.getuser(), "home": self.home, "nodes": NODES, "port": port,
            "slurmd": port + 1, "first": port + 2, "last": port + 1 + NODES,
            "job": 10_000 + port % 1000,  # groups of nodes meet at ports below PORTS
        }  # fmt: skip
        (self.home / "slurm.conf").write_text(CONF.format(**names), encoding="utf-8")
        (self.home / "gres.conf").write_text(GPUS.format(**names), encoding="utf-8")
        for number in range(4):  # fake GPUs: Slurm wants character devices
            (self.home / f"gpu{number}").symlink_to("/dev/null")
        nodes = [f"127.0.0.{number + 1}" for number in range(NODES)]  # names that resolve
        for folder in ("state", *(f"spool-{node}" for node in nodes)):
            (self.home / folder).mkdir()
        self._start_munge()
        self._daemon("slurmctld", "slurmctld", "-D")
        for node in nodes:
            self.start_node(node)
        self.wait_idle()

    def _start_munge(self) -> None:
        folder = self.home / "munge"
        folder.mkdir(mode=0o700)
        (folder / "key").touch(0o600)
        (folder / "key").write_bytes(os.urandom(128))
        files = {"key-file": "key", "log-file": "munged.log", "pid-file": "munged.pid", "seed-file": "seed"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        self._daemon("munged", "munged", "-F", "--force", f"--socket={self.home / 'munge.sock'}", *options)

    def start_node(self, name: str) -> None:
        self._daemon(name, "slurmd", "-D", "-N", name)

    def _daemon(self, name: str, *command: str) -> None:
        program = shutil.which(command[0], path=_path())
        assert program is not None
        with (self.home / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [program, *command[1:]], env=self.env, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )

    def run(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm's says."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def wait_idle(self) -> None:
        """All nodes are up and nothing runs on them."""
        wait_for(
            lambda: self.run("sinfo", "-h", "-p", "lab", "-o", "%D %t", check=False) == f"{NODES} idle",
            lambda: f"nodes are {self.run('sinfo', '-h', '-o', '%n %t %E', check=False)!r}; {self.logs()}",
        )

    def queued(self) -> list[str]:
        """The jobs that wait or run, an array's elements one by one."""
        return self.run("squeue", "-h", "-r", "-o", "%A").split()

    def wait_taken_away(self, job: str) -> None:
        """The job is being stopped, or waits to be started again. A squeue that fails shows nothing."""
        state = ("squeue", "-h", "-j", job, "-o", "%T")
        wait_for(lambda: self.run(*state, check=False) not in ("", "RUNNING"), self.logs)

    def wait_empty(self) -> None:
        """No job waits or runs, nor comes back at once: a dead node's was missing once, why is unknown."""
        wait_for(
            lambda: not self.queued() and not time.sleep(AGAIN_S) and not self.queued(),
            lambda: f"{self.run('squeue', '-a')}; {self.logs()}",
        )

    def empty(self) -> None:
        """Whatever is left of a test goes, and lost nodes come back."""
        self.run("scancel", "--user", getpass.getuser(), check=False)
        for pid, variables in living(self._mark):
            if "SLURM_JOB_ID" in variables:
                kill(pid)
        for name, daemon in list(self._daemons.items()):
            if daemon.poll() is not None:
                self.start_node(name)
        wait_for(lambda: not self.queued(), self.logs)  # what is cancelled does not come back
        self.wait_idle()

    def processes(self, job: str) -> dict[int, str]:
        """The processes of a job's steps and script, by their rank, and their command lines."""
        found = living(self._mark, f"SLURM_JOB_ID={job}")
        by_rank = sorted((int(variables.get("RANK", 0)), pid) for pid, variables in found)
        return {pid: _command(pid) for _, pid in by_rank}

    def lose_node(self, name: str, with_tasks: bool) -> None:
        """The node stops answering; the tasks on it die too, or live on unseen.

        Their stepd dies before them: it would still tell Slurm that they died, which ends the job.
        """
        self._daemons[name].kill()
        self._daemons[name].wait()
        if not with_tasks:
            return
        tasks = [pid for pid, _ in living(self._mark, f"SLURMD_NODENAME={name}")]
        for pid in [*{parent(task) for task in tasks if _is_stepd(parent(task))}, *tasks]:
            kill(pid)

    def stop_controller(self) -> None:
        """It goes without a word."""
        time.sleep(SAVED_S)  # or else it would not know of the jobs that started last
        self._daemons["slurmctld"].kill()
        self._daemons["slurmctld"].wait()

    def start_controller(self) -> None:
        """It comes back."""
        self._daemon("slurmctld", "slurmctld", "-D")
        wait_for(lambda: " UP" in self.run("scontrol", "ping", check=False), self.logs)

    def stop(self) -> None:
        """Nothing is left behind, whatever state the cluster is in."""
        if "slurmctld" in self._daemons:
            self.run("scancel", "--user", getpass.getuser(), check=False)
        for daemon in reversed(self._daemons.values()):  # munge last: the others talk to the end
            daemon.terminate()
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        kill_all(self._mark)
        shutil.rmtree(self.home, ignore_errors=True)

    def logs(self) -> str:
        log = self.home / "slurmctld.log"
        return log.read_text(encoding="utf-8", errors="replace")[-1500:] if log.exists() else "no log"


def _command(pid: int) -> str:
    """The command line; nothing where the process has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _is_stepd(pid: int) -> bool:
    """Whether this is the daemon that a step's tasks on a node are children of."""
    return _command(pid).startswith("slurmstepd")


def _free_ports() -> int:
    """The first of a row of free ports."""
    for first in sorted(PORTS, key=lambda _: os.urandom(4)):
        sockets = []
        try:
            for port in range(first, first + 2 + NODES):
                sockets.append(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no row of free ports")


def _path() -> str:
    """Daemons are where only root's search path looks."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
