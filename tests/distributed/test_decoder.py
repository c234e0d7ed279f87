"""A decoder that is cut over ranks gives the whole one's logits, on every rank, from its slices alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llama_ssp.config import Dtype
from llama_ssp.distributed.comm import ALONE
from llama_ssp.errors import DistributedError
from llama_ssp.models.assemble import decoder
from llama_ssp.models.decoder import Decoder, WholeNorms
from llama_ssp.models.families import FAMILIES as FAMILY_ROWS
from llama_ssp.models.families import TESTED_FAMILIES
from llama_ssp.models.synthetic import SyntheticSource, config_for
from llama_ssp.models.synthetic import build as build_synthetic
from llama_ssp.planner.storage import BUFFERS
from llama_ssp.planner.weights import ModelPart, held, parameters
from tests.distributed.threads import ranks_of, together
from tests.families import FAMILIES, synthetic
from tests.test_decoder import CPU, PASSES, TOLERANCE, VARIANTS, module_of, saved, walked


def uneven(name: str) -> dict[str, Any]:
    """Sizes of which 2, 3 and 4 ranks have unequal shares, as of the vocabulary, 97 tokens."""
    family, own = FAMILIES[name]
    grouped = {key for key in ("num_key_value_heads", "num_kv_heads") if own.get(key, 1) > 1}
    sizes = {"hidden_size": 40, FAMILY_ROWS[family].mlp_key: 56, **dict.fromkeys(grouped, 5)}
    sizes["num_heads" if "num_heads" in own else "num_attention_heads"] = 10 if grouped else 5
    if own.get("num_key_value_heads") is None:
        sizes["num_key_value_heads"] = 5
    other = {"moe_intermediate_size": 28, "word_embed_proj_dim": 40}
    return sizes | {key: size for key, size in other.items() if key in own}


UNEVEN = {f"{name}-uneven": (name, uneven(name)) for name in FAMILIES}
VARIANTS.update(UNEVEN)
VARIANTS["odd-mlp"] = "llama-mha", {"intermediate_size": 687}
VARIANTS["falcon-mha-uneven"] = "falcon", {**VARIANTS["falcon-mha"][1], **uneven("falcon")}
VARIANTS["qwen3-moe-mixed-uneven"] = "qwen3_moe", {**VARIANTS["qwen3-moe-mixed"][1], **uneven("qwen3_moe")}
NAMES = *FAMILIES, *VARIANTS


def fits(found: Decoder, world: int) -> bool:
    """Whether the heads can be split over `world` ranks."""
    attention = found.blocks[0].attention
    heads, groups = (size // attention.head_dim for size in attention.sizes[:2])
    return world <= groups or (world % groups == 0 and world <= heads)


def whole_norms(found: Decoder) -> bool:
    return isinstance(found.blocks[0].attention.norms, WholeNorms)


# Of each decoder two of three numbers of ranks, in turn; of families test_tensor.py has the third.
GRID = [
    (name, world) for number, name in enumerate(NAMES) for world in (2, 3, 4) if (number + world) % 3 != 1
]


@pytest.mark.few(16)
@pytest.mark.parametrize(("name", "world"), GRID)
@torch.inference_mode()
def test_parts_give_the_logits_of_the_whole(name, world, tmp_path):
    module = module_of(name)
    whole = saved(module, tmp_path)
    if not fits(whole, world):
        assert name not in UNEVEN
        with pytest.raises(DistributedError, match="heads cannot be split"):
            saved(module, tmp_path, ranks_of(world)[0])
        return
    expected, _ = walked(whole)
    ranks = ranks_of(world)
    parts = [saved(module, tmp_path, rank) for rank in ranks]
    found = together([lambda part=part: walked(part)[0] for part in parts], ranks)
    for logits in found:
        for ours, theirs in zip(logits, expected, strict=True):
            assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    sums = (3 if whole_norms(whole) else 2) * len(whole.blocks) + 1
    assert {rank.counts["sums"] for rank in ranks} == {len(PASSES) * sums}
    assert {rank.counts["gathers"] for rank in ranks} == {len(PASSES)}


@torch.inference_mode()
def test_a_norm_of_one_ranks_heads_alone_is_seen(tmp_path):
    module = module_of("olmo2-uneven")
    expected, _ = walked(saved(module, tmp_path))
    ranks = ranks_of(2)
    parts = [saved(module, tmp_path, rank) for rank in ranks]
    for part in parts:
        for block in part.blocks:
            block.attention.norms.reduce = None
    (found, _) = together([lambda part=part: walked(part)[0] for part in parts], ranks)
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) > 1e-2


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
