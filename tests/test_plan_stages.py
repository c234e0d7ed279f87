"""placement=layers in the plan: each GPU's layers are those that accelerate gives it, and none is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from llama_ssp.config import Dtype, PlacementConf, Splitting, Steps
from llama_ssp.distributed.placement import resolve
from llama_ssp.models import synthetic
from llama_ssp.models.device_map import spread_of
from llama_ssp.planner.activations import GPU
from llama_ssp.planner.fit import FitVerdict
from llama_ssp.planner.layers import Stage, layers_lines, stages
from llama_ssp.planner.search import option
from llama_ssp.planner.storage import WEIGHTS
from llama_ssp.planner.weights import ModelPart, held
from llama_ssp.planner.workload import GIB
from tests.plans import machine, model, request

PLENTY = 10**13
BY_LAYERS = resolve(PlacementConf(splitting=Splitting.layers), 1, drafts=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus", "dtype"),
    [
        ("7B", 4, Dtype.bf16), ("llama2-70b", 8, Dtype.bf16), ("llama3.1-8b", 3, Dtype.bf16),
        ("qwen2.5-0.5b", 3, Dtype.bf16), ("gemma2-2b", 4, Dtype.bf16), ("65B", 4, Dtype.int8),
        ("65B", 4, Dtype.nf4), ("gpt-neo-1.3b", 2, Dtype.bf16), ("gpt-neox-20b", 4, Dtype.fp16),
    ],
)  # fmt: skip
def test_layers_are_dealt_out_as_accelerate_does(name: str, gpus: int, dtype: Dtype) -> None:
    conf = model(name)
    with torch.device("meta"):
        module: Any = synthetic.build(conf, torch.bfloat16)
    spread = spread_of(module, dtype, {**dict.fromkeys(range(gpus), PLENTY), "cpu": PLENTY})
    layers = dict.fromkeys(range(gpus), 0)
    for part, gpu in spread.items():
        layers[int(gpu)] += part.rpartition(".")[2].isdecimal()  # of model.layers.7
    head = next(gpu for part, gpu in spread.items() if part in ("lm_head", "embed_out"))
    found = stages(conf, dtype, gpus)
    assert [stage.layers for stage in found] == list(layers.values())
    assert [stage.head for stage in found].index(True) == head


@pytest.mark.parametrize("name", ["7B", "gemma2-2b", "gpt-neo-1.3b"])
@pytest.mark.parametrize("dtype", [Dtype.bf16, Dtype.nf4])
def test_together_the_gpus_hold_the_model(name: str, dtype: Dtype) -> None:
    on = request(name, None, machine("p4d"), dtype=dtype)
    whole = held(ModelPart.of(on.target.model), dtype)
    sums = dict.fromkeys(whole, 0)
    for lines in layers_lines(on.target, None, on.work, 4, replace(GPU, cpu=True)):
        for line in lines:
            if line.name in WEIGHTS:
                sums[line.name] += line.bytes
    assert {**sums, "buffers": 0} == {**whole, "buffers": 0}  # which every GPU has


def test_laws_and_the_draft_are_on_the_first_gpu() -> None:
    on = request("13B", "7B", machine("p4d", gpus=2))
    place = resolve(PlacementConf(splitting=Splitting.layers), 1, drafts=True)
    first, second = option(on, place).ranks
    assert {line.role for line in second.lines} == {"model", "libraries"}
    assert any(line.role == "draft" for line in first.lines)
    assert not any(line.name.startswith("laws") for line in second.lines)
    assert first.total - second.total > 13 * 10**9


def test_what_passes_through_a_full_gpu_is_counted() -> None:
    """accelerate #608: a device_map that fills the cards runs with one row, and out of memory with eight."""
    card = machine("p4d", gpus=2, gib=17.0)
    few, many = (request("13B", None, card, rows=rows, prompt_tokens=1900) for rows in (1, 8))
    assert option(few, BY_LAYERS).verdict is FitVerdict.fits
    assert option(many, BY_LAYERS).verdict is FitVerdict.does_not_fit
    weights = [
        sum(line.bytes for line in one.lines if line.name in WEIGHTS) for one in option(many, BY_LAYERS).ranks
    ]
    assert max(weights) < 14 * GIB, "by weights alone it would fit"


def test_one_gpu_holds_all_and_computes_alone() -> None:
    on = replace(request("7B", None, machine("p4d")), engine=Steps.eager)
    assert stages(on.target.model, Dtype.bf16, 1) == [Stage(32, True, True, True)]
    alone = resolve(PlacementConf(), 1, drafts=False)
    assert option(on, BY_LAYERS).ms_per_token == option(on, alone).ms_per_token
    single = replace(on, machine=machine("p4d", gpus=1))
    assert option(single, BY_LAYERS).worst.total == option(single, alone).worst.total
