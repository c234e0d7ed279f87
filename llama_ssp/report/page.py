"""`llama-ssp report RUN`: a run as one HTML page, without scripts and other files. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import yaml

from llama_ssp.config import home_expanded
from llama_ssp.config.compose import composed
from llama_ssp.config.run import resolved
from llama_ssp.errors import OK, DataError, StorageError, UsageError, first_line, shortened
from llama_ssp.report.console import Console
from llama_ssp.report.plots import svg
from llama_ssp.report.tables import Column, Row, Table
from llama_ssp.report.task_tables import items_of, plan_against_actual

USAGE = "llama-ssp report RUN [out=FILE.html]"
MEANING = "RUN: the folder of a run, outputs/DATE/TIME-TASK; the page is its report.html, or out="
MAX_BYTES = 2**28
WHERE_IT_RAN = ("out", "output")  # settings that decide nothing
FIX = "give the folder of a run: outputs/DATE/TIME-TASK"
VERSIONS = "llama_ssp", "torch", "transformers", "python"
PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<meta name="viewport" content="width=device-width"><style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 75rem; padding: 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; border-bottom: 2px solid #d0d4da; margin-top: 2rem; }
.scroll { overflow-x: auto; margin: .6rem 0 1.2rem; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; white-space: nowrap; }
th, td { padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #d0d4da; overflow-wrap: anywhere; }
td:first-child, th:first-child { white-space: nowrap; } .n { text-align: right; white-space: nowrap; }
@media print { body { font-size: 9.5pt; max-width: none; padding: 0; } .scroll { overflow: visible; }
  h2, caption { break-after: avoid; } tr, svg { break-inside: avoid; } }
</style></head>
<body>
<h1>$title</h1>
$body</body></html>
""")


@dataclass(frozen=True)
class SavedRun:
    """A run's folder, its summary, and its settings."""

    folder: Path
    summary: dict[str, Any]
    settings: dict[str, Any]


def execute(words: Sequence[str], console: Console) -> int:
    """Writes the page of the run that is named; returns the exit code. Raises UsageError and DataError."""
    if {"--help", "-h"} & set(words):
        console.show([USAGE, MEANING])
        return OK
    places = [word for word in words if not word.startswith(("-", "out="))]
    if len(places) != 1 or any(word.startswith("-") for word in words):
        raise UsageError("name one run", found=" ".join(words) or "nothing", allowed=USAGE)
    run = open_run(places[0])
    given = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    file = home_expanded(given[-1]) if given else run.folder / "report.html"
    try:
        text = page(run)
    except (LookupError, TypeError, AttributeError) as error:  # another program's summary, or version's
        what, fix = "the summary lacks figures of its task", "read it with the program that wrote it"
        raise DataError(what, run.folder / "summary.json", first_line(error), fix=fix) from error
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        what, fix = f"cannot write the report: {error.strerror}", "give another place: out=FILE.html"
        raise StorageError(what, file, fix=fix) from None
    console.line(str(file))
    return OK


def open_run(place: str) -> SavedRun:
    """Reads the run of a folder, or of its summary.json. Raises DataError where there is none."""
    folder = home_expanded(place)
    folder = folder.parent if folder.name == "summary.json" else folder
    summary = _read(folder / "summary.json", json.loads)
    if not isinstance(summary, dict) or not isinstance(summary.get("task"), str):
        raise DataError("this is not the summary of a run", folder / "summary.json", fix=FIX)
    settings = _read(folder / "config.yaml", yaml.safe_load) if (folder / "config.yaml").exists() else {}
    return SavedRun(folder.resolve(), summary, settings)


def _read(file: Path, parse: Any) -> Any:
    try:
        if (size := file.stat().st_size) > MAX_BYTES:
            raise DataError("the file is too large for a run's", file, f"{size} bytes", fix=FIX)
        return parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError("this is not the folder of a run", file.parent, error.strerror, fix=FIX) from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        found = shortened(str(error), 100)
        raise DataError("the file of a run cannot be read", file, found, fix=FIX) from None


def page(run: SavedRun) -> str:
    """Returns the page: settings that are not the defaults, where it ran, picture, tables, all settings."""
    pair = " with ".join(str(run.summary[key]) for key in ("target", "drafter") if run.summary.get(key))
    title = f"llama-ssp: {run.summary['task']}{', ' * bool(pair)}{pair}"
    return PAGE.substitute(title=escape(title), body="".join(_sections(run)))


def _sections(run: SavedRun) -> Iterator[str]:
    changed, others = settings_tables(run)
    facts = [{"what": key, "is": value} for key, value in _facts(run) if value]
    columns = [Column(name, "", is_text=True) for name in ("what", "is")]
    yield _html(changed)
    yield _html(Table("run", columns, facts, "Run"))
    yield f"<h2>{escape(run.folder.name)}</h2>\n"
    if (drawn := svg(run.summary)) is not None:
        yield f"<figure>{drawn}</figure>\n"
    yield "".join(map(_html, items_of(run.summary)))
    if (compared := plan_against_actual(run.summary)) is not None:
        yield _html(compared)
    yield f"<h2>Other settings</h2>\n{_html(others)}"


def _html(item: Table | str) -> str:
    if isinstance(item, str):
        return f"<p>{escape(item)}</p>\n" if item else ""
    if not item.rows:
        return f"<p>{escape(item.title)} {item.empty}</p>\n"
    return f'<div class="scroll">{item.html()}</div>\n'


def _facts(run: SavedRun) -> Iterator[tuple[str, str]]:
    summary, host, versions = run.summary, run.summary.get("host") or {}, run.summary.get("versions") or {}
    yield "folder", str(run.folder)
    for key in ("status", "began", "seed", "wall_s", "commit"):
        yield key, str(summary.get(key) or "")
    yield "processor", ", ".join(str(host[key]) for key in ("name", "processor", "system") if key in host)
    yield "GPUs", ", ".join(summary.get("gpus") or [])
    yield "devices", "; ".join(f"{role}: {device}" for role, device in (summary.get("devices") or {}).items())
    yield "versions", ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions)


def settings_tables(run: SavedRun) -> tuple[Table, Table]:
    """Returns the settings that differ from the defaults of the task, and the others."""
    usual = dict(_flat(resolved(composed([f"task={run.summary['task']}"]))))
    given = {key: value for key, value in _flat(run.settings) if key not in WHERE_IT_RAN}
    rows: list[Row] = [{"key": key, "value": value, "usual": usual.get(key)} for key, value in given.items()]
    changed = [row for row in rows if row["value"] != row["usual"]]
    key, value, default = (Column(name, name, is_text=True) for name in ("key", "value", "usual"))
    title = "Settings that differ from the defaults"
    others = [row for row in rows if row not in changed]
    return (
        Table("settings_differ", [key, value, default], changed, title, "(none)"),
        Table("settings", [key, value], others),
    )


def _flat(settings: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields every setting as dotted key and text."""
    if isinstance(settings, dict) and settings:
        for name, value in settings.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, json.dumps(settings, ensure_ascii=False, default=str)
