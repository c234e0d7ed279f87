"""Processes forked from a server that has imported torch, transformers and the package once for all tests.

Importing them takes five seconds of a core; a process from here starts in a moment, and so do those that it
starts itself, if it has spares. Tests of what a process imports, or of how it starts, start Python.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

from tests.processes import MARK, STARTS

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch" / "run.py"
PATIENCE_S = 600.0
IMPORTED = [
    "pytest", "llama_ssp.cli", "llama_ssp.tasks.runner", "transformers.models.llama.modeling_llama",
    "tests.distributed.pairs",
]  # fmt: skip


def server() -> Any:
    """The multiprocessing context that forks from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with patch.dict(os.environ):
        os.environ.pop(MARK, None)  # the server does not end with the test that starts it
        forkserver.ensure_running()
    STARTS.append("forkserver")
    return context


def start(
    words: Sequence[object], folder: Path, streams: Sequence[Path | str],
    env: Mapping[str, str] | None = None, first: Callable[[], object] | None = None, spares: int = 0,
) -> Any:  # fmt: skip
    """Starts Python with `words`: a script, or -m and a module, and its arguments. Returns the process.

    `streams` are the files of standard input, output and error; a terminal is one for all three. `first` is
    called before the script. What the process starts with its own Python is, `spares` times, a process that
    was forked like this one and waits for it.
    """
    names, variables = [str(stream) for stream in streams], dict(env or os.environ)
    args = [str(word) for word in words], folder, names, variables, first, spares
    process = server().Process(target=_run, args=args, daemon=True)
    process.start()
    return process


class Answer(NamedTuple):
    """What a process said, and its exit code; None if it had not ended."""

    code: int | None
    out: str
    err: str
    summary: dict[str, Any] | None = None  # of the run, where no output=json printed it

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document: the run's, or the last line of standard output."""
        document: dict[str, Any] = self.summary or json.loads(self.out.splitlines()[-1])
        return document


def answers(processes: Sequence[Any], said: Sequence[Sequence[Path]], patience_s: float) -> list[Answer]:
    """When all have ended: what they said. Who has not after this long gives None, and is killed."""
    until = time.monotonic() + patience_s
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    texts = [[stream.read_text(encoding="utf-8", errors="replace") for stream in both] for both in said]
    return [Answer(code, *both) for code, both in zip(codes, texts, strict=True)]


def python(
    words: Sequence[object], folder: Path, env: Mapping[str, str] | None = None, stdin: str = "",
    spares: int = 0,
) -> Answer:  # fmt: skip
    """Runs Python with these words, as `start` does, to its end."""
    with tempfile.TemporaryDirectory() as scratch:
        streams = [Path(scratch) / name for name in ("in", "out", "err")]
        streams[0].write_text(stdin, encoding="utf-8")
        (answer,) = answers([start(words, folder, streams, env, spares=spares)], [streams[1:]], PATIENCE_S)
    assert answer.code is not None, f"{words} had not ended after {PATIENCE_S:g} s: {answer}"
    folders = folder.glob("outputs/**/summary.json") if "{" not in answer.out else ()
    latest = max(folders, key=lambda file: file.stat().st_mtime, default=None)
    return answer._replace(summary=latest and json.loads(latest.read_text(encoding="utf-8")))


def launcher_store() -> Any:
    """A store as torchrun keeps it, which outlives the ranks."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def as_launched(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment of a rank that torchrun starts on one machine."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


class Started:
    """Ranks of a program that are running, as torchrun would start them, in a folder for what they say.

    torchrun itself, and the imports of its ranks, take fifteen seconds of a core.
    """

    def __init__(
        self, folder: Path, world: int, *words: object, program: Path | str = LAUNCH,
        fault: Callable[[int], object] | None = None, stdin: str = "", spares: int = 0,
    ) -> None:  # fmt: skip
        """`fault(rank)` goes first on each rank, which has so many `spares`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stdin").write_text(stdin, encoding="utf-8")
        self._store = launcher_store()
        self._said = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(world)]
        self.processes = [
            start(
                [program, *words], folder, [folder / "stdin", *said],
                os.environ | as_launched(rank, world, self._store.port), fault and partial(fault, rank),
                spares,
            )
            for rank, said in enumerate(self._said)
        ]  # fmt: skip

    def has_come(self, rank: int) -> bool:
        """Whether the rank waits for the others, or did."""
        return bool(self._store.check([f"llama_ssp/0/0/rank/{rank}"]))

    def finish(self, patience_s: float = PATIENCE_S) -> list[Answer]:
        return answers(self.processes, self._said, patience_s)


def _run(
    words: list[str], folder: Path, streams: list[str], env: dict[str, str], first: Callable[[], Any] | None,
    spares: int,
) -> None:  # fmt: skip
    _take(env)
    if len(set(streams)) == 1:
        os.login_tty(os.open(streams[0], os.O_RDWR))
    for number, stream in enumerate(streams):
        anew = os.O_TRUNC if number else 0
        os.dup2(os.open(stream, os.O_RDWR | os.O_CREAT | anew, 0o600), number)
    _open_streams()
    os.chdir(folder)
    multiprocessing.current_process()._config["daemon"] = False  # it may have children
    keep_spares(spares)
    _execute(words, first)


def _open_streams() -> None:
    sys.stdin, sys.stdout = os.fdopen(0, "r", closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)


def _execute(words: list[str], first: Callable[[], Any] | None) -> None:
    sys.argv = {"-m": words[1:], "-c": ["-c", *words[2:]]}.get(words[0], words)
    if first:
        first()
    if words[0] in ("-m", "-c"):
        sys.path.insert(0, os.getcwd())
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _take(env: dict[str, str]) -> None:
    """Takes this environment, also where others look for it: in the memory that the process began with."""
    os.environ.clear()
    os.environ.update(env)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[47:49])  # env_start and env_end
    known = sorted(env.items(), key=lambda item: item[0] not in (MARK, "RANK"))
    block = b"".join(os.fsencode(f"{name}={value}\0") for name, value in known)
    block = block[: block.rfind(b"\0", 0, end - begin) + 1]
    ctypes.memmove(begin, block.ljust(end - begin, b"\0"), end - begin)


def keep_spares(count: int) -> None:
    """Forks processes to which subprocess.Popen gives what it shall start with this Python, in place of new
    ones.
    """
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not (pid := os.fork()):
            for _, other in [*spares, (0, ours)]:
                other.close()
            _be_spare(theirs)
        theirs.close()
        spares.append((pid, ours))
    start_anew: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    names = inspect.signature(start_anew)

    def start_spare(self: Any, *args: Any) -> None:
        how = names.bind(self, *args).arguments
        words = [os.fspath(word) for word in how["args"] if word != "-u"]
        if not spares or words[0] != sys.executable:
            start_anew(self, *args)
            return
        self.pid, spare = spares.pop(0)
        ends = [how[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        asked = [how[name] for name in ("preexec_fn", "start_new_session", "process_group")]
        told = pickle.dumps((words[1:], how["env"] or dict(os.environ), how["cwd"] or os.getcwd(), *asked))
        with spare:
            socket.send_fds(spare, [told], [n if end == -1 else end for n, end in enumerate(ends)])
            spare.recv(1)
        self._child_created = True
        self._close_pipe_fds(
            *(how[f"{end}{way}"] for end in ("p2c", "c2p", "err") for way in ("read", "write"))
        )

    if count:
        subprocess.Popen._execute_child = start_spare  # type: ignore[attr-defined]


def _be_spare(starter: socket.socket) -> NoReturn:
    """Waits to be asked, does it, and ends; or ends with the process that could ask."""
    end_with_parent, code = partial(ctypes.CDLL(None).prctl, 1), 1
    end_with_parent(signal.SIGKILL)
    hears = signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for who works there
    told, streams, *_ = socket.recv_fds(starter, 2**20, 3)
    if not told:
        os._exit(0)
    end_with_parent(0)
    words, env, folder, first, leads_session, group = pickle.loads(told)
    try:
        if leads_session:
            os.setsid()
        if group is not None and group >= 0:
            os.setpgid(0, group)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _open_streams()
        _take(env)
        os.chdir(folder)
        signal.signal(signal.SIGINT, hears)
        if first:
            first()
        starter.send(b"1")
        starter.close()
        _execute(words, None)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
