"""A document's own figures next to those of the run that makes its table anew. No torch."""

from __future__ import annotations

from llama_ssp.config.documents import DOCUMENTS, REGULAR, SPECULATIVE
from llama_ssp.report.tables import Column, Row, Table

TITLES = {
    "ms_per_token": ("ms/token", 1, False),
    "speedup": ("faster", 2, False),
    "acceptance_rate": ("accepted", 2, False),
    "score": ("score", 1, True),
}


def document_items(summary: Row) -> list[Table | str]:
    """A row for each of the document's, with its figures and this run's; nothing without a document."""
    name = summary.get("document")
    if not name:
        return []
    document, found = DOCUMENTS[name], _found(summary)
    lines: list[Table | str] = ["", f"{document.title}: {document.machine}"]
    if not document.rows:
        return lines
    keys = [key for key in TITLES if any(key in row for row in document.rows.values())]
    columns = [Column("name", "", is_text=True)]
    for key in keys:
        title, digits, is_percent = TITLES[key]
        for suffix, by in (("_document", "document"), ("_here", "here")):
            columns.append(Column(key + suffix, f"{title}, {by}", digits, is_percent=is_percent))
    rows = []
    for row_name, given in document.rows.items():
        own = found.get(row_name, {})
        rows.append(
            {"name": row_name, **{f"{key}_document": given.get(key) for key in keys},
             **{f"{key}_here": own.get(key) for key in keys}}
        )  # fmt: skip
    starred = "here: synthetic models of scaled shapes (names with a star), which show the method, not speed"
    return [*lines, Table("document", columns, rows), *([starred] if summary["stand_ins"] else [])]


def _found(summary: Row) -> dict[str, Row]:
    """This run's figures under the document's names."""
    if summary["task"] == "measure" and "pairs" in summary:
        rows: dict[str, Row] = {}
        for one in summary["pairs"]:
            name = one["name"].replace("*", "")
            best = one["pair"][0] if one["pair"] else one["target_alone"]
            rows[name] = best
            rows.setdefault(name.partition("/")[0], one["target_alone"])
        return rows
    if summary["task"] == "measure":
        pair = summary.get("pair") or [{}]
        alone = {name: summary.get(name.replace(" ", "_")) or {} for name in ("target alone", "draft alone")}
        return {**alone, "pair": pair[0]}
    if summary["task"] == "compare" and summary["comparisons"]:
        regular, speculative = (summary["comparisons"][0][way] for way in (REGULAR, SPECULATIVE))
        before, after = regular["ms_per_token"], speculative["ms_per_token"]
        faster = before / after if before and after else None
        return {REGULAR: regular, SPECULATIVE: {**speculative, "speedup": faster}}
    if summary["task"] == "generate":
        return {SPECULATIVE: summary}
    if summary["task"] == "eval":
        return {
            (row["pair"] if row["mode"] == SPECULATIVE else row["target"]).replace("*", ""): row
            for row in summary["rows"]
        }
    return {}
