"""Small real model folders, as transformers saves them, whole or in shards; and what changes them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, Tensor]
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
    shutil.copytree(source, folder)
    return folder


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Changes the tensors of a folder with one weights file."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


TABLES = ("embed_tokens.weight", "lm_head.weight")


def renumber(source: Path, folder: Path, tokens: int | None = None) -> Path:
    """Copies the model; its tokens but the special ones get other ids, and their rows go with them.

    With `tokens`, only the first so many stay: the rest of a text is cut into shorter ones.
    """
    shutil.copytree(source, folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    kept = sorted(vocabulary.values())[:tokens]
    special = {token["id"] for token in content["added_tokens"]}
    free = torch.tensor([i for i in kept if i not in special])
    shuffled = free[torch.randperm(len(free), generator=torch.Generator().manual_seed(0))]
    new = dict(zip(free.tolist(), shuffled.tolist(), strict=True)) | {i: i for i in special}
    content["model"]["vocab"] = {token: new[i] for token, i in vocabulary.items() if i in new}
    merges = content["model"]["merges"]
    content["model"]["merges"] = [parts for parts in merges if "".join(parts) in content["model"]["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(TABLES):
            moved = tensor[: len(kept)].clone()
            moved[shuffled] = tensor[free]
            tensors[name] = moved
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": len(kept)}), encoding="utf-8")
    return folder
