"""Prompts: what is read, with which id, from which line; and which of them are refused."""

import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_ssp.config import GenerateConf, OnBadRow
from llama_ssp.errors import DataError, StorageError, UsageError
from llama_ssp.text.prompts import SAMPLE, Reading, _record, _text, checked, lines_of, read_prompts

exhaustive = settings(derandomize=True, deadline=None, database=None)


def reading(data: bytes, jsonl: bool = False, policy: OnBadRow = OnBadRow.fail) -> Reading:
    return checked(lines_of(data, "f"), _record if jsonl else _text, policy)


def found(data: bytes, jsonl: bool = False) -> list[tuple[str, str]]:
    return [(prompt.id, prompt.text) for prompt in reading(data, jsonl).prompts]


def test_the_config_s_prompts_are_numbered() -> None:
    prompts = read_prompts(GenerateConf(prompts=["a", "b"])).prompts
    rows = [("0", "a", "task.prompts[0]"), ("1", "b", "task.prompts[1]")]
    assert [(p.id, p.text, p.where) for p in prompts] == rows


def test_text_has_a_prompt_a_line_named_after_it() -> None:
    """Only a line feed ends a line."""
    expected = [("line-1", "one"), ("line-4", "two  "), ("line-5", "three")]
    assert found(b"one\n\n  \ntwo  \r\nthree") == expected
    text = "a\x0bb\x0cc\x85d\u2028e\rf"
    assert found(text.encode()) == [("line-1", text)]


def test_jsonl_has_its_own_ids_or_the_line_s() -> None:
    """A byte order mark is no text."""
    lines = [{"id": "x", "prompt": "a"}, {"prompt": "b"}, {"id": 7, "prompt": "c", "other": [1]}]
    data = b"\xef\xbb\xbf" + "\n".join(map(json.dumps, lines)).encode()
    assert found(b"\xef\xbb\xbfa") == [("line-1", "a")]
    assert found(data, jsonl=True) == [("x", "a"), ("line-2", "b"), ("7", "c")]


@pytest.mark.parametrize(
    "data",
    [b'{"prompt": "a"}', b'\n  {"prompt": "a"}', b'\xef\xbb\xbf{"prompt": "a"}'],
    ids=["plain", "behind an empty line", "behind a mark"],
)
def test_standard_input_shows_by_its_first_character_what_it_is(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert [p.text for p in read_prompts(GenerateConf()).prompts] == ["a"]


def test_a_terminal_gets_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert [p.text for p in read_prompts(GenerateConf()).prompts] == SAMPLE


def test_a_file_s_name_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leading tilde is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, text in (("a.txt", '{"prompt": "a"}'), ("a.jsonl", "a")):
        (tmp_path / name).write_text('{"prompt": "a"}')
        for path in (tmp_path / name, f"~/{name}"):
            (prompt,) = read_prompts(GenerateConf(prompt_file=str(path))).prompts
            assert prompt.text == text


def test_a_file_that_cannot_be_read_is_no_matter_of_data(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(StorageError, match="cannot read"):
        read_prompts(GenerateConf(prompt_file=str(tmp_path / "a")))


BAD_ROWS = [b'{"prompt": "a"}', b"{", b"\xff", b'{"prompt": "\\u0000"}', b'{"id": "line-1", "prompt": "b"}']


@pytest.fixture
def skipping() -> Reading:
    return reading(b"\n".join([*BAD_ROWS, b'{"prompt": "c"}']), jsonl=True, policy=OnBadRow.skip)


def test_skipping_keeps_the_good_rows(skipping: Reading) -> None:
    assert [p.text for p in skipping.prompts] == ["a", "c"]


def test_skipping_says_what_was_wrong(skipping: Reading) -> None:
    reasons = ["the line is not JSON", "the line is not UTF-8", "the prompt holds a NUL character"]
    assert [reason.split(";")[0] for reason in skipping.skipped] == [*reasons, "an id is used twice"]


def test_what_is_refused_whatever_the_policy() -> None:
    line = json.dumps({"id": "x" * 256, "prompt": "a"}).encode()
    with pytest.raises(DataError, match=r"used twice.*found 'x{40}\.\.\. \(256 characters\)'"):
        reading(line + b"\n" + line, jsonl=True)
    for data, error, said in (
        (b"\xff", DataError, "no usable prompt"), (b"\n", UsageError, "there is no prompt"),
        ("a\nb".encode("utf-16"), DataError, "UTF-16"),
    ):  # fmt: skip
        with pytest.raises(error, match=said):
            reading(data, policy=OnBadRow.skip)


printable = st.text(st.characters(exclude_categories=("C",)), min_size=1, max_size=8)
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)


@exhaustive
@given(st.dictionaries(printable, texts, min_size=1, max_size=5), st.booleans())
def test_jsonl_survives_the_round_trip(records: dict[str, str], ascii_only: bool) -> None:
    lines = (json.dumps({"id": i, "prompt": t}, ensure_ascii=ascii_only) for i, t in records.items())
    data = "\n".join(lines).encode()
    expected = {i: t for i, t in records.items() if i.isprintable()}
    try:
        assert dict(found(data, jsonl=True)) == records
    except DataError:
        assert expected != records
