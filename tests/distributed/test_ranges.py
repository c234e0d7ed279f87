"""Shares: every part is held, no rank is empty, and what cannot be split is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.errors import DistributedError, ModelError
from llama_ssp.models.sharding import WIDEST_UNIT, head_ranges, mlp_share, require_split, share, vocab_share


def sizes(spans: list[tuple[int, int]]) -> list[int]:
    return [last - first for first, last in spans]


@pytest.mark.parametrize("total", [1, 7, 52, 687, 1001, 11008, 17920, 32000])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("unit", [1, 16, 64])
def test_shares_follow_one_another_and_differ_by_one_unit(total: int, world: int, unit: int):
    spans = [share(total, world, rank, unit) for rank in range(world)]
    assert spans[0][0] == 0 and spans[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    units = [-(-size // unit) for size in sizes(spans)]
    assert max(units) - min(units) <= 1


def test_mlp_keeps_to_its_unit_as_long_as_no_rank_is_empty():
    assert sizes([mlp_share(687, 4, rank) for rank in range(4)]) == [192, 192, 192, 111]
    assert sizes([mlp_share(48, 3, rank) for rank in range(3)]) == [16, 16, 16]
    assert all(first % WIDEST_UNIT == 0 for first, _ in (mlp_share(22016, 3, rank) for rank in range(3)))


@pytest.mark.parametrize(("n_heads", "n_kv"), [(7, 7), (12, 3), (8, 1), (71, 1), (8, 2), (52, 52), (64, 8)])
def test_query_heads_stay_with_their_kv_heads(n_heads: int, n_kv: int):
    for world in range(1, n_heads + 1):
        try:
            held = [head_ranges(n_heads, n_kv, world, rank) for rank in range(world)]
        except DistributedError:
            assert world > n_kv
            continue
        assert [h for part in held for h in range(*part.query)] == list(range(n_heads))
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


def test_no_rank_is_left_empty():
    for part in (lambda: mlp_share(3, 4, 0), lambda: vocab_share(3, 4, 0)):
        with pytest.raises(DistributedError, match="3 over 4 ranks, allowed at most 3 ranks"):
            part()


SMALL = ModelConf(name="small", family="llama", n_heads=4, n_kv_heads=4, head_dim=8, dim=32, ffn=48, vocab=97)


def test_a_model_is_refused_for_what_cannot_be_split():
    require_split(SMALL, 4)
    require_split(replace(SMALL, dtype=Dtype.int8), 4)
    require_split(replace(SMALL, dtype=Dtype.nf4, dim=64, head_dim=64, ffn=256), 4)
    for changes, kind, found in (
        ({"family": "cohere"}, ModelError, "cohere"),
        ({"n_heads": 3, "n_kv_heads": 3}, DistributedError, "3 heads"),
        ({"family": "mixtral", "experts": 2, "expert_ffn": 3}, DistributedError, "3 over 4 ranks"),
    ):
        with pytest.raises(kind, match=found):
            require_split(replace(SMALL, **changes), 4)
