"""The run folder and the JSON document: what is kept of a run."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import sys
import time
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import yaml

from llama_ssp import __version__
from llama_ssp.config import RunConf, home_expanded, resolved
from llama_ssp.errors import StorageError

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "bitsandbytes", "hydra-core")


def config_sha256(run: RunConf) -> str:
    """A hash of everything that decides the output."""
    return hashlib.sha256(json.dumps(deciding(run), sort_keys=True, default=str).encode()).hexdigest()


def deciding(run: RunConf) -> dict[str, Any]:
    """The settings that decide the output; where results are put, and the plan, do not."""
    return {key: value for key, value in resolved(run).items() if key not in ("out", "output", "plan")}


def versions() -> dict[str, str]:
    found = {"llama_ssp": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


class RunFolder:
    """`<out>/<date>/<time>-<task>/`: the resolved config, the summary, the rounds when traced."""

    def __init__(self, run: RunConf, seed: int | None) -> None:
        self.path: Path | None = None
        self._rounds: IO[str] | None = None
        if run.out is None:
            return
        now = datetime.now()
        base = home_expanded(run.out) / now.strftime("%Y-%m-%d")
        name = f"{now:%H-%M-%S}-{run.task.name}"
        try:
            base.mkdir(parents=True, exist_ok=True)
            self.path = _new_folder(base, name)
            config = yaml.safe_dump({**resolved(run), "seed": seed}, sort_keys=False, allow_unicode=True)
            (self.path / "config.yaml").write_text(config, encoding="utf-8")
        except OSError as error:
            raise _storage(error, run.out) from None

    def round(self, record: dict[str, Any]) -> None:
        """Adds a line to rounds.jsonl."""
        if self.path is None:
            return
        try:
            if self._rounds is None:
                self._rounds = (self.path / "rounds.jsonl").open("w", encoding="utf-8")
            self._rounds.write(json.dumps(record) + "\n")
        except OSError as error:
            raise _storage(error, str(self.path)) from None

    def write(self, name: str, text: str) -> None:
        """Adds a file."""
        if self.path is None:
            return
        try:
            (self.path / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise _storage(error, str(self.path)) from None

    def close(self, summary: dict[str, Any]) -> None:
        """Writes the summary whole or not at all."""
        if self.path is None:
            return
        try:
            if self._rounds is not None:
                self._rounds.close()
            draft = self.path / "summary.json.part"
            draft.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            draft.replace(self.path / "summary.json")
        except OSError as error:
            raise _storage(error, str(self.path)) from None


class Console:
    """Standard output, the product. A reader that went away ends the run with one line."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()

    def write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise StorageError("standard output was closed by its reader") from None
        except OSError as error:
            raise StorageError(f"cannot write to standard output: {error.strerror}") from None

    def line(self, text: str) -> None:
        self.write(text + "\n")

    def document(self, summary: dict[str, Any], is_json: bool) -> None:
        """Ends a task. A person at a terminal reads where the run folder is; else it is one JSON document."""
        if is_json or not self.is_terminal:
            self.line(json.dumps(summary))
        elif summary.get("run_folder"):
            self.line(f"run folder: {summary['run_folder']}")


class NoConsole(Console):
    """Says nothing: the console of every rank but the leader."""

    def write(self, text: str) -> None:
        pass


class Progress:
    """How far a long work is: a line that is rewritten on a terminal, now and then a line in a log."""

    LOG_EVERY_S = 15.0

    def __init__(self, what: str, total: int, units: str) -> None:
        self._what, self._total, self._units = what, total, units
        self._done = self._before = 0
        self._live = sys.stderr.isatty() and log.isEnabledFor(logging.INFO)

    def __enter__(self) -> Progress:
        self._began = self._said = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
        if self._done > self._before:
            log.info("%s", self._line())

    def start(self, done: int) -> None:
        """Some of it was done before."""
        self._done = self._before = done

    def advance(self, count: int) -> None:
        self._done += count
        now = time.perf_counter()
        if self._live:
            sys.stderr.write(f"\r\x1b[K{self._line()}")
            sys.stderr.flush()
        elif now - self._said >= self.LOG_EVERY_S and self._done < self._total:
            self._said = now
            log.info("%s", self._line())

    def _line(self) -> str:
        spent = time.perf_counter() - self._began
        rate = (self._done - self._before) / spent if spent > 0 else 0.0
        left = self._total - self._done
        rest = f"{left / rate:.0f} s left" if left and rate else f"{spent:.1f} s"
        return f"{self._what}: {self._done} of {self._total} {self._units}, {rate:.1f}/s, {rest}"


def _new_folder(base: Path, name: str) -> Path:
    for number in range(1, 1000):
        path = base / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise StorageError("a thousand runs began in one second", where=str(base))


def _storage(error: OSError, where: str) -> StorageError:
    return StorageError(
        f"cannot write the run folder: {error.strerror}", where=where,
        fix="choose another place with out=FOLDER, or out=null for none",
    )  # fmt: skip
