"""A job's folder: begun once, continued by any attempt, merged when every shard is done."""

from __future__ import annotations

import hashlib
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
    drafted,
    replace_whole,
    require_file_system,
    storing,
    synced,
    unique_name,
    write_once,
)
from llama_ssp.batch.attempt_log import (
    FINISHED,
    LEFT,
    Attempt,
    PastAttempt,
    append_line,
    lines_in,
    read_part,
    sealed,
)
from llama_ssp.batch.manifest import Manifest, Shard
from llama_ssp.batch.responses import counted, is_error
from llama_ssp.distributed.identity import Identity, own_element, own_identity
from llama_ssp.errors import DataError, StorageError

MANIFEST, TRIALS, COSTS = "run.json", "trials.json", "costs.json"
PARTS, DONE, CLAIMS = "parts", "done", "claims"
GROUPS, PUBLISHED = "groups", "published"
BEAT_S, STALE_S = 10.0, 60.0  # of a claim: a heartbeat keeps it, so that others take over from a dead process
CHUNK = 2**20  # bytes
FINISHED_LINE = re.compile(rb'^[0-9a-f]{8} \{"finished":(\d+).*\n', re.MULTILINE)


@dataclass(frozen=True)
class Standing:
    """How far a job is, from its files; the names are those of the JSON interface."""

    records: int
    records_finished: int
    records_failed: int  # answered with an error
    shards: int
    shards_done: int
    attempts: int
    attempts_unended: int  # running still, or killed

    @property
    def whole(self) -> bool:
        return self.shards_done == self.shards

    def in_words(self) -> str:
        records = f"{self.records_finished} of {self.records} records, {self.records_failed} errors"
        return f"{records}, {self.shards_done} of {self.shards} shards done, {self.attempts} attempts"


@dataclass(frozen=True)
class Piece:
    """Records that one process, the group, finished between two times."""

    group: str
    began: float
    at: float
    records: int
    failed: int
    tokens: int


NOTHING = Standing(0, 0, 0, 0, 0, 0, 0)  # of a job that no process has begun


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

    def keep_costs(self, rounds: list[float]) -> list[float]:
        """Writes what rounds cost at each K, once; returns what the job began with, by which K is chosen."""
        path = self.folder / COSTS
        with storing(path):
            write_once(path, (json.dumps(rounds) + "\n").encode())
            return [float(cost) for cost in json.loads(path.read_bytes())]

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
                then, fix = held[role], f"give engine={held[role]}"
                raise DataError(
                    "the job has begun with another engine",
                    path,
                    f"{role}: {engines[role]}",
                    f"{role}: {then}",
                    fix,
                )

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
        done = self.done()
        for shard in self.manifest.shards:
            if shard.name in done or (claimed := _claim(self.folder / CLAIMS / shard.name)) is None:
                continue
            if not self.is_done(shard):  # after the listing, by the one that had the claim then
                return shard, claimed
            with claimed:
                pass
        return None

    def has_free(self) -> bool:
        """Whether `claim` may find a shard."""
        done = self.done()
        shards = (shard.name for shard in self.manifest.shards if shard.name not in done)
        return any(_is_abandoned(self.folder / CLAIMS / name) for name in shards)

    def silent(self) -> set[tuple[str, float]]:
        """Claimed shards of which it is unknown whether the process lives, with the claim's last renewal."""
        found, done = set(), self.done()
        for path in (self.folder / CLAIMS).glob("[!.]*"):
            with suppress(OSError, ValueError):
                if path.name not in done and _lives(json.loads(path.read_bytes())) is None:
                    found.add((path.name, path.stat().st_mtime))
        return found

    def attempt(self, shard: Shard, name: str = "") -> Attempt:
        """A new attempt at a shard, with what earlier ones have finished and failed at."""
        paths = sorted((self.folder / PARTS).glob(f"{shard.name}.*.jsonl"))
        earlier = [past for path in paths if (past := _part(path)) is not None]
        path = self.folder / PARTS / f"{shard.name}.{len(earlier):03d}.{name or unique_name()}.jsonl"
        return Attempt(shard, earlier, path, self._done(shard), self._own_log)

    @property
    def _own_log(self) -> Path:
        """The file of this process, the group: of GPU-hours, and of what it published."""
        return self.folder / GROUPS / f"{unique_name()}.jsonl"

    def enter(self, ranks: int) -> None:
        """Says that a group begins to work."""
        now = time.time()
        append_line(self._own_log, {"node": socket.gethostname(), "ranks": ranks, "began": now, "at": now})

    def holders(self) -> list[dict[str, Any]]:
        """The living processes that hold a claim, by this machine's clock: nothing is written."""
        found = []
        for path in (self.folder / CLAIMS).glob("[!.]*"):
            with suppress(OSError, ValueError):  # it is being released
                if not _is_abandoned(path, time.time()):
                    found.append(json.loads(path.read_bytes()))
        return found

    def done(self) -> set[str]:
        """The names of the shards that are done, by one listing."""
        return {path.stem for path in (self.folder / DONE).glob("[!.]*.jsonl")}

    def nodes(self) -> set[str]:
        """The nodes on which groups have worked on the job."""
        logs = (self.folder / GROUPS).glob("*.jsonl")
        return {entry["node"] for path in logs for entry in lines_in(path) if "node" in entry}

    def standing(self) -> Standing:
        return self.survey()[0]

    def survey(self) -> tuple[Standing, list[Piece]]:
        """How far the job is, and by whom. Of a done shard only its counts are read, where there are some."""
        done, attempts, unended, by_shard = self.done(), 0, 0, dict[str, Piece]()
        for path in (self.folder / GROUPS).glob("*.jsonl"):
            for entry in lines_in(path):
                if entry.get("shard") in done:
                    counts = (entry[name] for name in ("began", "at", "records", "failed", "tokens"))
                    by_shard[entry["shard"]] = Piece(path.stem, *counts)
        for name in done - by_shard.keys():  # its process was killed before it could count
            with storing(self.folder, reads=True):
                answers = (self.folder / DONE / f"{name}.jsonl").read_bytes().splitlines()
            by_shard[name] = Piece("", 0.0, 0.0, **counted([json.loads(answer) for answer in answers]))
        pieces, seen = list(by_shard.values()), set[int]()
        for path in sorted((self.folder / PARTS).glob("*.jsonl")):
            shard, _, group = path.stem.split(".", 2)
            if shard not in done and (past := _part(path)) is not None:
                fresh = counted([answer for i, answer in past.finished.items() if i not in seen])
                seen.update(past.finished)
                pieces.append(Piece(group, past.began_at or past.last_at, past.last_at, **fresh))
                attempts, unended = attempts + 1, unended + (not past.left)
        finished, failed = (sum(getattr(piece, name) for piece in pieces) for name in ("records", "failed"))
        shards = len(self.manifest.shards), len(done), attempts + len(done), unended
        return Standing(self.manifest.records, finished, failed, *shards), pieces

    def merge(self, output: Path) -> None:
        """Writes all answers in the order of the input. Raises DataError while any is missing."""
        done = self.done()
        if missing := [shard.name for shard in self.manifest.shards if shard.name not in done]:
            found = f"shards {', '.join(missing[:5])} missing, {len(missing)} in all"
            raise DataError("the job is not finished", self.folder, found, fix="start the same command again")
        digest, lines, records = hashlib.sha256(), 0, self.manifest.records
        with drafted(output) as (draft, file):
            for shard in self.manifest.shards:
                with storing(self.folder / DONE, reads=True), self._done(shard).open("rb") as answers:
                    for chunk in iter(partial(answers.read, CHUNK), b""):
                        file.write(chunk)
                        digest.update(chunk)
                        lines += chunk.count(b"\n")
            if lines != records:
                what, fix = "the finished shards do not add up", "delete the shard that was changed"
                raise DataError(what, self.folder / DONE, f"{lines} answers", records, fix)
            if not _holds(output, digest.hexdigest(), self.folder / PUBLISHED):
                append_line(self.folder / PUBLISHED, {"sha256": digest.hexdigest()})
                synced(file)
                draft.replace(output)
        for path in (self.folder / PARTS).glob("*"):
            path.unlink(missing_ok=True)

    def reopen(self) -> int:
        """Opens done shards with errors again, for another attempt at these records; returns how many."""
        count = 0
        for shard in self.manifest.shards if self.standing().records_failed else ():
            if not self.is_done(shard):
                continue
            answers = list(map(json.loads, self._done(shard).read_bytes().splitlines()))
            kept = {i: one for i, one in zip(shard.indices, answers, strict=True) if not is_error(one)}
            if len(kept) < shard.count:
                lines = [sealed({FINISHED: index, "record": one}) for index, one in kept.items()]
                path = self.folder / PARTS / f"{shard.name}.000.reopened-{unique_name()}.jsonl"
                replace_whole(path, b"".join([*lines, sealed({LEFT: True})]))
                with storing(path):
                    self._done(shard).unlink(missing_ok=True)
                count += shard.count - len(kept)
        return count

    def _done(self, shard: Shard) -> Path:
        return self.folder / DONE / f"{shard.name}.jsonl"


def _part(path: Path) -> PastAttempt | None:
    """What an attempt's file tells; None where its shard has been published meanwhile."""
    try:
        return read_part(path)
    except StorageError:
        if path.exists():
            raise
        return None


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


def count_finished(folder: Path, group: str = "") -> int:
    """How many records of the job are finished, for display; or those of groups whose name begins so.

    No line is checked against its checksum.
    """
    with suppress(OSError, StorageError):
        held, found, count = Journal.held(folder), set[int](), 0
        done = Journal(folder, held).done() if held else set()
        if not group:
            count = sum(shard.count for shard in held.shards if shard.name in done) if held else 0
        for path in (folder / GROUPS).glob(f"{group}*.jsonl") if group else ():
            count += sum(entry.get("records", 0) for entry in lines_in(path))
        for path in (folder / PARTS).glob(f"*.{group}*.jsonl"):
            if path.name.partition(".")[0] not in done:
                found.update(map(int, FINISHED_LINE.findall(path.read_bytes())))
        return len(found) + count
    return 0


def _holds(path: Path, sha256: str, published: Path) -> bool:
    """Whether the file is there and holds this. Raises DataError for what this job has not written."""
    if not path.exists():
        return False
    held = ""
    if path.is_file():
        with storing(path, reads=True), path.open("rb") as file:
            held = hashlib.file_digest(file, "sha256").hexdigest()
    if held != sha256 and all(entry.get("sha256") != held for entry in lines_in(published)):
        what, fix = "the output file is there already, with other content", "move it away"
        allowed = "no file, or what this job writes"
        raise DataError(what, path, allowed=allowed, fix=f"{fix}, then start the same command again")
    return held == sha256
