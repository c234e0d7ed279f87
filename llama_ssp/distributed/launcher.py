"""Starts a command's ranks on this machine, and ends as they end: `ranks=N`, without torchrun.

Each rank is this very command with a rank's environment, as torchrun gives it. They meet in a folder that
only this user may enter (board.py). A rank says by itself why it fails (failures.py); this process speaks
only for one that cannot, and ends the others where they would wait for it.

    standard input, standard output   of rank 0
    standard error                    of all
    Ctrl-C                            goes to rank 0, which tells the others, or (chat) ends an answer
    SIGTERM, SIGHUP                   the same
    this process is killed            the kernel kills the ranks
"""

import fcntl
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ssp.distributed.board import ATTEMPT, FOLDER, NOBODY, BoardLost, Cause, FolderBoard
from llama_ssp.distributed.cores import cores_here
from llama_ssp.distributed.placement import LEADER
from llama_ssp.distributed.signals import (
    BY_TORCHRUN,
    CODE_FILE,
    STOPPING,
    end_with_parent,
    heeded,
    kept_terminal,
)
from llama_ssp.errors import DISTRIBUTED, OK, DistributedError, StorageError

if TYPE_CHECKING:
    from llama_ssp.distributed.comm import Ranks

SOURCES = Path(__file__).resolve().parents[2]  # the folder that this package is imported from
# For libraries that want an address: nobody listens there.
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
IN_MEMORY = "/dev/shm"
FIRST = "0"  # start of these ranks: they are not started again
PREFIX = "llama-ssp-ranks-"
ROOM = 2**20  # bytes that the ranks may need there
OLD_S = 60.0  # after which a folder that nobody holds was left by a command that was killed
LOOK_S = 0.5  # between looks, if no signal comes
PART_S = 30.0  # for the others to end, once the leader has
FROM_KERNEL = 128  # si_code of a signal that a terminal sent to its whole foreground group
CLEAR = "\r\033[2K\033[?25h"  # takes a bar off a terminal's line, and shows the cursor


def import_path() -> dict[str, str]:
    """The environment in which Python finds this package, installed or not, and nothing in the folder."""
    path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def of_small_process(ranks: "Ranks", purpose: str) -> dict[str, str]:
    """Returns the environment of a small process of this rank; all ranks call it.

    The small processes of all ranks are ranks of a group of their own, with their own keys in the store.
    """
    members = ranks.gather_texts(os.environ.get("RANK", "0"))
    environment = os.environ | import_path()
    environment["RANK"] = environment["LOCAL_RANK"] = str(ranks.rank)
    environment["WORLD_SIZE"] = str(ranks.world)
    environment[ATTEMPT] = f"{os.environ.get(ATTEMPT, '0')}/{purpose}/{'-'.join(members)}"
    for name in (CODE_FILE, "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    return environment


def run_ranks(world: int, environment: Mapping[str, str]) -> int:
    """Runs this command as `world` ranks, with this `environment` added; returns the exit code.

    It is 0 if the leader has done its work, else that of the cause, if a rank has found one.
    """
    if not hasattr(signal, "sigtimedwait"):
        raise DistributedError(
            "ranks= needs Linux",
            found=sys.platform,
            fix=f"start with torchrun --nproc-per-node {world} -m llama_ssp",
        )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _heard())
    restore = kept_terminal()  # a rank that is killed leaves it as it was while a line was typed
    ranks: RankProcesses | None = None
    try:
        with meeting_folder() as folder:
            try:
                ranks = RankProcesses(world, environment, folder, before)
                return ranks.wait()
            finally:
                if ranks is not None:
                    ranks.kill()
                restore()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def meeting_folder() -> Iterator[Path]:
    """Makes a folder that only this user may enter, in memory if it can be. Raises StorageError."""
    places = [IN_MEMORY, tempfile.gettempdir()]
    folder: Path | None = None
    error: OSError | None = None
    for place in places:
        try:
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        except OSError as failed:
            error = failed
            continue
        try:
            (made / "room").write_bytes(bytes(ROOM))
            (made / "room").unlink()
            folder = made
            break
        except OSError as failed:
            error = failed
            shutil.rmtree(made, ignore_errors=True)
    if folder is None:
        raise StorageError(
            "there is no folder in which ranks can meet",
            where=", ".join(places),
            found=error.strerror if error else None,
            fix="TMPDIR names another folder for temporary files",
        )

    # A lock ends with its process, however that ends: another command sees that it may remove the folder.
    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_left(folder.parent)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_left(place: Path) -> None:
    """Removes the folders of this user's commands that were killed."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            facts = folder.lstat()
            if facts.st_uid != os.geteuid() or time.time() - facts.st_mtime < OLD_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


class RankProcesses:
    """The ranks' processes, by rank."""

    def __init__(self, world: int, environment: Mapping[str, str], folder: Path, mask: set[Any]) -> None:
        """Starts the ranks, which meet in the folder; `mask` is their mask of signals."""
        threads = max(cores_here() // world, 1)
        shared: dict[str, object] = {
            **ADDRESS,
            FOLDER: folder,
            ATTEMPT: FIRST,
            BY_TORCHRUN: "ranks",
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        }
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
        self._folder = folder / FIRST  # of the meetings, by their numbers
        self._cause: Cause | None = None  # why this process has ended the ranks
        self._until = math.inf  # when it ends them, if they have not ended by themselves

    def wait(self) -> int:
        """Waits until all ranks have ended; passes signals on. Returns the exit code."""
        leader = self._processes[LEADER]
        while None in [process.poll() for process in self._processes]:
            self._end_who_waits_in_vain()
            if leader.returncode is not None:
                self._until = min(self._until, time.monotonic() + PART_S)
            if time.monotonic() > self._until:
                self.kill()
            if info := signal.sigtimedwait(_heard(), LOOK_S):
                self._pass_on(info)
        self._end_who_waits_in_vain()  # all may have been killed: one line says so

        codes = [process.returncode for process in self._processes]
        if codes[LEADER] == OK:
            return OK
        cause = self._cause
        if cause is None:
            with suppress(BoardLost):
                cause = self._last_meeting().first_cause()
        if cause is not None:
            return cause.code
        if codes[LEADER] > 0:
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
        leader = self._processes[LEADER]
        others = self._processes[LEADER + 1 :]
        if info.si_signo in STOPPING and not (self._has_terminal and info.si_code == FROM_KERNEL):
            leader.send_signal(info.si_signo)
        if info.si_signo == signal.SIGTSTP:
            stopped = others if self._has_terminal else self._processes
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            for process in stopped:
                process.send_signal(signal.SIGCONT)

    def _end_who_waits_in_vain(self) -> None:
        """Ends all at once where a rank has ended before all have met: the others would wait for it.

        That may be long before they look for it, while they import torch. A rank that knows why has its time
        to say so.
        """
        failed = [rank for rank, process in enumerate(self._processes) if process.returncode]
        if not failed or self._cause is not None:
            return
        try:
            board = self._last_meeting()
            if all(board.read([f"rank/{rank}" for rank in range(len(self._processes))])):
                return  # they have met, and watch each other
            cause = board.first_cause(self._of(failed[0])) or self._of(failed[0])
        except BoardLost:  # such as a full disk
            cause = self._of(failed[0])
        if 0 <= cause.by < len(self._processes) and self._processes[cause.by].returncode is None:
            self._until = min(self._until, time.monotonic() + PART_S)
            return
        if cause.by == NOBODY:
            _say(cause.line)
        self._cause = cause
        self.kill()

    def _of(self, rank: int) -> Cause:
        """Returns the cause that all end with, if this rank, which has ended, said nothing."""
        code = self._processes[rank].returncode
        number = -code if code < 0 else code - 128
        if number in STOPPING:
            how = f"was stopped by {signal.Signals(number).name}"
        elif code < 0:
            how = f"was killed by {signal.Signals(number).name}"
        else:
            how = f"ended with {code}"
        exit_code = 128 + number if number in STOPPING else DISTRIBUTED
        return Cause(f"rank {rank} {how} during start", exit_code, by=NOBODY)

    def _last_meeting(self) -> FolderBoard:
        """Returns the board of the meeting that the ranks have come to last."""
        numbers = [0]
        with suppress(OSError):  # nobody has come
            numbers += [int(entry.name) for entry in self._folder.iterdir() if entry.name.isdigit()]
        return FolderBoard(self._folder / str(max(numbers)))


def _heard() -> set[signal.Signals]:
    """Returns the signals that the command waits for. One that is blocked comes even where it is ignored."""
    return {*heeded(), signal.SIGTSTP, signal.SIGCHLD}


def _begin(mask: set[Any]) -> None:
    """In the new process: it ends with this one, and its guard will hear what wants to stop it."""
    end_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, *STOPPING})


def _say(line: str) -> None:
    """Prints why the ranks end, where one of them that was killed may have left a bar."""
    bar = CLEAR if sys.stderr is not None and sys.stderr.isatty() else ""
    with suppress(OSError):  # the terminal may be gone
        print(f"{bar}error: {line}", file=sys.stderr)
