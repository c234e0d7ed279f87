"""Writes a run as one HTML page without scripts and other files: `llama-ssp report RUN`. No torch."""

import json
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import yaml

from llama_ssp.config import home_expanded
from llama_ssp.config.compose import composed
from llama_ssp.config.run import flat, resolved
from llama_ssp.config.yaml_files import MAX_VALUES, values_in
from llama_ssp.errors import OK, DataError, UsageError, first_line, shortened, writing
from llama_ssp.report.console import Console
from llama_ssp.report.plots import svg
from llama_ssp.report.run_folder import GIVEN
from llama_ssp.report.tables import Column, Row, Table
from llama_ssp.report.task_tables import CHECK_MEANINGS, items_of, plan_against_actual

USAGE = "llama-ssp report RUN"
MEANING = "RUN: the folder of a run, outputs/DATE/TIME-TASK; the page is its report.html"
CONFIG = "config.yaml"  # of a run's folder, written when the run begins
WHERE_IT_RAN = "out", "output"  # settings that decide nothing
CHANGED = "Settings that differ from the defaults"  # of a run by 0.3, which did not keep what was given
ASKED = "Settings that were given"
MEANINGS = "What each check shows"
FIX = "give the folder of a run: outputs/DATE/TIME-TASK"
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


def execute(words: Sequence[str], console: Console) -> int:
    """Writes the page of the run that is named; returns the exit code. Raises UsageError and DataError."""
    if {"--help", "-h"} & set(words):
        console.show([USAGE, MEANING])
        return OK
    if len(words) != 1 or words[0].startswith("-"):
        raise UsageError("name one run", found=" ".join(words) or "nothing", allowed=USAGE)

    place = home_expanded(words[0])
    folder = (place.parent if place.name == "summary.json" else place).resolve()
    if (folder / CONFIG).exists() and not (folder / "summary.json").exists():
        raise DataError(
            "the run has no summary: it was killed, or it has not ended",
            where=folder,
            allowed="summary.json, which a run writes at its end",
            fix=f"wait for it, or start it again with the settings of {CONFIG}",
        )
    summary = _read(folder / "summary.json", json.loads)
    if not isinstance(summary, dict) or not isinstance(summary.get("task"), str):
        raise DataError("this is not the summary of a run", where=folder / "summary.json", fix=FIX)
    settings: Row = {}
    if (folder / CONFIG).exists():
        settings = _read(folder / CONFIG, _settings)

    given = _read(folder / GIVEN, _settings) if (folder / GIVEN).exists() else None

    try:
        text = page(folder, summary, settings, given)
    except (LookupError, TypeError, AttributeError) as error:  # another program's summary, or version's
        raise DataError(
            "the summary lacks figures of its task",
            where=folder / "summary.json",
            found=first_line(error),
            fix="read it with the program that wrote it",
        ) from error

    file = folder / "report.html"
    with writing("report", file, fix="copy the folder to where you may write"):
        file.write_text(text, encoding="utf-8")
    console.line(str(file))
    return OK


def _settings(text: str) -> Any:
    """Returns what the YAML says. Raises ValueError where aliases make too many values of it."""
    if values_in(text) > MAX_VALUES:
        raise ValueError(f"aliases make more than {MAX_VALUES} values of it")
    return yaml.safe_load(text)


def _read(file: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        found = error.strerror
        if file.parent.is_dir() and not file.exists():
            found = f"no {file.name}"
        raise DataError("this is not the folder of a run", where=file.parent, found=found, fix=FIX) from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise DataError(
            "the file of a run cannot be read", where=file, found=shortened(str(error), 100), fix=FIX
        ) from None


def page(folder: Path, summary: Row, settings: Row, words: list[str] | None) -> str:
    """Returns the page: settings that were given, where it ran, picture, tables, all other settings.

    `words` are what was given; None where the folder does not say it: then what is not the default is shown.
    """
    title = f"llama-ssp: {summary['task']}"
    pair = [str(summary[key]) for key in ("target", "drafter") if summary.get(key)]
    if pair:
        title += f", {' with '.join(pair)}"

    defaults = dict(flat(resolved(composed([f"task={summary['task']}"]))))
    deciding = {name: value for name, value in flat(settings) if name not in WHERE_IT_RAN}
    rows = [{"key": name, "value": value, "default": defaults.get(name)} for name, value in deciding.items()]
    first = [row for row in rows if row["value"] != row["default"]]
    if words is not None:
        first = list(_given(words, deciding, defaults))
    shown = {row["key"] for row in first}
    others = [row for row in rows if row["key"] not in shown]
    facts = [{"key": name, "value": fact} for name, fact in _facts(folder, summary) if fact]

    keys = Column(key="key", is_text=True)
    values = Column(key="value", is_text=True)
    usual = Column(key="default", is_text=True)
    picture = svg(summary)
    compared = plan_against_actual(summary)
    sections = [
        _html(Table("first", [keys, values, usual], first, CHANGED if words is None else ASKED, "(none)")),
        _html(Table("run", [keys, values], facts, "Run")),
        f"<h2>{escape(folder.name)}</h2>",
        f"<figure>{picture}</figure>" if picture else "",
        *map(_html, items_of(summary)),
        _html(_meanings(summary)),
        _html(compared) if compared else "",
        "<h2>Other settings</h2>",
        _html(Table("settings", [keys, values], others)),
    ]
    return PAGE.substitute(title=escape(title), body="\n".join(filter(None, sections)))


def _given(words: list[str], settings: Row, defaults: Row) -> Iterator[Row]:
    """Yields a row for each setting that was given; of a group, such as a preset, its name is the value."""
    for word in words:
        key, _, text = word.lstrip("+~").partition("=")
        if key in ("task", *WHERE_IT_RAN) or key.startswith("hydra"):
            continue
        default = defaults.get(key, defaults.get(f"{key}.name"))
        yield {"key": key, "value": settings.get(key, text), "default": default}


def _meanings(summary: Row) -> Table | str:
    """Returns a row for each check of task=certify with what it shows; nothing for another task."""
    names = [check["name"] for check in summary.get("checks", ())] if summary["task"] == "certify" else []
    rows = [{"check": name, "shows": CHECK_MEANINGS.get(name, "")} for name in names]
    columns = [Column(key="check", is_text=True), Column(key="shows", is_text=True)]
    return Table("meanings", columns, rows, MEANINGS) if rows else ""


def _html(item: Table | str) -> str:
    if isinstance(item, str):
        return f"<p>{escape(item)}</p>" if item else ""
    if not item.rows:
        return f"<p>{escape(item.title)} {item.empty}</p>"
    return f'<div class="scroll">{item.html()}</div>'


def _facts(folder: Path, summary: Row) -> Iterator[tuple[str, str]]:
    """Yields where and with what it ran, as far as the summary has it."""
    yield "folder", str(folder)
    for key in ("status", "began", "seed", "commit"):
        value = summary.get(key)
        yield key, "" if value is None else str(value)
    yield "wall_s", f"{summary['wall_s']:.1f}" if summary.get("wall_s") else ""

    host = summary.get("host") or {}
    devices = summary.get("devices") or {}
    versions = summary.get("versions") or {}
    yield "processor", ", ".join(str(host[key]) for key in ("name", "processor", "system") if key in host)
    yield "GPUs", ", ".join(summary.get("gpus") or [])
    yield "devices", "; ".join(f"{role}: {device}" for role, device in devices.items())
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
