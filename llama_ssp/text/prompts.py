"""Prompts from the config, a file, or standard input: read strictly, refused by line.

Text has one prompt a line, blank lines left out. JSONL has an object a line with `prompt` and,
optionally, `id`; an id names the prompt's random stream and its result. No torch here.
"""

from __future__ import annotations

import json
import logging
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from llama_ssp.config import (
    AgreeConf,
    CertifyConf,
    CompareConf,
    MeasureConf,
    OnBadRow,
    PromptedConf,
    home_expanded,
)
from llama_ssp.errors import DataError, StorageError, UsageError

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 16 * 2**20
MAX_INPUT_BYTES = 2**28  # of standard input, which is held whole
MAX_FILE_BYTES = 2**30
JSON_ENDINGS = (".jsonl", ".json", ".ndjson")  # of files with an object a line, in letters of any case
MAX_ID_LENGTH = 256
BOM = b"\xef\xbb\xbf"  # some editors put it before UTF-8
SHORT = [  # for tasks that compare models; the pair that ships has seen such text
    "def hello",
    'def factorial(n):\n    """Return',
    "import os\nimport ",
    "class Stack:\n    def __init__(self",
    "    for i in range(",
    "7 * 8 = 56\n12 * 34 = 408\n23 * 45 = ",
    "try:\n    with open(path) as file:\n        ",
    "The quick brown fox",
]
SAMPLE = ['def hello(name):\n    """Greet someone by name."""\n']
# What task=measure goes on with, unless told otherwise: prose, facts, code and sums, a sentence each.
SENTENCES = [
    "The harbour was still dark when the first boats came home, and on the quay",
    "Water boils at a lower temperature in the mountains because",
    "To repair a bicycle tyre you first have to",
    "The committee met again on Thursday to decide whether the old bridge",
    "In the year after the great flood the farmers of the valley",
    "A compiler turns the text of a program into",
    "My grandmother used to say that a good soup needs",
    "The three largest cities of the country are",
    "If a train leaves at nine and takes four hours, it arrives",
    "Dear neighbours, next Saturday our street will",
    "The difference between a virus and a bacterium is",
    "def mean(values):",
    "import os\n\nfor name in os.listdir",
    "class Queue:\n    def __init__(self):",
    "12 * 34 = 408\n7 * 8 = 56\n61 * 9 = 549\n23 * 5 =",
]


@dataclass(frozen=True)
class TextPrompt:
    """A prompt as text. `where` is for messages: file and line."""

    id: str
    text: str
    where: str


@dataclass(frozen=True)
class Reading:
    """The prompts that were read, and what was wrong with those that were not."""

    prompts: list[TextPrompt]
    skipped: list[str]


@dataclass(frozen=True)
class Line:
    """A line of a file, its end left out: `number` counts from 1, `start` is its first byte in the file."""

    number: int
    start: int
    raw: bytes
    file: str

    @property
    def where(self) -> str:
        return f"{self.file} line {self.number}"

    @property
    def text(self) -> str:
        return _decoded(self.raw, self.where, self.start).removesuffix("\r")


def read_prompts(task: PromptedConf) -> Reading:
    """The prompts of a run, from the one source that the config names.

    None for a comparison that asks for them on the terminal, and for lengths instead of texts.
    """
    if task.prompts is not None:
        found = [TextPrompt(str(i), text, f"task.prompts[{i}]") for i, text in enumerate(task.prompts)]
        return _checked(iter(found), task.on_bad_row)
    if task.prompt_file is not None:
        data = file_bytes("task.prompt_file", task.prompt_file)
        jsonl = has_objects(task.prompt_file)
        return _checked(_parse(data, task.prompt_file, jsonl, task.on_bad_row), task.on_bad_row)
    if isinstance(task, MeasureConf):
        texts = [] if task.lengths else SENTENCES
        return Reading([TextPrompt(str(i), text, "sentences") for i, text in enumerate(texts)], [])
    if isinstance(task, CertifyConf | AgreeConf):
        return Reading([TextPrompt(str(i), t, "sample") for i, t in enumerate(SHORT)], [])
    if sys.stdin is None or sys.stdin.isatty():
        if isinstance(task, CompareConf) and sys.stdin is not None:
            return Reading([], [])
        return Reading([TextPrompt(str(i), t, "sample") for i, t in enumerate(SAMPLE)], [])
    data = _stdin_bytes()
    jsonl = data.removeprefix(BOM).lstrip()[:1] == b"{"
    return _checked(_parse(data, "standard input", jsonl, task.on_bad_row), task.on_bad_row)


def has_objects(name: str) -> bool:
    """Whether a file of this name holds a JSON object a line; others hold a prompt a line."""
    return name.lower().endswith(JSON_ENDINGS)


def _stdin_bytes() -> bytes:
    try:
        data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise StorageError(f"cannot read standard input: {error.strerror}") from None
    if len(data) > MAX_INPUT_BYTES:
        raise DataError(
            "standard input is too large", found=f"more than {MAX_INPUT_BYTES} bytes",
            allowed=f"{MAX_INPUT_BYTES} bytes", fix="put the prompts into a file, and use task=batch",
        )  # fmt: skip
    return data


def file_bytes(key: str, name: str) -> bytes:
    """All of the file that the config names with this key."""
    path = home_expanded(name)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DataError(
                f"{key} is not a regular file", where=str(path), fix="give a text file or a .jsonl file",
            )  # fmt: skip
        if found.st_size > MAX_FILE_BYTES:
            raise DataError(
                f"{key} is too large", where=str(path), found=f"{found.st_size} bytes",
                allowed=f"{MAX_FILE_BYTES} bytes", fix="split it into several files",
            )  # fmt: skip
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{key} does not exist", where=str(path), fix="check the path") from None
    except OSError as error:
        raise StorageError(f"cannot read {key}: {error.strerror}", where=str(path)) from None


def lines_of(data: bytes, file: str, start: int = 0, number: int = 1) -> Iterator[Line]:
    """The lines that are not blank; `data` begins at byte `start` of the file, with line `number`."""
    if start == 0:
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise DataError(
                "the prompts are UTF-16", where=file, allowed="UTF-8",
                fix="convert them: iconv -f utf-16 -t utf-8",
            )  # fmt: skip
        if data.startswith(BOM):
            data, start = data[len(BOM) :], len(BOM)
    for count, raw in enumerate(data.split(b"\n")):
        if raw.strip():
            yield Line(number + count, start, raw, file)
        start += len(raw) + 1


def _parse(data: bytes, name: str, jsonl: bool, policy: OnBadRow) -> Iterator[TextPrompt | DataError]:
    for line in lines_of(data, name):
        try:
            yield _record(line) if jsonl else TextPrompt(f"line-{line.number}", line.text, line.where)
        except DataError as error:
            yield error


def _decoded(raw: bytes, where: str, start: int) -> str:
    if len(raw) > MAX_LINE_BYTES:
        raise DataError(
            "a line is too long", where=where, found=f"{len(raw)} bytes",
            allowed=f"{MAX_LINE_BYTES} bytes", fix="split it, or put prompts one a line",
        )  # fmt: skip
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            "the line is not UTF-8", where=f"{where}, byte {start + error.start} of the file",
            found=f"byte 0x{raw[error.start]:02x}", fix="convert the file to UTF-8",
        ) from None  # fmt: skip


def _record(line: Line) -> TextPrompt:
    record = parsed_object(line)
    if not isinstance(record.get("prompt"), str):
        raise DataError(
            "the line has no prompt", where=line.where, found=", ".join(record),
            allowed='an object with a string "prompt"', fix="add it",
        )  # fmt: skip
    return TextPrompt(
        name_of(record.get("id", f"line-{line.number}"), line.where), record["prompt"], line.where
    )


def parsed_object(line: Line) -> dict[str, Any]:
    """The line's JSON object, read strictly."""
    text = line.text
    try:
        record = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(
            "the line is not JSON", where=line.where, found=reason,
            fix='write one object a line: {"id": "a", "prompt": "..."}',
        ) from None  # fmt: skip
    if not isinstance(record, dict):
        raise DataError(
            "the line has no prompt", where=line.where, found=type(record).__name__,
            allowed='an object with a string "prompt"', fix="add it",
        )  # fmt: skip
    return record


def name_of(value: object, where: str) -> str:
    """An id as text."""
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise DataError(
            "the id is neither text nor a whole number", where=where, found=type(value).__name__,
            fix="write the id as a string",
        )  # fmt: skip
    return str(value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key stands twice")
    return record


def _checked(found: Iterator[TextPrompt | DataError] | Iterator[TextPrompt], policy: OnBadRow) -> Reading:
    """Applies what holds for every prompt, whatever its source, and the policy on bad ones."""
    reading, seen = Reading([], []), dict[str, str]()
    for item in found:
        problem = item if isinstance(item, DataError) else problem_of(item, seen)
        if problem is None and isinstance(item, TextPrompt):
            seen[item.id] = item.where
            reading.prompts.append(item)
        elif problem is not None and policy is OnBadRow.fail:
            raise problem
        else:
            log.warning("skipped: %s", problem)
            reading.skipped.append(str(problem))
    if not reading.prompts:
        if reading.skipped:
            raise DataError(
                "no usable prompt is left",
                found=f"{len(reading.skipped)} bad ones, first: {reading.skipped[0]}",
            )
        raise UsageError(
            "there is no prompt", where="task.prompts, task.prompt_file, standard input",
            fix='write task.prompts=\'["your prompt"]\' or pipe one prompt a line',
        )  # fmt: skip
    return reading


def is_usable(own_id: str) -> bool:
    """Whether an id can be written down and told from others."""
    return 0 < len(own_id) <= MAX_ID_LENGTH and own_id.isprintable()


def problem_of(prompt: TextPrompt, seen: dict[str, str]) -> DataError | None:
    """What is wrong with a prompt among those whose ids have been seen, and where."""
    if prompt.id in seen:
        return DataError(
            "an id stands twice", where=f"{seen[prompt.id]} and {prompt.where}",
            found=repr(prompt.id), fix="give every prompt an id of its own",
        )  # fmt: skip
    if not is_usable(prompt.id):
        return DataError(
            "an id is unusable", where=prompt.where, found=repr(prompt.id[:40]),
            allowed=f"1 to {MAX_ID_LENGTH} printable characters", fix="shorten or clean it",
        )  # fmt: skip
    if "\0" in prompt.text:
        return DataError(
            "the prompt holds a NUL character", where=prompt.where,
            found=f"at character {prompt.text.index(chr(0))}", fix="remove it",
        )  # fmt: skip
    lone = next((i for i, c in enumerate(prompt.text) if "\ud800" <= c <= "\udfff"), None)
    if lone is not None:
        return DataError(
            "the prompt holds half a surrogate pair", where=prompt.where,
            found=f"at character {lone}", fix="write the character whole",
        )  # fmt: skip
    return None
