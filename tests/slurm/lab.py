"""A real Slurm on this host: four nodes, two partitions, no munge; up in a second, without root.

Everything is a child of this process and lives in one folder. A node is a slurmd of its own, so that a test
can kill it, with its tasks or without them.
"""

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.processes import kill, living, wait_for

# Daemons are where only root's search path looks.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
NODES, CONTROLLER = 4, "slurmctld"
AGAIN_S = 2.0
SAVED_S = 6.0  # the controller writes down what it knows every five seconds
FIRST_PORT = 21000  # nodes of a job meet at ports below; the system deals out ports above 32000

CONF = """\
ClusterName=lab
FirstJobId={job}
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmctldPort={port}
SlurmdPort={slurmd}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
EnforcePartLimits=ALL
ReturnToService=2
SlurmdTimeout=10
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=127.0.0.[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first}-{last} CPUs=2 Boards=1 \
SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:4 State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 DefMemPerCPU=200 PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=60 DefaultTime=5 DefMemPerCPU=200 PriorityTier=9 PreemptMode=OFF
"""
GPUS = "AutoDetect=off\nNodeName=127.0.0.[1-{nodes}] Name=gpu Flags=nvidia_gpu_env File={home}/gpu[0-3]\n"


class Lab:
    """The cluster. `env` is what its commands need."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="slurm-lab-"))
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.home / "slurm.conf")}
        self._mark = {"SLURM_CONF": self.env["SLURM_CONF"]}  # in the environment of all that is ours
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        number = os.getpid() % 1000  # another worker of pytest has a cluster with other ports and jobs
        port = FIRST_PORT + 10 * number
        names = {
            "host": socket.gethostname().split(".")[0], "user": getpass.getuser(), "home": self.home,
            "nodes": NODES, "port": port, "slurmd": port + 1, "first": port + 2, "last": port + 1 + NODES,
            "job": 10_000 + number,
        }  # fmt: skip
        (self.home / "slurm.conf").write_text(CONF.format(**names), encoding="utf-8")
        (self.home / "gres.conf").write_text(GPUS.format(**names), encoding="utf-8")
        for gpu in range(4):  # fake GPUs: Slurm wants character devices
            (self.home / f"gpu{gpu}").symlink_to("/dev/null")
        nodes = [f"127.0.0.{number + 1}" for number in range(NODES)]  # names that resolve
        for folder in ("state", *(f"spool-{node}" for node in nodes)):
            (self.home / folder).mkdir()
        for name in (CONTROLLER, *nodes):
            self._start(name)
        self.wait_idle()

    def _start(self, name: str) -> None:
        """The controller, or a node."""
        command = ["slurmctld", "-D"] if name == CONTROLLER else ["slurmd", "-D", "-N", name]
        with (self.home / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.env, stdout=out, stderr=out, stdin=subprocess.DEVNULL
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
        kill(*(each["pid"] for each in living(**self._mark) if "SLURM_JOB_ID" in each["environ"]))
        for name, daemon in list(self._daemons.items()):
            if daemon.poll() is not None:
                self._start(name)
        wait_for(lambda: not self.queued(), self.logs)  # what is cancelled does not come back
        self.wait_idle()

    def processes(self, job: str) -> list[dict[str, Any]]:
        """The processes of a job's steps and script, by their rank."""
        found = living(**self._mark, SLURM_JOB_ID=job)
        return sorted(found, key=lambda each: int(each["environ"].get("RANK", 0)))

    def lose_node(self, name: str, with_tasks: bool) -> None:
        """The node stops answering; the tasks on it die too, or live on unseen.

        Their stepd dies before them: it would still tell Slurm that they died, which ends the job.
        """
        self._kill(name)
        if not with_tasks:
            return
        tasks = living(**self._mark, SLURMD_NODENAME=name)
        parents = {each["ppid"] for each in tasks}
        stepds = [each for each in living() if each["pid"] in parents and "slurmstepd" in each["cmdline"][0]]
        kill(*(each["pid"] for each in [*stepds, *tasks]))

    def stop_controller(self) -> None:
        """It goes without a word."""
        time.sleep(SAVED_S)  # or else it would not know of the jobs that started last
        self._kill(CONTROLLER)

    def start_controller(self) -> None:
        """It comes back."""
        self._start(CONTROLLER)
        wait_for(lambda: " UP" in self.run("scontrol", "ping", check=False), self.logs)

    def stop(self) -> None:
        """Nothing is left behind, whatever state the cluster is in."""
        for name in self._daemons:  # no daemon starts a process any more
            self._kill(name)
        kill(*(each["pid"] for each in living(**self._mark)))
        shutil.rmtree(self.home, ignore_errors=True)

    def _kill(self, name: str) -> None:
        self._daemons[name].kill()
        self._daemons[name].wait()

    def logs(self) -> str:
        log = self.home / f"{CONTROLLER}.out"
        return log.read_text(encoding="utf-8", errors="replace")[-1500:] if log.exists() else "no log"
