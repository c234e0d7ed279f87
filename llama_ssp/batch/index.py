"""The input of a job as an index: where each record lies. It is made once and read by all groups. No torch.

The file `index` in the job's folder has a line of JSON (the input's files, and lines that make no request),
then a row of ROW for each record. A record is parsed when a shard with it is begun: no process holds them.
What cannot be read from its middle (a pipe, gzip) is kept as plain lines: input-0, input-1, ...
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import shutil
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from llama_ssp.batch.atomic_files import drafted, storing, synced, write_once
from llama_ssp.batch.requests import Form, Reader, Refused, Request, simple_id
from llama_ssp.config import BatchConf, RunConf, home_expanded
from llama_ssp.errors import DataError
from llama_ssp.report.console import Progress
from llama_ssp.text.prompts import (
    JSON_ENDINGS,
    STDIN,
    Line,
    TextPrompt,
    begins_object,
    lines_of,
    problem_of,
    reading,
)

log = logging.getLogger(__name__)

INDEX, KEPT, GZIP = "index", "input-{}", ".gz"
ROW = np.dtype([("file", "u4"), ("line", "u4"), ("start", "u8"), ("bytes", "u4"), ("crc", "u4"), ("id", "u4"),
                ("new", "u4")])  # fmt: skip
CHUNK = 2**16  # records between two signs of progress


@dataclass(frozen=True)
class Source:
    """One file of the input: where it was named, its plain lines, and what shows that it has changed."""

    name: str
    plain: str
    is_text: bool
    state: list[int]  # size and time; empty of a pipe

    @property
    def shown(self) -> str:
        return "standard input" if self.name == STDIN else self.name

    def begins_ids(self, sources: int) -> str:
        """The beginning of the ids of lines without one: of several files it is the file's name."""
        return f"{Path(self.name).name}-" if sources > 1 else ""


class Index:
    """Every record of a job's input: `rows` say where it lies, `refused` which lines make no request."""

    def __init__(self, sources: list[Source], sha256: str, rows: Any, refused: dict[int, Refused]) -> None:
        self.sources, self.sha256, self.rows, self.refused = sources, sha256, rows, refused
        self._readers: dict[int, tuple[IO[bytes], Reader]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def of_run(run: RunConf, work: Path) -> Index:
        """The index in the job's folder, if the input is as it was; else a new one, not yet saved."""
        assert isinstance(run.task, BatchConf) and run.task.input is not None
        names = _names(run.task.input)
        if (work / INDEX).exists():
            with storing(work / INDEX, reads=True), (work / INDEX).open("rb") as file:
                head = json.loads(file.readline())
                start = file.tell()
            sources = [Source(**source) for source in head["sources"]]
            if [source.name for source in sources] == names and all(
                one.state in ([], _state(Path(one.name)) if one.state else []) for one in sources
            ):
                rows = np.memmap(work / INDEX, ROW, "r", start) if head["rows"] else np.empty(0, ROW)
                refused = {one[0]: Refused(one[0], one[1], Form(one[2]), one[3]) for one in head["refused"]}
                return Index(sources, head["sha256"], rows, refused)
        return Index._build(run, names, work)

    @staticmethod
    def _build(run: RunConf, names: list[str], work: Path) -> Index:
        """Reads the whole input once, and checks every line."""
        sources = [_source(name, number, work) for number, name in enumerate(names)]
        total = sum(Path(source.plain).stat().st_size for source in sources)
        digest, refused, chunks = hashlib.sha256(), dict[int, Refused](), list[Any]()
        rows, count = list[tuple[int, ...]](), 0
        usual_new = run.task.max_new_tokens if isinstance(run.task, BatchConf) else 0
        with Progress("reading prompts", total, "bytes") as progress:
            for number, source in enumerate(sources):
                reader = Reader(run, source.is_text, source.begins_ids(len(sources)))
                with Path(source.plain).open("rb") as file:
                    for line in lines_of(_hashed(file, digest), source.shown):
                        name, new = simple_id(line, reader), usual_new
                        if name is None:
                            record = reader.read(line, count)
                            name, new = record.id, getattr(record, "max_new_tokens", 0)
                            if isinstance(record, Refused):
                                refused[count] = record
                        raw, id_ = line.raw, name.encode("utf-8", "surrogatepass")
                        place = number, line.number, line.start, len(raw)
                        rows.append((*place, zlib.crc32(raw), zlib.crc32(id_), new))
                        count += 1
                        if len(rows) == CHUNK:
                            chunks.append(np.array(rows, ROW))
                            rows.clear()
                            progress.advance(int(chunks[-1]["bytes"].sum()))
        index = Index(sources, digest.hexdigest(), np.concatenate([*chunks, np.array(rows, ROW)]), refused)
        index._refuse_twice(run)
        return index

    def _refuse_twice(self, run: RunConf) -> None:
        """Refuses all but the first of the lines that have one id; lines with equal sums are read for it."""
        order = np.argsort(self.rows["id"], kind="stable")
        ids = self.rows["id"][order]
        first = dict[str, str]()
        twice_N = np.flatnonzero(ids[1:] == ids[:-1])
        for place in np.union1d(twice_N, twice_N + 1):
            number = int(order[place])
            record = self.refused.get(number) or self.read(number, run)
            if (twice := problem_of(TextPrompt(record.id, "", self.where(number)), first)) is not None:
                self.refused[number] = Refused(number, record.id, record.form, str(twice))
            first.setdefault(record.id, self.where(number))
        self.refused = dict(sorted(self.refused.items()))

    def where(self, number: int) -> str:
        row = self.rows[number]
        return f"{self.sources[row['file']].shown} line {row['line']}"

    def read(self, number: int, run: RunConf) -> Request | Refused:
        """The record of this number, from the input. Raises StorageError, DataError if it has changed."""
        if (known := self.refused.get(number)) is not None:
            return known
        row = self.rows[number]
        file, size = int(row["file"]), int(row["bytes"])
        source = self.sources[file]
        with reading("task.input", Path(source.plain)):
            if file not in self._readers:
                reader = Reader(run, source.is_text, source.begins_ids(len(self.sources)))
                self._readers[file] = Path(source.plain).open("rb"), reader  # noqa: SIM115
            opened, reader = self._readers[file]
            opened.seek(int(row["start"]))
            raw = opened.read(size)
        if zlib.crc32(raw) != row["crc"]:
            what, fix = "the input has changed while the job runs", "put it back, and start the command again"
            raise DataError(what, self.where(number), fix=fix)
        return reader.read(Line(int(row["line"]), int(row["start"]), raw, source.shown), number)

    def save(self, work: Path) -> None:
        """Keeps the index for all groups, unless one of them has kept it."""
        refused = [[one.index, one.id, one.form.value, one.error] for one in self.refused.values()]
        sources = [asdict(source) for source in self.sources]
        head = {"sha256": self.sha256, "rows": len(self), "sources": sources, "refused": refused}
        if not (work / INDEX).exists():
            write_once(work / INDEX, json.dumps(head).encode() + b"\n" + self.rows.tobytes())


def _names(name: str) -> list[str]:
    """The files that task.input names: one, all of a folder, or those that a pattern fits, by their names."""
    path = home_expanded(name)
    if name == STDIN or (path.exists() and not path.is_dir()):
        return [name if name == STDIN else str(path)]
    endings = (*JSON_ENDINGS, *(ending + GZIP for ending in JSON_ENDINGS))
    paths = path.parent.glob(path.name) if "*" in path.name else path.glob("*")
    names = sorted(str(one) for one in paths if one.name.lower().endswith(endings) or "*" in path.name)
    if not names:
        what = "task.input holds no files" if path.is_dir() else "task.input does not exist"
        raise DataError(what, path, allowed=" ".join(endings) * path.is_dir(), fix="check the path")
    return names


def _state(path: Path) -> list[int]:
    with reading("task.input", path):
        status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
        raise DataError("task.input is not a regular file", path, fix="give a text file or a .jsonl file")
    return [] if stat.S_ISFIFO(status.st_mode) else [status.st_size, status.st_mtime_ns]


def _source(name: str, number: int, work: Path) -> Source:
    """The file, or what is kept of it; what came through a pipe for a job that has begun is used again."""
    path, state = Path(name), [] if name == STDIN else _state(Path(name))
    is_packed = name.lower().endswith(GZIP)
    is_text = not name.lower().removesuffix(GZIP).endswith(JSON_ENDINGS)
    if state and not is_packed:
        with reading("task.input", path), path.open("rb"):
            return Source(name, name, is_text, state)
    kept = work / KEPT.format(number)
    if state or not kept.exists():
        with storing(work):
            work.mkdir(parents=True, exist_ok=True)
        with reading("task.input", path):
            lines = sys.stdin.buffer if name == STDIN else gzip.open(path) if is_packed else path.open("rb")  # noqa: SIM115
        with lines, drafted(kept) as (draft, file):
            try:
                shutil.copyfileobj(lines, file)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(f"task.input cannot be unpacked: {error}", path, fix="check it") from None
            synced(file)
            draft.replace(kept)
    else:
        log.info("the prompts are those that came through the pipe when the job began: %s", kept)
    with kept.open("rb") as file:
        return Source(name, str(kept), is_text if state else not begins_object(file.read(4096)), state)


def _hashed(file: Iterable[bytes], digest: Any) -> Iterator[bytes]:
    for raw in file:
        digest.update(raw)
        yield raw
