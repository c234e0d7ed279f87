"""Checkpoints: one safetensors file with the progress as JSON in its header.

One file, so that one rename replaces weights, optimizer and progress together.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

NAME = "checkpoint.safetensors"


def save(
    folder: Path,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    progress: dict[str, Any],
) -> None:
    """Write another file and rename it: a kill at any time leaves a whole checkpoint."""
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"optimizer.{i}.{index}.{key}"] = torch.as_tensor(value)
    tensors = {name: value.cpu().contiguous() for name, value in tensors.items()}
    temporary = folder / (NAME + ".part")
    save_file(tensors, temporary, metadata={"progress": json.dumps(progress)})
    os.replace(temporary, folder / NAME)


def load(
    folder: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
) -> dict[str, Any] | None:
    """Put the last checkpoint into the model and the optimizers; None if there is none."""
    path = folder / NAME
    if not path.exists():
        return None
    states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in optimizers]
    parameters = dict(model.named_parameters())
    with safe_open(path, framework="pt") as file:
        progress = json.loads(file.metadata()["progress"])
        names = list(file.keys())
        for name in names:
            value = file.get_tensor(name)
            kind, _, rest = name.partition(".")
            if kind == "model":
                parameters[rest].data.copy_(value)
            else:
                which, index, key = rest.split(".", 2)
                states[int(which)].setdefault(int(index), {})[key] = value
    for optimizer, state in zip(optimizers, states, strict=True):
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    return progress
