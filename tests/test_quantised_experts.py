"""Quantised experts: each weight is the library's, and logits are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.quantised_folders import MOE, Tensors, module_of, on_disk, quantised
from tests.test_decoder import walked
from tests.test_quantised_folders import loaded, opened, walked_by, whole
from tests.test_rounded import off


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


def plain(name: str, folders: Path) -> tuple[Path, list[str], Tensors]:
    """A folder with the weights that the library reads, the quantised ones among them, and all of them."""
    folder, quantised_ = folders / f"{name}-plain", quantised(name, folders / name)
    module_of(name).save_pretrained(folder)
    matrices, found = on_disk(folder), load_file(quantised_ / "model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in load_file(folder / "model.safetensors").items()}
    for matrix in matrices:
        stem = matrix.removesuffix(".weight")
        own = {key.removeprefix(stem): found.pop(key) for key in list(found) if key.startswith(f"{stem}.")}
        found[matrix] = MOE[name].read(own, shapes[matrix]).contiguous()
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return folder, matrices, found


@pytest.mark.parametrize("name", MOE)
@torch.inference_mode()
def test_experts_are_the_librarys(name: str, folders: Path) -> None:
    """Each weight to the bit; logits in one process and over two ranks, decoded and with codes."""
    folder, matrices, weights = plain(name, folders)
    assert sum("experts" in matrix for matrix in matrices) == 2 * 4 * 3
    with opened(folders / name) as source:
        for matrix in matrices:
            read = whole(source.read(matrix, None), weights[matrix].dtype)
            assert torch.equal(read, weights[matrix]), matrix
    # Inputs of experts are not rounded, by transformers either: they are no layers of their own there.
    rounds = name.endswith("w4a8")
    module = AutoModelForCausalLM.from_pretrained(folders / name if rounds else folder, dtype=torch.float32)
    decoded, texts = walked(loaded(folders / name))
    expected = [
        module(torch.tensor([text])).logits[0, -len(own) :] for own, text in zip(decoded, texts, strict=True)
    ]
    ranks: list[list[Tensor]] = []
    for keeps in (False, True):
        ranks += walked_by(folders / name, 2, keeps_codes=keeps)[1]
    for found in (decoded, walked(loaded(folders / name, keeps_codes=True))[0]):
        assert off(found, expected) < 1e-5
    for found in ranks:
        assert off(found, expected) < (1e-2 if rounds else 1e-5)
