"""One process's work on a shard: the claim on it, and the file of the attempt.

A claim is a file that the process touches now and then, and deletes at the end. It only saves double work:
the first to publish wins. An attempt's file has a line for each event, with a checksum: which records began,
which were finished, and that the attempt left in good order; if not, it failed at what it began.
"""

import json
import os
import re
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO

from llama_ssp.batch.atomic_files import append_line, lines_in, sealed, storing, sync_folder, write_once
from llama_ssp.batch.records import counted
from llama_ssp.distributed.identity import Identity, own_element, own_identity

SYNC_EVERY = 16  # records that may be lost if the machine, not only a process, dies
SYNC_S = 5.0
# A heartbeat keeps a claim, so that others take over from a dead process.
BEAT_S = 10.0
STALE_S = 60.0

# SHARD.NUMBER.PROCESS.jsonl, and the draft of such a file, which a killed process may have left.
ATTEMPT_FILE = re.compile(r"(?P<shard>[0-9]{5,})\.(?P<number>[0-9]{3,})\.(?P<process>.+)\.jsonl")
ATTEMPT_DRAFT = re.compile(r"\.(?P<shard>[0-9]{5,})\.[0-9]{3,}\..+")
REOPENED = "reopened-"  # begins the name of a process in a file of answers that were taken back


@dataclass(frozen=True)
class Shard:
    """Consecutive records of the input."""

    name: str
    indices: range


@dataclass(kw_only=True)
class PastAttempt:
    """What an attempt's file tells."""

    process: str = ""  # as in the file's name
    finished: dict[int, dict[str, Any]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    among: int = 1  # texts that the process had under way when the last ones were begun
    node: str = ""
    left: bool = False
    damaged: set[int] = field(default_factory=set)  # records whose texts had no numbers
    last_at: float = 0.0  # when its last record was finished

    @property
    def failed_at(self) -> set[int]:
        """Records that were under way when the attempt was killed."""
        return set() if self.left else self.begun - self.finished.keys()


class Attempt:
    """One process's work on a shard. Each line reaches the system at once, the disk every SYNC_EVERY."""

    def __init__(
        self,
        *,
        shard: Shard,
        earlier: list[PastAttempt],
        path: Path,
        done: Path,
        group: Path,
        require_present: Callable[[], None],
    ) -> None:
        """Begins the file `path`; `publish` writes `done`, and its counts to the process's file `group`.

        `require_present` raises StorageError if the job that these files belong to has gone.
        """
        self.shard = shard
        self._path = path
        self._done = done
        self._group = group
        self._require_present = require_present
        self._finished: dict[int, dict[str, Any]] = {}
        self._earlier = earlier
        self.deaths = Counter[int]()
        # By record: the nodes on which an attempt died during it alone, and where it gave no numbers.
        self.deaths_alone = defaultdict[int, list[str]](list)
        self.damaged_on = defaultdict[int, set[str]](set)
        for past in earlier:
            self._finished = past.finished | self._finished
            self.deaths.update(died := past.failed_at)
            for index in died if past.among == len(died) == 1 else ():
                self.deaths_alone[index].append(past.node)
            for index in past.damaged:
                self.damaged_on[index].add(past.node)
        self._unsynced = 0
        self._synced_at = time.monotonic()
        with storing(path):
            path.parent.mkdir(exist_ok=True)
            self._file: BinaryIO = path.open("xb", buffering=0)
            sync_folder(path.parent)

    @property
    def missing(self) -> list[int]:
        """The records still to be done, in input order."""
        return [index for index in self.shard.indices if index not in self._finished]

    def begin(self, indices: list[int], among: int) -> None:
        """Says what is under way, before it is, and how many texts the process then has under way.

        Raises StorageError if the job's folder was removed: a line in an unlinked file is lost.
        """
        self._require_present()
        self._append({"begun": indices, "among": among, "node": socket.gethostname()})

    def finish(self, index: int, record: dict[str, Any]) -> None:
        self._append({"finished": index, "record": record, "at": round(time.time(), 1)})
        self._finished[index] = record

    def keep_damaged(self, indices: list[int]) -> None:
        """Says that texts had no numbers on this node, which then stops; the records stay open."""
        self._append({"damaged": indices})

    def excuse(self) -> None:
        """Says that the attempt is being ended from outside: no record is to blame. From any thread."""
        with suppress(ValueError):  # its file is closed: the shard has been published
            self._append({"left": True})

    def publish(self) -> bool:
        """Writes the whole shard, of which nothing is missing; returns whether this attempt was the first to.

        Raises StorageError if the job's folder was removed meanwhile.
        """
        self._require_present()
        answers = [self._finished[index] for index in self.shard.indices]
        self._file.close()
        whole = "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
        if was_first := write_once(self._done, whole.encode()):
            line = {"shard": self.shard.name, "at": time.time(), **counted(answers)}
            append_line(self._group, {**line, "others": self._others()})
        for path in attempt_files(self._path.parent, self.shard.name):
            path.unlink(missing_ok=True)  # what they hold is in `done` now
        return was_first

    def _others(self) -> dict[str, dict[str, Any]]:
        """Returns what is not this process's of the shard: what earlier ones finished, and whether they died.

        Their files go when the shard is published.
        """
        result: dict[str, dict[str, Any]] = {}
        known = set[int]()
        for past in self._earlier:
            own = counted(past.finished[index] for index in past.finished.keys() - known)
            known.update(past.finished)
            if past.process.startswith(REOPENED):
                continue
            of_process = result.setdefault(past.process, {"at": 0.0, "died": False, **dict.fromkeys(own, 0)})
            of_process["at"] = max(of_process["at"], past.last_at)
            of_process["died"] = of_process["died"] or bool(past.failed_at)
            for key, count in own.items():
                of_process[key] += count
        return result

    def _append(self, entry: dict[str, Any]) -> None:
        line = b"\n" + sealed(entry)  # so that a torn line before it stands alone
        with storing(self._path):
            if self._file.write(line) != len(line):
                raise OSError(0, "the disk took part of a line only")
            self._unsynced += 1
            if self._unsynced >= SYNC_EVERY or time.monotonic() - self._synced_at >= SYNC_S:
                os.fsync(self._file.fileno())
                self._unsynced = 0
                self._synced_at = time.monotonic()


class JournalThread(threading.Thread):
    """Makes calls that write, in their order: a disk that stalls does not stop who gives them."""

    def __init__(self) -> None:
        super().__init__(name="journal", daemon=True)
        self._calls = SimpleQueue[Callable[[], object] | None]()
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        while call := self._calls.get():
            try:
                call()
            except Exception as error:
                self._error = self._error or error

    def do(self, call: Callable[[], object]) -> None:
        """Has a call made after all before it. Raises what one of them has raised."""
        self.check()
        self._calls.put(call)

    def wait(self, seconds: float | None = None) -> None:
        """Waits until all calls so far have been made, or so long."""
        ended = threading.Event()
        self._calls.put(ended.set)
        ended.wait(seconds)

    def check(self) -> None:
        if self._error:
            raise self._error

    def close(self, seconds: float) -> None:
        """Ends the thread when all calls have been made; waits so long for that."""
        self._calls.put(None)
        self.join(seconds)


def attempt_files(folder: Path, shard: str = "*") -> list[Path]:
    """Returns the files of attempts at a shard, or at all shards, by name; no other file."""
    paths = folder.glob(f"{shard}.*.jsonl")
    return sorted(path for path in paths if ATTEMPT_FILE.fullmatch(path.name))


def read_part(path: Path) -> PastAttempt:
    """What the file tells: nothing where it has gone, because its shard has been published meanwhile."""
    named = ATTEMPT_FILE.fullmatch(path.name)
    past = PastAttempt(process=named["process"] if named else "")
    for entry in lines_in(path):
        past.begun.update(entry.get("begun", ()))
        past.among = entry.get("among", past.among)
        past.node = entry.get("node", past.node)
        if "finished" in entry:
            past.finished[entry["finished"]] = entry["record"]
            past.last_at = entry.get("at", 0.0)
        past.damaged.update(entry.get("damaged", ()))
        past.left = past.left or "left" in entry
    return past


def claim(path: Path) -> AbstractContextManager[None] | None:
    """The right to work on what `path` names, for a `with`; None while a living process has it."""
    own = json.dumps(this_process()).encode()
    # Several groups may find the claim abandoned at the same time. Usually one gets it. Two can, if the
    # second deletes the new claim of the first, which it takes for the old one: then work is done twice, no
    # more.
    if path.exists() and is_abandoned(path):
        with storing(path):
            path.unlink(missing_ok=True)
    return _held(path, own) if not path.exists() and write_once(path, own) else None


@contextmanager
def _held(path: Path, own: bytes) -> Iterator[None]:
    """Keeps the claim while the body runs, unless another process has taken it over."""
    released = threading.Event()

    def beat() -> None:
        is_over = False
        while not is_over:
            is_over = released.wait(BEAT_S)
            with suppress(OSError):
                if path.read_bytes() == own:
                    path.unlink() if is_over else os.utime(path)

    thread = threading.Thread(target=beat, name=f"claim {path.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        released.set()
        thread.join()


def this_process() -> dict[str, Any]:
    element = own_element()
    return {"host": socket.gethostname(), **asdict(own_identity()), **(asdict(element) if element else {})}


def holder_of(path: Path) -> tuple[dict[str, Any], float] | None:
    """Who holds the claim, and when it was renewed last; None where it is being released, or is no claim.

    Of a claim that this process may not read, or that its disk does not give now, only the time is known.
    """
    holder: Any = {}
    try:
        # Before its time is asked for: NFS looks at that anew when a file is opened.
        with suppress(OSError):
            holder = json.loads(path.read_bytes())
        renewed = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    return (holder, renewed) if isinstance(holder, dict) else None


def is_abandoned(path: Path, now: float | None = None) -> bool:
    """Whether the claim's process is gone, or silent for long; by the folder's clock where `now` is None."""
    if (found := holder_of(path)) is None:
        return True
    holder, renewed = found
    if now is None:  # what stamps the files may be another machine
        with storing(path), NamedTemporaryFile(dir=path.parent, prefix=".now.") as probe:
            now = os.stat(probe.name).st_mtime
    return now - renewed > STALE_S or lives(holder) is False


def lives(holder: dict[str, Any]) -> bool | None:
    """Whether a claim's process runs; None where this machine, or an older version's claim, does not tell."""
    element = own_element()
    if element and holder.get("job") == element.job and holder.get("restart") != element.restart:
        return False  # a scheduler starts an element again when it has ended
    return Identity(holder.get("machine", ""), holder.get("pid", 0), holder.get("started", "")).lives
