"""Tokenizers of GGUF headers: the ids of the tokenizers that they were written from."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as WITH_MARKS

from llama_ssp.errors import ModelError
from llama_ssp.text.tokenizer import HubTokens, read_tokens
from llama_ssp.text.vocabulary import read_vocabularies, read_vocabulary
from tests import checkpoints
from tests.gguf_files import finish, gguf, reads_tokenizers
from tests.test_gguf import made
from tests.warm import ROOT, python

pytestmark = reads_tokenizers

# The first one has letters that are not of the byte alphabet, as DeepSeek's.
SPECIAL, PLAIN, PADDING = ["<｜begin｜>", "<|im_end|>", "<|end_of_text|>"], ["<think>"], 5
TEXTS = [
    "", "Hello world", "  two  spaces,   three", "x = 12345678 + 3.14159", "1 12 123 1234",
    "naïve café, Ünïcödé", "cafe\u0301 nai\u0308ve", "emoji 🦙 😶‍🌫️ ✅", "tabs\tand\nlines\n\n\n  end ",
    "I'LL don't we've", "日本語 と 한국어", "HTTPServer aB CamelCase", "<|im_end|> is special <think> is not",
    "a<｜begin｜>b", "def f(x):\n        return x", "нещо на Български", "កាន់តែពិសេស",
]  # fmt: skip
WORDS = "Hello hello world worlds don't 123 1234 the then there café naïve lines spaces "
CORPUS = [*TEXTS, WORDS * 3] * 3
DIGITS = r"\p{N}"
LLAMA_3 = PRETOKENIZE_REGEX.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def trained(expression: str | None, composed: bool = False, whole: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=whole))
    made.normalizer = normalizers.NFC() if composed else None
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression in (None, DIGITS))
    split: list[Any] = [] if expression is None else [pre_tokenizers.Split(Regex(expression), "isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence([*split, letters])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(name, normalized=False) for name in PLAIN])
    return made


def add_tokens(writer: Any, model: str, tokens: list[str], kinds: list[int], **more: Any) -> int:
    """Adds a tokenizer to a file, and returns how many tokens it has."""
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    return len(tokens)


def add_byte_level(writer: Any, pre: str, made: Tokenizer, padding: int = PADDING, **more: Any) -> int:
    content = json.loads(made.to_str())
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    ids = made.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__) + [f"[PAD{len(ids) + n}]" for n in range(padding)]
    added = {token["content"]: 3 if token["special"] else 4 for token in content["added_tokens"]}
    kinds = [added.get(name, 5 if "[PAD" in name else 1) for name in tokens]
    begin, *_, end = [ids[name] for name, kind in added.items() if kind == 3]
    own = {"tokenizer_pre": pre, "token_merges": merges, "bos_token_id": begin, "eos_token_id": end}
    return add_tokens(writer, "gpt2", tokens, kinds, **own, **more)


def add_that_of_folders(writer: Any) -> int:
    """The tokenizer of tests/checkpoints.py, whose ids are those of its tokenizer.json."""
    return add_byte_level(writer, "gpt-2", checkpoints.tokenizer(), padding=0, add_bos_token=False)


def written(path: Path, architecture: str, add: Callable[..., int], *how: Any, **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}
    for key, value in {**sizes, "attention.head_count": 2}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((add(writer, *how, **more), 32), np.float32))
    finish(writer)
    return path


def byte_level(folder: Path, pre: str, made: Tokenizer, **more: Any) -> Path:
    return written(folder / f"{pre}.gguf", "llama", add_byte_level, pre, made, **more)


ORIGINALS: dict[str, tuple[str | None, bool, bool]] = {
    "llama-bpe": (LLAMA_3, False, True), "qwen2": (PRETOKENIZE_REGEX, True, False),
    "gpt-2": (None, False, False), "smollm": (DIGITS, False, False),
    "qwen35": (WITH_MARKS, True, False),
}  # fmt: skip


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_ids_are_those_of_the_original(pre: str, tmp_path: Path) -> None:
    original = trained(*ORIGINALS[pre])
    path = byte_level(tmp_path, pre, original)
    found = read_tokens(path, 1000)
    assert isinstance(found, HubTokens)
    start = [original.token_to_id(SPECIAL[0])] * (pre == "llama-bpe")
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert found.encode(text, special=True) == start + ids, text
        assert found.decode(ids) == original.decode(ids), text
        original.encode_special_tokens = True
        assert found.encode(text) == start + original.encode(text, add_special_tokens=False).ids, text
        original.encode_special_tokens = False
    assert found.end_ids == {original.token_to_id(name) for name in SPECIAL[1:]}
    assert found.size == original.get_vocab_size()  # rows that pad the embedding are no tokens
    assert found.bos_id == original.token_to_id(SPECIAL[0])
    from_file, vocabulary = found.vocabulary, read_vocabulary(path)
    assert vocabulary is not None
    assert from_file.ids == vocabulary.ids and from_file.surfaces == vocabulary.surfaces


def test_another_way_to_split_gives_other_ids(tmp_path: Path) -> None:
    original = trained(*ORIGINALS["llama-bpe"])
    found = read_tokens(byte_level(tmp_path, "qwen2", original, add_bos_token=False), 1000)
    assert any(found.encode(text, special=True) != original.encode(text).ids for text in TEXTS)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2"])
def test_sentencepiece_ids_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    made = Tokenizer(models.BPE(byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, limit_alphabet=70)
    made.train_from_iterator(CORPUS, trainer)
    learnt = [name for name, _ in sorted(made.get_vocab().items(), key=lambda each: each[1])]
    learnt = [name for name in learnt if len(name) > 1 or name not in " \n"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(learnt)]
    if architecture == "gemma2":
        tokens, kinds = [*tokens, "\n\n", "    "], [*kinds, 4, 4]
    scores = [-float(number) for number in range(len(tokens))]
    special = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "token_scores": scores}
    path = written(tmp_path / "m.gguf", architecture, add_tokens, "llama", tokens, kinds, **special)
    ours, theirs = read_tokens(path, 1000), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        if architecture == "llama" and text.startswith(" "):
            continue  # transformers adds no space before a space; sentencepiece, and Llama's own file, do
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, special=True) == [1, *ids], text
        assert ours.decode(ids) == text


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    """With the original's file beside it the model runs."""
    original = trained(None)
    path = byte_level(tmp_path, "nonesuch", original)
    with pytest.raises(ModelError, match=r"tokenizer is not known.*'nonesuch'.*llama-bpe.*tokenizer\.json"):
        read_tokens(path, 1000)
    original.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    found = read_tokens(path, 1000)
    assert found.encode("Hello world") == original.encode("Hello world").ids
    checkpoints.tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"that of another model.*of 300 tokens as in its header"):
        read_tokens(path, 1000)


def test_two_files_are_not_taken_for_one(tmp_path: Path) -> None:
    one = byte_level(tmp_path, "gpt-2", trained(None))
    other = byte_level(tmp_path, "qwen2", trained(PRETOKENIZE_REGEX))
    first, second = read_vocabularies(one, other)
    assert first is not None and second is not None and first.ids != second.ids
    assert len(set(map(id, read_vocabularies(one, one)))) == 1


def test_a_chat_template_is_used(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    path = byte_level(tmp_path, "qwen2", trained(PRETOKENIZE_REGEX), chat_template=template)
    found = read_tokens(path, 1000)
    ids = found.chat([{"role": "user", "content": "Hello"}])
    assert found.decode(ids) == "user: Hello"
    assert ids[-1] in found.end_ids


LATER = """
import sys
from llama_ssp import load_pair

with load_pair(sys.argv[1], max_tokens=99, overrides=["engine=eager", "model.dtype=fp32"]) as pair:
    text = pair.generate(["hello"], max_new_tokens=8, seed=1)[0].token_ids
print(text, {"transformers", "torch._dynamo"} & sys.modules.keys())
"""


@pytest.mark.slow
def test_a_later_start_imports_neither_transformers_nor_the_compiler(tmp_path: Path) -> None:
    """And writes what the first one wrote, which has made and kept the config and the tokenizer."""
    path, _ = made("llama", tmp_path, metadata=add_that_of_folders)
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": str(ROOT)}
    (script := tmp_path / "later.py").write_text(LATER)
    first = python([script, path], tmp_path, env)  # in a process that has imported both
    second = subprocess.check_output([sys.executable, script, path], env=env, text=True)
    assert "'transformers'" in first.out and second == f"{first.out[: first.out.index(']') + 1]} set()\n"
