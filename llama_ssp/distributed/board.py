"""What ranks tell each other outside of collectives: that they live, where, and why they end. No torch.

    who started the ranks      where they write
    the command (ranks=N)      files in a folder that only this user may enter
    torchrun                   torchrun's own store: a port without a password

A store on a port is open to every user who reaches the machine, and tells anybody the names of its keys: no
prefix of them is secret. So the form of all that is read is checked. A sign of life that no rank can have
written counts as none. A cause that no rank can have written ends all ranks, with a line that says so
(FORGED). A forged cause of the right form is not known from a true one.
"""

from __future__ import annotations

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llama_ssp.config.environment import MAX_WORLD, START, number_of, rank_environment
from llama_ssp.distributed.identity import Identity
from llama_ssp.distributed.placement import LEADER
from llama_ssp.distributed.signals import STOPPING, UNWAITED
from llama_ssp.errors import (
    DATA,
    DISTRIBUTED,
    FAILED_CHECK,
    INPUT_OUTPUT,
    MODEL,
    USAGE,
    DistributedError,
    one_line,
    shortened,
)

FOLDER = "LLAMA_SSP_RANKS"  # names the folder in which ranks meet that the command started
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
CAUSE = "cause"
CODES = frozenset({FAILED_CHECK, USAGE, DATA, MODEL, DISTRIBUTED, INPUT_OUTPUT, *(128 + n for n in STOPPING)})
NOBODY = -1  # in place of a rank: the launcher says the line
# Bytes.
MAX_BEAT = 1024
MAX_CAUSE = 2**16
# Characters of a cause, twelve bytes each at most, and of a part of a beat.
MAX_LINE = 4000
MAX_WORD = 200
EARLY_S = 10.0  # for a rank that fails before all have met, to tell the others
LEADER_S = 1.0  # for the leader to say first what all ranks would say
LOOK_S = 0.05
CONNECTED_S = 5.0  # after torch's own limit for a connection, which then says first that there is none
STEPS = 20  # of a wait for the store: one of them at most passes while this process itself is stopped
Answer = TypeVar("Answer")
MEETINGS: list[Board] = []  # of this process: each has a place of its own


class BoardLost(Exception):
    """What the ranks write cannot be read or written any more."""


@dataclass(frozen=True)
class Cause:
    """Why all ranks end: in one line, with one exit code; rank `by` says it."""

    line: str
    code: int = DISTRIBUTED
    by: int = LEADER


# In place of a cause that no rank can have written.
FORGED = Cause("the ranks' store holds something that no rank wrote, in place of why they end")


@dataclass(frozen=True)
class Beat:
    """A sign of life: its number, what the rank does, and its process."""

    number: int
    place: str
    process: Identity


class Board(ABC):
    """A place where every rank of a meeting writes, and reads what the others wrote."""

    @abstractmethod
    def write(self, key: str, text: str) -> None:
        """Writes a text of at most MAX_BEAT bytes. Raises BoardLost, as all methods do."""

    @abstractmethod
    def read(self, keys: list[str]) -> list[bytes]:
        """Returns what is there, empty where nothing is. It may be anything, and longer than is allowed."""

    @abstractmethod
    def first(self, key: str, text: str) -> bytes:
        """Writes the text unless something is there; returns what is there then."""

    @abstractmethod
    def groups_store(self, patience_s: float) -> Any:
        """Returns a store for torch's process groups, whose calls wait this long."""

    def another(self) -> Board:
        """Returns the board for another thread, which does not wait for calls of this one."""
        return self

    def first_cause(self, new: Cause | None = None) -> Cause | None:
        """Returns the first cause: `new`, if there was none before. None while there is none."""
        text = ""
        if new is not None:
            line = shortened(one_line(new.line), MAX_LINE)
            text = json.dumps({"line": line, "code": new.code, "by": new.by})
        content = self.first(CAUSE, text)
        return read_cause(content) if content else None


class FolderBoard(Board):
    """Files in a folder.

    A rank's sign of life always has MAX_BEAT bytes, and is written over the one before in one call. This
    needs no new space: a disk that has become full does not matter. Parts of two, if somebody ever read them,
    would count as none if they make no valid one.
    """

    def __init__(self, folder: Path) -> None:
        """The folder of one meeting, which is made if it is not there."""
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise BoardLost(self._lost(error)) from error

    def write(self, key: str, text: str) -> None:
        padded = text.encode().ljust(MAX_BEAT)
        try:
            file = os.open(self._file(key), os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(file, padded, 0)
            finally:
                os.close(file)
        except OSError as error:
            raise BoardLost(self._lost(error)) from error

    def read(self, keys: list[str]) -> list[bytes]:
        return [self._content(key) for key in keys]

    def first(self, key: str, text: str) -> bytes:
        content = self._content(key)
        if content or not text:
            return content
        try:
            file = self._file(key)
            part = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
            part.write_text(text, encoding="utf-8")
            with suppress(FileExistsError):
                file.hardlink_to(part)
            part.unlink()
        except OSError as error:
            raise BoardLost(self._lost(error)) from error
        return self._content(key)

    def groups_store(self, patience_s: float) -> Any:
        store = _stores().FileStore(str(self._folder / "groups"), -1)
        store.set_timeout(timedelta(seconds=patience_s))
        return store

    def _file(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    def _content(self, key: str) -> bytes:
        try:
            with self._file(key).open("rb") as file:
                return file.read(MAX_CAUSE + 1).rstrip(b" ")
        except FileNotFoundError:
            if self._folder.is_dir():
                return b""
            raise BoardLost(f"the ranks' folder {self._folder} is gone") from None
        except OSError as error:
            raise BoardLost(self._lost(error)) from error

    def _lost(self, error: OSError) -> str:
        return f"the ranks' folder {self._folder} cannot be used: {error.strerror or error}"


class StoreBoard(Board):
    """Keys in torchrun's store, which answers each call within `patience_s`, or is lost."""

    def __init__(self, store: Any, patience_s: float) -> None:
        self._store = store
        self._patience_s = patience_s

    def write(self, key: str, text: str) -> None:
        answered_within(self._patience_s, partial(self._store.set, key, text))

    def read(self, keys: list[str]) -> list[bytes]:
        return answered_within(self._patience_s, partial(self._read, keys))

    def _read(self, keys: list[str]) -> list[bytes]:
        """A call for a key that is not there would wait."""
        if self._store.check(keys):
            return list(self._store.multi_get(keys))
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def first(self, key: str, text: str) -> bytes:
        content: bytes = answered_within(self._patience_s, partial(self._store.compare_set, key, "", text))
        return content

    def groups_store(self, patience_s: float) -> Any:
        # A later meeting has the connection of the first, but a patience of its own.
        self._store.set_timeout(timedelta(seconds=patience_s))
        return self._store

    def another(self) -> StoreBoard:
        return StoreBoard(answered_within(self._patience_s, self._store.clone), self._patience_s)

    def again(self, prefix: str, patience_s: float) -> StoreBoard:
        """Returns the board of a later meeting, over the connection of this one."""
        return StoreBoard(_stores().PrefixStore(prefix, self._store.underlying_store), patience_s)


def answered_within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Returns what `ask`, a call of torchrun's store, returns.

    torch's calls wait without end for a store whose machine is frozen or cut off. So another thread calls,
    and is left there. Time in which this process itself is stopped does not count. Raises BoardLost for a
    store that is silent or gone.
    """
    answers = list[Answer]()
    errors = list[Exception]()
    is_over = threading.Event()

    def call() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)
        is_over.set()

    threading.Thread(target=call, name=UNWAITED, daemon=True).start()
    if not any(is_over.wait(seconds / STEPS) for _ in range(STEPS)):
        raise BoardLost(
            f"torchrun's store ({_address()}) has not answered for {seconds:g} s: "
            "its machine is stopped or cut off"
        )
    if errors and not isinstance(errors[0], RuntimeError):
        raise errors[0]
    if errors:
        raise BoardLost("torchrun, which keeps the ranks' store, is gone") from errors[0]
    return answers[0]


def _address() -> str:
    """Returns where torchrun's store is, for messages."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def open_board(patience_s: float) -> Board:
    """Returns where this process meets the other ranks: a place of this meeting, and of this start of ranks.

    Raises DistributedError if there is none.
    """
    place = f"{os.environ.get(ATTEMPT, '0')}/{len(MEETINGS)}"
    if folder := os.environ.get(FOLDER):
        try:
            return FolderBoard(Path(folder, place))
        except BoardLost as lost:
            raise DistributedError(
                str(lost), where=f"{FOLDER}={folder}", fix="start the command again"
            ) from lost
    prefix = f"llama_ssp/{place}"
    earlier = MEETINGS[-1] if MEETINGS else None
    if isinstance(earlier, StoreBoard):
        return earlier.again(prefix, patience_s)
    return _connected(patience_s, prefix)


def _connected(patience_s: float, prefix: str) -> StoreBoard:
    """Connects to the store that torchrun keeps."""
    here = rank_environment()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        raise DistributedError(
            "several ranks were asked for, but not by torchrun",
            where="environment",
            found="no store that a launcher keeps",
            fix=START,
        )
    host = os.environ.get("MASTER_ADDR", "")
    port = number_of("MASTER_PORT", 1, 65535)
    where = f"rank {here.rank} of {here.world}, {_address()}"
    fix = "check MASTER_ADDR and MASTER_PORT"
    silent = DistributedError(
        "torchrun's store does not answer", where=where, fix=f"start torchrun again; {fix}"
    )
    silent.speaks = True  # the others cannot be told

    stores = _stores()
    connect = partial(
        stores.TCPStore,
        host_name=host,
        port=port,
        world_size=here.world,
        is_master=False,
        timeout=timedelta(seconds=patience_s),
        wait_for_workers=False,
    )
    try:
        store = answered_within(patience_s + CONNECTED_S, connect)
    except BoardLost as lost:
        raise silent from lost
    return StoreBoard(stores.PrefixStore(prefix, store), patience_s)


def _stores() -> Any:
    """Returns the module that has torch's stores, though its type does not say so."""
    import torch.distributed as dist

    return dist


def announce(line: str, code: int) -> Cause:
    """Tells the other ranks why this one ends before all have met; returns the first cause, this or another.

    Raises DistributedError or BoardLost where there is nothing to tell them by.
    """
    cause = Cause(line, code, rank_environment().rank)
    board = open_board(EARLY_S)
    until = time.monotonic() + LEADER_S
    while cause.by != LEADER and not board.first_cause() and time.monotonic() < until:
        time.sleep(LOOK_S)
    return board.first_cause(cause) or cause


def read_cause(content: bytes) -> Cause:
    """Returns the cause, FORGED if no rank can have written it."""
    fields = _json(content, MAX_CAUSE)  # this bounds the line, too
    if not isinstance(fields, dict) or fields.keys() != {"line", "code", "by"}:
        return FORGED
    line = fields["line"]
    code = fields["code"]
    by = fields["by"]
    if not isinstance(line, str) or not line.strip():
        return FORGED
    if not _is_number(code) or code not in CODES or not _is_number(by) or not NOBODY <= by < MAX_WORLD:
        return FORGED
    return Cause(one_line(line), code, by)


def beat_text(number: int, place: str, process: Identity) -> str:
    return json.dumps([number, place, *asdict(process).values()])


def read_beat(content: bytes) -> Beat | None:
    """Returns the sign of life; None if no rank can have written it."""
    parts = _json(content, MAX_BEAT)
    if not isinstance(parts, list) or len(parts) != 5:
        return None
    number, place, machine, pid, started = parts
    words = (place, machine, started)
    if not all(isinstance(word, str) and len(word) <= MAX_WORD for word in words):
        return None
    if not _is_number(number) or not _is_number(pid) or pid < 2:
        return None
    return Beat(number, one_line(place), Identity(machine, pid, started))


def _json(content: bytes, most: int) -> Any:
    """Returns what the bytes hold, None if they are no JSON or too many."""
    if len(content) > most:
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
