"""Linear attention: the delta rule next to transformers' own functions, and the rings of states.

Controls: a rule without its decay, without its correction, or with another state before it gives other
numbers than transformers'; a ring that is too small refuses.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from llama_ssp.errors import ModelError
from llama_ssp.models.attention import Places
from llama_ssp.models.cache_layout import DeltaShape
from llama_ssp.models.delta import EPSILON, DeltaNet, delta_rule
from llama_ssp.models.graph_sizes import LAG, ring_of
from llama_ssp.models.interface import Tally
from llama_ssp.models.kv_cache import KVCache, growing, in_ring
from llama_ssp.models.linear import dense
from llama_ssp.models.passes import RowSpan, all_rows

CPU = torch.device("cpu")
KEYS, VALUES, KEY_DIM, VALUE_DIM, WIDTH, KERNEL = 2, 6, 5, 4, 16, 4
CHANNELS = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM


def random_parts(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Queries and keys of norm 1, values, decays and betas of some tokens, (1, T, heads, ...)."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "query": theirs.l2norm(random(VALUES, KEY_DIM)),
        "key": theirs.l2norm(random(VALUES, KEY_DIM)),
        "value": random(VALUES, VALUE_DIM),
        "g": -random(VALUES).abs() * 0.3,
        "beta": torch.sigmoid(2 * random(VALUES)),
    }


def ours(parts: dict[str, Tensor], before: Tensor, wanted: int, rows: list[int] | None = None) -> Any:
    """`delta_rule` of these tokens, of rows of so many tokens each."""
    tokens = parts["key"].shape[1]
    row_T = torch.repeat_interleave(torch.arange(len(rows or [0])), torch.tensor(rows or [tokens]))
    is_seen_TT = (row_T[:, None] == row_T) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return delta_rule(
        parts["query"][0] * KEY_DIM**-0.5,
        parts["key"][0],
        parts["value"][0],
        parts["g"][0],
        parts["beta"][0],
        is_seen_TT,
        before,
        wanted=wanted,
    )


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
def test_the_rule_is_transformers(tokens: int, rule: str) -> None:
    """What tokens read, and the state after the last one; after each one, too, by texts that end there."""
    parts = random_parts(tokens)
    before = torch.randn(1, VALUES, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(1))
    read, states = ours(parts, before, wanted=tokens)
    function = getattr(theirs, rule)
    wanted, _ = function(**parts, initial_state=before, output_final_state=True)
    assert off(read, wanted[0]) < 1e-5
    for end in {1, tokens // 2, tokens} - {0}:
        some = {name: part[:, :end] for name, part in parts.items()}
        _, state = function(**some, initial_state=before, output_final_state=True)
        assert off(states[end - 1], state[0]) < 1e-5

    _, last = ours(parts, before, wanted=1)
    assert off(last[0], states[-1]) < 1e-6


@pytest.mark.parametrize("part", ["g", "beta", "before"])
def test_each_part_of_the_rule_matters(part: str) -> None:
    parts = random_parts(7)
    before = torch.randn(1, VALUES, KEY_DIM, VALUE_DIM)
    wanted, _ = theirs.torch_chunk_gated_delta_rule(**parts, initial_state=before)
    if part == "before":
        before = before * 0
    else:
        parts[part] = parts[part] * 0.5
    assert off(ours(parts, before, wanted=1)[0], wanted[0]) > 1e-2


def test_rows_at_once_are_rows_alone() -> None:
    """To the last bits, in any order; what is not a number in one row changes no bit of another."""
    rows = [3, 1, 5]
    each = [random_parts(tokens, seed) for seed, tokens in enumerate(rows)]
    together = {name: torch.cat([parts[name] for parts in each], 1) for name in each[0]}
    before = torch.randn(len(rows), VALUES, KEY_DIM, VALUE_DIM)
    read, states = ours(
        together, before.repeat_interleave(torch.tensor(rows), 0), wanted=sum(rows), rows=rows
    )
    begin = 0
    for row, tokens in enumerate(rows):
        alone, state = ours(each[row], before[row : row + 1], wanted=tokens)
        assert off(read[begin : begin + tokens], alone) < 1e-6
        assert off(states[begin : begin + tokens], state) < 1e-6
        begin += tokens

    damaged = before.clone()
    damaged[0, 0, 0, 0] = torch.nan
    read_again, states_again = ours(
        together, damaged.repeat_interleave(torch.tensor(rows), 0), wanted=sum(rows), rows=rows
    )
    assert read_again[:3].isnan().any() and states_again[:3].isnan().any()
    assert torch.equal(read_again[3:], read[3:]) and torch.equal(states_again[3:], states[3:])


def layer(dtype: torch.dtype = torch.float32) -> DeltaNet:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return DeltaNet(
        inputs=dense(random(CHANNELS + VALUES * VALUE_DIM + 2 * VALUES, WIDTH) / 2),
        output=dense(random(WIDTH, VALUES * VALUE_DIM)),
        kernel_CK=random(CHANNELS, KERNEL),
        decay_H=-2 + random(VALUES),
        step_H=random(VALUES),
        norm_E=1 + 0.2 * random(VALUE_DIM),
        key_heads=KEYS,
        key_dim=KEY_DIM,
        activation="silu",
        epsilon=EPSILON,
    )


def cache_for(rows: int, rewinds: int, capacity: int = 40, spare: int = 0) -> KVCache:
    """A cache with nothing but garbage in it."""
    shape = DeltaShape(heads=VALUES, key_dim=KEY_DIM, value_dim=VALUE_DIM, channels=CHANNELS, tail=KERNEL - 1)
    cache = KVCache.of(
        rows=rows,
        capacity=capacity,
        shapes=[shape],
        dtype=torch.float32,
        device=CPU,
        tally=Tally(),
        rewinds=rewinds,
        spare=spare,
    )
    for tensor in cache.layers[0][:2]:
        tensor.fill_(torch.nan)
    return cache


# What is fed of each row: (first position, tokens). Later passes roll back by up to 3 tokens.
FED = [
    ((0, 3), (0, 1), (0, 0)),
    ((3, 2), (1, 4), (0, 2)),
    ((4, 1), (2, 3), (1, 4)),
    ((5, 6), (5, 1), (4, 5)),
    ((8, 4), (5, 2), (9, 1)),
    ((0, 5), (6, 1), (9, 2)),
]


@torch.inference_mode()
def test_steps_of_all_rows_are_rows_in_turn() -> None:
    """The two ways to read a pass give the same, and leave the same states and tails."""
    net = layer()
    rewinds = 3
    caches = [cache_for(3, rewinds), cache_for(3, rewinds)]
    generator = torch.Generator().manual_seed(4)
    for fed in FED:
        spans = all_rows([start for start, _ in fed], [count for _, count in fed])
        x_TH = torch.randn(sum(count for _, count in fed), WIDTH, generator=generator)
        places = caches[0].places(spans)
        by_row = net(x_TH, {}, caches[0].layers[0], places)
        caches[1].feed(spans)
        step = Places(position_T=places.position_T, first_T=places.first_T, attend=places.attend)
        at_once = net(x_TH, {}, caches[1].layers[0], step)
        assert off(at_once, by_row) < 1e-6
        for row, (start, count) in enumerate(fed):
            for which, tail in ((0, KERNEL - 1), (1, 0)):
                ring = ring_of(rewinds) + tail
                kept = min(start + count, ring)
                places_in_ring = in_ring(row, start + count - kept, kept, ring, CPU)
                mine, other = (cache.layers[0][which][places_in_ring] for cache in caches)
                assert not kept or off(mine, other) < 1e-6


@torch.inference_mode()
def test_pads_of_graphs_change_no_row() -> None:
    """They stand in the spare slot, as cuda_graphs.Graph puts them there."""
    net = layer()
    cache, padded = cache_for(2, 2, spare=7), cache_for(2, 2, spare=7)
    spans = all_rows([0, 0], [3, 2])
    x_TH = torch.randn(5, WIDTH)
    places = cache.places(spans)
    padded.feed(spans)
    pads = 3
    step = Places(
        position_T=torch.cat([places.position_T, torch.zeros(pads, dtype=torch.int64)]),
        first_T=torch.cat([places.first_T, torch.full((pads,), 2 * 40 + 6)]),
        attend=places.attend,
    )
    wanted = net(x_TH, {}, cache.layers[0], places)
    found = net(torch.cat([x_TH, torch.ones(pads, WIDTH)]), {}, padded.layers[0], step)
    assert off(found[:5], wanted) < 1e-6
    for one, other in zip(cache.layers[0][:2], padded.layers[0][:2], strict=True):
        rows = len(one) * 2 // 3
        is_written = ~one[:rows].isnan()
        assert torch.equal(is_written, ~other[:rows].isnan())
        assert off(other[:rows][is_written], one[:rows][is_written]) < 1e-6


def test_a_ring_has_the_states_of_a_roll_back() -> None:
    """So many tokens back a pass goes on; one more, and it would go on from another state: it refuses."""
    for rewinds in (0, 1, 4):
        cache = cache_for(2, rewinds)
        cache.places([RowSpan(1, 0, 20)])
        kept = [length for length in range(1, 21) if cache.resumable(1, length)]
        assert kept == list(range(20 - ring_of(rewinds) + 1, 21))
        assert len(kept) == rewinds + 1 + LAG
        assert cache.resumable(1, 21) == 0 and cache.resumable(0, 1) == 0
        with pytest.raises(ModelError, match="a state that is not kept"):
            cache.places([RowSpan(1, kept[0] - 1, 1)])
        cache.places([RowSpan(1, kept[0], 1)])
        assert cache.resumable(1, kept[0] + 1) and not cache.resumable(1, kept[0] + 2)
        cache.clear(1)
        assert cache.resumable(1, kept[0]) == 0


def test_a_cache_without_states_goes_on_anywhere() -> None:
    cache = KVCache.of(
        rows=1, capacity=9, shapes=[(1, 4)], dtype=torch.float32, device=CPU, tally=Tally(), rewinds=3
    )
    assert cache.ring == 0 and cache.resumable(0, 5) == 5
    assert [(dim, name) for _, dim, name in growing(cache.layers[0])] == [(1, "N")] * 2


def test_a_cache_counts_its_states() -> None:
    """By rows and rings; whatever the capacity is."""
    sizes = []
    for capacity in (40, 400):
        cache = cache_for(3, 4, capacity)
        assert cache.tally.now == sum(tensor.nbytes for tensor in cache.layers[0])
        sizes.append(cache.tally.now)
    ring = ring_of(4)
    states = 3 * ring * VALUES * KEY_DIM * VALUE_DIM
    tails = 3 * (ring + KERNEL - 1) * CHANNELS
    assert sizes == [4 * (states + tails) + 3 * 8] * 2


def test_a_ring_is_cut_where_it_ends() -> None:
    """Places of one row alone, in the order of the positions."""
    assert in_ring(2, 3, 2, 7, CPU) == slice(17, 19)
    wrapped = in_ring(2, 5, 4, 7, CPU)
    assert isinstance(wrapped, Tensor) and wrapped.tolist() == [19, 20, 14, 15]
