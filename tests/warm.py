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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 300.0
IMPORTED = [
    "pytest", "llama_ssp.cli", "llama_ssp.tasks.runner", "transformers.models.llama.modeling_llama",
    "tests.distributed.pairs",
]  # fmt: skip


def server() -> Any:
    """The multiprocessing context that forks from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def python(
    words: Sequence[object], folder: Path, env: Mapping[str, str] | None = None, stdin: str = "",
    patience_s: float = PATIENCE_S,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """What `subprocess.run([sys.executable, *words])` returns; `words` are a script, or -m and a module, and
    its arguments."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "0").write_text(stdin, encoding="utf-8")
        args = (list(map(str, words)), str(folder), dict(os.environ if env is None else env), scratch)
        process = server().Process(target=_run, args=args, daemon=True)
        process.start()
        process.join(patience_s)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(args[0], patience_s)
        out, err = ((Path(scratch) / name).read_text(encoding="utf-8", errors="replace") for name in "12")
        return subprocess.CompletedProcess(args[0], process.exitcode, out, err)


def _run(words: list[str], folder: str, env: dict[str, str], streams: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for number in range(3):
        os.dup2(os.open(f"{streams}/{number}", os.O_RDWR | os.O_CREAT, 0o600), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, folder)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
