"""The input of a job as an index: where each record lies. It is made once and read by all groups. No torch.

The file `index` in the job's folder has a line of JSON (the input's files, and lines that make no request),
then a row of ROW for each record. A record is parsed when a shard with it is begun: no process holds them.
What cannot be read from its middle (a pipe, gzip, Parquet) is kept as plain lines: input-0, input-1, ...
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import stat
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from llama_ssp.batch.atomic_files import drafted, replace_whole, storing, synced
from llama_ssp.batch.records import Reader, Refused, Request
from llama_ssp.config import BatchConf, OnBadRow, RunConf, home_expanded
from llama_ssp.errors import DataError, UsageError
from llama_ssp.report.console import Progress
from llama_ssp.text import prompts
from llama_ssp.text.prompts import (
    HEAD_BYTES,
    JSON_ENDINGS,
    STDIN,
    TextPrompt,
    begins_object,
    open_pipe,
    reading,
    require_usable,
    whole_lines,
)

log = logging.getLogger(__name__)

INDEX = "index"
KEPT = "input-{}"
GZIP = ".gz"
PARQUET = ".parquet"
FIELDS = {"file": "u4", "line": "u4", "start": "u8", "bytes": "u4", "crc": "u4", "id": "u4", "new": "u4"}
ROW = np.dtype([*FIELDS.items()])
PACKED = struct.Struct("=IIQIIII")
MAX_RECORDS = 2**26  # of a job: an index of 2 GiB, which one process makes in memory
MAX_BAD = 10_000  # lines that end the job with their count and the first of them; each takes about 1 KiB
MAX_SKIPPED = 2**20  # bad lines that are answered with their errors


@dataclass(frozen=True)
class InputFile:
    """One file of the input: where it was named, its plain lines, and what shows that it has changed."""

    name: str
    plain: str
    is_text: bool
    state: list[int]  # size and time; empty of a pipe

    @property
    def shown(self) -> str:
        return "standard input" if self.name == STDIN else self.name


@dataclass(kw_only=True)
class Index:
    """Every record of a job's input: `rows` say where it lies, `refused` which lines make no request."""

    sources: list[InputFile]
    sha256: str
    rows: Any
    refused: dict[int, Refused]
    is_kept: bool = False  # in the job's folder
    _checked: set[str] = field(default_factory=set)  # settings of lines that are good: a check takes long

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def of_run(run: RunConf, work: Path) -> Index:
        """The index in the job's folder, if the input is as it was; else a new one, not yet saved."""
        names = names_of(str(run.task_as(BatchConf).input))
        kept = Index.kept(work)
        if kept and [source.name for source in kept.sources] == names:
            files = [source for source in kept.sources if source.state]  # a pipe's has none, and stays
            if all(source.state == _state(Path(source.name)) for source in files):
                return kept
        return Index._build(run, names, work)

    @staticmethod
    def kept(work: Path) -> Index | None:
        """The index in the job's folder, of the input as it was."""
        if not (path := work / INDEX).exists():
            return None
        with reading("the journal", path), path.open("rb") as file:
            head = json.loads(file.readline())
            start = file.tell()
        rows = np.memmap(path, ROW, "r", start) if head["rows"] else np.empty(0, ROW)
        refused = {
            number: Refused(index=number, id=name, url=url, error=error)
            for number, name, url, error in head["refused"]
        }
        return Index(
            sources=[
                InputFile(
                    name=source["name"],
                    plain=source["plain"],
                    is_text=source["is_text"],
                    state=source["state"],
                )
                for source in head["sources"]
            ],
            sha256=head["sha256"],
            rows=rows,
            refused=refused,
            is_kept=True,
        )

    def save(self, work: Path) -> None:
        """Keeps the index for all groups."""
        if self.is_kept:
            return
        head = {"sha256": self.sha256, "rows": len(self), "sources": [*map(asdict, self.sources)]}
        head["refused"] = [[one.index, one.id, one.url, one.error] for one in self.refused.values()]
        with storing(work):
            work.mkdir(parents=True, exist_ok=True)
        replace_whole(work / INDEX, json.dumps(head).encode() + b"\n" + self.rows.tobytes())
        self.is_kept = True

    def corrected(self, held: Index | None) -> set[int] | None:
        """The records that differ from the job's so far; None where these are not other lines of it."""
        if held is None or len(self) != len(held):
            return None
        differ = {name: self.rows[name] != held.rows[name] for name in ("id", "crc", "bytes")}
        changed = {*np.flatnonzero(differ["id"] | differ["crc"] | differ["bytes"]).tolist()}
        if not held.refused.keys() >= {*np.flatnonzero(differ["id"]).tolist()}:  # these may have had no id
            return None
        return changed | (self.refused.keys() ^ held.refused.keys())

    @staticmethod
    def _build(run: RunConf, names: list[str], work: Path) -> Index:
        """Reads the whole input once, and checks every line. Raises DataError for what is too much."""
        sources = [_source(name, number, work) for number, name in enumerate(names)]
        index = Index(sources=sources, sha256="", rows=None, refused={})
        total = sum(Path(source.plain).stat().st_size for source in sources)
        digest = hashlib.sha256()
        rows = bytearray()
        with Progress("reading prompts", total, "bytes") as progress:
            for number, source in enumerate(sources):
                path = Path(source.plain)
                with reading("task.input", path), path.open("rb", buffering=0) as file:
                    index._add_rows(rows, number, HashedFile(file, digest, progress), run)

        index.sha256 = digest.hexdigest()
        index.rows = np.frombuffer(rows, ROW)
        index._refuse_twice(run)
        return index

    def _add_rows(self, rows: bytearray, number: int, file: HashedFile, run: RunConf) -> None:
        """Appends a row for each line of the file of this number."""
        reader = self._reader(number, run)
        count = len(rows) // PACKED.size
        for line in prompts.lines_of(file, self.sources[number].shown):
            if count == MAX_RECORDS:
                raise DataError(
                    "the input has too many records",
                    where=line.where,
                    found=f"more than {MAX_RECORDS}",
                    allowed=MAX_RECORDS,
                    fix="split it into several jobs",
                )

            name = reader.simple_id(line)
            new = run.task.max_new_tokens
            if name is None:
                try:
                    record = reader.read(line, count)
                    name = record.id
                    new = record.max_new_tokens
                except Refused as refused:
                    name = refused.id
                    new = 0
                    self._refuse(refused, run)

            sums = zlib.crc32(line.raw), zlib.crc32(name.encode("utf-8", "surrogatepass"))
            rows += PACKED.pack(number, line.number, line.start, len(line.raw), *sums, new)
            count += 1

    def _refuse(self, refused: Refused, run: RunConf) -> None:
        """Notes that a line makes no request. Raises DataError for so many that the file is no input."""
        self.refused[refused.index] = refused
        skips = run.task.on_bad_row is OnBadRow.skip
        max_bad = MAX_SKIPPED if skips else MAX_BAD
        if len(self.refused) > max_bad:
            raise DataError(
                f"more than {max_bad} lines are bad",
                found=f"the last was: {refused.error}",
                fix="correct the input" if skips else "correct them, or write task.on_bad_row=skip",
            )

    def _refuse_twice(self, run: RunConf) -> None:
        """Refuses all but the first of the lines that have one id; lines with equal sums are read for it."""
        order = np.argsort(self.rows["id"], kind="stable")
        ids = self.rows["id"][order]
        first = dict[str, str]()
        twice_N = np.flatnonzero(ids[1:] == ids[:-1])
        for place in np.union1d(twice_N, twice_N + 1):
            number = int(order[place])
            record = self.refused.get(number) or self.read(number, run)
            try:
                require_usable(TextPrompt(record.id, "", self.where(number)), first)
            except DataError as twice:
                # By its line: an output in which an id stands twice loses an answer where it is read by ids.
                own = self._line_name(number, run)
                refused = Refused(index=number, id=own, url=record.url, error=str(twice))
                self._refuse(refused, run)
            first.setdefault(record.id, self.where(number))
        self.refused = dict(sorted(self.refused.items()))

    def _line_name(self, number: int, run: RunConf) -> str:
        """Returns the id that the record of this number would have if its line had none."""
        row = self.rows[number]
        return f"{self._reader(int(row['file']), run).named}line-{row['line']}"

    def where(self, number: int) -> str:
        row = self.rows[number]
        return f"{self.sources[row['file']].shown} line {row['line']}"

    def read(self, number: int, run: RunConf) -> Request:
        """Returns the record of this number. Raises Refused, StorageError, DataError if it has changed."""
        if (known := self.refused.get(number)) is not None:
            raise known
        of, line, start, size, crc, *_ = self.rows[number].tolist()
        source = self.sources[of]
        with reading("task.input", Path(source.plain)), Path(source.plain).open("rb") as file:
            file.seek(start)
            raw = file.read(size)
        if zlib.crc32(raw) != crc:
            raise DataError(
                "the input has changed while the job runs",
                where=self.where(number),
                fix="put it back, and start the command again",
            )
        return self._reader(of, run).read(prompts.Line(line, start, raw, source.shown), number)

    def _reader(self, number: int, run: RunConf) -> Reader:
        """What reads the lines of a file; of several files its name begins the ids of lines without one."""
        source = self.sources[number]
        named = f"{Path(source.name).name}-" if len(self.sources) > 1 else ""
        return Reader(run, source.is_text, named, self._checked)


def names_of(name: str) -> list[str]:
    """The files that task.input names: one, all of a folder, or those that a pattern fits, by their names.

    Raises DataError if there are none.
    """
    path = home_expanded(name)
    if name == STDIN or (path.exists() and not path.is_dir()):
        return [name if name == STDIN else str(path)]
    endings = (*JSON_ENDINGS, *(ending + GZIP for ending in JSON_ENDINGS), PARQUET)
    paths = path.parent.glob(path.name) if "*" in path.name else path.glob("*")
    names = sorted(str(one) for one in paths if one.name.lower().endswith(endings) or "*" in path.name)
    if not names and path.is_dir():
        raise DataError(
            "task.input holds no files", where=path, allowed=" ".join(endings), fix="check the path"
        )
    if not names:
        fix = "check the path"
        if any(home_expanded(part.strip()).is_file() for part in name.split(",")):
            fix = "name a folder, or a pattern in quotes, as in task.input='part-*.jsonl'"
        raise DataError("task.input does not exist", where=path, fix=fix)
    return names


def _state(path: Path) -> list[int]:
    with reading("task.input", path):
        status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
        raise DataError(
            "task.input is not a regular file", where=path, fix="give a text file or a .jsonl file"
        )
    return [] if stat.S_ISFIFO(status.st_mode) else [status.st_size, status.st_mtime_ns]


def _source(name: str, number: int, work: Path) -> InputFile:
    """Returns the file, or what is kept of it; a job that goes on uses what came through a pipe."""
    path = Path(name)
    state = [] if name == STDIN else _state(Path(name))
    is_pipe = not state
    is_packed = name.lower().endswith(GZIP)
    is_table = name.lower().endswith(PARQUET)
    is_text = not (is_table or name.lower().removesuffix(GZIP).endswith(JSON_ENDINGS))
    if not (is_pipe or is_packed or is_table):
        with reading("task.input", path), path.open("rb"):
            return InputFile(name, name, is_text, state)

    kept = work / KEPT.format(number)
    if is_pipe and kept.exists():
        log.info("the prompts are those that came through the pipe when the job began: %s", kept)
    else:
        _keep_plain_lines(name, kept)
    with kept.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return InputFile(name, str(kept), not begins_object(head) if is_pipe else is_text, state)


def _keep_plain_lines(name: str, kept: Path) -> None:
    """Writes the lines of a pipe, a packed file or a table to the file `kept`.

    Raises DataError for what cannot be unpacked, has a line without an end, or gives nothing.
    """
    path = Path(name)
    with storing(kept):
        kept.parent.mkdir(parents=True, exist_ok=True)
    with reading("task.input", path), _opened(name) as packed, drafted(kept) as (draft, file):
        is_table = name.lower().endswith(PARQUET)
        try:
            file.writelines(_table_lines(packed, name) if is_table else whole_lines(packed, name))
        except (EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
            raise DataError(
                "task.input cannot be unpacked", where=path, found=error, fix="check it"
            ) from None

        if path.is_fifo() and not file.tell():
            raise DataError(
                "nothing comes through the pipe",
                where=path,
                fix="start the process that writes into it first",
            )
        synced(file)
        draft.replace(kept)


def _opened(name: str) -> AbstractContextManager[IO[bytes]]:
    """Opens a pipe, a packed file or a table for reading."""
    path = Path(name)
    if name == STDIN:
        return nullcontext(sys.stdin.buffer)
    if name.lower().endswith(GZIP):
        return cast(IO[bytes], gzip.open(path))
    return open_pipe(path) if path.is_fifo() else path.open("rb")


def _table_lines(file: Any, name: str) -> Iterator[bytes]:
    """The rows of a Parquet file as lines of JSON, without what is null in them."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UsageError(
            "Parquet needs pyarrow", where=name, fix="pip install pyarrow, or give .jsonl"
        ) from None
    for batch in ParquetFile(file).iter_batches(1024):  # rows that are in memory at once
        for row in batch.to_pylist():
            known = {column: value for column, value in row.items() if value is not None}
            yield json.dumps(known, default=str).encode() + b"\n"


@dataclass
class HashedFile:
    """A file; what is read of it is added to a digest, and to a progress bar."""

    file: IO[bytes]
    digest: Any
    progress: Progress

    def read(self, size: int) -> bytes:
        block = self.file.read(size)
        self.digest.update(block)
        self.progress.advance(len(block))
        return block
