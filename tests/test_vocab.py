"""Vocabularies: what tokens stand for, which are the same, what is found and what is done about it."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from llama_ssp.config import Bridging
from llama_ssp.errors import ModelError
from llama_ssp.models.checkpoint import SHIPPED_FOLDER
from llama_ssp.text.compatibility import LEAST_SHARED, VocabularyMatch, diagnose, pair
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
from tests.checkpoints import renumber
from tests.tongues import PAIRS, tongue


@cache
def read(folder: Path) -> Vocabulary:
    vocabulary = read_vocabulary(folder)
    assert vocabulary is not None
    return vocabulary


WORDS = read(SHIPPED_FOLDER / "demo")


@pytest.fixture(scope="module")
def fewer(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """600 of the 4,096 tokens, under other ids."""
    folder = tmp_path_factory.mktemp("fewer") / "x"
    return read(renumber(SHIPPED_FOLDER / "demo_draft", folder, tokens=600))


def marked(folder: Path, begin: str = "") -> Vocabulary:
    """SentencePiece's notation: a mark for the space, numbered bytes for what has no token."""
    tokens = {"<unk>": 0, "<s>": 1, "\u2581": 2, "\u2581a": 3, "a": 4, "b": 5}
    numbered = {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    made = Tokenizer(models.BPE(vocab={**tokens, **numbered}, merges=[("\u2581", "a")], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if begin:
        parts = [normalizers.Prepend(begin), normalizers.Replace(" ", "\u2581")]
        made.normalizer = normalizers.Sequence(parts)
    made.add_special_tokens(["<unk>", "<s>"])
    checkpoints.write_tokenizer(folder, made)
    return read(folder)


def test_surfaces_of_each_notation(tmp_path: Path) -> None:
    for token, notation, expected in (
        ("\u0120caf\u00c3\u00a9", Notation.letters, " café".encode()),
        ("\u2581caf\u00e9", Notation.marks, " café".encode()),
        ("<0x0A>", Notation.marks, b"\n"),
        ("<0x0A>", Notation.plain, b"<0x0A>"),
    ):
        assert surface(token, notation) == expected
    sp = marked(tmp_path)
    assert sp.notation is Notation.marks and WORDS.notation is Notation.letters
    assert sp.surfaces[1] is None and sp.surfaces[3] == b" a"
    assert sp.by_surface[b"a"] == 4, "the token, and not the numbered byte"
    guessed = [notation_guessed([token]) for token in ("\u2581a", "\u0120a", "a")]
    assert guessed == [Notation.marks, Notation.letters, Notation.plain]


@settings(derandomize=True, deadline=None, database=None)
@given(st.text("aé日🙂 \n\u0301z~<s>", max_size=20))
def test_surfaces_of_a_text_add_up_to_it(text: str) -> None:
    assert WORDS.text_of(WORDS.encode(text)) == text.encode()
    assert WORDS.text_of(WORDS.cut(text.encode())) == text.encode()


def test_no_space_is_put_into_a_text_nor_taken_from_it(tmp_path: Path) -> None:
    """SentencePiece puts one before every text, and before each part that is encoded alone."""
    broken = b"a\xffb" * 2000 + "é".encode()[:1]  # bytes that are no text are encoded, however many
    assert WORDS.text_of(WORDS.encoded(broken)) == broken
    sp = marked(tmp_path, "\u2581")
    assert sp.begins_with_space and not WORDS.begins_with_space
    assert sp.text_of(sp.encoded(b"ab")) == b" ab", "where a text begins, as the model knows it"
    for text in (b"b\xffab", b"ab\xe2", b"a\xff ab"):
        assert sp.text_of(sp.encoded(text)) == b" " + text, "behind half a character there is none"
    bridge = Intersection(WORDS, sp, match(WORDS, sp), 1.0)
    for text in ("ab", " ab", "b\na"):
        assert sp.text_of(bridge.later_ids(WORDS.encode(text))) == text.encode()


def test_tokens_of_other_notations_match_by_bytes(tmp_path: Path) -> None:
    result = match(WORDS, marked(tmp_path))
    assert WORDS.surfaces[result.target_of[3]] == b" a"
    assert result.target_of[4] == result.target_of[6 + ord("a")] != NONE, "two draft tokens for one"
    assert result.draft_of[result.target_of[4]] == 4, "the draft reads the plainer one"
    assert WORDS.names[result.target_of[1]] == "<s>" and result.target_of[0] == NONE


def test_a_namesake_that_stands_for_other_bytes_is_no_counterpart() -> None:
    """<0x61> is the byte "a" in one notation, and six characters in another."""
    target, draft = tongue("<0x61>", "a", "b"), tongue("b", "<0x61>", marks=True)
    result = match(target, draft)
    assert result.target_of == (target.ids["b"], target.ids["a"])
    assert result.draft_of == (NONE, draft.ids["<0x61>"], draft.ids["b"])


def shuffled(ids: Mapping[str, int], seed: int) -> dict[str, int]:
    items = sorted(ids.items())
    random.Random(seed).shuffle(items)
    return dict(items)


@pytest.mark.parametrize("name", PAIRS)
def test_matches_mean_the_same(name: str) -> None:
    target, draft = PAIRS[name]
    result = match(target, draft)
    for i, t in enumerate(result.target_of):
        assert t == NONE or i in draft.special or target.surfaces[t] == draft.surfaces[i], i


@pytest.mark.parametrize("name", PAIRS)
def test_matches_are_found_from_both_sides(name: str) -> None:
    result = match(*PAIRS[name])
    for t, i in enumerate(result.draft_of):
        assert i == NONE or result.target_of[i] == t


@pytest.mark.parametrize("name", PAIRS)
def test_matches_do_not_hang_on_order(name: str) -> None:
    """get_vocab() comes in any order."""
    result = match(*PAIRS[name])
    for seed in range(5):
        assert match(*(replace(v, ids=shuffled(v.ids, seed)) for v in PAIRS[name])) == result, seed


def test_several_ends_are_one() -> None:
    target, draft = PAIRS["ends of texts"]
    result = match(target, draft)
    assert [result.target_of[draft.ids[end]] for end in ("<end>", "<stop>")] == [target.ids["</s>"]] * 2


WIDTHS = [(300, 300), (32000, 32016), (32064, 32000), (151936, 152064), (320, 320)]


def test_padding_is_no_difference(tmp_path: Path) -> None:
    """Nor are added tokens on top."""
    tokenizer = checkpoints.tokenizer()
    checkpoints.write_tokenizer(tmp_path / "base", tokenizer)
    tokenizer.add_special_tokens(["<pad>"])
    checkpoints.write_tokenizer(tmp_path / "chat", tokenizer)
    base, chat = read(tmp_path / "base"), read(tmp_path / "chat")
    for widths in WIDTHS:
        result = pair(base, base, widths, Bridging.auto)
        expected = VocabularyMatch.same if widths == (300, 300) else VocabularyMatch.padded
        assert (result.verdict, result.bridge) == (expected, None), widths
    for target, draft in ((base, chat), (chat, base)):
        result = pair(target, draft, (target.size, draft.size), Bridging.auto)
        assert (result.verdict, result.bridge) == (VocabularyMatch.padded, None), result.in_words()
        assert "<pad>" in result.in_words()


def test_a_pair_of_other_tokens_drafts_those_of_both(fewer: Vocabulary) -> None:
    result = pair(WORDS, fewer, (4096, 600), Bridging.auto)
    assert result.verdict is VocabularyMatch.different
    assert result.match.shared == 600 and isinstance(result.bridge, Intersection)
    assert 0.5 < result.ceiling < 1 < result.expansion


def test_a_pair_of_other_tokens_says_so(fewer: Vocabulary) -> None:
    result = pair(WORDS, fewer, (4096, 600), Bridging.auto)
    assert "600 of the target's 4096 tokens" in result.in_words() and "tokens of both" in result.in_words()
    assert result.record()["bridge"] == "intersection" and result.record()["verdict"] == "different"


def test_a_pair_of_other_tokens_is_refused_without_a_bridge(fewer: Vocabulary) -> None:
    with pytest.raises(ModelError, match=r"different tokenizers;.*speculation\.bridge"):
        pair(WORDS, fewer, (4096, 600), Bridging.off)


# Target and draft, their logits, and why they are no pair: examples are named.
REFUSED = [
    (tongue("a", "b", "c"), tongue("a", "x"), (3, 2), r"share too little;.*has \d+% of a sample"),
    (
        tongue("a", "b", "ab", "ba"), tongue("b", "a", "ab", "ba"), (4, 4),
        r"of the same size; .*'a': 0 and 1, 'b': 1 and 0",
    ),
    (
        tongue("a", "b", "c"), tongue("x", "y", "z", "a"), (64, 64),
        "of the same size; found 3 and 4 tokens, 6 differ.*'a': 0 and 3",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("target", "draft", "widths", "words"), REFUSED)
def test_pairs_that_are_refused_unless_the_user_wants_what_they_share(
    target: Vocabulary, draft: Vocabulary, widths: tuple[int, int], words: str
) -> None:
    """Letters are half of a vocabulary's tokens; what a text has of them decides."""
    with pytest.raises(ModelError, match=words) as refused:
        pair(target, draft, widths, Bridging.auto)
    assert refused.value.code == 4 and "\n" not in str(refused.value)
    assert diagnose(target, draft, widths).ceiling < LEAST_SHARED < 1 or widths[0] == widths[1]
    assert isinstance(pair(target, draft, widths, Bridging.intersection).bridge, Intersection)


@pytest.mark.parametrize(
    ("widths", "beyond"),
    [((4, 4), ()), ((4, 3), ("d",)), ((3, 4), ("d",)), ((2, 4), ("c", "d")), ((4, 9), ())],
    ids=["none", "the last of the target", "the last of the draft", "two of the draft", "padding alone"],
)  # fmt: skip
def test_tokens_that_one_model_alone_has_logits_for(widths: tuple[int, int], beyond: tuple[str, ...]) -> None:
    """With the same tokens in both tokenizers. One such token is enough to refuse the pair, by name."""
    words = tongue("a", "b", "c", "d")
    assert diagnose(words, words, widths).beyond == beyond
    if beyond:
        with pytest.raises(ModelError, match=rf"{len(beyond)} tokens only in the larger \('{beyond[0]}'"):
            pair(words, words, widths, Bridging.auto)


def test_habits_are_noted() -> None:
    target, draft = tongue("<s>", "a", special=("<s>",), start=("<s>",)), tongue("<s>", "a", special=("<s>",))
    notes = diagnose(target, replace(draft, template="x", normaliser="y"), (2, 2)).notes
    assert [note.split()[0] for note in notes] == ["other", "texts", "other"]


def bridge_of(target: Vocabulary, draft: Vocabulary) -> Intersection:
    bridge = pair(target, draft, (target.size, draft.size), Bridging.auto).bridge
    assert bridge is not None
    return bridge


@pytest.mark.parametrize(
    "text",
    ["def hello(name):\n    return name", "naïve café", "  7 * 8 = 56", "日本 🙂"],
    ids=["code", "accents", "a sum", "Japanese"],
)
def test_the_draft_reads_the_same_text(text: str, fewer: Vocabulary) -> None:
    for target, draft in ((WORDS, fewer), (fewer, WORDS)):
        bridge, ids = bridge_of(target, draft), target.encode(text)
        assert bridge.prompt_ids([*target.start, *ids]) == [*draft.start, *draft.encode(text)]
        assert draft.text_of(bridge.later_ids(ids)) == text.encode()


def test_only_the_space_that_the_tokenizer_put_before_a_chat_is_taken_off(tmp_path: Path) -> None:
    """SentencePiece puts one before the first text alone: spaces after other special tokens were written."""
    sp = replace(marked(tmp_path, "\u2581"), start=(1,))
    begin, text = sp.ids["<s>"], sp.encode("ab")
    assert begin == 1 and sp.text_of(text) == b" ab"
    chat = [*sp.start, *text, begin, *text, begin, *text]
    ids = bridge_of(sp, WORDS).prompt_ids(chat)
    own, spaced = WORDS.ids["<s>"], WORDS.encode(" ab")
    assert ids == [*WORDS.start, *WORDS.encode("ab"), own, *spaced, own, *spaced]


def test_texts_are_translated_token_by_token(fewer: Vocabulary) -> None:
    """What comes later changes nothing."""
    text = "def mean(values):\n    return sum(values) / len(values)\n\n" * 2
    ids, bridge = WORDS.encode(text), bridge_of(WORDS, fewer)
    parts = [i for token in ids for i in bridge.later_ids([token])]
    assert parts == bridge.later_ids(ids) and fewer.text_of(parts).decode() == text


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [([3, 7], 2, {3, 7}), (None, 2, {2}), (7, None, {7}), ([], 2, {2}), (None, None, set())],
    ids=["both", "config.json alone", "generation_config.json alone", "an empty list", "none"],
)
def test_generation_config_says_which_tokens_end_a_text_before_config(
    generation: Any, config: Any, ends: set[int], tmp_path: Path
) -> None:
    """As in transformers. Chat models have the end of a turn in the first file, and not in the other."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    assert end_ids_of(tmp_path) == ends


@pytest.mark.parametrize("name", ["demo", "demo_draft"])
def test_the_file_says_what_the_library_says(name: str) -> None:
    """task=plan reads tokenizer.json itself, if it can; a run asks transformers."""
    folder = SHIPPED_FOLDER / name
    light, loaded = read(folder), HubTokens(folder).vocabulary
    words = diagnose(light, loaded, (light.size, loaded.size)).in_words()
    assert words == f"vocabularies: same, {light.size} tokens"
    assert (light.special, light.start, light.ends) == (loaded.special, loaded.start, loaded.ends)


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    """Nor does one that is missing."""
    assert read_vocabulary(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    assert read_vocabulary(tmp_path) is None
