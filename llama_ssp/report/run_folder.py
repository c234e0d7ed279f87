"""The run folder and its summary: what is kept of a run."""

import hashlib
import json
import logging
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import yaml

from llama_ssp import __version__
from llama_ssp.config import RunConf, home_expanded, resolved
from llama_ssp.errors import StorageError, writing
from llama_ssp.report.machine import commit, host
from llama_ssp.report.tables import Table
from llama_ssp.report.task_tables import items_of

log = logging.getLogger(__name__)

MAX_NAME = 120  # characters of a folder of a sweep
PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "bitsandbytes", "hydra-core")
GIVEN = "overrides.yaml"  # what the user gave, a word an entry
FIX = "choose another place with out=FOLDER, or out=null for none"


def config_sha256(run: RunConf) -> str:
    """Returns a hash of everything that decides the output."""
    return hashlib.sha256(json.dumps(deciding(run), sort_keys=True, default=str).encode()).hexdigest()


def deciding(run: RunConf) -> dict[str, Any]:
    """Returns the settings that decide the output: not where results go, nor what only the plan uses."""
    undeciding = ("out", "output", "download", "plan", "ranks")
    return {key: value for key, value in resolved(run).items() if key not in undeciding}


def versions() -> dict[str, str]:
    """Returns the versions of this package, of Python and of the PACKAGES that are installed."""
    result = {"llama_ssp": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        result[package] = "none"
        with suppress(PackageNotFoundError):
            result[package] = version(package)
    return result


def sources() -> dict[str, str]:
    """Returns a hash of each of this package's modules, by its path in the package: versions tell less."""
    package = Path(__file__).resolve().parents[1]
    files = sorted(package.rglob("*.py"))
    hashes = {str(file.relative_to(package)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return {name: digest[:12] for name, digest in hashes.items()}


class RunFolder:
    """Writes config, summary, tables, and rounds if traced, to `<out>/<date>/<time>-<task>/`.

    A sweep gives another path as `place`. `words` are the overrides that the user gave, with their keys in
    full. Writes nothing if `out` is null. Raises StorageError if it cannot write the folder.
    """

    def __init__(
        self, run: RunConf, seed: int | None, place: Path | None = None, words: Sequence[str] = ()
    ) -> None:
        self._run = run
        self._seed = seed
        self.path: Path | None = None
        self._rounds: IO[str] | None = None
        now = datetime.now()
        self._began = now.isoformat(timespec="seconds")
        if run.out is None:
            return

        place = place or home_expanded(run.out) / f"{now:%Y-%m-%d}/{now:%H-%M-%S}-{run.task.name}"
        with writing("run folder", run.out, FIX):
            place.parent.mkdir(parents=True, exist_ok=True)
            self.path = _new_folder(place.parent, place.name)
            config = yaml.safe_dump({**resolved(run), "seed": seed}, sort_keys=False, allow_unicode=True)
            (self.path / "config.yaml").write_text(config, encoding="utf-8")
            given = yaml.safe_dump([*words], allow_unicode=True)
            (self.path / GIVEN).write_text(given, encoding="utf-8")

    def keep_decisions(self, decisions: dict[str, Any]) -> None:
        """Writes how each pair runs, and who decided it, before anything is loaded."""
        if self.path is not None:
            with writing("run folder", self.path, FIX):
                content = yaml.safe_dump(decisions, sort_keys=False, allow_unicode=True)
                (self.path / "decisions.yaml").write_text(content, encoding="utf-8")

    def summary(self, status: str, figures: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON document of the run, with the task's figures."""
        return {
            "task": self._run.task.name,
            "status": status,
            "began": self._began,
            "target": self._run.model.name,
            "drafter": self._run.drafter_name,
            "config_sha256": config_sha256(self._run),
            "seed": self._seed,
            "versions": versions(),
            "commit": commit(),
            "host": host(),
            **figures,
            "run_folder": str(self.path) if self.path else None,
        }

    def round(self, record: dict[str, Any]) -> None:
        """Adds a line to rounds.jsonl."""
        if self.path is not None:
            with writing("run folder", self.path, FIX):
                self._rounds = self._rounds or (self.path / "rounds.jsonl").open("w", encoding="utf-8")
                self._rounds.write(json.dumps(record) + "\n")

    def close(self, summary: dict[str, Any]) -> None:
        """Writes the summary whole or not at all, then its tables."""
        if self.path is None:
            return
        with writing("run folder", self.path, FIX):
            if self._rounds is not None:
                self._rounds.close()
            part = self.path / "summary.json.part"
            part.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            part.replace(self.path / "summary.json")
            for item in items_of(summary):
                if isinstance(item, Table):
                    (self.path / f"{item.name}.csv").write_text(item.csv(), encoding="utf-8")


def sweep_folder(number: int, varied: Sequence[str], out: str | None, began: datetime) -> Path | None:
    """Logs a sweep's job by its `varied` overrides; returns its folder below `out`, None without `out`."""
    place = None
    if out is not None:
        whole = ",".join(varied)
        label = re.sub(r"[^\w.=,+-]", "_", whole)[:MAX_NAME]
        name = label if label and label == whole else f"{label}-job{number}"
        place = home_expanded(out) / f"{began:%Y-%m-%d/%H-%M-%S}-sweep" / name
    job = f"job {number + 1}: {' '.join(varied)}"
    log.info("%s", job if place is None else f"{job}; {place}")
    return place


def _new_folder(base: Path, name: str) -> Path:
    """Makes the folder; appends a number if the name is taken."""
    for number in range(1, 1000):
        path = base / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise StorageError(
        "a thousand runs began in one second", where=base, fix="give each a place with out=FOLDER"
    )
