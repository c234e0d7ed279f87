"""A job's folder: begun once, continued by any attempt, merged when every shard is done."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llama_ssp.batch.atomic_files import (
    replace_whole,
    require_file_system,
    storing,
    unique_name,
    write_once,
)
from llama_ssp.batch.attempt_log import Attempt, PastAttempt, read_part
from llama_ssp.batch.manifest import Manifest, Shard
from llama_ssp.distributed.identity import Identity, own_element, own_identity
from llama_ssp.errors import DataError

MANIFEST, TRIALS, PARTS, DONE, CLAIMS = "run.json", "trials.json", "parts", "done", "claims"
BEAT_S, STALE_S = 10.0, 60.0  # of a claim: a heartbeat keeps it, so that others take over from a dead process
FINISHED_LINE = re.compile(rb'^[0-9a-f]{8} \{"finished":(\d+).*\n', re.MULTILINE)


@dataclass(frozen=True)
class Standing:
    """How far a job is, from its files; the names are those of the JSON interface."""

    records: int
    records_finished: int
    shards: int
    shards_done: int
    attempts: int
    attempts_unended: int  # running still, or killed

    @property
    def whole(self) -> bool:
        return self.shards_done == self.shards

    def in_words(self) -> str:
        records = f"{self.records_finished} of {self.records} records"
        return f"{records}, {self.shards_done} of {self.shards} shards done, {self.attempts} attempts"


NOTHING = Standing(0, 0, 0, 0, 0, 0)  # of a job that no process has begun


class Journal:
    """A folder that several processes, on several machines, may work on at once."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @staticmethod
    def begin(folder: Path, manifest: Manifest) -> Journal:
        """The job's journal, new or continued. Raises DataError if the folder holds another job."""
        with storing(folder):
            for name in (PARTS, DONE, CLAIMS):
                (folder / name).mkdir(parents=True, exist_ok=True)
        require_file_system(folder)
        if write_once(folder / MANIFEST, manifest.as_bytes()):
            return Journal(folder, manifest)
        journal = Journal.find(folder)
        manifest.require_same(journal.manifest, str(folder))
        return journal

    @staticmethod
    def held(folder: Path) -> Manifest | None:
        """The job that this folder holds; None where it holds none."""
        path = folder / MANIFEST
        if not path.is_file():
            return None
        with storing(path, reads=True):
            return Manifest.read(path.read_bytes(), str(path))

    @staticmethod
    def find(folder: Path) -> Journal:
        """A journal that is there already. Raises DataError where none is."""
        manifest = Journal.held(folder)
        if manifest is None:
            raise DataError("there is no job in this folder", folder, fix="check task.output")
        return Journal(folder, manifest)

    def keep_trials(self, engines: dict[str, str]) -> None:
        """Writes, by role, whether steps that were on trial are compiled; raises DataError if it differs.

        In 16 bit, compiled and eager steps round differently: a text should not depend on which of several
        machines of one kind, or which attempt, wrote it.
        """
        path, kinds = self.folder / TRIALS, {role: how.partition(":")[0] for role, how in engines.items()}
        with storing(path):
            if not kinds or write_once(path, (json.dumps(kinds) + "\n").encode()):
                return
            held = json.loads(path.read_bytes())
        for role, how in kinds.items():
            if held.get(role, how) != how:
                now, then, fix = (
                    f"{role}: {engines[role]}",
                    f"{role}: {held[role]}",
                    f"give engine={held[role]}",
                )
                raise DataError("the job has begun with another engine", path, now, then, fix)

    def is_done(self, shard: Shard) -> bool:
        return self._done(shard).exists()

    def release_jobs(self) -> None:
        """Deletes the claims of a scheduler's jobs; for when none of the jobs is left."""
        for path in (self.folder / CLAIMS).glob("*"):
            with suppress(OSError, ValueError):
                if json.loads(path.read_bytes()).get("job") is not None:
                    path.unlink()

    def claim(self) -> tuple[Shard, AbstractContextManager[None]] | None:
        """The first shard that is neither done nor claimed by a living process, and the claim on it."""
        for shard in self.manifest.shards:
            if not self.is_done(shard) and (claimed := _claim(self.folder / CLAIMS / shard.name)) is not None:
                return shard, claimed
        return None

    def has_free(self) -> bool:
        """Whether `claim` may find a shard: one that is not done, and that no living process has claimed."""
        claims = ((shard, self.folder / CLAIMS / shard.name) for shard in self.manifest.shards)
        return any(not self.is_done(s) and (not p.exists() or _is_abandoned(p)) for s, p in claims)

    def silent(self) -> set[tuple[str, float]]:
        """Claimed shards of which it is unknown whether the process lives, with the claim's last renewal."""
        found = set()
        for shard in self.manifest.shards:
            path = self.folder / CLAIMS / shard.name
            with suppress(OSError, ValueError):
                if not self.is_done(shard) and _lives(json.loads(path.read_bytes())) is None:
                    found.add((shard.name, path.stat().st_mtime))
        return found

    def attempt(self, shard: Shard, name: str = "") -> Attempt:
        """A new attempt at a shard, with what earlier ones have finished and failed at."""
        earlier = self._attempts(shard)
        path = self.folder / PARTS / f"{shard.name}.{len(earlier):03d}.{name or unique_name()}.jsonl"
        return Attempt(shard, earlier, path, self._done(shard))

    def holders(self) -> list[dict[str, Any]]:
        """The living processes that hold a claim, by this machine's clock: nothing is written."""
        found = []
        for path in (self.folder / CLAIMS).glob("[!.]*"):
            with suppress(OSError, ValueError):  # it is being released
                if not _is_abandoned(path, time.time()):
                    found.append(json.loads(path.read_bytes()))
        return found

    def past_attempts(self) -> Iterator[PastAttempt]:
        """What every attempt's file tells, in the order of the input."""
        for shard in self.manifest.shards:
            yield from self._attempts(shard)

    def standing(self) -> Standing:
        finished = unended = attempts = done = 0
        for shard in self.manifest.shards:
            past = self._attempts(shard)
            attempts += len(past)
            unended += sum(not one.left for one in past)
            if self.is_done(shard):
                done, finished = done + 1, finished + shard.count
            else:
                finished += len(set().union(*(one.finished for one in past)))
        shards = len(self.manifest.shards)
        return Standing(self.manifest.records, finished, shards, done, attempts, unended)

    def merge(self, output: Path) -> None:
        """Writes all answers in the order of the input. Raises DataError while any is missing."""
        missing = [shard.name for shard in self.manifest.shards if not self.is_done(shard)]
        if missing:
            found = f"shards {', '.join(missing[:5])} missing, {len(missing)} in all"
            raise DataError("the job is not finished", self.folder, found, fix="start the same command again")
        with storing(self.folder / DONE, reads=True):
            whole = b"".join(self._done(shard).read_bytes() for shard in self.manifest.shards)
        lines, records = whole.count(b"\n"), self.manifest.records
        if lines != records:
            what, fix = "the finished shards do not add up", "a file was changed by hand: delete its shard"
            raise DataError(what, self.folder / DONE, f"{lines} answers", records, fix)
        if not _is_file_of(output, whole):
            replace_whole(output, whole)

    def _done(self, shard: Shard) -> Path:
        return self.folder / DONE / f"{shard.name}.jsonl"

    def _attempts(self, shard: Shard) -> list[PastAttempt]:
        with storing(self.folder, reads=True):
            paths = sorted((self.folder / PARTS).glob(f"{shard.name}.*.jsonl"))
        return [read_part(path) for path in paths]


def _claim(path: Path) -> AbstractContextManager[None] | None:
    """The right to work on a shard, for a `with`; None while a living process has it.

    A claim only saves double work. What is published stays right without: the first to publish wins.
    """
    own = json.dumps(_this_process()).encode()
    if not path.exists() and write_once(path, own):  # most look at others' claims: nothing is written then
        return _held(path, own)
    # Of many groups that find it abandoned at once, one takes it; two may, if they look again at one moment.
    if _is_abandoned(path) and replace_whole(path, own, partial(_is_abandoned, path)):
        return _held(path, own)
    return None


@contextmanager
def _held(path: Path, own: bytes) -> Iterator[None]:
    """Touches the file now and then, and deletes it at the end, unless another has taken the claim over."""
    released = threading.Event()

    def beat() -> None:
        while not released.wait(BEAT_S):
            with suppress(OSError):
                if path.read_bytes() == own:
                    os.utime(path)

    thread = threading.Thread(target=beat, name=f"claim {path.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        released.set()
        thread.join()
        with suppress(OSError):
            if path.read_bytes() == own:
                path.unlink(missing_ok=True)


def _this_process() -> dict[str, object]:
    own = own_element()
    element = {"job": own.job, "restart": own.restart} if own else {"job": None, "restart": 0}
    return {"host": socket.gethostname(), **asdict(own_identity()), **element}


def _is_abandoned(path: Path, now: float | None = None) -> bool:
    """Whether the claim's process is gone, or has been silent for long."""
    try:
        holder = json.loads(path.read_bytes())  # first: NFS looks at a file's time anew when it is opened
        age = (_now_there(path.parent) if now is None else now) - path.stat().st_mtime
    except (OSError, ValueError):
        return True  # it was released meanwhile, or is no claim
    own = own_element()
    if own is not None and own.replaces(holder.get("job"), holder.get("restart")):
        return True
    return age > STALE_S or _lives(holder) is False


def _now_there(folder: Path) -> float:
    """The time by the clock that stamps the folder's files, which may be another machine's."""
    probe = folder / f".now.{socket.gethostname()}.{os.getpid()}"
    with storing(probe):
        try:
            probe.touch()
            return probe.stat().st_mtime
        except FileNotFoundError:
            return time.time()
        finally:
            probe.unlink(missing_ok=True)


def _lives(holder: dict[str, Any]) -> bool | None:
    """Whether a claim's process runs; None where this machine, or an older version's claim, does not tell."""
    return Identity(holder.get("machine", ""), holder.get("pid", 0), holder.get("started", "")).lives


def count_finished(folder: Path) -> int:
    """How many records of the job are finished, for display: no line is checked against its checksum."""
    with suppress(OSError):
        held = Journal.held(folder)
        done = {path.stem for path in (folder / DONE).glob("*.jsonl")}
        found = set[int]()
        for path in (folder / PARTS).glob("*.jsonl"):
            if path.name.partition(".")[0] not in done:
                found.update(map(int, FINISHED_LINE.findall(path.read_bytes())))
        return len(found) + sum(shard.count for shard in held.shards if shard.name in done) if held else 0
    return 0


def _is_file_of(path: Path, data: bytes) -> bool:
    """Whether the file is there and holds this. Raises DataError for anything else in its place."""
    if not path.exists():
        return False
    with storing(path, reads=True):
        if path.is_file() and path.read_bytes() == data:
            return True
    what, fix = "the output file is there already, with other content", "move it away"
    allowed = "no file, or what this job writes"
    raise DataError(what, path, allowed=allowed, fix=f"{fix}, then start the same command again")
