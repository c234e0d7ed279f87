"""A conversation in a file, which grows by a line with each turn, so that nothing that was said is lost.

    {"from": 0, "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    {"from": 2, "messages": [...]}        the next question and its reply
    {"from": 2, "messages": []}           these two were taken back

Each line says: from this message on, the conversation is what follows here. A system message is the first
one. `from` may be missing, and is then 0: a JSON document with `messages`, such as a summary, is read, too.
"""

import errno
import json
import logging
from contextlib import suppress
from io import FileIO
from itertools import takewhile
from pathlib import Path
from typing import Any

from llama_ssp.config import home_expanded
from llama_ssp.errors import DataError, StorageError, UsageError, of_system, writing
from llama_ssp.text.messages import Message, messages_of

log = logging.getLogger(__name__)

FILE = "messages.jsonl"  # in a run folder
SUMMARY = "summary.json"
LAST = "last"  # in place of a name: the newest conversation below the folder of runs
FORM = 'lines with {"messages": [{"role": "user", "content": "..."}, ...]}'


class Transcript:
    """The file of one conversation. Without a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: FileIO | None = None  # without a buffer: what is written is in the file
        self._kept: list[Message] = []  # the conversation that the file has

    def keep(self, messages: list[Message]) -> None:
        """Writes what has changed since the last call. Raises StorageError; the file is then as before."""
        if self.path is None or messages == self._kept:
            return
        pairs = zip(self._kept, messages, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        with writing("conversation", self.path, "free some space: the next turn is written with this one"):
            if self._file is None:
                self._file = FileIO(self.path, "ab")
            end = self._file.seek(0, 2)
            try:
                self._append({"from": shared, "messages": messages[shared:]})
            except OSError:
                with suppress(OSError):  # half a line
                    self._file.truncate(end)
                raise
        self._kept = list(messages)

    def _append(self, record: dict[str, Any]) -> None:
        assert self._file is not None, "keep() opens it"
        # Half a character (a lone surrogate) becomes JSON's own way to write it.
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "the disk is full")


def transcript_named(name: str, out: str | None, besides: Path | None) -> Path:
    """Returns the file of a conversation: that of a run folder, a file, or the newest in `out`.

    `besides` is the folder of the run that asks. Raises UsageError where there is none.
    """
    if name == LAST:
        return _newest(out, besides)
    path = home_expanded(name)
    for file in (path / FILE, path / SUMMARY) if path.is_dir() else (path,):
        if file.is_file():
            return file
    found = "a folder without messages.jsonl" if path.is_dir() else None
    raise UsageError(
        "there is no such conversation",
        where=name,
        found=found,
        fix="name a run folder of a chat, its messages.jsonl, or a file of /save",
    )


def _newest(out: str | None, besides: Path | None) -> Path:
    if out is None:
        raise UsageError("out=null keeps no conversations", fix="name the file or the folder of one")
    own = besides and besides.resolve()
    files = [file for file in home_expanded(out).glob(f"*/*/{FILE}") if file.parent.resolve() != own]
    if not files:
        raise UsageError("there is no conversation yet", where=out, fix="name the file or the folder of one")
    return max(files, key=lambda file: file.stat().st_mtime_ns)


def read_transcript(file: Path) -> list[Message]:
    """Returns the messages at the end of the conversation. A torn last line counts as not written.

    Raises StorageError where the file cannot be read, and DataError where it is no conversation.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StorageError(of_system(error), fix="name another file") from None

    whole = _parsed(content)
    if isinstance(whole, dict):  # one document
        return _continued([], whole, f"{file}")
    messages = list[Message]()
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        record = _parsed(line)
        if record is None and number == len(lines) and (number > 1 or not line):
            if line:
                log.warning("%s: the last line is torn, and left out", file)
            break
        messages = _continued(messages, record, f"{file}:{number}")
    return messages


def save_transcript(file: Path, messages: list[Message]) -> None:
    """Writes a conversation as one line, whole or not at all; over a file only if that is one, too.

    Raises StorageError, or DataError where the file is something else.
    """
    if file.exists():
        read_transcript(file)
    part = file.with_name(f"{file.name}.part")
    line = json.dumps({"messages": messages}, ensure_ascii=False) + "\n"
    with writing("conversation", file, "name another file"):
        part.write_bytes(line.encode("utf-8", "backslashreplace"))
        part.replace(file)


def _parsed(content: bytes) -> Any:
    """Returns what the JSON holds; None if it is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _continued(messages: list[Message], record: Any, where: str) -> list[Message]:
    """Returns the messages as the record says that they go on."""
    given = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(given, list):
        raise DataError("the file is no conversation", where=where, allowed=FORM, fix="name another file")
    start = record.get("from", 0)
    if not isinstance(start, int) or not 0 <= start <= len(messages):
        raise DataError(
            "a line of the conversation does not follow those before it",
            where=where,
            found=f"from {start!r}",
            allowed=f"0 to {len(messages)}",
            fix="take out the line, or name another file",
        )
    return [*messages[:start], *messages_of(given, where)]
