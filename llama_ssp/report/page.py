"""Runs as one HTML page: no scripts, no other files, fit for a browser and for paper. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from llama_ssp.report.headline import headline
from llama_ssp.report.plots import svg
from llama_ssp.report.saved_run import SavedRun, settings_tables
from llama_ssp.report.tables import Column, Row, Table
from llama_ssp.report.task_tables import items_of, plan_against_actual

STYLE = """
:root { color-scheme: light; --line: #d0d4da; --soft: #f4f6f8; --ink: #1c2733; --dim: #5b6773; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink);
  margin: 0 auto; max-width: 75rem; padding: 1.5rem; background: #fff; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem;
  border-bottom: 2px solid var(--line); padding-bottom: .2rem; overflow-wrap: anywhere; }
p { margin: .3rem 0; } .dim { color: var(--dim); }
.scroll { overflow-x: auto; margin: .6rem 0 1.2rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .2rem 0; white-space: nowrap; }
th, td { padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; } th { color: var(--dim); font-weight: 600; }
td:first-child, th:first-child { white-space: nowrap; }
.n { text-align: right; white-space: nowrap; } tbody tr:nth-child(even) { background: var(--soft); }
svg { max-width: 100%; height: auto; }
@media print { body { font-size: 9.5pt; max-width: none; padding: 0; } h2, caption { break-after: avoid; }
  tr, svg { break-inside: avoid; } thead { display: table-header-group; } .scroll { overflow: visible; }
  table { font-size: 8pt; } @page { margin: 14mm; } }
"""
VERSIONS = "llama_ssp", "torch", "transformers", "python"


def page(runs: Sequence[SavedRun]) -> str:
    """The page of one run, or of several side by side."""
    names = list(dict.fromkeys(run.subject for run in runs))
    title = f"llama-ssp: {'; '.join(names[:3])}{' ...' * (len(names) > 3)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{''.join(_sections(runs))}</body></html>\n"
    )


def _sections(runs: Sequence[SavedRun]) -> Iterator[str]:
    yield _html(_surroundings(runs))
    if len(runs) > 1:
        yield f"<h2>Side by side</h2>\n{_html(side_by_side(runs))}"
    for run in runs:
        yield f"<h2>{escape(run.name)}: {escape(run.subject)}</h2>\n"
        if (drawn := svg(run.summary)) is not None:
            yield f"<figure>{drawn}</figure>\n"
        yield "".join(map(_html, items_of(run.summary)))
        if (compared := plan_against_actual(run.summary)) is not None:
            yield _html(compared)
    yield f"<h2>Settings</h2>\n{''.join(map(_html, settings_tables(runs)))}"


def _html(item: Table | str) -> str:
    if isinstance(item, str):
        return f"<p>{escape(item)}</p>\n" if item else ""
    return (
        f'<div class="scroll">{item.html()}</div>\n'
        if item.rows
        else f"<p>{escape(item.title)} {item.empty}</p>\n"
    )


def _surroundings(runs: Sequence[SavedRun]) -> Table:
    """What ran where: the facts of each run."""
    facts = [dict(_facts(run)) for run in runs]
    keys = list(dict.fromkeys(key for own in facts for key in own))
    rows: list[Row] = [
        {"what": key, **{str(n): own.get(key) for n, own in enumerate(facts)}}
        for key in keys
        if any(own.get(key) is not None for own in facts)
    ]
    columns = [Column(str(n), run.name, is_text=True) for n, run in enumerate(runs)]
    return Table("runs", [Column("what", "", is_text=True), *columns], rows)


def _facts(run: SavedRun) -> Iterator[tuple[str, str | None]]:
    found, host = run.summary, run.summary.get("host") or {}
    yield "folder", str(run.folder)
    for key in ("task", "status", "began", "seed", "target", "drafter"):
        yield key, None if found.get(key) is None else str(found[key])
    yield "seconds", f"{found['wall_s']:.1f}" if found.get("wall_s") is not None else None
    yield "host", ", ".join(str(host[key]) for key in ("name", "system") if key in host) or None
    yield "processor", f"{host['processor']}, {host['cores']} cores" if host else None
    yield "GPUs", ", ".join(found.get("gpus") or []) or None
    yield "devices", "; ".join(_devices(found.get("devices") or {})) or None
    versions = found.get("versions") or {}
    yield "versions", ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions) or None
    yield "commit", found.get("commit")
    yield "configuration", (found.get("config_sha256") or "")[:12] or None


def _devices(devices: Row) -> Iterator[str]:
    """Each role's device; of several pairs each pair's."""
    for name, one in devices.items():
        yield f"{name}: {', '.join(_devices(one))}" if isinstance(one, dict) else f"{name}: {one}"


def side_by_side(runs: Sequence[SavedRun]) -> Table:
    """The figures of every run, under the runs' numbers."""
    figures = [{figure.name: figure for figure in headline(run.summary)} for run in runs]
    names = list(dict.fromkeys(name for own in figures for name in own))
    rows: list[Row] = []
    for name in names:
        row: Row = {"what": name}
        for n, own in enumerate(figures):
            if figure := own.get(name):
                row |= {str(n): figure.value, f"{n}_low": figure.low, f"{n}_high": figure.high}
        rows.append(row)
    columns = [Column("what", "", is_text=True)]
    for n, run in enumerate(runs):
        columns.append(Column(str(n), run.name))
        if any(f"{n}_low" in row and row[f"{n}_low"] is not None for row in rows):
            columns.append(Column(str(n), "interval", is_interval=True))
    return Table("side_by_side", columns, rows)
