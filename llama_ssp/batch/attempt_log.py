"""One attempt's file: a line for each event, with a checksum, appended and never changed.

A line is one write, so a killed process leaves at most one torn line, the last. Lines say which records
began, which were finished, and that the attempt left in good order; if not, it failed at what it began.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from llama_ssp.batch.atomic_files import storing, sync_folder, write_once
from llama_ssp.batch.manifest import Shard
from llama_ssp.errors import DataError

BEGUN, FINISHED, LEFT, AT, AMONG = "begun", "finished", "left", "at", "among"
DAMAGED, NODE = "damaged", "node"
SYNC_EVERY = 16  # records that may be lost if the machine, not only a process, dies
SYNC_S = 5.0


@dataclass
class PastAttempt:
    """What an attempt's file tells."""

    finished: dict[int, dict[str, Any]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    among: int = 1  # texts that the process had under way when the last ones were begun
    left: bool = False
    began_at: float | None = None  # when its first record was begun
    damaged: dict[int, str] = field(default_factory=dict)  # by record: the node whose device gave no numbers
    times: dict[int, float] = field(default_factory=dict)  # when each record was finished

    @property
    def failed_at(self) -> set[int]:
        """Records that were under way when the attempt was killed."""
        return set() if self.left else self.begun - self.finished.keys()

    @property
    def alone(self) -> bool:
        """Whether the process was killed during one record alone."""
        return self.among == 1 and len(self.failed_at) == 1


class Attempt:
    """One process's work on a shard. Each line reaches the system at once, the disk every SYNC_EVERY."""

    def __init__(self, shard: Shard, earlier: list[PastAttempt], path: Path, done: Path) -> None:
        """Begins the file `path`; `publish` writes `done`."""
        self.shard, self._path, self._done = shard, path, done
        self._finished: dict[int, dict[str, Any]] = {}
        for past in earlier:
            self._finished = past.finished | self._finished
        self.deaths = Counter(index for past in earlier for index in past.failed_at)
        self.deaths_alone = Counter(index for past in earlier if past.alone for index in past.failed_at)
        self.damaged_on = defaultdict[int, set[str]](set)
        for past in earlier:
            for index, node in past.damaged.items():
                self.damaged_on[index].add(node)
        self._unsynced, self._synced_at = 0, time.monotonic()
        self._torn = False  # the last write failed and may have left part of a line
        with storing(path):
            self._file: BinaryIO = path.open("xb", buffering=0)
            sync_folder(path.parent)

    @property
    def is_whole(self) -> bool:
        return len(self._finished) == self.shard.count

    @property
    def missing(self) -> list[int]:
        """The records still to be done, in input order."""
        return [index for index in self.shard.indices if index not in self._finished]

    def begin(self, indices: list[int], among: int) -> None:
        """Says what is under way, before it is, and how many texts the process then has under way."""
        self._append({BEGUN: indices, AMONG: among, AT: round(time.time(), 1)})

    def finish(self, index: int, record: dict[str, Any]) -> None:
        self._append({FINISHED: index, "record": record, AT: round(time.time(), 1)})
        self._finished[index] = record

    def keep_damaged(self, index: int, node: str) -> None:
        """Says that a text had no numbers on a node that then stopped; the record stays open."""
        self._append({DAMAGED: index, NODE: node})

    def excuse(self) -> None:
        """Says that the attempt is being ended from outside: no record is to blame. From any thread."""
        if not self._file.closed:
            self._append({LEFT: True})

    def leave(self) -> None:
        """Ends the attempt in good order; what is missing is for another."""
        self.excuse()
        if not self._file.closed:
            with storing(self._path):
                os.fsync(self._file.fileno())
                self._file.close()

    def publish(self) -> bool:
        """Gives the whole shard its final name; whether this attempt was the first to."""
        if self.missing:
            found = f"{len(self.missing)} missing"
            raise DataError("a shard is not finished", self.shard.name, found, fix="report it")
        lines = [json.dumps(self._finished[index], ensure_ascii=False) + "\n" for index in self.shard.indices]
        self.leave()
        return write_once(self._done, "".join(lines).encode())

    def _append(self, entry: dict[str, Any]) -> None:
        line = sealed(entry)
        with storing(self._path):
            if self._torn:
                whole = self._path.read_bytes().rfind(b"\n") + 1
                self._file.truncate(whole)
                self._file.seek(whole)
            taken = 0
            try:
                taken = self._file.write(line)
            finally:
                self._torn = taken != len(line)
            if self._torn:
                raise OSError(0, "the disk took part of a line only")
            self._unsynced += 1
            due = time.monotonic() - self._synced_at >= SYNC_S
            if self._unsynced >= SYNC_EVERY or due:
                os.fsync(self._file.fileno())
                self._unsynced, self._synced_at = 0, time.monotonic()


def sealed(entry: dict[str, Any]) -> bytes:
    """The entry as a line with its checksum in front."""
    body = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def read_part(path: Path) -> PastAttempt:
    """What the file tells up to its last whole line. Raises DataError for damage before that."""
    with storing(path, reads=True):
        lines = path.read_bytes().split(b"\n")
    past, entries = PastAttempt(), [_opened(line) for line in lines[:-1]]
    while entries and entries[-1] is None:
        entries.pop()
    for number, entry in enumerate(entries, start=1):
        if entry is None:
            what, found = "a journal file is damaged in its middle", "a line that does not match its checksum"
            fix = "check the disk; then delete this file: what it holds will be computed again"
            raise DataError(what, f"{path} line {number}", found, "damage at the end only", fix)
        past.begun.update(entry.get(BEGUN, ()))
        past.among = entry.get(AMONG, past.among)
        past.began_at = entry.get(AT) if past.began_at is None else past.began_at
        if FINISHED in entry:
            past.finished[int(entry[FINISHED])] = entry["record"]
            past.times[int(entry[FINISHED])] = entry.get(AT, 0.0)
        if DAMAGED in entry:
            past.damaged[int(entry[DAMAGED])] = entry[NODE]
        past.left = past.left or LEFT in entry
    return past


def _opened(line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None where the line is not what was written."""
    sum_, _, body = line.partition(b" ")
    with suppress(ValueError):
        entry = json.loads(body) if sum_ == b"%08x" % zlib.crc32(body) else None
        return entry if isinstance(entry, dict) else None
    return None
