"""Copies of a saved model with other tokens: a draft of another tokenizer that is still a good draft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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
