"""Makes a rank's part without memory for one weight; measures the memory while a model is loaded."""

import subprocess
import sys

import pytest
import torch

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.models.assemble import decoder
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.linear import LayerFormat
from llama_ssp.models.synthetic import config_for
from llama_ssp.planner.workload import TARGET, Role
from tests.memory_trace import BlankSource, FakeRanks
from tests.warm import ROOT

META = torch.device("meta")


def part(model: ModelConf, world: int, rank: int) -> tuple[DecoderModel, FakeRanks]:
    """Returns a rank's part, made by the very code that loads one; weights on this device are not read."""
    ranks, config, role = FakeRanks(rank, world), config_for(model), Role(TARGET, model, Dtype.bf16)
    made = decoder(config, BlankSource(role, config), ranks, LayerFormat(Dtype.bf16, META))
    return DecoderModel(made, config, model.name, ranks), ranks


# MiB beyond its share: modules that are imported while it loads, one weight on its way, what malloc keeps.
BESIDES = 300


@pytest.mark.long
def test_a_rank_never_holds_more_than_its_share():
    """Of a model, from files and from a seed, that would not fit beside the bound if it were held whole."""
    command = ["bench/load_memory.py", "gib=0.9", "ranks=2", "ways=files:bf16,seed:bf16"]
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [line.split("|")[1:-1] for line in ran.stdout.splitlines() if ":bf16 |" in line]
    assert len(rows) == 2 * 2
    whole = 0.9 * 1024
    for cells in rows:
        share, before, most, after, allowed = (float(cell) for cell in cells[2:7])
        bound = before + 1.15 * share + BESIDES
        assert after <= most <= min(bound, allowed) < before + whole, cells
