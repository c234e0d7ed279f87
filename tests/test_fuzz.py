"""Random files of prompts and of requests: lines whose worth is known, and files with bytes of them changed.

    [FUZZ_FILES=300] [FUZZ_SEED=7] [FUZZ_ONLY=NUMBER] .venv/bin/python -m pytest tests/test_fuzz.py

Fails with each file that meets a fault: an exception, an answer other than documented. A seed and a number
always make the same file; what hangs ends the tests and shows where.

Where every line is known, the prompts that come out must be those of the good lines; where bytes were
changed, what holds for any file must hold: no line is lost, the policies agree, what is taken can be used.
"""

import faulthandler
import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from llama_ssp.batch.records import CHAT, COMPLETIONS, Refused, Request
from llama_ssp.config import BatchConf, GenerateConf, ModelConf, OnBadRow, RunConf
from llama_ssp.errors import RunError
from llama_ssp.text import prompts
from llama_ssp.text.prompts import read_prompts
from tests.refusals import BAD_LINES, LONGEST_LINE
from tests.test_records import records_of

FILES, SEED, ONLY = (
    int(os.environ.get(f"FUZZ_{n}", d)) for n, d in (("FILES", 300), ("SEED", 7), ("ONLY", -1))
)
LIMIT_S = 60.0
BAD = [line.encode() if isinstance(line, str) else line for line, *_ in BAD_LINES.values()]
TEXTS = ("a", "a  b", " \t\r\n", "\"'\\/{}[]#$", "éж漢🙂\u0301\u200d\u202e\ufeff\ufffd", "\x1b[2J\x7f")
IDS = ("twin", "é" * 256, -1, "../../x", "a b")
SETTINGS = ({}, {"temperature": 0, "seed": None}, {"max_tokens": 9, "stop": ["a"]}, {"logit_bias": {"5": -1}})


class Text(NamedTuple):
    """A file. `good` are the ids of the lines that make prompts, None where that is not known."""

    content: bytes
    lines: int  # that are not blank
    good: list[str] | None
    batch: bool


def made(random: Random) -> Text:
    batch, share = random.random() < 0.5, random.choice((0.05, 0.5))
    lines, good = list[bytes](), list[str]()
    for _ in range(random.choice((0, 1, 1, 2, 3, 5, 8))):
        if random.random() < 0.1:
            lines.append(random.choice((b"", b" ", b"\t", b"\r")))
        if random.random() < share:
            lines.append(random.choice(BAD))
            continue
        own_id = random.choice((f"line-{len(lines) + 1}", len(lines), random.choice(IDS)))
        named = {} if str(own_id).startswith("line") else {"id": own_id}
        record = named | (request(random, str(own_id)) if batch else {"prompt": random.choice(TEXTS)})
        lines.append(json.dumps(record, ensure_ascii=random.random() < 0.5).encode())
        good += [str(own_id)] * (str(own_id) not in good)
    content = random.choice((b"\n", b"\r\n")).join(lines) + random.choice((b"", b"\n"))
    if lines and random.random() < 0.05:
        content = b"\xef\xbb\xbf" + content
    if random.random() < 0.4:
        return Text(changed(random, content), 0, None, batch)
    return Text(content, sum(bool(line.strip()) for line in lines), good, batch)


def request(random: Random, own_id: str) -> dict[str, Any]:
    """A line of a batch job without its id, or as OpenAI's batches have it."""
    url, body = COMPLETIONS, {"prompt": random.choice(TEXTS), **random.choice(SETTINGS)}
    if random.random() < 0.3:
        url, body["messages"] = CHAT, [{"role": "user", "content": body.pop("prompt")}]
    wrapped = {"custom_id": own_id, "url": url, "body": body}
    return wrapped if random.random() < 0.3 else {"topic": [1, {"a": None}], **body}


def changed(random: Random, content: bytes) -> bytes:
    """Bytes of it changed, lost, doubled, put in."""
    result = bytearray(content)
    for _ in range(random.randrange(1, 8)):
        start = random.randrange(len(result) + 1)
        put_in = (b"", random.randbytes(1), result[start : start + 30], random.choice(BAD)[:200])
        result[start : start + random.choice((0, 0, 1, 9))] = random.choice(put_in)
    return bytes(result)


def read(text: Text, file: str, policy: OnBadRow) -> tuple[list[tuple[str, str]], list[str]] | RunError:
    """The id and the text of each prompt, and what was said of the other lines; or why all are refused."""
    try:
        if not text.batch:
            found = read_prompts(GenerateConf(name="generate", prompt_file=file, on_bad_row=policy))
            return [(prompt.id, prompt.text) for prompt in found.prompts], found.skipped
        task = BatchConf(name="batch", input=file, output=f"{file}.out", on_bad_row=policy)
        run = RunConf(model=ModelConf(name="m", vocab=512, context=1024), task=task)
        records = records_of(run, Path(f"{file}.work"))
    except RunError as error:
        return error
    taken = [(record.id, record.said) for record in records if isinstance(record, Request)]
    return taken, [record.error for record in records if isinstance(record, Refused)]


def problems(folder: Path, text: Text) -> list[str]:
    """What is wrong with the answers to this file, with bad lines skipped and refused."""
    file = folder / "a.jsonl"
    file.write_bytes(text.content)
    skipping, strict = read(text, str(file), OnBadRow.skip), read(text, str(file), OnBadRow.fail)
    errors = [answer for answer in (skipping, strict) if isinstance(answer, RunError)]
    whole = isinstance(skipping, RunError)
    taken, bad = ([], []) if whole else skipping
    said, ids = [*map(str, errors), *bad], [own_id for own_id, _ in taken]
    checks = {
        "another exit code": any(error.code not in (2, 3) for error in errors),
        "not one short line": any(len(line.splitlines()) != 1 or len(line) > LONGEST_LINE for line in said),
        "refused whole": whole and (len(errors) < 2 or bool(text.good)),
        "an id is used twice": len(set(ids)) < len(ids),
        "an id cannot be used": any(not (0 < len(own) <= 256 and own.isprintable()) for own in ids),
        "a text cannot be used": any(
            "\0" in prompt or prompt.encode(errors="ignore").decode() != prompt for _, prompt in taken
        ),
        "the policies tell other things": not whole and isinstance(strict, RunError) != bool(bad),
        "the policies use other words": not whole and len(bad) == 1 and bad[0] != str(strict),
        "other prompts": not whole and text.good not in (None, ids),
        "a line is lost": not whole and text.good is not None and len(ids) + len(bad) != text.lines,
    }
    return [f"{problem}: {skipping}, {strict}" for problem, is_so in checks.items() if is_so]


def faults(seed: int, numbers: range, folder: Path) -> Iterator[str]:
    """Tries the files with these numbers."""
    for number in numbers:
        text = made(Random(f"{seed}/files/{number}"))
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            wrong = problems(folder, text)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"[:300]]
        finally:
            faulthandler.cancel_dump_traceback_later()
        if wrong:
            yield f"{number} {'; '.join(wrong)} {text!r:.1000}"


def test_files_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading that lets everything through meets a fault in some file."""
    numbers = range(ONLY, ONLY + 1) if ONLY >= 0 else range(FILES)
    assert list(faults(SEED, numbers, tmp_path)) == []
    monkeypatch.setattr(prompts, "require_usable", lambda *_: None)
    monkeypatch.setattr("llama_ssp.batch.records.require_usable", lambda *_: None)
    assert list(faults(7, range(150), tmp_path))
