"""Small real model folders, as transformers saves them: whole, sharded, and broken in one way each."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

INDEX = "model.safetensors.index.json"
CONTEXT = 128
TEXT = ["the quick brown fox jumps over the lazy dog", "def hello(name):\n    return name", "naïve café"]
SPECIAL = ["<s>", "</s>"]


def tokenizer(size: int = 300) -> Tokenizer:
    """A byte-level BPE tokenizer: the 256 bytes, two special tokens, a few merges."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    return made


def write_tokenizer(folder: Path, made: Tokenizer, **settings: Any) -> None:
    """The two files that transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def save(folder: Path, shard: str = "1GB", made: Tokenizer | None = None, **changes: Any) -> Path:
    """A random Llama of two layers with its tokenizer; `shard` is the most a weight file may hold."""
    made = made or tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": made.get_vocab_size(), "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT, "bos_token_id": 0, "eos_token_id": 1, **changes,
    }  # fmt: skip
    torch.manual_seed(0)
    module = LlamaForCausalLM(LlamaConfig(**sizes))
    module.save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder, made)
    return folder


def copied(source: Path, folder: Path) -> Path:
    """A copy to break."""
    shutil.copytree(source, folder)
    return folder


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header and data."""
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(file: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    """Writes a safetensors file from a header, whatever it claims, and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
