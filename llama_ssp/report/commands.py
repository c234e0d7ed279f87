"""`llama-ssp runs`, `report RUN ...` and `diff RUN RUN`: what reads run folders. No torch, no Hydra."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llama_ssp.config import RunConf, home_expanded
from llama_ssp.config.short_forms import DIFF, REPORT, RUNS
from llama_ssp.errors import OK, DataError, StorageError, UsageError, first_line
from llama_ssp.report.console import Console
from llama_ssp.report.differences import differences
from llama_ssp.report.headline import headline
from llama_ssp.report.page import page
from llama_ssp.report.saved_run import SavedRun, open_run
from llama_ssp.report.tables import Column, Row, Table
from llama_ssp.report.task_tables import items_of

USAGE = {
    RUNS: "llama-ssp runs [FOLDER]",
    REPORT: "llama-ssp report RUN... [out=FILE.html]",
    DIFF: "llama-ssp diff RUN RUN",
}
MEANING = {
    RUNS: "lists the runs below FOLDER (outputs), the newest last, each with its first figures",
    REPORT: "RUN: the folder of a run, outputs/DATE/TIME-TASK; the report goes into the first, or to out=",
    DIFF: "RUN: the folder of a run, outputs/DATE/TIME-TASK",
}
COLUMNS = Column("run", is_text=True), Column("of", is_text=True)
FIRST = 2  # figures of a run in the list
INCOMPLETE = LookupError, TypeError, AttributeError  # of a summary without what its task writes


def execute(command: str, words: Sequence[str]) -> int:
    """Runs the command on the folders that are named; the exit code. Raises UsageError and DataError."""
    console = Console()
    if {"--help", "-h"} & set(words):
        console.show([USAGE[command], MEANING[command]])
        return OK
    places = [word for word in words if not word.startswith(("-", "out="))]
    refused = ("-",) if command == REPORT else ("-", "out=")
    wrong = [word for word in words if word.startswith(refused)]
    if wrong:
        raise UsageError(f"unknown argument {wrong[0]}", allowed=USAGE[command])
    if command == RUNS:
        _list_runs(places, console)
        return OK
    if not places or (command == DIFF and len(places) != 2):
        what = "name two runs" if command == DIFF else "name one run or several"
        raise UsageError(what, found=f"{len(places)} named", fix=USAGE[command])
    runs = [_complete(open_run(place)) for place in places]
    if command == DIFF:
        console.show(differences(*runs))
    else:
        asked = [word.removeprefix("out=") for word in words if word.startswith("out=")]
        file = home_expanded(asked[-1]) if asked else runs[0].folder / "report.html"
        try:
            file.write_text(page(runs), encoding="utf-8")
        except OSError as error:
            what, fix = f"cannot write the report: {error.strerror}", "give another place: out=FILE.html"
            raise StorageError(what, file, fix=fix) from None
        console.line(str(file))
    return OK


def _complete(run: SavedRun) -> SavedRun:
    """The run. Raises DataError where its summary is another program's, or another version's."""
    try:
        _ = headline(run.summary), items_of(run.summary)
    except INCOMPLETE as error:
        what, fix = "the summary lacks figures of its task", "read it with the program that wrote it"
        raise DataError(what, run.folder / "summary.json", first_line(error), fix=fix) from error
    return run


def _list_runs(places: list[str], console: Console) -> None:
    if len(places) > 1:
        raise UsageError("name one folder", found=f"{len(places)} named", fix=USAGE[RUNS])
    folder = home_expanded([*places, str(RunConf().out)][0])
    try:
        console.show([listed(folder)])
    except DataError:
        if places:
            raise
        console.line(f"no runs yet in {folder}")


def listed(folder: Path) -> Table:
    """The runs below a folder, by date. Raises DataError where there is none."""
    rows = list[Row]()
    for file in sorted(folder.rglob("summary.json")):
        with suppress(DataError, *INCOMPLETE):  # another program's
            run = open_run(str(file))
            status = str(run.summary.get("status", ""))
            figures = headline(run.summary)[:FIRST] if status == "done" else []
            words = [f"{one.name} {one.value:.3g}" for one in figures] or [status]
            rows.append({"run": str(file.parent), "of": f"{run.subject}: {'; '.join(words)}"})
    if not rows:
        raise DataError("there is no run", folder, fix="name the folder that out= was given")
    return Table("runs", COLUMNS, rows)
