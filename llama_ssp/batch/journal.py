"""A job's folder: begun once, continued by any attempt, merged when every shard is done."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from llama_ssp.batch import atomic_files as files
from llama_ssp.batch import attempts
from llama_ssp.batch.attempts import (
    ATTEMPT_DRAFT,
    ATTEMPT_FILE,
    REOPENED,
    Attempt,
    PastAttempt,
    Shard,
    attempt_files,
    read_part,
)
from llama_ssp.batch.records import counted, is_error
from llama_ssp.config.gone import gone
from llama_ssp.errors import DataError, StorageError, UsageError, shortened
from llama_ssp.speculative.stats import ratio
from llama_ssp.text.prompts import reading

MANIFEST = "run.json"
TRIALS = "trials.json"
COSTS = "costs.json"
ROWS = "rows.json"
FORMATS = "formats.json"  # in which number formats the models are, and on which device the job began
MACHINE = "machine.json"  # what was measured of the machine when the job began; {}: nothing
PARTS = "parts"
DONE = "done"
CLAIMS = "claims"
GROUPS = "groups"
PUBLISHED = "published"
NOTE_S = 30.0  # between notes of a process that loads
# What a job's folder may hold before its manifest: the input's index, what came through pipes, what a
# scheduler's script makes, and drafts that killed processes left.
BEFORE_MANIFEST = re.compile(
    r"index|input-[0-9]+|slurm|logs|\.(probe|index|input-[0-9]+|run\.json)\..+|\.nfs.+"
)
ALL_NAMES = {MANIFEST, TRIALS, COSTS, ROWS, FORMATS, MACHINE, PARTS, DONE, CLAIMS, GROUPS, PUBLISHED}
COUNTS = ("records", "failed", "tokens")  # of a group's work
GONE = ("speculation.siblings", 0)  # a setting of 0.2 that changes nothing


@dataclass(frozen=True)
class Manifest:
    """What run.json holds. `settings` is all that decides the output, flat."""

    input_sha256: str
    records: int
    settings: dict[str, Any]
    shards: tuple[Shard, ...]
    longest: int = 0  # tokens that the longest text may get to have, prompt included; 0 of a new job

    def as_bytes(self) -> bytes:
        body = {**vars(self), "shards": len(self.shards)}
        return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()

    def require_same(self, held: Manifest, where: str) -> None:
        """Raises DataError if the folder's manifest `held` is another job's."""
        changed = [key for key in ("input_sha256", "records") if getattr(held, key) != getattr(self, key)]
        fix = "undo the change, or choose another task.output"
        for key in sorted(held.settings.keys() | self.settings.keys()):
            old = held.settings.get(key)
            new = self.settings.get(key)
            if old != new:
                changed.append(f"{key}={old!r} now {new!r}")
                if gone(key) or gone(f"{key}={old}"):
                    fix = "finish it with the version that began it, or choose another task.output"
        if changed:
            raise DataError(
                "the folder holds the results of another job",
                where=where,
                found="; ".join(changed[:8]),
                allowed="the same input and settings",
                fix=fix,
            )


def shards_of(records: int, most: int, number: int | None = None) -> tuple[Shard, ...]:
    """So many shards, or of at most `most` records, as even as can be."""
    number = -(-records // most) if number is None else number
    bounds = [*(-(-records * n // number) for n in range(number)), records]
    return tuple(Shard(f"{n:05d}", range(start, end)) for n, (start, end) in enumerate(pairwise(bounds)))


@dataclass(frozen=True)
class Standing:
    """How far a job is, from its files; the names are those of the JSON interface."""

    records: int = 0
    records_finished: int = 0
    records_failed: int = 0  # answered with an error
    shards: int = 0
    shards_done: int = 0

    @property
    def whole(self) -> bool:
        return self.shards_done == self.shards

    def in_words(self) -> str:
        records = f"{self.records_finished} of {self.records} records, {self.records_failed} errors"
        return f"{records}, {self.shards_done} of {self.shards} shards done"


@dataclass(kw_only=True)
class GroupWork:
    """What one process, the leader of a group, has done, from its file; names are of the JSON interface."""

    group: str
    node: str = ""
    device: str = ""
    ranks: int = 1
    gpus: int = 0
    began: float = 0.0
    last_at: float = 0.0
    loading_since: float = 0.0  # 0 where it does not load; a group that is killed meanwhile keeps the time
    records: int = 0
    failed: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    died: bool = False  # it was killed while texts were under way

    @property
    def hours(self) -> float:
        return (self.last_at - self.began) / 3600 if self.began else 0.0

    def add(self, at: float, records: int, failed: int, tokens: int) -> None:
        self.last_at = max(self.last_at, at)
        self.records += records
        self.failed += failed
        self.tokens += tokens


def acceptance(groups: list[GroupWork]) -> float | None:
    """The share of drafts that was accepted in all groups together; None where they have not said it."""
    return ratio(sum(group.accepted for group in groups), sum(group.drafted for group in groups))


class Journal:
    """A folder that several processes, on several machines, may work on at once."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._names = {shard.name for shard in manifest.shards}
        self._in_work = set[str]()  # shards that this process has claimed and not given back

    @staticmethod
    def require_free(folder: Path, output: Path) -> None:
        """Raises UsageError or DataError unless a job with this output may be kept in the folder.

        A folder is free if it holds a job, or nothing but what a job makes before its manifest. A user's own
        files are never mixed with a job's.
        """
        require_apart(folder, output)
        if folder.exists() and not folder.is_dir():
            raise DataError("the job's folder is a file", where=folder, fix="choose another task.work")
        if not folder.is_dir():
            return
        with files.storing(folder):
            names = sorted(path.name for path in folder.iterdir())
        if MANIFEST in names:  # one look: another process may begin the job at this moment
            return
        draft_of_output = f".{output.name[:40]}."
        others = [
            name
            for name in names
            if not BEFORE_MANIFEST.fullmatch(name) and not name.startswith(draft_of_output)
        ]
        if others:
            shown = ", ".join(shortened(name, 40) for name in others[:3])
            raise DataError(
                "the job's folder holds other files, and no job",
                where=folder,
                found=f"{shown}{' ...' if len(others) > 3 else ''}",
                allowed="a new or empty folder, or that of a job",
                fix="choose another task.work; nothing was changed",
            )

    @staticmethod
    def begin(folder: Path, manifest: Manifest) -> Journal:
        """The job's journal, new or continued. Raises DataError if the folder holds another job."""
        files.require_file_system(folder)
        if not files.write_once(folder / MANIFEST, manifest.as_bytes()):
            manifest.require_same(held := Journal.find(folder).manifest, str(folder))
            manifest = held
        return Journal(folder, manifest)

    @staticmethod
    def held(folder: Path) -> Manifest | None:
        """Returns the job that this folder holds; None where it holds none. Raises DataError."""
        with _reading_manifest(folder):
            body = _manifest_body(folder)
            if body is None:
                return None
            # 0.2 listed the shards, and had `longest` among other facts.
            count = body["shards"]
            longest = body.get("facts", body)["longest"]
            shards = shards_of(body["records"], 0, count if isinstance(count, int) else len(count))
            return Manifest(body["input_sha256"], body["records"], body["settings"], shards, longest)

    @staticmethod
    def find(folder: Path) -> Journal:
        """A journal that is there already. Raises DataError where none is."""
        if manifest := Journal.held(folder):
            return Journal(folder, manifest)
        raise DataError("there is no job in this folder", where=folder, fix="check task.output")

    def kept(self, name: str, value: Any) -> Any:
        """Writes a value to the file of this name, once; returns what the first process wrote."""
        path = self.folder / name
        with files.storing(path):
            files.write_once(path, (json.dumps(value) + "\n").encode())
            return json.loads(path.read_bytes())

    def keep_trials(self, engines: dict[str, str]) -> None:
        """Writes, by role, whether steps that were on trial are compiled; raises DataError if it differs.

        They round differently, and a text should not depend on the machine or the attempt that wrote it.
        """
        kinds = {role: how.partition(":")[0] for role, how in engines.items()}
        held = self.kept(TRIALS, kinds) if kinds else {}
        for role, how in kinds.items():
            if (then := held.get(role, how)) != how:
                raise DataError(
                    "the job has begun with another engine",
                    where=self.folder / TRIALS,
                    found=f"{role}: {engines[role]}",
                    allowed=f"{role}: {then}",
                    fix=f"give engine={then}",
                )

    def keep_formats(self, target: str, formats: dict[str, str], device: str) -> list[str]:
        """Writes the number formats by role, and this device, once; returns what differs from them, in words.

        Raises DataError where the role `target` has another format: texts have its distribution. A draft in
        another one changes their bytes alone, and so does another device.
        """
        held = self.kept(FORMATS, {"formats": formats, "device": device})
        then = held["device"]
        lines = list[str]()
        if device != then:
            lines.append(f"the job began on {then}, this is {device}: texts in 16 bit differ by rounding")
        for role, dtype in formats.items():
            before = held["formats"].get(role, dtype)
            if before == dtype:
                continue
            if role == target:
                raise DataError(
                    "the job has begun with its target in another number format",
                    where=self.folder / FORMATS,
                    found=f"{dtype} on {device}",
                    allowed=f"{before} on {then}",
                    fix=f"run it on such devices, or begin a job for both kinds with {role}.dtype={dtype}",
                )
            lines.append(f"the job began with its {role} in {before} on {then}, here it is in {dtype}")
        return lines

    def is_done(self, shard: Shard) -> bool:
        return self._done(shard).exists()

    def require_present(self) -> None:
        """Raises StorageError if the job's folder was removed, or holds another job now.

        A process that goes on would answer texts that nobody will find.
        """
        with _reading_manifest(self.folder):
            now = _manifest_body(self.folder)
            is_same = now is not None and now["settings"] == self.manifest.settings
        if not is_same:
            raise StorageError(
                "the job's folder was removed while this process worked on it",
                where=self.folder,
                found="no run.json" if now is None else "another job",
                fix="start the same command again: what was removed is computed anew",
            )

    def _claims(self) -> Iterator[tuple[Path, dict[str, Any], float]]:
        """Yields each claim: its file, who holds it, and when it was renewed last. Nothing is written."""
        for path in (self.folder / CLAIMS).glob("[!.]*"):
            holder = attempts.holder_of(path) if path.name in self._names else None
            if holder is not None:
                yield path, *holder

    def holders(self) -> list[dict[str, Any]]:
        """The living processes that hold a claim, by this machine's clock."""
        now = time.time()
        return [holder for path, holder, _ in self._claims() if not attempts.is_abandoned(path, now)]

    def silent(self) -> set[tuple[str, float]]:
        """Claimed shards of which it is unknown whether the process lives, with the claim's last renewal."""
        done = self.done()
        unknown = [(path.name, at) for path, holder, at in self._claims() if attempts.lives(holder) is None]
        return {(name, at) for name, at in unknown if name not in done}

    def claim(self) -> tuple[Shard, AbstractContextManager[None]] | None:
        """Returns the first shard that is neither done nor claimed, with the claim on it; None without one.

        Raises StorageError if the job's folder is gone.
        """
        self.require_present()
        done = self.done()
        for shard in self.manifest.shards:
            if shard.name in done or shard.name in self._in_work:
                continue
            claimed = attempts.claim(self.folder / CLAIMS / shard.name)
            if claimed is None:
                continue
            if not self.is_done(shard):  # after the listing, by the one that had the claim then
                return shard, self._working_on(shard, claimed)
            with claimed:
                pass
        return None

    @contextmanager
    def _working_on(self, shard: Shard, claimed: AbstractContextManager[None]) -> Iterator[None]:
        """Holds a claim, and knows it: were its file deleted, this process would else claim it again."""
        self._in_work.add(shard.name)
        try:
            with claimed:
                yield
        finally:
            self._in_work.discard(shard.name)

    def attempt(self, shard: Shard, name: str = "") -> Attempt:
        """Begins a new attempt at a shard, with what earlier ones have finished and failed at."""
        earlier = list(map(read_part, self._parts(shard)))
        file_name = f"{shard.name}.{len(earlier):03d}.{name or files.unique_name()}.jsonl"
        return Attempt(
            shard=shard,
            earlier=earlier,
            path=self.folder / PARTS / file_name,
            done=self._done(shard),
            group=self._own_log,
            require_present=self.require_present,
        )

    @property
    def _own_log(self) -> Path:
        """The file of this process, the group: of GPU-hours, and of what it published."""
        return self.folder / GROUPS / f"{files.unique_name()}.jsonl"

    def note(self, **about: str | float) -> None:
        """Adds what GroupWork has to the file of this process, the group."""
        files.append_line(self._own_log, {**about, "last_at": time.time()})

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Notes now and then that this process loads: its time counts also where it is killed meanwhile."""
        since = time.time()
        is_over = threading.Event()

        def note_again() -> None:
            with suppress(StorageError):  # a full disk: the task finds it by itself
                while not is_over.wait(NOTE_S):
                    self.note(loading_since=since)

        self.note(loading_since=since)
        thread = threading.Thread(target=note_again, name="loading", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            self.note(loading_since=0.0)

    def done(self) -> set[str]:
        """Returns the names of the shards that are done, by one listing."""
        return self._names & {path.stem for path in (self.folder / DONE).glob("[!.]*.jsonl")}

    def standing(self) -> Standing:
        return self.survey()[0]

    def survey(self) -> tuple[Standing, list[GroupWork]]:
        """How far the job is, and by whom. Of a done shard only its counts are read, where there are some."""
        done = self.done()
        groups = dict[str, GroupWork]()
        last = dict[str, tuple[float, GroupWork, dict[str, Any]]]()  # by shard; it may have been reopened
        for path in sorted((self.folder / GROUPS).glob("*.jsonl")):
            group = groups[path.stem] = GroupWork(group=path.stem)
            for entry in files.lines_in(path):
                if (name := entry.pop("shard", None)) is None:
                    vars(group).update(entry)
                elif name in done and (name not in last or entry["at"] >= last[name][0]):
                    last[name] = entry["at"], group, entry
        for _, group, entry in last.values():
            for name, of_other in entry.pop("others", {}).items():  # 0.3 gave all to who ended the shard
                other = groups.setdefault(name, GroupWork(group=name))
                counts = {key: of_other[key] for key in COUNTS}
                other.add(of_other["at"], **counts)
                other.died = other.died or of_other["died"]
                for key, count in counts.items():
                    entry[key] -= count
            group.add(**entry)
        # What groups finished that were killed before they counted it.
        uncounted = groups.setdefault("", GroupWork(group=""))
        for name in done - last.keys():
            uncounted.add(0.0, **counted(self.answers(self.manifest.shards[int(name)]).values()))
        seen = set[int]()
        for past, is_over in self._open_parts(done):
            group = groups.setdefault(past.process, GroupWork(group=past.process))
            group.add(past.last_at, **counted(past.finished[i] for i in past.finished.keys() - seen))
            group.died = group.died or (is_over and bool(past.failed_at))
            seen.update(past.finished)
        finished, failed = (sum(vars(one)[key] for one in groups.values()) for key in ("records", "failed"))
        standing = Standing(self.manifest.records, finished, failed, len(self.manifest.shards), len(done))
        return standing, [group for group in groups.values() if group.group or group.records]

    def _open_parts(self, done: set[str]) -> Iterator[tuple[PastAttempt, bool]]:
        """Yields each attempt at a shard that is not done, and whether its process works on it no more."""
        now = time.time()
        held = {path.name for path, _, _ in self._claims() if not attempts.is_abandoned(path, now)}
        parts = [(path.name.partition(".")[0], path) for path in attempt_files(self.folder / PARTS)]
        latest = dict(parts)  # of each shard, by their order
        for shard, path in parts:
            if shard not in done:
                yield read_part(path), shard not in held or path != latest[shard]

    def merge(self, output: Path) -> None:
        """Writes all answers in the order of the input. Raises DataError while any is missing."""
        done = self.done()
        published = self.folder / PUBLISHED
        if missing := [shard.name for shard in self.manifest.shards if shard.name not in done]:
            raise DataError(
                "the job is not finished",
                where=self.folder,
                found=f"shards {', '.join(missing[:5])} missing, {len(missing)} in all",
                fix="start the same command again",
            )
        digest = hashlib.sha256()
        lines = 0
        records = self.manifest.records
        with files.drafted(output) as (draft, file):
            for shard in self.manifest.shards:
                with self._done(shard).open("rb") as answers:
                    while chunk := answers.read(2**20):
                        file.write(chunk)
                        digest.update(chunk)
                        lines += chunk.count(b"\n")
            if lines != records:
                raise DataError(
                    "the finished shards do not add up",
                    where=self.folder / DONE,
                    found=f"{lines} answers",
                    allowed=records,
                    fix="delete the shard that was changed",
                )
            held = ""
            if output.is_file():
                with output.open("rb") as present:
                    held = hashlib.file_digest(present, "sha256").hexdigest()
            if held != digest.hexdigest():
                if output.exists() and {"sha256": held} not in files.lines_in(published):
                    raise DataError(
                        "the output file is there already",
                        where=output,
                        found="other content",
                        allowed="no file, or what this job writes",
                        fix="move it away, then start the same command again",
                    )
                files.append_line(published, {"sha256": digest.hexdigest()})
                files.synced(file)
                draft.replace(output)
        for path in (self.folder / PARTS).glob("*"):
            ours = ATTEMPT_FILE.fullmatch(path.name) or ATTEMPT_DRAFT.fullmatch(path.name)
            if ours and ours["shard"] in self._names:  # what they hold is in `done` now
                path.unlink(missing_ok=True)

    def answers(self, shard: Shard) -> dict[int, dict[str, Any]]:
        """The answers that a shard has so far, by their records."""
        if self.is_done(shard):
            with reading("the journal", self.folder):
                lines = self._done(shard).read_bytes().splitlines()
            return dict(zip(shard.indices, map(json.loads, lines), strict=True))
        parts = map(read_part, self._parts(shard))
        return {index: answer for past in parts for index, answer in past.finished.items()}

    def reopen(self, corrected: set[int] | None = None) -> int:
        """Takes answers back: the errors of done shards, or those of corrected records; returns how many.

        Raises DataError where the answer of a corrected record is no error.
        """
        count = 0
        for shard in self.manifest.shards:
            if corrected is None:
                is_meant = self.is_done(shard)
            else:
                is_meant = not corrected.isdisjoint(shard.indices)
            if not is_meant:
                continue

            answers = self.answers(shard)
            errors = {index for index, answer in answers.items() if is_error(answer)}
            taken = errors if corrected is None else corrected & answers.keys()
            if sound := sorted(taken - errors):
                raise DataError(
                    "the input has changed",
                    where=self.folder,
                    found=f"another record {sound[0] + 1}, which has an answer",
                    allowed="other lines where the answer is an error, or none",
                    fix="undo the change, or choose another task.output",
                )
            if taken:
                lines = [files.sealed({"finished": i, "record": answers[i]}) for i in answers.keys() - taken]
                replaced = {*self._parts(shard), self._done(shard)}
                path = self.folder / PARTS / f"{shard.name}.000.{REOPENED}{files.unique_name()}.jsonl"
                files.replace_whole(path, b"".join([*lines, files.sealed({"left": True})]))
                with files.storing(path):
                    for old in replaced - {path}:
                        old.unlink(missing_ok=True)
                count += len(taken)
        return count

    def _parts(self, shard: Shard) -> list[Path]:
        """Returns the files of the attempts at a shard, in their order."""
        return attempt_files(self.folder / PARTS, shard.name)

    def _done(self, shard: Shard) -> Path:
        return self.folder / DONE / f"{shard.name}.jsonl"


def _manifest_body(folder: Path) -> dict[str, Any] | None:
    """Returns what run.json holds, without settings that change nothing any more; None without it."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    with reading("the journal", path):
        body = json.loads(path.read_bytes())
    settings = {key: value for key, value in body["settings"].items() if (key, value) != GONE}
    return {**body, "settings": settings}


@contextmanager
def _reading_manifest(folder: Path) -> Iterator[None]:
    """Raises DataError where run.json is not what a job writes."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            "run.json cannot be read",
            where=folder / MANIFEST,
            found=f"{type(error).__name__}: {error}",
            fix="damaged, or not ours: choose another folder",
        ) from None


def require_apart(folder: Path, output: Path) -> None:
    """Raises UsageError where a job's folder and its output, once written, would be in each other's place."""
    work = Path(os.path.realpath(folder))
    result = Path(os.path.realpath(output))
    if work == result or result in work.parents:
        raise UsageError(
            "task.work is where the output goes",
            where=f"work={folder}",
            found=f"output={output}",
            fix="leave task.work out, or name another folder",
        )
    if work in result.parents:
        name = result.relative_to(work).parts[0]
        if name in ALL_NAMES or BEFORE_MANIFEST.fullmatch(name):
            raise UsageError(
                "task.output has a name that the job's folder needs",
                where=f"work={folder}",
                found=f"output={output}",
                fix="choose another task.output",
            )


def count_finished(folder: Path, group: str = "") -> int:
    """How many records of the job are finished; or those by groups whose name begins so."""
    with suppress(OSError, StorageError):
        if held := Journal.held(folder):
            _, groups = Journal(folder, held).survey()
            return sum(one.records for one in groups if one.group.startswith(group))
    return 0
