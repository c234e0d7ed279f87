"""One attempt's file: a line a record, each with a checksum, appended and never changed.

A line is one write, so a killed process leaves at most one torn line, the last. Lines say what was
begun, what was finished, and that an attempt left in good order; one that did not has failed at what it
had begun.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from llama_ssp.batch.atomic_files import storing, sync_folder
from llama_ssp.errors import DataError

BEGUN, FINISHED, LEFT = "begun", "finished", "left"


@dataclass
class Story:
    """What a part file tells."""

    finished: dict[int, dict[str, Any]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    left: bool = False

    @property
    def failed_at(self) -> set[int]:
        """Records that were under way when the attempt ended without a word."""
        return set() if self.left else self.begun - self.finished.keys()

    @property
    def failed_alone(self) -> set[int]:
        """The one record that must be to blame, where no other was under way."""
        return self.failed_at if len(self.failed_at) == 1 else set()


class Part:
    """Appends to an attempt's file. Each line reaches the system at once, the disk every `sync_every`."""

    def __init__(self, path: Path, sync_every: int, sync_s: float) -> None:
        self.path = path
        self._sync_every, self._sync_s = sync_every, sync_s
        self._unsynced, self._synced_at = 0, time.monotonic()
        with storing(path):
            self._file: BinaryIO = path.open("xb", buffering=0)
            sync_folder(path.parent)

    def begin(self, indices: list[int]) -> None:
        """Says what is under way now, before it is."""
        self._append({BEGUN: indices})

    def finish(self, index: int, record: dict[str, Any]) -> None:
        self._append({FINISHED: index, "record": record})

    def excuse(self) -> None:
        """Says that the attempt is being ended from outside: no record is to blame."""
        if not self._file.closed:
            self._append({LEFT: True})

    def leave(self) -> None:
        """The last line of an attempt that ends in good order, done or not."""
        self.excuse()
        self.close()

    def close(self) -> None:
        if not self._file.closed:
            with storing(self.path):
                os.fsync(self._file.fileno())
                self._file.close()

    def _append(self, entry: dict[str, Any]) -> None:
        line = sealed(entry)
        with storing(self.path):
            written = self._file.write(line)
            if written != len(line):
                raise OSError(0, "the disk took part of a line only")
            self._unsynced += 1
            due = time.monotonic() - self._synced_at >= self._sync_s
            if self._unsynced >= self._sync_every or due:
                os.fsync(self._file.fileno())
                self._unsynced, self._synced_at = 0, time.monotonic()


def sealed(entry: dict[str, Any]) -> bytes:
    """The entry as a line with its checksum in front."""
    body = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def read_part(path: Path) -> Story:
    """What the file tells up to its last whole line. Damage before that is refused: it is no torn write."""
    with storing(path):
        lines = path.read_bytes().split(b"\n")
    story = Story()
    entries = [_opened(line) for line in lines[:-1]]
    last = max((number for number, entry in enumerate(entries) if entry is not None), default=-1)
    for number, entry in enumerate(entries[: last + 1], start=1):
        if entry is None:
            raise DataError(
                "a journal file is damaged in its middle", where=f"{path} line {number}",
                found="a line that does not match its checksum", allowed="damage at the end only",
                fix="check the disk; then delete this file: what it holds will be computed again",
            )  # fmt: skip
        _take(story, entry)
    return story


def _take(story: Story, entry: dict[str, Any]) -> None:
    if BEGUN in entry:
        story.begun.update(entry[BEGUN])
    elif FINISHED in entry:
        story.finished[int(entry[FINISHED])] = entry["record"]
    elif LEFT in entry:
        story.left = True


def _opened(line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None where the line is not what was written."""
    sum_, _, body = line.partition(b" ")
    if sum_ != b"%08x" % zlib.crc32(body):
        return None
    try:
        entry = json.loads(body)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
