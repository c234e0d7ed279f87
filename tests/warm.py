"""Processes forked from a server that has imported torch, transformers and the package once for all tests.

Importing them takes five seconds of a core; a process from here starts in a moment. Tests of what a process
imports, or of how it starts, start Python themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.processes import note_start, outliving

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 600.0
IMPORTED = [
    "pytest", "llama_ssp.cli", "llama_ssp.tasks.runner", "transformers.models.llama.modeling_llama",
    "tests.distributed.pairs",
]  # fmt: skip


def server() -> Any:
    """The multiprocessing context that forks from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with outliving():
        forkserver.ensure_running()
    note_start("forkserver")
    return context


def start(
    words: Sequence[object], folder: Path, streams: Sequence[Path | str], env: Mapping[str, str] | None = None
) -> Any:
    """Starts Python with `words`: a script, or -m and a module, and its arguments. Returns the process.

    `streams` are the files of standard input, output and error; a terminal is one for all three.
    """
    args = [str(word) for word in words], folder, [str(one) for one in streams], dict(env or os.environ)
    process = server().Process(target=_run, args=args, daemon=True)
    process.start()
    return process


def python(
    words: Sequence[object], folder: Path, env: Mapping[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, *words], text=True, capture_output=True)` returns."""
    with tempfile.TemporaryDirectory() as scratch:
        streams = [Path(scratch) / name for name in ("in", "out", "err")]
        streams[0].write_text(stdin, encoding="utf-8")
        process = start(words, folder, streams, env)
        process.join(PATIENCE_S)
        ended = process.exitcode is not None
        process.kill()
        out, err = (stream.read_text(encoding="utf-8", errors="replace") for stream in streams[1:])
        assert ended, f"{words} had not ended after {PATIENCE_S:g} s: {out[-1000:]} {err[-2000:]}"
        return subprocess.CompletedProcess(list(map(str, words)), process.exitcode, out, err)


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


def ranks(world: int, words: Sequence[object], folder: Path, stdin: str = "") -> list[tuple[int, str, str]]:
    """Starts `words` on so many ranks; the exit code, output and errors of each.

    torchrun itself, and the imports of its ranks, take fifteen seconds of a core.
    """
    (folder / "stdin").write_text(stdin, encoding="utf-8")
    store, started = launcher_store(), []
    for rank in range(world):
        streams = [folder / "stdin", folder / f"{rank}.out", folder / f"{rank}.err"]
        for stream in streams[1:]:
            stream.unlink(missing_ok=True)
        own = os.environ | as_launched(rank, world, store.port)
        started.append((start(words, folder, streams, own), streams))
    found = []
    for process, (_, *said) in started:
        process.join(PATIENCE_S)
        process.kill()
        found.append((process.exitcode, *(stream.read_text(encoding="utf-8") for stream in said)))
    return found


def _run(words: list[str], folder: Path, streams: list[str], env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    if len(set(streams)) == 1:
        os.login_tty(os.open(streams[0], os.O_RDWR))
    for number, stream in enumerate(streams):
        os.dup2(os.open(stream, os.O_RDWR | os.O_CREAT, 0o600), number)
    sys.stdin, sys.stdout = os.fdopen(0, "r", closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(folder)
    multiprocessing.current_process()._config["daemon"] = False  # it may have children
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(folder))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
