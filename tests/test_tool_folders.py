"""Quantised folders that their tools have made are read with the weights that the tools read in them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.loader import load
from llama_ssp.models.passes import Pass, all_rows
from tests.tool_folders import FILES, LOGITS, MADE, MAX_BYTES, TOKENS

CPU = torch.device("cpu")
NEAR = 1e-5  # of the largest logit: what another order of sums in fp32 does
NAMES = sorted(path.name for path in FILES.iterdir() if path.is_dir() and path != LOGITS)


def off(name: str, other: str) -> float:
    """How far our logits are from those of the tool, or of the weights before they were quantised."""
    model, path = complete(ModelConf(name=name, path=str(FILES / name)), "model")
    assert isinstance(path, Path)
    loaded = load(model, path, Dtype.fp32, CPU, "model")
    pass_ = Pass(spans=all_rows([0], [len(TOKENS)]), device=CPU)
    found = loaded.logits(torch.tensor([TOKENS]), pass_, loaded.new_cache(1, len(TOKENS)))[0]
    expected = load_file(LOGITS / f"{name}.safetensors")[other]
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_tool(name: str) -> None:
    """And not those of the weights before: the comparison would notice another reading of the codes."""
    assert off(name, "tool") < NEAR < 100 * NEAR < off(name, "plain")


def test_every_folder_is_small_and_can_be_made_anew() -> None:
    assert sorted(MADE) == NAMES
    for name in NAMES:
        assert sum(file.stat().st_size for file in (FILES / name).iterdir()) < MAX_BYTES, name
