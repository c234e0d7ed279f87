"""`llama-ssp report RUN ...` and `llama-ssp diff RUN RUN`: what reads run folders. No torch, no Hydra."""

from __future__ import annotations

from collections.abc import Sequence

from llama_ssp.config import home_expanded
from llama_ssp.errors import OK, StorageError, UsageError
from llama_ssp.report.console import Console
from llama_ssp.report.differences import differences
from llama_ssp.report.page import page
from llama_ssp.report.saved_run import open_run

REPORT, DIFF = "report", "diff"
USAGE = {REPORT: "llama-ssp report RUN... [out=FILE.html]", DIFF: "llama-ssp diff RUN RUN"}
MEANING = "RUN: the folder of a run, outputs/DATE/TIME-TASK; the report goes into the first, or to out="


def execute(command: str, words: Sequence[str]) -> int:
    """Runs the command on the folders that are named; the exit code. Raises UsageError and DataError."""
    console = Console()
    if {"--help", "-h"} & set(words):
        console.show([USAGE[command], MEANING])
        return OK
    places = [word for word in words if not word.startswith(("-", "out="))]
    wrong = [word for word in words if word.startswith("-") or (word.startswith("out=") and command == DIFF)]
    if wrong:
        raise UsageError(f"unknown argument {wrong[0]}", allowed=USAGE[command])
    if not places or (command == DIFF and len(places) != 2):
        what = "name two runs" if command == DIFF else "name one run or several"
        raise UsageError(what, found=f"{len(places)} named", fix=USAGE[command])
    runs = [open_run(place) for place in places]
    if command == DIFF:
        console.show(differences(*runs))
        return OK
    asked = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    file = home_expanded(asked[-1]) if asked else runs[0].folder / "report.html"
    try:
        file.write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the report: {error.strerror}", file, fix="out=FILE.html") from None
    console.line(str(file))
    return OK
