"""Who holds what, and which share: every part is held, no rank is empty, what is impossible is one line."""

from dataclasses import replace
from itertools import pairwise

import pytest

from llama_ssp.config import DraftSeat, Dtype, ModelConf, PlacementConf, Splitting
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import DistributedError, ModelError
from llama_ssp.models.sharding import WIDEST_UNIT, head_ranges, mlp_share, require_split, share, vocab_share


def sizes(spans: list[tuple[int, int]]) -> list[int]:
    return [last - first for first, last in spans]


@pytest.fixture(params=[1, 7, 52, 687, 1001, 11008, 17920, 32000], ids="{} rows".format)
def total(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[1, 2, 3, 4, 8], ids="{} ranks".format)
def world(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[1, 16, 64], ids="units of {}".format)
def unit(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_shares_follow_one_another(total: int, world: int, unit: int):
    spans = [share(total, world, rank, unit) for rank in range(world)]
    assert spans[0][0] == 0 and spans[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_shares_differ_by_one_unit_at_most(total: int, world: int, unit: int):
    spans = [share(total, world, rank, unit) for rank in range(world)]
    units = [-(-size // unit) for size in sizes(spans)]
    assert max(units) - min(units) <= 1


def test_mlp_keeps_to_its_unit_as_long_as_no_rank_is_empty():
    assert sizes([mlp_share(687, 4, rank) for rank in range(4)]) == [192, 192, 192, 111]
    assert sizes([mlp_share(48, 3, rank) for rank in range(3)]) == [16, 16, 16]
    assert all(first % WIDEST_UNIT == 0 for first, _ in (mlp_share(22016, 3, rank) for rank in range(3)))
    for part in (lambda: mlp_share(3, 4, 0), lambda: vocab_share(3, 4, 0)):
        with pytest.raises(DistributedError, match="3 over 4 ranks, allowed at most 3 ranks"):
            part()


@pytest.mark.parametrize(("n_heads", "n_kv"), [(7, 7), (12, 3), (8, 1), (71, 1), (8, 2), (52, 52), (64, 8)])
def test_query_heads_stay_with_their_kv_heads(n_heads: int, n_kv: int):
    for world in range(1, n_heads + 1):
        try:
            held = [head_ranges(n_heads, n_kv, world, rank) for rank in range(world)]
        except DistributedError:
            assert world > n_kv
            continue
        assert [h for part in held for h in range(*part.query)] == list(range(n_heads)), world
        group = n_heads // n_kv
        for part in held:
            assert part.queries > 0 and part.queries % part.kvs == 0
            here = part.queries // part.kvs
            for i, head in enumerate(range(*part.query)):
                assert part.kv[0] + i // here == head // group


@pytest.mark.parametrize(
    ("n_heads", "n_kv", "world", "allowed"),
    [(12, 3, 4, "1..3, 6, 9, 12"), (7, 7, 8, "1..7"), (8, 2, 3, "1, 2, 4, 6, 8")],
)
def test_heads_that_cannot_be_split(n_heads: int, n_kv: int, world: int, allowed: str):
    with pytest.raises(DistributedError) as refused:
        head_ranges(n_heads, n_kv, world, 0)
    line = str(refused.value)
    assert "\n" not in line
    assert f"found {n_heads} heads, {n_kv} KV heads, {world} ranks" in line
    assert f"allowed {allowed} ranks" in line


SMALL = ModelConf(name="small", family="llama", n_heads=4, n_kv_heads=4, head_dim=8, dim=32, ffn=48, vocab=97)


def test_a_model_is_refused_for_what_cannot_be_split():
    require_split(SMALL, 4)
    require_split(replace(SMALL, dtype=Dtype.int8), 4)
    require_split(replace(SMALL, dtype=Dtype.nf4, dim=64, head_dim=64, ffn=256), 4)
    for changes, kind, found in (
        ({"family": "olmo"}, ModelError, "olmo"),
        ({"n_heads": 3, "n_kv_heads": 3}, DistributedError, "3 heads"),
        ({"family": "mixtral", "experts": 2, "expert_ffn": 3}, DistributedError, "3 over 4 ranks"),
    ):
        with pytest.raises(kind, match=found):
            require_split(replace(SMALL, **changes), 4)


OWN, SHARDED, COPIES = DraftSeat.own, DraftSeat.sharded, DraftSeat.replicated


@pytest.mark.parametrize(
    ("conf", "world", "target", "draft", "copies"),
    [
        (PlacementConf(), 1, (0,), (0,), False),
        (PlacementConf(), 4, (0, 1, 2, 3), (0,), False),
        (PlacementConf(draft=COPIES), 3, (0, 1, 2), (0, 1, 2), True),
        (PlacementConf(draft=COPIES, draft_degree=2), 3, (0, 1, 2), (0, 1), True),
        (PlacementConf(draft=SHARDED), 4, (0, 1, 2, 3), (0, 1, 2, 3), False),
        (PlacementConf(draft=SHARDED, draft_degree=2), 4, (0, 1, 2, 3), (0, 1), False),
        (PlacementConf(draft=OWN), 4, (0, 1, 2), (3,), False),
        (PlacementConf(draft=OWN, draft_degree=2), 4, (0, 1), (2, 3), False),
        (PlacementConf(draft=OWN, draft_ranks=[1]), 3, (0, 2), (1,), False),
        (PlacementConf(draft=OWN, target_ranks=[0, 3], draft_ranks=[2, 1]), 4, (0, 3), (2, 1), False),
        (PlacementConf(splitting=Splitting.deepspeed), 2, (0, 1), (0,), False),
        (PlacementConf(splitting=Splitting.layers), 1, (0,), (0,), False),
    ],
    ids=[
        "alone",
        "leader",
        "copies",
        "copies on two",
        "sharded",
        "sharded over two",
        "own",
        "own over two",
        "own listed",
        "both listed",
        "deepspeed",
        "layers",
    ],
)
def test_table(conf, world, target, draft, copies):
    placement = resolve(conf, world, drafts=True)
    assert (placement.target, placement.draft, placement.copies) == (target, draft, copies)
    assert placement.draft_apart == (conf.draft is OWN)
    assert placement.draft_degree == (1 if copies else len(draft))


def test_without_a_draft_every_rank_is_the_targets():
    assert resolve(PlacementConf(draft=OWN), 3, drafts=False).target == (0, 1, 2)
    assert resolve(PlacementConf(draft=COPIES), 2, drafts=False).draft == ()


REFUSED = [
    (PlacementConf(draft=OWN), 1, "no rank is left for the target"),
    (PlacementConf(draft=OWN, draft_degree=4), 4, "at least 5 ranks"),
    (PlacementConf(draft=SHARDED, draft_degree=3), 2, "1..2"),
    (PlacementConf(draft=OWN, draft_ranks=[7]), 4, "start 8 ranks"),
    (PlacementConf(target_ranks=[1, 2]), 3, "target's ranks do not begin with the leader"),
    (PlacementConf(target_ranks=[0, 0]), 2, "different ones of 0..1"),
    (PlacementConf(target_ranks=[0, 1]), 3, "ranks 2 of 3"),
    (PlacementConf(draft=SHARDED, target_ranks=[0, 1], draft_ranks=[1, 2]), 3, "partly"),
    (PlacementConf(draft=SHARDED, draft_ranks=[1, 0]), 2, "draft's ranks do not begin with the leader"),
    (PlacementConf(draft=OWN, target_ranks=[0, 1], draft_ranks=[1]), 2, "its ranks are the target's"),
    (PlacementConf(splitting=Splitting.layers), 2, "one process"),
    (PlacementConf(splitting=Splitting.deepspeed, draft=OWN), 2, "DeepSpeed"),
]


@pytest.mark.parametrize(("conf", "world", "says"), REFUSED, ids=[says for _, _, says in REFUSED])
def test_refused(conf, world, says):
    with pytest.raises(DistributedError, match=says):
        resolve(conf, world, drafts=True)
