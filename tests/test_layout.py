"""The table of tensors: what it plans and what is built of it are what they were when there were two tables.

The committed file has both, of each preset of that time over 1, 2, 3 and 8 ranks (tests/loaded_bytes.py).
What is built is counted in the modules themselves: one table that both sides read proves nothing.
"""

import json
from typing import Any

import pytest

from llama_ssp.config import ModelConf
from llama_ssp.models.layout import layout, rows_of
from llama_ssp.models.layout_sizes import sizes_of_model
from llama_ssp.models.sharding import length
from llama_ssp.models.shares import share_of
from llama_ssp.models.tensor_row import Part, Split
from tests.loaded_bytes import COMMITTED, built, once_each, planned, preset, presets_then


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(COMMITTED.read_text(encoding="utf-8"))
    return document


@pytest.mark.few(12)
@pytest.mark.parametrize("name", presets_then())
def test_what_is_planned_is_as_it_was(name: str, committed: dict[str, Any]) -> None:
    assert once_each(planned(preset(name))) == committed[f"{name} planned"]


@pytest.mark.slow
@pytest.mark.few(12)
@pytest.mark.parametrize("name", presets_then())
def test_what_is_built_is_as_it_was(name: str, committed: dict[str, Any]) -> None:
    assert once_each(built(preset(name))) == committed[f"{name} built"]


@pytest.mark.parametrize(
    "name", ["30B", "qwen3-8b", "gpt-oss-20b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b"]
)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_ranks_shares_make_the_whole(name: str, world: int) -> None:
    """Each output and each input is on one rank, but those of keys that ranks share."""
    sizes = sizes_of_model(preset(name))
    if world > sizes.n_kv and world % sizes.n_kv:
        pytest.skip("the heads cannot be split so")
    shares = [share_of(sizes, world, rank) for rank in range(world)]
    for row in layout(sizes):
        if row.split in (Split.whole, Split.keys):
            continue
        of_all = row.inputs if row.splits_inputs else row.outputs
        parts = [span for share in shares for span in share.spans(row)]
        assert sum(map(length, parts)) == of_all, row.weight
        places = sorted(place for span in parts for place in range(*span))
        assert places == list(range(of_all)), row.weight


def test_groups_of_linear_attention_are_found() -> None:
    """Of qwen3_next's two matrices: q0 k0 v0 v1 z0 z1 | q1 k1 ..., and b0 b1 a0 a1 | b2 b3 ..."""
    model = ModelConf(
        name="next", family="qwen3_next", dim=16, vocab=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=4,
        ffn=32, context=8, experts=2, experts_per_token=1, expert_ffn=8, shared_ffn=8, linear_layers=3,
        linear_key_heads=2, linear_value_heads=4, linear_key_dim=3, linear_value_dim=5, linear_kernel=4,
    )  # fmt: skip
    sizes = sizes_of_model(model)
    wide, narrow = rows_of(sizes, Part.delta_in)
    assert sizes.linear == (0, 1, 2) and sizes.attending == (3,)
    whole = share_of(sizes)
    queries, keys, values, gates = (0, 3), (3, 6), (6, 16), (16, 26)
    second = [(26 + first, 26 + last) for first, last in (queries, keys, values, gates)]
    assert whole.spans(wide) == [
        queries, second[0], keys, second[1], values, second[2], gates, second[3]
    ]  # fmt: skip
    assert whole.spans(narrow) == [(0, 2), (4, 6), (2, 4), (6, 8)]
    # Of four ranks two share a head of keys; each has one head of values.
    last = share_of(sizes, world=4, rank=3)
    assert last.spans(wide) == [(26, 29), (29, 32), (37, 42), (47, 52)]
    assert last.spans(narrow) == [(5, 6), (7, 8)]
    (conv,) = rows_of(sizes, Part.delta_conv)
    assert last.spans(conv) == [(3, 6), (9, 12), (27, 32)]
    assert conv.weight_sizes == (32, 1, 4)


def test_gates_of_attention_come_after_its_queries() -> None:
    """On disk they stand head by head."""
    sizes = sizes_of_model(preset("qwen3.5-27b"))
    query = rows_of(sizes, Part.qkv)[0]
    spans = share_of(sizes, world=4, rank=1).spans(query)
    first = 6 * 512  # the heads of rank 0
    assert spans[0] == (first, first + 256) and spans[6] == (first + 256, first + 512)
    assert len(spans) == 12


def test_groups_of_queries_keys_and_values_are_found() -> None:
    """Of falcon's one matrix: q0 q1 k0 v0 | q2 q3 k1 v1, in units of a head."""
    model = ModelConf(
        name="falcon", family="falcon", dim=16, vocab=32, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=4,
        ffn=32, context=8,
    )  # fmt: skip
    sizes = sizes_of_model(model)
    (row,) = rows_of(sizes, Part.qkv)
    whole = share_of(sizes).spans(row)
    second = share_of(sizes, world=2, rank=1).spans(row)
    assert whole == [(0, 8), (16, 24), (8, 12), (24, 28), (12, 16), (28, 32)]
    assert second == [(16, 32)]


@pytest.mark.parametrize("part", [Part.qkv, Part.up], ids=str)
def test_only_the_first_rank_adds_a_bias_of_a_sum(part: Part) -> None:
    sizes = sizes_of_model(preset("gpt-neox-20b"))
    output = Part.output if part is Part.qkv else Part.down
    for rank in range(2):
        share = share_of(sizes, 2, rank)
        assert all(share.has_bias(row) for row in rows_of(sizes, part)), rank
        assert [share.has_bias(row) for row in rows_of(sizes, output)] == [rank == 0], rank
