"""A sweep (--multirun): folders that are named by what differs, and one table of all runs. No torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from llama_ssp.config import home_expanded
from llama_ssp.errors import DataError, StorageError
from llama_ssp.report.console import Console
from llama_ssp.report.headline import headline
from llama_ssp.report.saved_run import SavedRun, open_run
from llama_ssp.report.tables import Column, Row, Table

log = logging.getLogger(__name__)

NAME = "sweep"
LONGEST = 120  # characters of a folder's name


class Sweep:
    """The jobs of a sweep by their overrides; `out` is where run folders go, None for nowhere."""

    def __init__(self, jobs: Sequence[Sequence[str]], out: str | None) -> None:
        shared = set.intersection(*map(set, jobs))
        self._differing = [[word for word in words if word not in shared] for words in jobs]
        now = datetime.now()
        place = f"{now:%Y-%m-%d}/{now:%H-%M-%S}-{NAME}"
        self._folder = home_expanded(out) / place if out is not None else None

    def place(self, number: int) -> Path | None:
        """The folder of a job."""
        if self._folder is None:
            return None
        labels = [re.sub(r"[^\w.=,+-]", "_", ",".join(words))[:LONGEST] for words in self._differing]
        is_unique = labels[number] and labels.count(labels[number]) == 1
        return self._folder / (labels[number] if is_unique else f"{labels[number]}-job{number}")

    def end(self, console: Console) -> None:
        """Writes sweep.csv and sweep.md with a row for each finished job; shows the table on a terminal."""
        table = self._table()
        if table is None or self._folder is None:
            return
        try:
            (self._folder / f"{NAME}.csv").write_text(table.csv(), encoding="utf-8")
            (self._folder / f"{NAME}.md").write_text(table.markdown(), encoding="utf-8")
        except OSError as error:
            what, fix = f"cannot write the sweep's table: {error.strerror}", "give another place: out=FOLDER"
            raise StorageError(what, self._folder, fix=fix) from None
        if console.is_terminal:
            console.show([table])
        log.info("sweep: %s", self._folder / f"{NAME}.csv")

    def _table(self) -> Table | None:
        """A row for each job: what differs, then its figures."""
        runs = {number: run for number in range(len(self._differing)) if (run := self._run(number))}
        if not runs:
            return None
        rows, keys, figures = list[Row](), dict[str, None](), dict[str, bool]()
        for number, run in runs.items():
            row: Row = dict(word.lstrip("+").split("=", 1) for word in self._differing[number] if "=" in word)
            keys |= dict.fromkeys(row)
            for figure in headline(run.summary):
                ends = {f"{figure.name}_low": figure.low, f"{figure.name}_high": figure.high}
                row |= {figure.name: figure.value, **ends}
                figures[figure.name] = figures.get(figure.name, False) or figure.low is not None
            rows.append(row)
        columns = [Column(key, is_text=True) for key in keys]
        for rank, (name, has_interval) in enumerate(figures.items()):
            columns.append(Column(name, optional=2 * rank))
            if has_interval:
                columns.append(Column(name, "interval", is_interval=True, optional=2 * rank + 1))
        return Table(NAME, columns, rows, "The sweep")

    def _run(self, number: int) -> SavedRun | None:
        place = self.place(number)
        try:
            return open_run(str(place))
        except DataError:  # it did not get so far
            return None
