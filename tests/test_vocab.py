"""Vocabularies: what tokens stand for, which are the same, what is found and what is done about it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from llama_ssp.config import Bridging
from llama_ssp.errors import ModelError
from llama_ssp.models.checkpoint import SHIPPED_FOLDER
from llama_ssp.text.compatibility import LEAST_SHARED, Diagnosis, VocabularyMatch, diagnose, pair
from llama_ssp.text.tokenizer import HubTokens
from llama_ssp.text.translation import NONE, Intersection, match
from llama_ssp.text.vocabulary import (
    Notation,
    Vocabulary,
    end_ids_of,
    notation_guessed,
    read_vocabulary,
    surface,
)
from tests import checkpoints
from tests.renumbered import renumber
from tests.tongues import PAIRS, tongue


@cache
def shipped(name: str) -> Vocabulary:
    found = read_vocabulary(SHIPPED_FOLDER / name)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return shipped("demo")


@pytest.fixture(scope="module")
def fewer(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """600 of the 4,096 tokens, under other ids."""
    folder = tmp_path_factory.mktemp("fewer") / "x"
    found = read_vocabulary(renumber(SHIPPED_FOLDER / "demo_draft", folder, tokens=600))
    assert found is not None
    return found


def marked(folder: Path, begin: str = "") -> Vocabulary:
    """SentencePiece's notation: a mark for the space, numbered bytes for what has no token."""
    tokens = {"<unk>": 0, "<s>": 1, "\u2581": 2, "\u2581a": 3, "a": 4, "b": 5}
    numbered = {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    made = Tokenizer(models.BPE(vocab={**tokens, **numbered}, merges=[("\u2581", "a")], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if begin:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend(begin), normalizers.Replace(" ", "\u2581")]
        )
    made.add_special_tokens(["<unk>", "<s>"])
    checkpoints.write_tokenizer(folder, made)
    found = read_vocabulary(folder)
    assert found is not None
    return found


def test_surfaces_of_each_notation(tmp_path: Path, words: Vocabulary) -> None:
    assert surface("\u0120caf\u00c3\u00a9", Notation.letters) == " café".encode()
    assert surface("\u2581caf\u00e9", Notation.marks) == " café".encode()
    assert surface("<0x0A>", Notation.marks) == b"\n"
    assert surface("<0x0A>", Notation.plain) == b"<0x0A>"
    sp = marked(tmp_path)
    assert sp.notation is Notation.marks and words.notation is Notation.letters
    assert sp.surfaces[1] is None and sp.surfaces[3] == b" a"
    assert sp.by_surface[b"a"] == 4, "the token, and not the numbered byte"
    assert notation_guessed(["\u2581a"]) is Notation.marks
    assert notation_guessed(["\u0120a"]) is Notation.letters
    assert notation_guessed(["a"]) is Notation.plain


@settings(derandomize=True, deadline=None, database=None)
@given(st.text("aé日🙂 \n\u0301z~<s>", max_size=20))
def test_surfaces_of_a_text_add_up_to_it(text: str) -> None:
    known = shipped("demo")
    assert known.text_of(known.encode(text)) == text.encode()
    assert known.text_of(known.cut(text.encode())) == text.encode()


def test_bytes_that_are_no_text_are_encoded_however_many(words: Vocabulary) -> None:
    text = b"a\xffb" * 2000 + "é".encode()[:1]
    assert words.text_of(words.encoded(text)) == text


def test_no_space_is_put_into_a_text_nor_taken_from_it(tmp_path: Path, words: Vocabulary) -> None:
    """SentencePiece puts one before every text, and before each part that is encoded alone."""
    sp = marked(tmp_path, "\u2581")
    assert sp.begins_with_space and not words.begins_with_space
    assert sp.text_of(sp.encoded(b"ab")) == b" ab", "where a text begins, as the model knows it"
    for text in (b"b\xffab", b"ab\xe2", b"a\xff ab"):
        assert sp.text_of(sp.encoded(text)) == b" " + text, "behind half a character there is none"
    made = Intersection(words, sp, match(words, sp), 1.0)
    for text in ("ab", " ab", "b\na"):
        assert sp.text_of(made.later_ids(words.encode(text))) == text.encode()


def test_tokens_of_other_notations_match_by_bytes(tmp_path: Path, words: Vocabulary) -> None:
    sp = marked(tmp_path)
    found = match(words, sp)
    assert words.surfaces[found.target_of[3]] == b" a"
    assert found.target_of[4] == found.target_of[6 + ord("a")] != NONE, "two draft tokens for one"
    assert found.draft_of[found.target_of[4]] == 4, "the draft reads the plainer one"
    assert words.names[found.target_of[1]] == "<s>" and found.target_of[0] == NONE


@pytest.mark.parametrize("name", PAIRS)
def test_matches_do_not_hang_on_order(name: str) -> None:
    """get_vocab() comes in any order."""
    first = match(*PAIRS[name])
    for seed in range(5):
        target, draft = (replace(v, ids=shuffled(v.ids, seed)) for v in PAIRS[name])
        assert match(target, draft) == first


def shuffled(ids: Mapping[str, int], seed: int) -> dict[str, int]:
    items = sorted(ids.items())
    random.Random(seed).shuffle(items)
    return dict(items)


@pytest.mark.parametrize("name", PAIRS)
def test_matches_mean_the_same(name: str) -> None:
    target, draft = PAIRS[name]
    found = match(target, draft)
    for i, t in enumerate(found.target_of):
        if t != NONE and i not in draft.special:
            assert target.surfaces[t] == draft.surfaces[i]
    for t, i in enumerate(found.draft_of):
        assert i == NONE or found.target_of[i] == t


def test_several_ends_are_one_end() -> None:
    target, draft = PAIRS["ends of texts"]
    found = match(target, draft)
    assert [found.target_of[draft.ids[name]] for name in ("<end>", "<stop>")] == [target.ids["</s>"]] * 2


@pytest.mark.parametrize(
    ("widths", "verdict"),
    [
        ((300, 300), VocabularyMatch.same),
        ((32000, 32016), VocabularyMatch.padded),
        ((32064, 32000), VocabularyMatch.padded),
        ((151936, 152064), VocabularyMatch.padded),
        ((320, 320), VocabularyMatch.padded),
    ],
)
def test_padding_is_no_difference(tmp_path: Path, widths: tuple[int, int], verdict: VocabularyMatch) -> None:
    checkpoints.write_tokenizer(tmp_path, checkpoints.tokenizer())
    known = read_vocabulary(tmp_path)
    assert known is not None
    found = pair(known, known, widths, Bridging.auto)
    assert (found.verdict, found.bridge) == (verdict, None)


def test_added_tokens_on_top_are_padding_to_the_other(tmp_path: Path) -> None:
    made = checkpoints.tokenizer()
    checkpoints.write_tokenizer(tmp_path / "base", made)
    made.add_special_tokens(["<pad>"])
    checkpoints.write_tokenizer(tmp_path / "chat", made)
    base, chat = read_vocabulary(tmp_path / "base"), read_vocabulary(tmp_path / "chat")
    assert base is not None and chat is not None
    for target, draft in ((base, chat), (chat, base)):
        found = pair(target, draft, (target.size, draft.size), Bridging.auto)
        assert (found.verdict, found.bridge) == (VocabularyMatch.padded, None)
        assert "<pad>" in found.in_words()


def test_a_pair_of_other_tokens_drafts_those_of_both_and_says_so(
    words: Vocabulary, fewer: Vocabulary
) -> None:
    found = pair(words, fewer, (4096, 600), Bridging.auto)
    assert found.verdict is VocabularyMatch.different
    assert found.match.shared == 600 and isinstance(found.bridge, Intersection)
    assert 0.5 < found.ceiling < 1 < found.expansion
    assert "600 of the target's 4096 tokens" in found.in_words() and "tokens of both" in found.in_words()
    assert found.record()["bridge"] == "intersection" and found.record()["verdict"] == "different"
    with pytest.raises(ModelError, match=r"different tokenizers;.*speculation\.bridge"):
        pair(words, fewer, (4096, 600), Bridging.off)


def test_a_pair_that_shares_half_a_text_or_more_is_paired() -> None:
    """Letters are half of this vocabulary's tokens; what a text has of them decides."""
    assert 0 < LEAST_SHARED < 1
    target, draft = tongue("a", "b", "c"), tongue("a", "x")
    share = diagnose(target, draft, (3, 2)).ceiling
    assert share < LEAST_SHARED
    with pytest.raises(ModelError, match=rf"share too little;.*has {share:.0%} of a sample"):
        pair(target, draft, (3, 2), Bridging.auto)
    assert isinstance(pair(target, draft, (3, 2), Bridging.intersection).bridge, Intersection)


def permuted() -> tuple[Vocabulary, Vocabulary]:
    return tongue("a", "b", "ab", "ba"), tongue("b", "a", "ab", "ba")


def test_as_many_tokens_that_are_others_are_refused_with_examples() -> None:
    with pytest.raises(ModelError, match=r"of the same size; .*'a': 0 and 1, 'b': 1 and 0") as refused:
        pair(*permuted(), (4, 4), Bridging.auto)
    assert refused.value.code == 4 and "\n" not in str(refused.value)
    assert isinstance(pair(*permuted(), (4, 4), Bridging.intersection).bridge, Intersection)


def test_as_many_logits_with_other_tokens_are_refused_with_examples() -> None:
    target, draft = tongue("a", "b", "c"), tongue("x", "y", "z", "a")
    with pytest.raises(ModelError, match="of the same size; found 3 and 4 tokens, 6 differ") as refused:
        pair(target, draft, (64, 64), Bridging.auto)
    assert "'a': 0 and 3" in str(refused.value)


def test_habits_are_noted() -> None:
    target, draft = tongue("<s>", "a", special=("<s>",), start=("<s>",)), tongue("<s>", "a", special=("<s>",))
    notes = diagnose(target, replace(draft, template="x", normaliser="y"), (2, 2)).notes
    assert [note.split()[0] for note in notes] == ["other", "texts", "other"]


def bridge_of(found: Diagnosis) -> Intersection:
    assert found.bridge is not None
    return found.bridge


TEXTS = ["def hello(name):\n    return name", "naïve café", "  7 * 8 = 56", "日本 🙂"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_draft_reads_the_same_text(text: str, words: Vocabulary, fewer: Vocabulary) -> None:
    for target, draft in ((words, fewer), (fewer, words)):
        made = bridge_of(pair(target, draft, (target.size, draft.size), Bridging.auto))
        ids = target.encode(text)
        assert made.prompt_ids([*target.start, *ids]) == [*draft.start, *draft.encode(text)]
        assert draft.text_of(made.later_ids(ids)) == text.encode()


def test_long_texts_are_translated_in_parts(words: Vocabulary, fewer: Vocabulary) -> None:
    """Where a part ends hangs on the text alone, and the parts add up to it."""
    text = "def mean(values):\n    return sum(values) / len(values)\n\n" * 8
    ids = words.encode(text)
    made = bridge_of(pair(words, fewer, (4096, 600), Bridging.auto))
    ends, parts = [0], list[int]()
    while (at := made.split_after(ids, ends[-1])) is not None:
        assert made.split_after(ids[: at + 1], ends[-1]) == at, "what comes later changes nothing"
        parts += made.later_ids(ids[ends[-1] : at])
        ends.append(at)
    assert len(ends) > 3
    assert parts + made.later_ids(ids[ends[-1] :]) == made.later_ids(ids)
    assert fewer.text_of(parts + made.later_ids(ids[ends[-1] :])).decode() == text


def test_the_file_and_the_library_say_the_same() -> None:
    """task=plan reads tokenizer.json itself; a run asks transformers."""
    for name in ("demo", "demo_draft"):
        folder = SHIPPED_FOLDER / name
        light, loaded = shipped(name), HubTokens(folder, end_ids_of(folder)).vocabulary()
        words = diagnose(light, loaded, (light.size, loaded.size)).in_words()
        assert words == f"vocabularies: same, {light.size} tokens"
        assert (light.special, light.start, light.ends) == (loaded.special, loaded.start, loaded.ends)


def test_folders_without_a_readable_tokenizer_file_are_none(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    assert read_vocabulary(tmp_path) is None
