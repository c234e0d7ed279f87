"""The memory of each rank, and the cases in which others say "it fits" and then run out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from llama_ssp import config
from llama_ssp.config import Dtype, ModelConf, Splitting, presets
from llama_ssp.config import validation as checks
from llama_ssp.distributed.placement import Placement
from llama_ssp.errors import DistributedError
from llama_ssp.planner.fit import require_capacity
from llama_ssp.planner.memory import (
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    peaks,
    rank_work,
    reserved,
    segments,
    tensor_lines,
)
from llama_ssp.planner.storage import Weight, sizes_of
from llama_ssp.planner.weights import ModelPart, held, parameters
from llama_ssp.planner.workload import BOUND, DRAFT, MIB, TARGET, MemoryLine, Role, Workload
from tests.distributed.test_large import part

WORK = Workload(rows=1, prompt_tokens=1920, new_tokens=128, k=4, prefill_chunk=512)
SIZES: dict[str, dict[str, Any]] = {
    "7B": dict(n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128, dim=4096, ffn=11008, vocab=32000),
    "30B": dict(n_layers=60, n_heads=52, n_kv_heads=52, head_dim=128, dim=6656, ffn=17920, vocab=32000),
    "65B": dict(n_layers=80, n_heads=64, n_kv_heads=64, head_dim=128, dim=8192, ffn=22016, vocab=32000),
}


def role(name: str, size: str, dtype: Dtype = Dtype.fp16, **changes: Any) -> Role:
    conf = ModelConf(name=size, family="llama", **{"context": 2048, **SIZES[size], **changes})
    return Role(name, conf, dtype)


def placed(target: int, draft: int = 0, copies: bool = False) -> Placement:
    return Placement(Splitting.tensor, target, tuple(range(target)), tuple(range(draft)), copies)


def total(
    target: Role, draft: Role | None, placement: Placement, work: Workload = WORK, rank: int = 0
) -> int:
    return sum(line.bytes for line in lines_of(target, draft, placement, work, rank))


def lines_of(*what: Any) -> tuple[MemoryLine, ...]:
    """The lines of rank_work(*what)."""
    return tensor_lines(rank_work(*what))


def phases(*what: Any) -> dict[str, dict[str, int]]:
    return peaks(rank_work(*what))


def phase_bytes(*what: Any) -> dict[str, int]:
    return {phase: sum(parts.values()) for phase, parts in phases(*what).items()}


@pytest.fixture(scope="module")
def hydra() -> Iterator[None]:
    config.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(presets.CONF), version_base="1.3"):
        yield


PRESETS = sorted(file.stem for file in (presets.CONF / "model").glob("*.yaml") if file.stem != "local")


@pytest.mark.few(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_holds_what_the_real_model_holds(name: str, hydra: None) -> None:
    """Parameters and bytes, buffers included, of the decoder, on meta."""
    model = checks.to_run(compose("run", [f"model={name}"])).model
    made = part(model, 1, 0)[0].decoder
    once = {p.untyped_storage()._cdata: p for p in (*made.parameters(), *made.buffers())}.values()
    assert parameters(model) == sum(p.numel() for p in once if p.dtype is torch.bfloat16)
    assert sum(held(ModelPart.of(model), Dtype.bf16).values()) == sum(p.nbytes for p in once)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 8])
def test_the_ranks_together_hold_the_model(world: int) -> None:
    """Whole matrices are dealt out; norms and buffers are everyone's."""
    model = role(TARGET, "30B").model
    whole = held(ModelPart.of(model), Dtype.fp16)
    parts = [held(ModelPart.of(model, world, rank), Dtype.fp16) for rank in range(world)]
    for group in ("embedding", "layers", "head"):
        assert sum(part[group] for part in parts) == whole[group]
    assert all(part["norms"] == whole["norms"] for part in parts)


def test_an_uneven_split_is_counted_by_its_largest_part() -> None:
    """30B over 8: seven heads on four ranks, six on the others, as published: 7.765 and 7.385 GiB."""
    target = role(TARGET, "30B")
    weights = [
        sum(held(ModelPart.of(target.model, 8, rank), Dtype.fp16).values()) / 2**30 for rank in range(8)
    ]
    assert [round(w, 3) for w in weights] == [7.765] * 4 + [7.385] * 4
    caches = [_named(target, rank, "cache") for rank in range(8)]
    assert caches[0] * 6 == caches[7] * 7


def _named(target: Role, rank: int, name: str) -> int:
    lines = lines_of(target, None, placed(8), replace(WORK, k=0), rank)
    return next(line.bytes for line in lines if line.name == name)


def test_key_heads_are_replicated_where_ranks_are_more() -> None:
    target = role(TARGET, "65B", n_kv_heads=4)
    whole = sum(_named(target, rank, "cache") for rank in range(8))
    single = lines_of(target, None, placed(1), replace(WORK, k=0), 0)
    assert whole == 2 * next(line.bytes for line in single if line.name == "cache")


def test_the_draft_is_counted() -> None:
    """vLLM #9995: 70B over 4 GPUs "fits" until an 8B draft on one of them is loaded."""
    target, draft = role(TARGET, "65B"), role(DRAFT, "7B")
    without = total(target, None, placed(8), replace(WORK, k=0))
    unsharded = total(target, draft, placed(8, 1))
    leader, last = (total(target, draft, placed(8, 8), rank=rank) for rank in (0, 7))
    assert unsharded - without > 12.5 * 2**30
    assert last - without < 1.75 * 2**30
    embedding = 2 * 32000 * 4096
    assert 0.8 * embedding < leader - last < 1.2 * embedding, "the leader looks up for all"
    other = total(target, draft, placed(8, 1), rank=1)
    assert other < without + 2**30, "only the rank that holds the draft pays for it"


def test_the_draft_has_a_cache_of_its_own() -> None:
    """llama.cpp #25465: an unbudgeted draft cache. It grows with rows as the target's does."""
    target, draft = role(TARGET, "65B"), role(DRAFT, "7B")
    lines = {
        (line.role, line.name): line.bytes
        for line in lines_of(target, draft, placed(8, 1), replace(WORK, rows=3), 0)
    }
    slots = WORK.slots
    assert lines[DRAFT, "cache"] == 3 * slots * 2 * 32 * 4096 * 2
    assert lines[TARGET, "cache"] == 3 * slots * 2 * 80 * 1024 * 2


def test_the_shape_of_verification_is_counted() -> None:
    """vLLM #37521: the warm-up saw one token a request, the run K+1 with distributions for each."""
    target = role(TARGET, "7B", vocab=152064, context=4096)
    draft = role(DRAFT, "7B", n_layers=1, vocab=152064, context=4096)
    work = Workload(rows=16, prompt_tokens=64, new_tokens=64, k=8)
    found = phase_bytes(target, draft, placed(1, 1), work, 0)
    laws = phases(target, draft, placed(1, 1), work, 0)["verify"]["laws"]
    assert laws > 16 * 152064 * (9 * 4 + 8 * 4 + 9 * 8 + 8 * 8), "both laws, in fp32 and in double"
    assert found["verify"] > found["prefill"]
    names = {line.name for line in lines_of(target, draft, placed(1, 1), work, 0)}
    assert "laws (verify)" in names


def test_logits_in_fp32_round_up_to_a_segment() -> None:
    """vLLM #27508: 1024 x 201,088 logits made fp32 ask for 785.5 MiB, which takes 786."""
    logits = 1024 * 201_088 * 4
    assert logits / MIB == 785.5
    assert reserved([(logits, 1)]) / MIB == 786


def test_a_cache_is_planned_at_its_full_size() -> None:
    """Ours is made once, for prompts and new tokens."""
    target = role(TARGET, "7B")
    growth = [total(target, None, placed(1), replace(WORK, k=0, new_tokens=n)) for n in (1, 128)]
    assert growth[1] - growth[0] > 126 * 2 * 32 * 4096 * 2


def test_quantising_while_loading_needs_more_than_the_result() -> None:
    """torchao's README: a 7B in 8 bit peaks 2 GB above what it holds. Ours holds one layer in 16 bit."""
    target, work = role(TARGET, "7B", Dtype.int8), Workload(1, 8, 8, 0)
    found = phase_bytes(target, None, placed(1), work, 0)
    caches = 2 * 32 * 16 * 4096 * 2
    assert found["load"] == 2 * 2 * 4096 * 11008 - caches
    assert found["load"] == max(found.values())


def test_quantised_layers_have_scales_and_the_tables_stay_wide() -> None:
    model = role(TARGET, "7B").model
    eight, sixteen = held(ModelPart.of(model), Dtype.int8), held(ModelPart.of(model), Dtype.bf16)
    assert 2 * eight["layers"] == sixteen["layers"]
    assert eight["embedding"] == sixteen["embedding"] and eight["head"] == sixteen["head"]
    assert eight["quantisation scales"] == 4 * 32 * (4 * 4096 + 2 * 11008 + 4096)


def test_eight_bit_has_a_workspace() -> None:
    """int8 products are summed in 32 bit before they are 16 bit again."""
    work = replace(WORK, k=0, prompt_tokens=1024, prefill_chunk=1024)
    eight, sixteen = (
        phase_bytes(role(TARGET, "7B", dtype), None, placed(1), work, 0) for dtype in (Dtype.int8, Dtype.bf16)
    )
    del eight["load"], sixteen["load"]
    assert max(eight.values()) > max(sixteen.values()) + 1023 * 11008 * 4


def test_split_drafts_and_copies() -> None:
    """A copy is whole on every rank; a share is a part, its embedding and head by vocabulary."""
    target, draft = role(TARGET, "65B"), role(DRAFT, "7B")
    copy = total(target, draft, placed(4, 4, copies=True), rank=3)
    share = total(target, draft, placed(4, 4), rank=3)
    assert copy - share > 0.74 * sum(held(ModelPart.of(draft.model), Dtype.fp16).values())


def test_weights_and_caches_are_refused_without_a_plan() -> None:
    """What is checked where nothing else can be planned: weights and caches of the whole models."""
    roles = [role(TARGET, "7B"), role(DRAFT, "7B")]
    whole = sum(held(ModelPart.of(roles[0].model), Dtype.fp16).values()) + 2 * 32 * 4096 * 2 * WORK.slots
    require_capacity(roles, 1, WORK.slots, "cuda:0", 2 * whole, 0.0)
    with pytest.raises(DistributedError, match=r"model 7B: weights 12\.6 GiB, cache 1\.0 GiB; draft 7B"):
        require_capacity(roles, 1, WORK.slots, "cuda:0", 2 * whole - 1, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [Dtype.int8, Dtype.nf4])
def test_quantised_layers_are_what_bitsandbytes_makes(dtype: Dtype) -> None:
    """One matrix, quantised on the CPU: its numbers, and what describes them."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    found = dict(tensors_of(Weight("layers", 192, 128, linear=True), dtype))
    layer: Any
    if dtype is Dtype.int8:
        layer = Linear8bitLt(128, 192, bias=False, has_fp16_weights=False).to("cpu")
        held_beside = [layer.weight.SCB]
    else:
        layer = Linear4bit(128, 192, bias=False, quant_type="nf4", compress_statistics=False).to("cpu")
        held_beside = [layer.weight.quant_state.absmax, layer.weight.quant_state.code]
    assert found["layers"] == layer.weight.nbytes
    assert found["quantisation scales"] == sum(t.nbytes for t in held_beside)


def tensors_of(weight: Weight, dtype: Dtype) -> Iterator[tuple[str, int]]:
    """Bytes by group."""
    found: dict[str, int] = {}
    for group, size in sizes_of(weight, dtype):
        found[group] = found.get(group, 0) + size
    return iter(found.items())


def test_a_draft_apart_is_on_its_own_ranks() -> None:
    target, draft = role(TARGET, "65B"), role(DRAFT, "7B")
    apart = Placement(Splitting.tensor, 8, tuple(range(6)), (6, 7))
    assert {line.role for line in lines_of(target, draft, apart, WORK, 7)} == {DRAFT}
    assert {line.role for line in lines_of(target, draft, apart, WORK, 5)} == {TARGET}
    leader = phases(target, draft, apart, WORK, 0)["verify"]
    assert leader["laws"] > 4 * 32000 * 4, "who decides has the draft's laws"


def test_segments_are_counted() -> None:
    """43 MiB in segments of 44, whose rest of exactly 1 MiB stays: 65B over 8 loses 80 MiB to it."""
    assert reserved([(43 * MIB, 80)]) == 80 * 44 * MIB
    line = segments(rank_work(role(TARGET, "65B"), None, placed(8), replace(WORK, k=0), 0))
    assert line.kind == BOUND
    assert 80 * MIB < line.bytes < 240 * MIB


@pytest.mark.parametrize("size", [300, 3 * MIB, 12 * MIB, 43 * MIB, 44 * MIB - 512, 41 * MIB - 512])
def test_segments_of_many_are_those_of_one_after_the_other(size: int) -> None:
    """Also where what is left over of a segment is used."""
    before, after = [(29 * MIB + 512, 1), (17 * MIB, 2)], [(5 * MIB // 4, 3), (700 * 1024, 5)]
    assert reserved([*before, (size, 30), *after]) == reserved([*before, *[(size, 1)] * 30, *after])


def test_small_tensors_share_segments_and_large_ones_fill_what_is_free() -> None:
    small, large = [(100, 1), (700 * 1024, 1)], [(5 * MIB, 1), (9 * MIB, 1)]
    assert reserved(small) == SMALL_SEGMENT
    assert reserved([*small, *large]) == SMALL_SEGMENT + LARGE_SEGMENT, "both fit in one segment"
    assert reserved([*small, *large, (6 * MIB, 1)]) == SMALL_SEGMENT + LARGE_SEGMENT
    assert reserved([*small, *large, (6 * MIB + 1, 1)]) == SMALL_SEGMENT + 2 * LARGE_SEGMENT
    assert reserved([(30 * MIB + 1, 1)]) == 32 * MIB
