"""A finished run, read back from its folder. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llama_ssp.config import home_expanded
from llama_ssp.errors import DataError, shortened
from llama_ssp.report.tables import Column, Row, Table

MOST_BYTES = 2**28
WHERE_IT_RAN = ("out", "output")  # settings that decide nothing


@dataclass(frozen=True)
class SavedRun:
    """A run's folder, its summary, and its settings by their dotted keys."""

    folder: Path
    summary: dict[str, Any]
    settings: dict[str, str]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def subject(self) -> str:
        """The task and the pair, in words."""
        target, drafter = self.summary.get("target"), self.summary.get("drafter")
        pair = f"{target} with {drafter}" if drafter else f"{target or ''}"
        return f"{self.summary['task']}, {pair}" if pair else f"{self.summary['task']}"


def open_run(place: str) -> SavedRun:
    """The run of a folder, or of its summary.json. Raises DataError where there is none."""
    folder = home_expanded(place)
    folder = folder.parent if folder.name == "summary.json" else folder
    found = _read(folder / "summary.json", json.loads)
    if not isinstance(found, dict) or not isinstance(found.get("task"), str):
        raise DataError("this is not the summary of a run", folder / "summary.json", fix=FIX)
    settings = _read(folder / "config.yaml", yaml.safe_load) if (folder / "config.yaml").exists() else {}
    return SavedRun(folder.resolve(), found, dict(_flat(settings)))


FIX = "give folders of runs: outputs/DATE/TIME-TASK"


def _read(file: Path, parse: Any) -> Any:
    try:
        if file.stat().st_size > MOST_BYTES:
            raise DataError(
                "the file is too large for a run's", file, f"{file.stat().st_size} bytes", fix=FIX
            )
        return parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError("this is not the folder of a run", file.parent, error.strerror, fix=FIX) from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise DataError(
            "the file of a run cannot be read", file, shortened(str(error), 100), fix=FIX
        ) from None


def _flat(settings: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every setting as dotted key and text."""
    if isinstance(settings, dict) and settings:
        for name, value in settings.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, json.dumps(settings, ensure_ascii=False, default=str)


def settings_tables(runs: Sequence[SavedRun]) -> list[Table]:
    """The settings that differ between the runs, and those that all share; each run has a column."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings if key not in WHERE_IT_RAN))
    rows: list[Row] = [
        {"key": key, **{str(n): run.settings.get(key) for n, run in enumerate(runs)}} for key in keys
    ]
    differ = [row for row in rows if len({row[str(n)] for n in range(len(runs))}) > 1]
    same = [row for row in rows if row not in differ]
    key, value = Column("key", "setting", is_text=True), Column("0", "value", is_text=True)
    columns = [Column(str(n), run.name, is_text=True) for n, run in enumerate(runs)]
    found = []
    if len(runs) > 1:
        title, none = "Settings that differ", "(none)"
        found.append(Table("settings_differ", [key, *columns], differ, title, none))
    title = "Settings that all runs share" if len(runs) > 1 else "Settings"
    return [*found, Table("settings", [key, value], same, title)]
