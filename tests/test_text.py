"""Tokens to text: pieces that add up, characters that are whole, stop strings wherever they fall."""

import string
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from llama_ssp.errors import visible
from llama_ssp.text.detokenizer import INCOMPLETE, Detokenizer, Stop, TextSoFar
from tests import checkpoints

exhaustive = settings(derandomize=True, deadline=None, database=None)


@cache
def tokenizer() -> Any:
    return checkpoints.tokenizer()


def decode(ids: list[int]) -> str:
    text: str = tokenizer().decode(ids, skip_special_tokens=True)
    return text


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


@cache
def byte_fallback() -> Tokenizer:
    """Like Llama's: a few words, and bytes for every other character."""
    words = {"<unk>": 0, "\u2581a": 1, "b": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    made = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def letters(ids: list[int]) -> str:
    """A tokenizer whose tokens are letters, and from 100 on pairs of letters."""
    pairs = [a + b for a in "abc" for b in "abc"]
    return "".join(pairs[i - 100] if i >= 100 else string.ascii_lowercase[i] for i in ids)


def ids_of(text: str) -> list[int]:
    return [string.ascii_lowercase.index(c) for c in text]


def write(tokens: list[int], stops: Sequence[Stop], blocks: list[int]) -> tuple[str, str, int]:
    """Writes tokens in blocks as the loop does: the text, what was printed, tokens that were kept."""
    writing = TextSoFar(letters, (), stops)
    printed, kept = "", 0
    for size in [*blocks, len(tokens)]:
        block, tokens = tokens[:size], tokens[size:]
        cut = writing.kept(block)
        kept += len(block) if cut is None else cut
        printed += writing.printable(cut is not None)
        if cut is not None:
            break
    return writing.text, printed + writing.printable(True), kept


words = st.text("aé日🙂 \n\u0301z~\ufffd", max_size=12)


@exhaustive
@given(words, words)
def test_pieces_add_up(prompt: str, text: str) -> None:
    detokenizer = Detokenizer(decode, encode(prompt))
    pieces = [detokenizer.push(token) for token in encode(text)]
    assert "".join([*pieces, detokenizer.end()]) == text


@exhaustive
@given(words, words)
def test_pieces_are_whole(prompt: str, text: str) -> None:
    detokenizer = Detokenizer(decode, encode(prompt))
    pieces = [detokenizer.push(token) for token in encode(text)]
    assert INCOMPLETE in text or not any(INCOMPLETE in piece for piece in pieces)


@exhaustive
@given(st.lists(st.integers(0, 299), max_size=20))
def test_any_tokens_give_what_decoding_them_at_once_gives(tokens: list[int]) -> None:
    """With a broken character at the end, too: it is held back until the text ends."""
    detokenizer = Detokenizer(decode, [])
    assert "".join([*map(detokenizer.push, tokens), detokenizer.end()]) == decode(tokens)


@exhaustive
@given(st.text("aé日本語🙂", max_size=9), st.text("aé日本語🙂", min_size=1, max_size=9))
def test_bytes_for_rare_characters(prompt: str, text: str) -> None:
    """One broken byte makes a whole run of them unreadable, so none may be cut out of its character."""

    def tokens(written: str) -> list[int]:
        return [t for c in written for t in ([1] if c == "a" else [3 + byte for byte in c.encode()])]

    detokenizer = Detokenizer(byte_fallback().decode, [2, *tokens(prompt)])
    pieces = [detokenizer.push(token) for token in tokens(text)]
    assert "".join(pieces) == text.replace("a", " a")
    detokenizer.push(tokens("é")[0])
    assert detokenizer.end() == INCOMPLETE


def test_a_character_comes_when_its_last_byte_does() -> None:
    """Also one that was begun in the prompt."""
    *begun, last = tokens = encode("🙂")
    assert len(tokens) == 4
    assert [*map(Detokenizer(decode, []).push, tokens)] == ["", "", "", "🙂"]
    detokenizer = Detokenizer(decode, [*encode("caf"), *begun])
    assert [detokenizer.push(token) for token in (last, *encode("~"))] == ["🙂", "~"]


def test_what_is_whole_before_half_a_character_is_written_at_once() -> None:
    """A length limit may end the text there, and a stop string may be in it."""
    pieces = {0: b"x", 1: " so \u201c".encode()[:-2], 2: "\u201c".encode()[1:2], 3: "\u201c".encode()[2:]}

    def of_bytes(ids: list[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    for tokens, texts in (([0, 1, 2, 3, 0], ["x", " so ", "", "\u201c", "x"]), ([1, 0], [" so ", "\ufffdx"])):
        detokenizer = Detokenizer(of_bytes, [0, 1, 2, 3])
        assert [detokenizer.push(token) for token in tokens] == texts
    writing = TextSoFar(of_bytes, (), ["so"])
    assert writing.kept([0, 1, 2, 3]) == 2 and writing.text == "x "


@pytest.mark.parametrize(
    ("text", "stops", "written", "kept"),
    [
        ("xa\ufffd", [], "xa\ufffd", None), ("xa\ufffd", ["a\ufffd"], "x", 5),
        ("xa\ufffdbb", ["a\ufffd"], "x", 6), ("a\ufffd\ufffd", ["\ufffd\ufffd"], "a", 7),
        ("xaé", ["a\ufffd"], "xaé", None),
    ],
    ids=["no stop", "half a character", "before more", "twice half", "a whole character"],
)  # fmt: skip
@pytest.mark.parametrize("at_once", [False, True])
def test_a_replacement_character_may_be_text(
    text: str, stops: list[str], written: str, kept: int | None, at_once: bool
) -> None:
    """A stop string ends in it once the next token, or the end, shows that it is no half character."""
    tokens, writing, printed, found = encode(text), TextSoFar(decode, (), stops), "", None
    step = len(tokens) if at_once else 1
    for start in range(0, len(tokens), step):
        if found is None:
            count = writing.kept(tokens[start : start + step], start + step >= len(tokens))
            found = None if count is None else start + count
            printed += writing.printable(found is not None)
    assert (writing.text, printed + writing.printable(True), found) == (written, written, kept)


def test_special_tokens_are_left_out() -> None:
    start, end = (tokenizer().token_to_id(name) for name in checkpoints.SPECIAL)
    detokenizer = Detokenizer(decode, [start])
    assert "".join(map(detokenizer.push, [*encode("a"), end, *encode("b"), end])) == "ab"


def test_a_long_text_is_decoded_in_short_pieces() -> None:
    """A token costs the same whatever stands before it."""
    seen, text = list[int](), "the quick brown fox " * 40

    def counted(ids: list[int]) -> str:
        seen.append(len(ids))
        return decode(ids)

    detokenizer = Detokenizer(counted, encode(text))
    assert "".join(map(detokenizer.push, encode(text))) == text
    assert max(seen) < 20


def test_a_stop_may_be_a_token_without_text() -> None:
    assert write([*ids_of("xa"), 25, *ids_of("b")], ["ab", 25], [4]) == ("xa", "xa", 3)


def test_a_possible_beginning_is_held_back_then_released() -> None:
    writing, printed = TextSoFar(letters, (), ["abc"]), []
    for letter in "xabyab":
        writing.kept(ids_of(letter))
        printed.append(writing.printable(False))
    assert printed == ["x", "", "", "aby", "", ""]
    assert [writing.printable(True) for _ in range(2)] == ["ab", ""]


@exhaustive
@given(
    st.lists(st.sampled_from([0, 1, 2, *range(100, 109)]), min_size=1, max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), max_size=6),
)
def test_stop_strings_against_the_plain_definition(
    tokens: list[int], stops: list[str], blocks: list[int]
) -> None:
    """The text ends before the earliest stop string of the first token that completes one."""
    ends = [n for n in range(1, len(tokens) + 1) if any(s in letters(tokens[:n]) for s in stops)]
    whole = letters(tokens[: ends[0]] if ends else tokens)
    text = whole[: min(whole.find(s) for s in stops if s in whole)] if ends else whole
    assert write(tokens, stops, blocks) == (text, text, ends[0] if ends else len(tokens))


def test_what_would_steer_a_terminal_is_written_out():
    assert visible("a\x1b[31m\x07\r\x00\x7f\x9b") == r"a\x1b[31m\x07\r\x00\x7f\x9b"
    assert visible("left \u202e right\u2028\ufeff") == r"left \u202e right\u2028\ufeff"
    assert visible("\ud800") == r"\ud800"
    kept = "return 日本 é 👩\u200d👧 \N{VARIATION SELECTOR-16}"
    marks = (
        "\u200f\u200e\u061c\u200b\u2060\u00ad"  # of direction and for breaks, as Hebrew and Thai have them
    )
    assert visible(f"def f():\n\t{kept}{marks}") == f"def f():\n\t{kept}{marks}"
