"""A model whose tokens have other ids: the same function of text, for a bridge to lose nothing by."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TABLES = ("embed_tokens.weight", "lm_head.weight")


def renumber(source: Path, folder: Path, seed: int = 0) -> Path:
    """A copy of a saved model; every token but the special ones changes its id, and its rows go with it."""
    shutil.copytree(source, folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    special = {token["id"] for token in content["added_tokens"]}
    free = torch.tensor([i for i in sorted(vocabulary.values()) if i not in special])
    shuffled = free[torch.randperm(len(free), generator=torch.Generator().manual_seed(seed))]
    new = dict(zip(free.tolist(), shuffled.tolist(), strict=True))
    content["model"]["vocab"] = {token: new.get(i, i) for token, i in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(TABLES):
            moved = tensor.clone()
            moved[shuffled] = tensor[free]
            tensors[name] = moved
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
