"""A job's folder: begun once, continued by any attempt, merged when whole."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_ssp.batch.atomic_files import replace_whole, storing, write_once
from llama_ssp.batch.attempt_log import Part, Story, read_part
from llama_ssp.batch.claims import Claim, claim, release_jobs
from llama_ssp.batch.manifest import Manifest, Shard
from llama_ssp.errors import DataError

MANIFEST, PARTS, DONE, CLAIMS = "run.json", "parts", "done", "claims"
SYNC_EVERY = 16  # records that a machine, not a process, may take with it when it dies
SYNC_S = 5.0


@dataclass(frozen=True)
class Standing:
    """How far a job is, from its files."""

    records: int
    finished: int
    shards: int
    shards_done: int
    attempts: int
    attempts_unended: int  # running still, or gone without a word

    @property
    def whole(self) -> bool:
        return self.shards_done == self.shards

    def in_words(self) -> str:
        return (
            f"{self.finished} of {self.records} records, {self.shards_done} of {self.shards} shards done, "
            f"{self.attempts} attempts"
        )


class Journal:
    """A folder that several processes, on several machines, may work on at once."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @staticmethod
    def begin(folder: Path, manifest: Manifest) -> Journal:
        """The job's journal, new or continued; another job's is refused."""
        with storing(folder):
            for name in (PARTS, DONE, CLAIMS):
                (folder / name).mkdir(parents=True, exist_ok=True)
        path = folder / MANIFEST
        if write_once(path, manifest.as_bytes(), _unique()):
            return Journal(folder, manifest)
        held = Journal.find(folder).manifest
        manifest.require_same(held, str(folder))
        return Journal(folder, held)

    @staticmethod
    def held(folder: Path) -> Manifest | None:
        """What job this folder holds; None where it holds none."""
        path = folder / MANIFEST
        if not path.is_file():
            return None
        with storing(path):
            return Manifest.read(path.read_bytes(), str(path))

    @staticmethod
    def find(folder: Path) -> Journal:
        """A journal that is there already."""
        manifest = Journal.held(folder)
        if manifest is None:
            raise DataError("there is no job in this folder", where=str(folder), fix="check task.output")
        return Journal(folder, manifest)

    def is_done(self, shard: Shard) -> bool:
        return self._done(shard).exists()

    def release_jobs(self) -> None:
        """What a scheduler's jobs held may be taken at once; for when none of them is left."""
        release_jobs(self.folder / CLAIMS)

    def claim(self) -> tuple[Shard, Claim] | None:
        """The first shard that is neither done nor being done by a living process, and the right to it."""
        for shard in self.manifest.shards:
            if self.is_done(shard):
                continue
            held = claim(self.folder / CLAIMS / shard.name, _unique())
            if held is not None:
                return shard, held
        return None

    def attempt(self, shard: Shard, name: str = "") -> Attempt:
        """A new attempt at a shard, which knows what earlier ones have finished and failed at."""
        earlier = self._stories(shard)
        path = self.folder / PARTS / f"{shard.name}.{len(earlier):03d}.{name or _unique()}.jsonl"
        return Attempt(shard, earlier, Part(path, SYNC_EVERY, SYNC_S), self._done(shard))

    def standing(self) -> Standing:
        finished = unended = attempts = done = 0
        for shard in self.manifest.shards:
            stories = self._stories(shard)
            attempts += len(stories)
            unended += sum(not story.left for story in stories)
            if self.is_done(shard):
                done += 1
                finished += shard.count
            else:
                finished += len(set().union(*(story.finished for story in stories)))
        shards = len(self.manifest.shards)
        return Standing(self.manifest.records, finished, shards, done, attempts, unended)

    def merge(self, output: Path) -> None:
        """Writes all answers in the order of the input; refused while any is missing."""
        missing = [shard.name for shard in self.manifest.shards if not self.is_done(shard)]
        if missing:
            raise DataError(
                "the job is not finished", where=str(self.folder),
                found=f"shards {', '.join(missing[:5])} missing, {len(missing)} in all",
                fix="start the same command again",
            )  # fmt: skip
        with storing(output):
            whole = b"".join(self._done(shard).read_bytes() for shard in self.manifest.shards)
        lines = whole.count(b"\n")
        if lines != self.manifest.records:
            raise DataError(
                "the finished shards do not add up", where=str(self.folder / DONE), found=f"{lines} answers",
                allowed=str(self.manifest.records), fix="a file was changed by hand: delete its shard",
            )  # fmt: skip
        if not _is_file_of(output, whole):
            replace_whole(output, whole, _unique())

    def _done(self, shard: Shard) -> Path:
        return self.folder / DONE / f"{shard.name}.jsonl"

    def _stories(self, shard: Shard) -> list[Story]:
        with storing(self.folder):
            paths = sorted((self.folder / PARTS).glob(f"{shard.name}.*.jsonl"))
        return [read_part(path) for path in paths]


class Attempt:
    """One process's go at a shard."""

    def __init__(self, shard: Shard, earlier: list[Story], part: Part, done: Path) -> None:
        self.shard = shard
        self._part, self._done = part, done
        self._finished: dict[int, dict[str, Any]] = {}
        for story in earlier:
            for index, record in story.finished.items():
                self._finished.setdefault(index, record)
        self.failures = Counter(index for story in earlier for index in story.failed_at)
        self.failures_alone = Counter(index for story in earlier for index in story.failed_alone)

    @property
    def missing(self) -> list[int]:
        """The records still to be done, in input order."""
        return [index for index in self.shard.indices if index not in self._finished]

    def begin(self, indices: list[int]) -> None:
        self._part.begin(indices)

    def finish(self, index: int, record: dict[str, Any]) -> None:
        self._part.finish(index, record)
        self._finished[index] = record

    def excuse(self) -> None:
        """Says that the attempt is being ended from outside; from any thread."""
        self._part.excuse()

    def leave(self) -> None:
        """Ends the attempt in good order; what is missing is for another."""
        self._part.leave()

    def publish(self) -> bool:
        """Gives the whole shard its final name; whether this attempt was the first to."""
        if self.missing:
            raise DataError(
                "a shard is not finished", where=self.shard.name, found=f"{len(self.missing)} missing",
                fix="report it",
            )  # fmt: skip
        lines = [json.dumps(self._finished[index], ensure_ascii=False) + "\n" for index in self.shard.indices]
        self.leave()
        return write_once(self._done, "".join(lines).encode(), _unique())


def _is_file_of(path: Path, data: bytes) -> bool:
    """Whether the file is there and holds this; anything else in its place is refused."""
    if not path.exists():
        return False
    with storing(path):
        if path.is_file() and path.read_bytes() == data:
            return True
    raise DataError(
        "the output file is there already, with other content", where=str(path),
        allowed="no file, or what this job writes", fix="move it away, then start the same command again",
    )  # fmt: skip


def _unique() -> str:
    """A name no other attempt has: of a scheduler's job and restart, else of the host, and of the process."""
    job = os.environ.get("SLURM_JOB_ID")
    where = f"{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else socket.gethostname()
    return f"{where}-{os.getpid()}"
