"""Tokenizers as folders have them: each is read as a user would expect, or what is missing is said."""

import json
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.errors import ModelError
from llama_ssp.models.checkpoint import find
from llama_ssp.models.loader import load
from llama_ssp.models.model_config import hub_config
from llama_ssp.text.tokenizer import HubTokens, read_tokens
from tests import checkpoints, families

SETTINGS = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}


def read(folder: Path) -> HubTokens:
    found = read_tokens(folder, 300)
    assert isinstance(found, HubTokens)
    return found


def gpt2_files(folder: Path) -> None:
    """What came before tokenizer.json: a table of tokens and a list of merges."""
    model = json.loads(checkpoints.tokenizer().to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))


def fast_alone(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(checkpoints.tokenizer().to_str())


def of_an_unknown_class(folder: Path) -> None:
    checkpoints.write_tokenizer(folder, checkpoints.tokenizer(), tokenizer_class="NobodysTokenizer")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    folder = checkpoints.save(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return folder


@pytest.mark.parametrize("write", [gpt2_files, fast_alone, of_an_unknown_class])
def test_files_that_are_enough(write: Callable[[Path], None], bare: Path) -> None:
    write(bare)
    known, text = read(bare), "the quick naïve 🙂"
    assert known.encode(text)[-3:] == checkpoints.tokenizer().encode(text).ids[-3:]
    assert known.decode(known.encode(text)) == text
    assert known.vocabulary.text_of(known.encode(text)) == text.encode()


def piece(token: str, score: float, kind: int) -> bytes:
    """One entry of a SentencePiece file, a protocol buffer."""
    text = token.encode()
    body = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(body)]) + body


SENTENCEPIECE = b"".join(
    [
        piece("<unk>", 0, 2), piece("<s>", 0, 3), piece("</s>", 0, 3),
        *(piece(f"<0x{byte:02X}>", 0, 6) for byte in range(256)),
        piece("\u2581a", -1, 1), piece("\u2581", -2, 1), piece("a", -3, 1), piece("b", -4, 1),
        b"\x12\x05\x18\x02\x98\x02\x01",  # byte-pair merges, with bytes to fall back on
    ]
)  # fmt: skip


def test_a_sentencepiece_file_is_read_or_its_package_is_named(bare: Path) -> None:
    """Old folders have nothing else; what reads it is no package that everyone needs. So a tiktoken file."""
    (bare / "tokenizer.model").write_bytes(SENTENCEPIECE)
    if find_spec("sentencepiece") and find_spec("google.protobuf"):
        assert read(bare).vocabulary.surfaces[259] == b" a"
    else:
        with pytest.raises(
            ModelError, match=r"cannot be read.*llama-ssp\[sentencepiece\].*tokenizer.json"
        ) as no:
            read(bare)
        assert no.value.code == 4
    (bare / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    if not find_spec("tiktoken"):
        with pytest.raises(ModelError, match=r"llama-ssp\[tiktoken\]"):
            read(bare)


def test_ends_without_a_generation_config(bare: Path) -> None:
    """config.json's hold, and without any there the tokenizer's own."""
    checkpoints.write_tokenizer(bare, checkpoints.tokenizer())
    (bare / "generation_config.json").unlink()
    checkpoints.edit(bare / "config.json", lambda c: c.update(eos_token_id=[1, 7]))
    assert read(bare).end_ids == {1, 7}
    checkpoints.edit(bare / "config.json", lambda c: c.pop("eos_token_id"))
    assert read(bare).end_ids == {1}
    (bare / "generation_config.json").write_text("[]")
    assert read(bare).end_ids == {1}


def test_a_hub_s_name_in_the_place_of_a_path_is_told() -> None:
    with pytest.raises(ModelError, match=r"model\.path is not a folder.*model=some/model"):
        find(ModelConf(name="local", path="some/model"), "model")


@pytest.mark.parametrize("family", ["qwen2", "smollm3"])
def test_heads_of_an_odd_size_are_refused(family: str, tmp_path: Path) -> None:
    """transformers takes them where config.json does not say the size, and fails at the first step."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0}
    for hidden in (40, 36):
        families.tiny(family, hidden_size=hidden, **sizes).save_pretrained(tmp_path / str(hidden))
    model, cpu = ModelConf(name="local"), torch.device("cpu")
    load(model, tmp_path / "40", Dtype.fp32, cpu, "model")
    with pytest.raises(ModelError, match=r"cannot be loaded.*even head size, and it is 9; correct config"):
        load(model, tmp_path / "36", Dtype.fp32, cpu, "model")


def test_a_fault_of_the_machine_is_not_the_config_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes its folder for compiled code while transformers reads the config."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", "/scratch/cache")

    folder = checkpoints.save(tmp_path / "model")
    monkeypatch.setattr(AutoConfig, "from_pretrained", fails)
    with pytest.raises(OSError, match="Read-only file system: '/scratch/cache'"):
        hub_config(folder)
