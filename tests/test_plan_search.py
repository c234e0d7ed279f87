"""Placements of a pair: all that there are, ranked, and what is advised where none fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llama_ssp.config import Dtype, PlacementConf, Splitting
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import DistributedError
from llama_ssp.planner.advice import advice, largest, overrides
from llama_ssp.planner.fit import FitVerdict, RankMemory, communicators, library_lines, rank_memories
from llama_ssp.planner.memory import rank_work, segments, tensor_lines
from llama_ssp.planner.plan import make_plan, worlds_of
from llama_ssp.planner.search import option, placements, regular_ms, search
from llama_ssp.planner.workload import GIB
from tests.plans import machine, request

P4D = machine("p4d")


def named(words: str, world: int):
    return next(one for one in placements(world, True) if one.in_words() == words)


def test_every_kind_of_placement_is_there():
    words = [one.in_words() for one in placements(3, True)]
    assert words == [
        "target 0-2, draft 0 (whole)", "target 0-2, draft 0,1 (split)", "target 0-2, draft 0-2 (split)",
        "target 0,1, draft 2 (own)", "target 0, draft 1,2 (own)", "target 0-2, draft 0-2 (copies)",
    ]  # fmt: skip
    assert [one.in_words() for one in placements(1, True)] == ["target 0, draft 0 (whole)"]
    assert [one.in_words() for one in placements(4, False)] == ["target 0-3"]


def test_a_huge_cluster_is_planned_by_what_the_models_can_use(monkeypatch):
    """64 and 32 heads: more than 96 ranks are no use to any placement, and no table of them is made."""
    worlds = set[int]()

    def counted(conf, world, drafts):
        worlds.add(world)
        return resolve(conf, world, drafts)

    monkeypatch.setattr("llama_ssp.planner.search.resolve", counted)
    huge = request("65B", "7B", replace(P4D, nodes=1024, gpus=4))
    assert search(huge, [1, 64, 128, 4096])[0].placement.world <= 64
    assert worlds == {1, 64}
    with pytest.raises(DistributedError, match=r"heads cannot be split.*4096 ranks"):
        search(huge, [4096])
    many = replace(huge, target=replace(huge.target, model=replace(huge.target.model, n_heads=2**20)))
    with pytest.raises(DistributedError, match=r"too many ranks.*1048576 ranks.*at most 4096"):
        search(many, [2**20])


def test_a_draft_over_many_ranks_is_split_over_powers_of_two():
    degrees = [one.draft_degree for one in placements(300, True) if one.draft_apart]
    assert degrees == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert len(list(placements(256, True))) == 2 * 256


@pytest.mark.parametrize("world", [1, 2, 5])
def test_placements_are_asked_for_as_they_are_said(world):
    for one in placements(world, True):
        words = dict(word.split("=") for word in overrides(one).split())
        seat = PlacementConf(draft=type(PlacementConf().draft)(words["placement"]))
        degree = words.get("placement.draft_degree")
        assert resolve(replace(seat, draft_degree=int(degree) if degree else None), world, True) == one


def test_the_fastest_that_fits_comes_first():
    found = search(request("65B", "7B", P4D, prompt_tokens=1536), list(range(1, 9)))
    assert [one.verdict.rank for one in found] == sorted(one.verdict.rank for one in found)
    fitting = [one for one in found if one.verdict is FitVerdict.fits]
    assert [one.ms_per_token for one in fitting] == sorted(one.ms_per_token for one in fitting)
    assert found[0].placement.in_words() == "target 0-7, draft 0-7 (split)"
    assert {one.verdict for one in found} >= {FitVerdict.fits, FitVerdict.does_not_fit}


def test_a_sharded_draft_saves_what_the_whole_one_spoils():
    """65B over 4 GPUs of 40 GB: with the whole 7B on the leader it does not fit, split it does."""
    on = request("65B", "7B", P4D, prompt_tokens=1536)
    assert option(on, named("target 0-3, draft 0 (whole)", 4)).verdict is FitVerdict.does_not_fit
    assert option(on, named("target 0-3, draft 0-3 (split)", 4)).verdict is FitVerdict.fits


def test_communicators_are_counted():
    """nccl issue 864: every communicator takes its own."""
    assert communicators(named("target 0, draft 0 (whole)", 1), 0) == 0
    assert communicators(named("target 0-3, draft 0-3 (split)", 4), 0) == 1
    assert communicators(named("target 0-3, draft 0,1 (split)", 4), 0) == 2
    assert communicators(named("target 0-3, draft 0,1 (split)", 4), 3) == 1
    own = named("target 0-2, draft 3,4 (own)", 5)
    assert [communicators(own, rank) for rank in range(5)] == [2] * 5


def test_the_memory_of_a_rank_is_its_tensors_segments_and_libraries():
    on = request("30B", "7B", P4D)
    for place in placements(8, True):
        for one in rank_memories(P4D, on.target, on.draft, place, on.work):
            own = rank_work(on.target, on.draft, place, on.work, one.rank, P4D.kernels)
            assert one.lines == (*tensor_lines(own), segments(own), *library_lines(P4D, place, one.rank))


@pytest.mark.parametrize(
    ("total", "capacity", "verdict"),
    [
        (10 * GIB, 11 * GIB, FitVerdict.fits),
        (10 * GIB, int(10.2 * GIB), FitVerdict.uncertain),
        (10 * GIB, int(9.8 * GIB), FitVerdict.uncertain),
        (10 * GIB, 9 * GIB, FitVerdict.does_not_fit),
        (40 * GIB, 41 * GIB, FitVerdict.uncertain),  # 3 % of a large estimate
        (0, 0, FitVerdict.uncertain),
    ],
)
def test_verdict(total, capacity, verdict):
    lines = option(request("tiny", None, P4D), next(placements(1, False))).ranks[0].lines[:1]
    assert RankMemory(0, (replace(lines[0], bytes=total),), capacity).verdict is verdict


def test_the_largest_is_the_largest():
    on = request("13B", None, machine("p4d", gpus=1))
    chosen = search(on, [1])[0]
    room = largest(on, chosen)

    def fits(**work: int) -> bool:
        other = replace(on, work=replace(on.work, k=chosen.k, **work))
        return option(other, chosen.placement, chosen.k).verdict is FitVerdict.fits

    assert 1 < room.rows < 100
    assert fits(rows=room.rows) and not fits(rows=room.rows + 1)
    assert room.context_tokens == 2048 and room.k == 0 and room.is_model_limit  # no draft


def test_no_more_than_the_model_can_read():
    on = request("llama3.1-8b", None, machine("l4x4", gpus=1))
    room = largest(on, search(on, [1])[0])
    assert on.work.slots < room.context_tokens < 131072 and not room.is_model_limit


def test_advice_fits_when_it_is_followed():
    on = request("65B", "7B", machine("p4d", gpus=4), prompt_tokens=1536)
    chosen = option(on, named("target 0-3, draft 0 (whole)", 4))
    said = advice(on, chosen, [1, 2, 3, 4])
    assert said[0] == "draft split over 4 (placement=sharded on 4 ranks)"
    assert "draft=none: the target alone fits" in said
    assert not advice(on, search(on, [4])[0], [4])


def test_more_ranks_are_advised():
    on = request("65B", None, P4D)
    said = advice(on, option(on, next(placements(2, False))), list(range(1, 9)))
    assert said[0].startswith("target over 8 ranks instead of 2")


def test_int8_is_advised_where_it_helps():
    on = request("13B", None, machine("l4x4", gpus=1))
    chosen = search(on, [1])[0]
    assert chosen.verdict is FitVerdict.does_not_fit
    assert "model.dtype=int8 (target 0)" in advice(on, chosen, [1])


def test_nf4_is_advised_where_int8_is_still_too_much():
    """65B on one GPU of 40 GiB, and on one of 80 GB, where int8 is enough."""
    small, large = (
        request("65B", None, on) for on in (machine("p4d", gpus=1, gib=40.0), machine("p4de", gpus=1))
    )
    said, other = (advice(on, search(on, [1])[0], [1]) for on in (small, large))
    assert "model.dtype=nf4 (target 0)" in said and "model.dtype=int8 (target 0)" in other
    assert not any("int8" in words for words in said) and not any("nf4" in words for words in other)


def test_nf4_is_counted_with_its_scales_and_refused_where_the_loader_refuses_it():
    four, eight, sixteen = (
        option(request("65B", None, P4D, dtype=dtype), next(placements(8, False))).worst.total
        for dtype in (Dtype.nf4, Dtype.int8, Dtype.bf16)
    )
    assert four < eight < sixteen
    odd = request("65B", None, P4D, dtype=Dtype.nf4)
    odd = replace(odd, target=replace(odd.target, model=replace(odd.target.model, dtype=Dtype.nf4, dim=8200)))
    for world in (1, 2):
        with pytest.raises(DistributedError, match="nf4 needs inputs in whole blocks"):
            option(odd, next(placements(world, False)))


def test_a_shorter_context_and_fewer_rows_are_advised():
    on = request("13B", None, machine("p4d", gpus=1), rows=32, prompt_tokens=1900)
    chosen = search(on, [1])[0]
    said = advice(on, chosen, [1])
    room = largest(on, chosen)
    assert f"{room.rows} rows instead of 32 (task.batch_size)" in said
    assert f"context {room.context_tokens} instead of 2028 (prompt and new tokens)" in said


def test_where_nothing_helps_nothing_is_advised():
    on = request("llama3.1-70b", None, machine("cpu", gib=1.0))
    assert advice(on, search(on, [1])[0], [1]) == []


def test_more_ranks_than_can_be_split_are_refused():
    on = request("qwen2.5-7b", None, P4D)  # 28 heads, 4 KV heads
    found = {len(one.placement.target) for one in search(on, list(range(1, 9)))}
    assert found == {1, 2, 3, 4, 8}  # over 8, two ranks share the queries of each KV head
    with pytest.raises(DistributedError, match=r"cannot be split.*28 heads, 4 KV heads, 6 ranks"):
        option(on, next(placements(6, False)))
    with pytest.raises(DistributedError, match="cannot be split"):
        search(on, [5, 7])


def test_other_ways_of_splitting_are_refused():
    place = resolve(PlacementConf(splitting=Splitting.deepspeed), 2, drafts=False)
    with pytest.raises(DistributedError, match="what DeepSpeed holds is not planned"):
        option(request("7B", None, P4D), place)


def test_copies_are_never_better_than_the_leaders_draft():
    on = request("65B", "7B", P4D)
    copies, whole = (option(on, named(f"target 0-7, draft {w}", 8)) for w in ("0-7 (copies)", "0 (whole)"))
    assert copies.ms_per_token == whole.ms_per_token
    assert sum(b.total for b in copies.ranks) > sum(b.total for b in whole.ranks)


def test_speed_up_is_over_the_best_regular_run():
    on = request("65B", "7B", P4D)
    worlds = [1, 3, 8]
    options = search(on, worlds)
    alone = search(replace(on, draft=None), worlds)[0]
    assert regular_ms(on, options, worlds) == alone.ms_per_token
    tight = replace(on, machine=machine("p4d", gib=1.0))
    assert regular_ms(tight, options, worlds) == min(one.regular_ms for one in options)


def test_text_drafts_cost_nothing_but_the_check():
    on = replace(request("7B", None, P4D), text_drafts=True)
    chosen = search(on, [1])[0]
    assert chosen.times.draft == 0 and chosen.k == on.k_max
    assert make_plan(on).speedup > 2


def test_of_many_gpus_not_every_number_is_tried():
    assert worlds_of(8) == list(range(1, 9))
    assert worlds_of(24) == [1, 2, 4, 8, 16, 24]
    assert worlds_of(32) == [1, 2, 4, 8, 16, 32]


@pytest.mark.slow
def test_the_sentence():
    said = make_plan(request("65B", "7B", P4D)).sentence()
    assert said.startswith("It fits, target 0-7, draft 0-7 (split); at acceptance 0.80: ")
    assert said.endswith("drafting does not pay.")
    assert "without drafting" in make_plan(request("7B", None, P4D)).sentence()
    dear = make_plan(request("7B", "7B", P4D, acceptance=0.3)).sentence()
    assert "at acceptance 0.30 drafting does not pay" in dear


def test_changes_are_combined_where_none_is_enough():
    """70B on one GPU of 24 GB, of a node with four: each in nf4, over more of them."""
    on = request("llama3.1-70b", "llama3.1-8b", machine("l4x4", gpus=1))
    said = advice(on, search(on, [1])[0], [1])
    assert "dtype=nf4" in said[0] and "cluster.gpus=" in said[0] and "cluster.nodes" in said[-1], said
