"""A decoder that is cut over ranks gives the whole one's logits, on every rank, from its slices alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llama_ssp.models.decoder import Decoder
from llama_ssp.models.sharding import head_ranges
from tests.distributed.threads import ranks_of, together
from tests.families import FAMILIES, WHOLE
from tests.test_decoder import PASSES, TOLERANCE, VARIANTS, module_of, saved, walked

WIDE: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "seven-heads": ("llama-mha", {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7}),
    "odd-mlp": ("llama-mha", {"intermediate_size": 687}),
    "odd-neox": ("gpt_neox", {"hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 99}),
    "phi3-uneven": ("phi3", WIDE),
    **{f"{name}-uneven": (name, WIDE) for name in ("llama-gqa", "mistral-window", "qwen3", "gemma2")},
    "falcon-uneven": ("falcon-gqa", {"hidden_size": 48, "num_attention_heads": 6, "num_kv_heads": 3}),
    "mixtral-uneven": ("mixtral", WIDE),
}
VARIANTS.update(UNEVEN)
UNSPLIT = {"olmo2", "gpt_oss"}  # norms over all heads, and experts with other weights on disk
NAMES = [name for name in (*FAMILIES, *WHOLE, *VARIANTS) if name not in UNSPLIT]


def fits(found: Decoder, world: int) -> bool:
    """Whether the heads can be split over so many ranks."""
    attention = found.blocks[0].attention
    heads, groups = (size // attention.head_dim for size in attention.sizes[:2])
    try:
        head_ranges(heads, groups, world, 0)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_parts_give_the_logits_of_the_whole(name, world, tmp_path):
    module = module_of(name)
    whole = saved(module, tmp_path)
    if not fits(whole, world):
        pytest.skip("the heads cannot be split")
    expected, _ = walked(whole)
    ranks = ranks_of(world)
    parts = [saved(module, tmp_path, rank) for rank in ranks]
    found = together([lambda part=part: walked(part)[0] for part in parts], ranks)
    for logits in found:
        for ours, theirs in zip(logits, expected, strict=True):
            assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    sums = 2 * len(whole.blocks) + 1
    assert {rank.counts["sums"] for rank in ranks} == {len(PASSES) * sums}
    assert {rank.counts["gathers"] for rank in ranks} == {len(PASSES)}
