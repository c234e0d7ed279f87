"""A decoder that is cut over ranks gives the whole one's logits, on every rank, from its slices alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llama_ssp.config import Dtype
from llama_ssp.distributed.comm import ALONE
from llama_ssp.models.assemble import decoder
from llama_ssp.models.families import FAMILIES as FAMILY_ROWS
from llama_ssp.models.families import TESTED_FAMILIES
from llama_ssp.models.synthetic import SyntheticSource, config_for
from llama_ssp.models.synthetic import build as build_synthetic
from llama_ssp.planner.storage import BUFFERS
from llama_ssp.planner.weights import ModelPart, held, parameters
from tests.distributed.test_tensor import CPU, compare
from tests.distributed.threads import ranks_of, together
from tests.families import FAMILIES, module_of, saved, synthetic, walked


def uneven(name: str) -> dict[str, Any]:
    """Sizes of which 2, 3 and 4 ranks have unequal shares, as of the vocabulary, 97 tokens."""
    family, own = FAMILIES[name]
    grouped = {key for key in ("num_key_value_heads", "num_kv_heads") if own.get(key, 1) > 1}
    sizes = {"hidden_size": 40, FAMILY_ROWS[family].mlp_key: 56, **dict.fromkeys(grouped, 5)}
    sizes["num_heads" if family == "gpt_neo" else "num_attention_heads"] = 10 if grouped else 5
    if own.get("num_key_value_heads") is None:
        sizes["num_key_value_heads"] = 5
    other = {"moe_intermediate_size": 28, "word_embed_proj_dim": 40}
    return sizes | {key: size for key, size in other.items() if key in own}


UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {name: (name, uneven(name)) for name in FAMILIES}
UNEVEN |= {
    "odd-mlp": ("llama-mha", {"intermediate_size": 687}),
    "falcon-mha": ("falcon-mha", uneven("falcon")),
    "qwen3-moe-mixed": ("qwen3-moe-mixed", uneven("qwen3_moe")),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", UNEVEN)
def test_parts_give_the_logits_of_the_whole(name, world, tmp_path):
    """Sizes that cannot be cut evenly; test_tensor.py has the others."""
    family, sizes = UNEVEN[name]
    module_of(family, **sizes).save_pretrained(tmp_path)
    compare(tmp_path, world)


@torch.inference_mode()
def test_a_norm_of_one_ranks_heads_alone_is_seen(tmp_path):
    module, ranks = module_of("olmo2", **uneven("olmo2")), ranks_of(2)
    expected, _ = walked(saved(module, tmp_path))
    parts = [saved(module, tmp_path, rank) for rank in ranks]
    for part in parts:
        for block in part.blocks:
            block.attention.norms.reduce = None
    (result, _) = together([lambda part=part: walked(part)[0] for part in parts], ranks)
    assert max(float((a - b).abs().max()) for a, b in zip(result, expected, strict=True)) > 1e-2


@pytest.mark.parametrize("family", TESTED_FAMILIES)
@torch.inference_mode()
def test_parts_have_the_planned_sizes(family):
    model = synthetic(family)
    config = config_for(model)
    source = SyntheticSource.of_config(config, model, torch.float32, CPU, drafts=False)
    parts = [decoder(config, source, rank) for rank in (ALONE, *ranks_of(3))]
    module = build_synthetic(model, torch.float32)
    assert parameters(model) == sum(p.numel() for p in module.parameters())
    for number, part in enumerate(parts):
        world, rank = (3, number - 1) if number else (1, 0)
        planned = held(ModelPart.of(model, world, rank), Dtype.fp32)
        assert sum(planned.values()) - planned.get(BUFFERS, 0) == sum(p.nbytes for p in part.parameters())
