"""Prompts from the config, a file, or standard input. Errors name the line. No torch.

Text has one prompt a line; blank lines are skipped. JSONL has an object a line with `prompt` and an optional
`id`, which names the prompt's random stream and its result.
"""

import io
import json
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, Protocol, TypeVar

from llama_ssp.config import OnBadRow, PromptedConf, home_expanded
from llama_ssp.errors import DataError, StorageError, UsageError, shortened

log = logging.getLogger(__name__)
Item = TypeVar("Item")

MAX_LINE_BYTES = 16 * 2**20
MAX_UNENDED_BYTES = 2 * MAX_LINE_BYTES  # a line that goes on beyond this is not even read to its end
BLOCK_BYTES = 2**22  # of a file that is read at once
HEAD_BYTES = 4096  # of a file, which show whether it has objects
MAX_INPUT_BYTES = 2**28  # of standard input, which is read whole
MAX_FILE_BYTES = 2**30
JSON_ENDINGS = (".jsonl", ".json", ".ndjson", ".jl")  # of files with an object a line, in upper or lower case
MAX_ID_LENGTH = 256
STDIN = "-"  # as the name of a prompt file
CORRECT_PROMPTS = "correct them; the log names each"
BOM = b"\xef\xbb\xbf"  # some editors put it before UTF-8
# Published question files: the keys of a line's object tell which one it is.
FORMATS = "Spec-Bench or MT-bench (category, turns), HumanEval (task_id, prompt) or GSM8K (question, answer)"
SHORT = [  # for tasks that compare models; the shipped pair was trained on such text
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
# The default prompts of task=measure: prose, facts, code and sums, a sentence each.
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
    """A prompt as text. `where` is for messages: file and line.

    A suite's question has a category, and `later` turns, each of which follows an answer.
    """

    id: str
    text: str
    where: str
    category: str = ""
    later: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """The prompts that were read, and the problems of those that were skipped."""

    prompts: list[TextPrompt]
    skipped: list[str]


class Line(NamedTuple):
    """A line of a file, without its end: `number` counts from 1, `start` is its first byte in the file."""

    number: int
    start: int
    raw: bytes
    file: str

    @property
    def where(self) -> str:
        return f"{self.file} line {self.number}"

    @property
    def text(self) -> str:
        """Raises DataError for what is too long, or not UTF-8."""
        if len(self.raw) > MAX_LINE_BYTES:
            raise DataError(
                "a line is too long",
                where=self.where,
                found=f"{len(self.raw)} bytes",
                allowed=f"{MAX_LINE_BYTES} bytes",
                fix="split it, or put prompts one a line",
            )
        try:
            return self.raw.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DataError(
                "the line is not UTF-8",
                where=f"{self.where}, byte {self.start + error.start} of the file",
                found=f"byte 0x{self.raw[error.start]:02x}",
                fix="convert the file to UTF-8",
            ) from None


def read_prompts(task: PromptedConf) -> Reading:
    """Returns the prompts of a run, from the one source that the config names.

    There are none where a comparison asks on the terminal, or where a measurement has lengths instead.
    """
    policy = task.on_bad_row
    if task.prompts is not None:
        prompts = [TextPrompt(str(i), text, f"task.prompts[{i}]") for i, text in enumerate(task.prompts)]
        return checked(prompts, lambda prompt: prompt, policy)
    if task.prompt_file == STDIN and sys.stdin is not None:
        return _from_stdin(policy)
    if task.prompt_file is not None:
        with opened("task.prompt_file", task.prompt_file) as file:
            read = _record if has_objects(task.prompt_file, file) else _text
            return checked(lines_of(file, task.prompt_file), read, policy)
    if task.suite is not None:
        with opened("task.suite", task.suite) as file:
            return checked(lines_of(file, task.suite), _question, policy)

    if task.usual_prompts == "sentences":
        return _samples([] if task.lengths else SENTENCES, "sentences")
    if task.usual_prompts == "short":
        return _samples(SHORT)
    if sys.stdin is None or sys.stdin.isatty():
        return _samples([] if task.asks_for_prompts and sys.stdin is not None else SAMPLE)
    return _from_stdin(policy)


def _from_stdin(policy: OnBadRow) -> Reading:
    """Returns the prompts of standard input: objects if the first line begins one, else a prompt a line."""
    name = "standard input"
    try:
        data = _pipe_bytes(sys.stdin.buffer, name)
    except OSError as error:
        raise StorageError(
            f"cannot read {name}: {error.strerror}", fix="put the prompts into a file: prompt_file=FILE"
        ) from None
    return checked(lines_of(data, name), _record if begins_object(data) else _text, policy)


def _samples(texts: list[str], where: str = "sample") -> Reading:
    return Reading([TextPrompt(str(i), text, where) for i, text in enumerate(texts)], [])


def has_objects(name: str, file: IO[bytes]) -> bool:
    """Whether a file has a JSON object a line, not a prompt a line: by its name, or a pipe's first byte."""
    if home_expanded(name).is_fifo():
        head = file.read(HEAD_BYTES)
        file.seek(0)
        return begins_object(head)
    return name.lower().endswith(JSON_ENDINGS)


def begins_object(data: bytes) -> bool:
    return data.removeprefix(BOM).lstrip()[:1] == b"{"


@contextmanager
def opened(key: str, name: str) -> Iterator[IO[bytes]]:
    """Opens the file that `key` names; reads a pipe whole. Raises DataError or StorageError."""
    path = home_expanded(name)
    with reading(key, path):
        status = path.stat()
        if stat.S_ISFIFO(status.st_mode):  # <(command)
            with open_pipe(path) as pipe:
                data = _pipe_bytes(pipe, key, path)
            yield io.BytesIO(data)
            return

        if not stat.S_ISREG(status.st_mode):
            raise DataError(
                f"{key} is not a regular file", where=path, fix="give a text file or a .jsonl file"
            )
        if status.st_size > MAX_FILE_BYTES:
            raise DataError(
                f"{key} is too large",
                where=path,
                found=f"{status.st_size} bytes",
                allowed=f"{MAX_FILE_BYTES} bytes",
                fix="split it into several files, or use task=batch",
            )
        with path.open("rb", buffering=0) as file:
            yield file


def open_pipe(path: Path) -> IO[bytes]:
    """Opens a named pipe without waiting for a process that writes into it: without one, nothing is read."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(handle, True)
    return open(handle, "rb")


@contextmanager
def reading(key: str, path: Path) -> Iterator[None]:
    """Raises DataError or StorageError where the file that `key` names cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{key} does not exist", where=path, fix="check the path") from None
    except OSError as error:
        raise StorageError(
            f"cannot read {key}: {error.strerror}", where=path, fix="check its permissions"
        ) from None


def _pipe_bytes(pipe: IO[bytes], what: str, path: object = "") -> bytes:
    """Returns all that comes through a pipe; nothing where no process writes into it. Raises DataError."""
    data = pipe.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        allowed = f"{MAX_INPUT_BYTES} bytes"
        raise DataError(
            f"{what} is too large",
            where=path,
            found=f"more than {allowed}",
            allowed=allowed,
            fix="put the prompts into a file, and use task=batch",
        )
    return data


class Readable(Protocol):
    """What gives at most so many bytes at a call, and none at its end."""

    def read(self, size: int, /) -> bytes | None: ...


def whole_lines(file: Readable, name: str) -> Iterator[bytes]:
    """Yields the lines of a file with their ends, and holds a block and a line of it at most.

    Raises DataError for a line that has no end within MAX_UNENDED_BYTES. One of more than MAX_LINE_BYTES that
    ends before is yielded: it is refused by itself, and the lines after it are read.
    """
    begun = b""
    number = 1
    while block := file.read(BLOCK_BYTES):
        *ended, begun = (begun + block).split(b"\n")
        for raw in ended:
            yield raw + b"\n"

        number += len(ended)
        if len(begun) > MAX_UNENDED_BYTES:
            raise DataError(
                "a line is too long, and does not end",
                where=f"{name} line {number}",
                found=f"more than {MAX_UNENDED_BYTES} bytes",
                allowed=f"{MAX_LINE_BYTES} bytes",
                fix="give a text file with a prompt a line, or a .jsonl file",
            )
    if begun:
        yield begun


def lines_of(source: bytes | Readable, name: str) -> Iterator[Line]:
    """Yields the lines of a file that are not blank, without their ends. Raises DataError for UTF-16."""
    start = 0
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    for number, raw in enumerate(whole_lines(file, name), start=1):
        if number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise DataError(
                "the prompts are UTF-16",
                where=name,
                allowed="UTF-8",
                fix="convert them: iconv -f utf-16 -t utf-8",
            )
        if number == 1 and raw.startswith(BOM):
            start = len(BOM)
            raw = raw.removeprefix(BOM)
        if raw and not raw.isspace():
            yield Line(number, start, raw.removesuffix(b"\n"), name)
        start += len(raw)


def _text(line: Line) -> TextPrompt:
    return TextPrompt(f"line-{line.number}", line.text, line.where)


def _question(line: Line) -> TextPrompt:
    """Returns a suite's question. Raises DataError for other formats."""
    record = parsed_object(line)
    where = line.where
    own_id = f"line-{line.number}"
    match record:
        case {"turns": [_, *_] as turns}:
            own_id = record.get("question_id", own_id)
            category = record.get("category", "all")
        case {"task_id": own_id, "prompt": prompt}:
            category = "humaneval"
            turns = [prompt]
        case {"question": question, "answer": _}:
            category = "gsm8k"
            turns = [question]
        case _:
            raise DataError(
                "the line is not a known suite's question",
                where=where,
                found=", ".join(record),
                allowed=FORMATS,
                fix="other prompts go into task.prompt_file",
            )

    if not all(isinstance(text, str) for text in [category, *turns]):
        raise DataError(
            "a question's turns or category are not text", where=where, fix="use the published file as it is"
        )
    return TextPrompt(name_of(own_id, where), turns[0], where, category, turns[1:])


def _record(line: Line) -> TextPrompt:
    record = parsed_object(line)
    if not isinstance(record.get("prompt"), str):
        raise _no_prompt(line, ", ".join(record))
    own_id = name_of(record.get("id", f"line-{line.number}"), line.where)
    return TextPrompt(own_id, record["prompt"], line.where)


def parsed_object(line: Line) -> dict[str, Any]:
    """Returns the line's JSON object, read strictly. Raises DataError."""
    text = line.text
    try:
        record = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            "the line is not JSON",
            where=line.where,
            found="nested too deeply" if isinstance(error, RecursionError) else str(error),
            fix='write one object a line: {"id": "a", "prompt": "..."}',
        ) from None
    if not isinstance(record, dict):
        raise _no_prompt(line, type(record).__name__)
    return record


def _no_prompt(line: Line, found: str) -> DataError:
    allowed = 'an object with a string "prompt"'
    return DataError("the line has no prompt", where=line.where, found=found, allowed=allowed, fix="add it")


def name_of(value: object, where: str) -> str:
    """Returns an id as text. Raises DataError."""
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise DataError(
            "the id is neither text nor a whole number",
            where=where,
            found=type(value).__name__,
            fix="write the id as a string",
        )
    return str(value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key is given twice")
    return record


# Made once: to make one takes as long as to read a line. Python refuses a number of thousands of digits.
DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_no_duplicates)


def checked(items: Iterable[Item], made: Callable[[Item], TextPrompt], policy: OnBadRow) -> Reading:
    """Returns the prompts that are `made` of the items. Bad ones are raised or skipped."""
    reading = Reading([], [])
    seen = dict[str, str]()
    for item in items:
        try:
            prompt = made(item)
            require_usable(prompt, seen)
        except DataError as problem:
            if policy is OnBadRow.fail:
                raise
            log.warning("skipped: %s", problem)
            reading.skipped.append(str(problem))
        else:
            seen[prompt.id] = prompt.where
            reading.prompts.append(prompt)

    if reading.skipped and not reading.prompts:
        raise DataError(
            "no usable prompt is left",
            found=f"{len(reading.skipped)} bad ones, first: {reading.skipped[0]}",
            fix=CORRECT_PROMPTS,
        )
    if not reading.prompts:
        raise UsageError(
            "there is no prompt",
            where="prompt, prompt_file, standard input",
            fix="write prompt='your prompt' or pipe one prompt a line",
        )
    return reading


def is_usable(own_id: str) -> bool:
    """Returns whether an id is printable and not too long."""
    return 0 < len(own_id) <= MAX_ID_LENGTH and own_id.isprintable()


def require_usable(prompt: TextPrompt, seen: Mapping[str, str] = {}) -> None:
    """Raises DataError for a prompt that cannot be used; `seen` is where the ids before it are from."""
    where = prompt.where
    own_id = repr(shortened(prompt.id, 40))
    if prompt.id in seen:
        raise DataError(
            "an id is used twice",
            where=f"{seen[prompt.id]} and {where}",
            found=own_id,
            fix="give every prompt an id of its own",
        )
    if not is_usable(prompt.id):
        raise DataError(
            "an id is unusable",
            where=where,
            found=own_id,
            allowed=f"1 to {MAX_ID_LENGTH} printable characters",
            fix="shorten or clean it",
        )

    if "\0" in prompt.text:
        raise DataError(
            "the prompt holds a NUL character",
            where=where,
            found=f"at character {prompt.text.index(chr(0))}",
            fix="remove it",
        )
    lone = next((i for i, c in enumerate(prompt.text) if "\ud800" <= c <= "\udfff"), None)
    if lone is not None:
        raise DataError(
            "the prompt holds a byte that is not UTF-8, or half a surrogate pair",
            where=where,
            found=f"at character {lone}",
            fix="convert the text to UTF-8, or write the character whole",
        )
