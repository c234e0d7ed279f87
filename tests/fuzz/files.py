"""Files of prompts, JSONL and text: lines whose worth is known, and the same with bytes of it changed.

Where every line is known, the prompts that come out must be those of the good lines; where bytes were changed,
what holds for any file must hold: no line is lost, the policies agree, and what is taken can be used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from llama_ssp.batch.job import records_of
from llama_ssp.batch.requests import Refused, Request
from llama_ssp.config import BatchConf, GenerateConf, ModelConf, OnBadRow, RunConf, SamplingConfig
from llama_ssp.errors import RunError
from llama_ssp.text.prompts import Reading, file_bytes, read_prompts

T = TypeVar("T")
SKIP, FAIL = OnBadRow.skip, OnBadRow.fail
VOCAB = 512
LONGEST_LINE = 1500
LETTERS = (
    "abkz01 .,:;=+-~@#$%&*()[]{}<>\"'\\/|?!_\t\n\r\x00\x1b\x7f\u200d\u202e\ufeff\ufffdéж漢🙂\u0301\ud83d"
)
BAD_LINES: tuple[str | bytes, ...] = (
    "{", "[]", "null", "1", '"text"', "{}", '{"prompt": 1}', '{"prompt": null}', '{"prompt": ["a"]}', '{"prompts": "a"}',
    '{"prompt": "a", "id": null}', '{"prompt": "a", "id": 1.5}', '{"prompt": "a", "id": true}', '{"prompt": "a", "id": {}}',
    '{"prompt": "a", "prompt": "b"}', '{"prompt": "a", "x": NaN}', '{"prompt": "a", "x": -Infinity}', '{"prompt": "a"} {}',
    '{"prompt": "a\\u0000"}', '{"prompt": "\\ud800"}', '{"prompt": "a", "id": "\\udc00"}', '{"prompt": "a", "id": ""}',
    '{"prompt": "a", "id": "a\\nb"}', '{"prompt": "a", "id": "\\u202e"}', '{"prompt": "a", "id": "' + "x" * 257 + '"}',
    '{"prompt": "a", "id": 1' + "0" * 300 + "}", '{"prompt": "a", "x": ' + "9" * 5000 + "}", '{"prompt": ' + "[" * 5000, "'",
    '{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"prompt": "a",}', "{'prompt': 'a'}", '{"prompt": "a\tb"}',
    b'{"prompt": "\xff"}', b'{"prompt": "\xc3"}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\xf4\x90\x80\x80"}', b"a\xfe\xff", b"\x00",
    b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "a"}', b'{"prompt": "a\x00"}',
)  # fmt: skip
GOOD_SETTINGS: tuple[dict[str, object], ...] = (
    {}, {}, {"temperature": 0}, {"top_p": 0.5, "top_k": 3}, {"max_new_tokens": 1}, {"max_tokens": 9}, {"seed": 0}, {"stop": "x"},
    {"stop": ["a", "\n"]}, {"logit_bias": {"5": -1.5}}, {"bad_tokens": [1, 2]}, {"note": {"any": [None]}}, {"seed": None},
)  # fmt: skip
BAD_SETTINGS: tuple[dict[str, object], ...] = (
    {"temperature": -1}, {"temperature": "0"}, {"temperature": None}, {"temperature": True}, {"top_p": 0}, {"top_k": 1.5},
    {"max_new_tokens": 0}, {"max_new_tokens": 10**9}, {"max_new_tokens": "5"}, {"max_tokens": True}, {"seed": -1}, {"seed": 2**63},
    {"seed": 1.5}, {"stop": ""}, {"stop": [""]}, {"stop": [1]}, {"stop": {"a": 1}}, {"logit_bias": {"x": 1}}, {"logit_bias": {"5": "a"}},
    {"logit_bias": {"5": 1e30}}, {"logit_bias": [5]}, {"logit_bias": {str(VOCAB): 1}}, {"bad_tokens": 5}, {"bad_tokens": [-1]},
    {"bad_tokens": [VOCAB]}, {"bad_tokens": ["a"]}, {"temprature": 1}, {"min_new_tokens": 10**6}, {"messages": []}, {"top_p": [1]},
    {"temperature": {"a": 1}}, {"logit_bias": {"\u00b2": 1}}, {"logit_bias": {"1" + "0" * 30: 1}}, {"seed": "1"},
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A file. `good` are the ids of the lines that make prompts, None where that is not known."""

    name: str
    content: bytes
    lines: int
    good: tuple[str, ...] | None
    policy: OnBadRow
    batch: bool


def made(random: Random) -> Text:
    batch, policy = random.random() < 0.5, random.choice((FAIL, SKIP, SKIP))
    name = random.choice(("a.jsonl", "a.jsonl", "a.jsonl", "a.json", "a.txt"))
    bad = random.choice((0.05, 0.5))
    lines, good, seen, blank = list[bytes](), list[str](), set[str](), 0
    for number in range(1, random.choice((0, 1, 1, 2, 3, 5, 8)) + 1):
        if random.random() < 0.1:
            lines.append(random.choice((b"", b"  ", b"\t", b"\r")))
            blank += 1
            continue
        if name == "a.txt":
            text = noise(random, 20).replace("\n", "").replace("\r", "")
            line, named, fits = text.encode("utf-8", "surrogatepass"), f"line-{number}", _clean(text) == text
        elif random.random() < bad:
            line, named, fits = _bad(random, batch), "", False
        else:
            line, named, fits = _good(random, batch, number)
        if fits and named not in seen:
            good.append(named)
        seen |= {named} if named else set()  # a refused request's error is an answer with its id
        lines.append(line)
    end = random.choice((b"\n", b"\n", b"\r\n"))
    content = end.join(lines) + random.choice((b"", end))
    if random.random() < 0.05 and lines:
        content = b"\xef\xbb\xbf" + content
    sure = random.random() >= 0.4
    content = content if sure else _changed(random, content)
    return Text(name, content, len(lines) - blank, tuple(good) if sure else None, policy, batch)


def _good(random: Random, batch: bool, number: int) -> tuple[bytes, str, bool]:
    """A line, the name that its prompt gets, and whether it makes one."""
    record: dict[str, object] = {"prompt": _clean(noise(random, 12))}
    if random.random() < 0.5:
        record["topic"] = random.choice((1, None, [1, {"a": "b"}], "x" * 50))
    named = f"line-{number}"
    if random.random() < 0.6:
        value = random.choice((number, f"n{number}", "twin", "é" * 256, -number, "../../x", "a b"))
        record["id"], named = value, str(value)
    if batch:
        record |= random.choice(GOOD_SETTINGS)
        if random.random() < 0.3:
            return _enveloped(random, record, named)
        if random.random() < 0.2:
            record["messages"] = [{"role": "user", "content": record.pop("prompt")}]
    return json.dumps(record, ensure_ascii=random.random() < 0.5).encode(), named, True


def _enveloped(random: Random, record: dict[str, object], named: str) -> tuple[bytes, str, bool]:
    """As OpenAI's batches have it."""
    body = {key: value for key, value in record.items() if key not in ("id", "topic", "note")}
    url = "/v1/completions"
    if random.random() < 0.5:
        url, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": body.pop("prompt")}]
    whole = {"custom_id": named, "method": "POST", "url": url, "body": {**body, "n": 1, "model": "any"}}
    fits = random.random() < 0.8
    if not fits:
        change = random.choice(
            ({"url": "/v1/embeddings"}, {"method": "GET"}, {"body": None}, {"body": {**body, "n": 2}}, {"custom_id": 1.5},
             {"body": {**body, "tools": [{}]}}, {"body": {**body, "stream": True}}, {"url": None}, {"url": {"a": 1}}, {"body": []})
        )  # fmt: skip
        whole |= change
        named = named if "custom_id" not in change else ""
    return json.dumps(whole).encode(), named, fits


def _bad(random: Random, batch: bool) -> bytes:
    if batch and random.random() < 0.5:
        return json.dumps({"prompt": "a", "id": str(random.random()), **random.choice(BAD_SETTINGS)}).encode()
    line = random.choice(BAD_LINES)
    return line.encode() if isinstance(line, str) else line


def noise(random: Random, most: int) -> str:
    """An "a", and a few characters of many kinds."""
    return "a" + "".join(random.choice(LETTERS) for _ in range(random.randrange(most + 1)))


def _clean(text: str) -> str:
    return text.replace("\0", "").replace("\ud83d", "")


def _changed(random: Random, content: bytes) -> bytes:
    """Bytes of it changed, lost, doubled, put in."""
    changed = bytearray(content)
    for _ in range(random.randrange(1, 8)):
        at = random.randrange(len(changed) + 1)
        match random.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                del changed[at : at + random.randrange(10)]
            case 2:
                changed[at:at] = changed[at : at + 30]
            case 3:
                changed[at:at] = random.randbytes(random.randrange(6))
            case _:
                changed[at:at] = _bad(random, batch=True)[:200]
    return bytes(changed)


def problems(folder: Path, text: Text) -> list[str]:
    """What is wrong with the answer to this file."""
    file = folder / text.name
    file.write_bytes(text.content)
    return (_of_batch if text.batch else _of_prompts)(str(file), text)


def _of_prompts(name: str, text: Text) -> list[str]:
    def read(policy: OnBadRow) -> Reading | RunError:
        task = GenerateConf(name="generate", prompt_file=name, on_bad_row=policy)
        return _or_error(lambda: read_prompts(task))

    skipping, strict = read(SKIP), read(FAIL)
    wrong = _one_line(skipping) + _one_line(strict)
    if isinstance(skipping, RunError):
        if not isinstance(strict, RunError):
            wrong.append("refused whole when bad lines are skipped, read when they are not")
        if text.good:
            wrong.append(f"good lines, but refused: {skipping}")
        return wrong
    ids = [prompt.id for prompt in skipping.prompts]
    if (str(strict) if isinstance(strict, RunError) else None) != (skipping.skipped or [None])[0]:
        wrong.append(f"the two policies do not tell the same: {strict}; {skipping.skipped[:3]}")
    if text.good is not None and (tuple(ids), len(ids) + len(skipping.skipped)) != (text.good, text.lines):
        wrong.append(f"{text.lines} lines, prompts {ids}, not {text.good}, {len(skipping.skipped)} skipped")
    return wrong + _unusable([(prompt.id, prompt.text) for prompt in skipping.prompts])


def _of_batch(name: str, text: Text) -> list[str]:
    task = BatchConf(name="batch", input=name, output=name + ".out", on_bad_row=text.policy)
    run = RunConf(model=ModelConf(name="m", vocab=VOCAB, context=1024), task=task)
    records = _or_error(lambda: records_of(run, file_bytes("task.input", name)))
    if isinstance(records, RunError):
        expected = text.good is None or (text.policy is FAIL and len(text.good) < text.lines)
        return _one_line(records) + ([] if expected else [f"refused: {records}"])
    taken = [record for record in records if isinstance(record, Request)]
    bad = [record for record in records if isinstance(record, Refused)]
    wrong = [] if text.policy is SKIP or not bad else ["taken with bad lines"]
    ids = tuple(record.id for record in taken)
    if text.good is not None and (ids, len(records)) != (text.good, text.lines):
        errors = [refused.error for refused in bad]
        wrong.append(f"{text.lines} lines, {len(records)} records, {ids}, not {text.good}: {errors}")
    wrong += _unusable([(record.id, record.said) for record in taken])
    for record in taken:
        wrong += _unsound(record.sampling)
        if not 1 <= record.max_new_tokens < 1024 or any(not stop for stop in record.stop):
            wrong.append(f"settings {record.max_new_tokens} {record.stop}")
    return wrong + [f"an error of two lines: {r.error!r}" for r in bad if len(r.error.splitlines()) > 1]


def _unsound(sampling: SamplingConfig) -> list[str]:
    """Numbers that no accepted record may have; penalties and biases may be negative."""
    wrong = []
    for name, value in vars(sampling).items():
        numbers = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        least = -1e20 if name in ("frequency_penalty", "presence_penalty", "logit_bias") else 0
        wrong += [f"{name} is {number!r:.60}" for number in numbers if not least <= number < 1e20]
    return wrong


def _or_error(read: Callable[[], T]) -> T | RunError:
    try:
        return read()
    except RunError as error:
        return error


def _one_line(answer: object) -> list[str]:
    if not isinstance(answer, RunError):
        return []
    lines = str(answer).splitlines()
    wrong = [] if answer.code in (2, 3) else [f"exit code {answer.code}"]
    return wrong + (
        [f"not one line: {lines!r:.200}"] if len(lines) != 1 or len(lines[0]) > LONGEST_LINE else []
    )


def _unusable(prompts: list[tuple[str, str]]) -> list[str]:
    ids = [name for name, _ in prompts]
    wrong = ["an id is used twice"] if len(set(ids)) < len(ids) else []
    wrong += [f"id {name!r:.50}" for name in ids if not (0 < len(name) <= 256 and name.isprintable())]
    return wrong + [f"text {text!r:.50}" for _, text in prompts if any(_is_unusable(c) for c in text)]


def _is_unusable(character: str) -> bool:
    return character == "\0" or "\ud800" <= character <= "\udfff"
