"""Starts a command's ranks on this machine, and ends as they end: `ranks=N`, without torchrun.

Each rank is this very command with a rank's environment, as torchrun gives it; this process keeps their
store. A rank says by itself why it fails (failures.py); this process speaks only for one that cannot.

    standard input, standard output   of rank 0
    standard error                    of all
    Ctrl-C                            goes to rank 0, which tells the others, or (chat) ends an answer
    SIGTERM                           the same
    this process is killed            the kernel kills the ranks
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from llama_ssp.distributed.placement import LEADER
from llama_ssp.distributed.signals import STOPPING, end_with_parent
from llama_ssp.errors import DISTRIBUTED, DistributedError

SOURCES = Path(__file__).resolve().parents[2]  # the folder that this package is imported from
HOST = "127.0.0.1"
LOOK_S = 0.5  # between looks, if no signal comes
PART_S = 30.0  # for the others to end, once the leader has
FROM_KERNEL = 128  # si_code of a signal that a terminal sent to its whole foreground group
HEARD = {*STOPPING, signal.SIGTSTP, signal.SIGCHLD}


def import_path() -> dict[str, str]:
    """The environment in which Python finds this package, installed or not, and nothing in the folder."""
    path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def run_ranks(world: int, environment: Mapping[str, str]) -> int:
    """Runs this command as `world` ranks, with this `environment` added; returns the exit code.

    It is the leader's, or, where a signal killed the leader, another rank's.
    """
    if not hasattr(signal, "sigtimedwait"):
        fix = f"start with torchrun --nproc-per-node {world} -m llama_ssp"
        raise DistributedError("ranks= needs Linux", "", sys.platform, fix=fix)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    ranks: RankProcesses | None = None
    try:
        with socket.create_server((HOST, 0), backlog=world) as listener:
            ranks = RankProcesses(world, environment, listener.getsockname()[1], before)
            ranks.keep_store(listener)
        return ranks.wait()
    finally:
        if ranks is not None:
            ranks.kill()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RankProcesses:
    """The ranks' processes, by rank."""

    def __init__(self, world: int, environment: Mapping[str, str], port: int, mask: set[Any]) -> None:
        threads = max((os.cpu_count() or 1) // world, 1)
        shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": HOST, "MASTER_PORT": port}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        shared |= {"TORCHELASTIC_RUN_ID": "ranks"}
        shared |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        inherited = {**os.environ, **import_path(), **environment}
        # Only a group in the foreground may read a terminal.
        self._has_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(world):
            variables = {**shared, "RANK": rank, "LOCAL_RANK": rank}
            leads = rank == LEADER
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "llama_ssp", *sys.argv[1:]],
                    env=inherited | {name: str(value) for name, value in variables.items()},
                    stdin=None if leads else subprocess.DEVNULL,
                    stdout=None if leads else subprocess.DEVNULL,
                    process_group=None if leads and self._has_terminal else 0,
                    preexec_fn=partial(_begin, mask),
                )
            )
        self._store: Any = None
        self._met = False

    def keep_store(self, listener: socket.socket) -> None:
        """Opens the store in which the ranks meet, on a port that they know already."""
        import torch.distributed as dist

        stores: Any = dist
        host, limit = (HOST, listener.getsockname()[1]), timedelta(seconds=PART_S)
        own = {"is_master": True, "master_listen_fd": listener.detach()}
        self._store = stores.TCPStore(*host, timeout=limit, wait_for_workers=False, **own)

    def wait(self) -> int:
        """Waits until all ranks have ended; passes signals on. Returns the exit code."""
        until, leader, silent = math.inf, self._processes[LEADER], set[int]()
        while None in [process.poll() for process in self._processes]:
            for rank, process in enumerate(self._processes):
                if process.returncode and rank not in silent:
                    silent.add(rank)
                    self._speak_for(rank, process.returncode)
            if leader.returncode is not None:
                until = min(until, time.monotonic() + PART_S)
            if time.monotonic() > until:
                self.kill()
            if info := signal.sigtimedwait(HEARD, LOOK_S):
                self._pass_on(info)
        codes = [process.returncode for process in self._processes]
        if codes[LEADER] >= 0:
            return codes[LEADER]
        if all(code <= 0 for code in codes):
            _say(f"the ranks were killed by {signal.Signals(-codes[LEADER]).name}")
        return next((code for code in codes if code > 0), 128 - codes[LEADER])

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _pass_on(self, info: signal.struct_siginfo) -> None:
        """To the leader, except what a terminal has sent it already. A stop is one of all ranks."""
        leader, others = self._processes[LEADER], self._processes[LEADER + 1 :]
        if info.si_signo in STOPPING and not (self._has_terminal and info.si_code == FROM_KERNEL):
            leader.send_signal(info.si_signo)
        if info.si_signo == signal.SIGTSTP:
            stopped = others if self._has_terminal else self._processes
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            for process in stopped:
                process.send_signal(signal.SIGCONT)

    def _speak_for(self, rank: int, code: int) -> None:
        """Tells the others of a rank that ended before all have met, and said nothing: they wait for it."""
        from llama_ssp.distributed.failures import Cause, first_cause, meeting

        with suppress(RuntimeError):
            store = meeting(self._store)
            self._met = self._met or store.check([f"rank/{n}" for n in range(len(self._processes))])
            number = -code if code < 0 else code - 128
            is_stop = number in STOPPING
            how = f"ended with {code}"
            if code < 0 or is_stop:
                how = f"was {'stopped' if is_stop else 'killed'} by {signal.Signals(number).name}"
            line = f"rank {rank} {how} during start"
            if not self._met and first_cause(store) is None:
                first_cause(store, Cause(line, 128 + number if is_stop else DISTRIBUTED, by=-1))
                _say(line)


def _begin(mask: set[Any]) -> None:
    """In the new process: it ends with this one, and its guard will hear what wants to stop it."""
    end_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, *STOPPING})


def _say(line: str) -> None:
    print(f"error: {line}", file=sys.stderr)
