"""The input file: read whole and checked when a job begins, by shards afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from llama_ssp.batch.manifest import Shard
from llama_ssp.batch.requests import Reader, Refused, Request
from llama_ssp.config import BatchConf, OnBadRow, RunConf
from llama_ssp.errors import DataError, RunError
from llama_ssp.text.prompts import file_bytes, has_objects, lines_of

SHOWN = 5  # bad lines that a message quotes

Place = tuple[int, int]  # where a record stands: its first byte, and the number of its line


@dataclass(frozen=True)
class Source:
    """The whole input."""

    sha256: str
    size: int
    places: list[Place]
    records: list[Request | Refused]


def read_source(run: RunConf) -> Source:
    """Every line, checked before anything is loaded."""
    data = file_bytes("task.input", _input(run))
    reader, places = _reader(run), list[Place]()
    records: list[Request | Refused] = []
    for line in lines_of(data, _input(run)):
        places.append((line.start, line.number))
        try:
            records.append(reader.read(line, len(records)))
        except RunError as error:
            records.append(reader.refused(line, len(records), error))
    require_good(run, records)
    return Source(hashlib.sha256(data).hexdigest(), len(data), places, records)


def require_good(run: RunConf, records: Sequence[Request | Refused]) -> None:
    """All bad lines at once, unless the job is to go on without them."""
    assert isinstance(run.task, BatchConf)
    bad = [record for record in records if isinstance(record, Refused)]
    if not bad or run.task.on_bad_row is OnBadRow.skip:
        return
    if len(bad) == 1:
        raise DataError(bad[0].error)
    more = f" (the first {SHOWN})" if len(bad) > SHOWN else ""
    raise DataError(
        f"{len(bad)} lines are bad: {' | '.join(r.error for r in bad[:SHOWN])}{more}",
        fix="correct them, or write task.on_bad_row=skip to have them answered with their errors",
    )  # fmt: skip


def read_shard(run: RunConf, shard: Shard, refused: dict[int, Refused]) -> list[Request | Refused]:
    """The records of a shard; `refused` are those known to be bad."""
    name = _input(run)
    data = file_bytes("task.input", name)[shard.start : shard.end]
    reader, records = _reader(run), list[Request | Refused]()
    for index, found in enumerate(lines_of(data, name, shard.start, shard.line), start=shard.first):
        records.append(refused[index] if index in refused else reader.read(found, index))
    return records


def _reader(run: RunConf) -> Reader:
    return Reader(run, not has_objects(_input(run)))


def _input(run: RunConf) -> str:
    assert isinstance(run.task, BatchConf) and run.task.input is not None
    return run.task.input
