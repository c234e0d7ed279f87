"""How many records a job has finished, told again and again: reads only what was added since."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from llama_ssp.batch.journal import DONE, PARTS, Journal

FINISHED_LINE = re.compile(rb'[0-9a-f]{8} \{"finished":(\d+)')


class Progress:
    """A count for people's eyes: lines are not checked against their sums."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._finished: set[int] = set()
        self._shards: dict[Path, range] = {}

    @property
    def records(self) -> int:
        """Of the whole job; 0 before it has begun."""
        return sum(len(indices) for indices in self._shards.values())

    def finished(self) -> int:
        with suppress(OSError):
            if not self._shards and (held := Journal.held(self._folder)):
                done = self._folder / DONE
                self._shards = {done / f"{shard.name}.jsonl": shard.indices for shard in held.shards}
            for path in (self._folder / PARTS).glob("*.jsonl"):
                self._take(path)
        for path, indices in self._shards.items():
            if path.exists():
                self._finished.update(indices)
        return len(self._finished)

    def _take(self, path: Path) -> None:
        """The whole lines behind what is known of this file."""
        with path.open("rb") as file:
            start = self._read.get(path, 0)
            file.seek(start)
            new = file.read()
        end = new.rfind(b"\n") + 1
        self._read[path] = start + end
        found = (FINISHED_LINE.match(line) for line in new[:end].split(b"\n"))
        self._finished.update(int(one[1]) for one in found if one)
