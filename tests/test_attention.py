"""Attention of steps on a CPU (kernels/attention.cpp): as exact as torch's; a token's result is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llama_ssp.models.attention import NO_SIDES, Pass, Row, Scores, Sides, attend_rows
from llama_ssp.models.kernels import attention as kernel
from llama_ssp.models.kernels.large_pages import PAGE
from llama_ssp.models.slot_cache import SlotCache, Tally

CPU = torch.device("cpu")
CAPACITY = 1200
# First slot, start and tokens of each row: parts and tiles of the kernel begin within the texts.
ROWS = [(0, 1021, 5), (CAPACITY, 0, 1), (2 * CAPACITY, 126, 3), (3 * CAPACITY, 520, 1), (4 * CAPACITY, 61, 5)]
# The same of prompts, one of which goes on behind a text. Results of the longest are merged in several turns.
PROMPTS = [(0, 0, 600), (CAPACITY, 500, 90), (2 * CAPACITY, 63, 2), (3 * CAPACITY, 0, 73)]
HEADS = ((1, 1), (4, 4), (6, 2), (8, 1), (16, 2), (11, 1))  # queries' and keys'
SIZES = (64, 80, 96, 128, 256, 20)
SHAPES = [*((h, 64) for h in HEADS), *(((16, 2), size) for size in SIZES[1:]), ((4, 4), 80), ((4, 4), 20)]
KINDS = {
    "plain": (Scores(0.125), False), "window": (Scores(0.125, window=70), False),
    "far window": (Scores(0.2, window=600), False), "softcap": (Scores(0.3, softcap=2.0), False),
    "sinks": (Scores(0.125, window=33), True),
}  # fmt: skip
TOLERANCE = 1e-5  # in fp32, of the largest number


def parts(
    heads: int, groups: int, size: int, dtype: torch.dtype, sinks: bool = False, rows: list[Row] = ROWS
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and sinks. Slots that no token sees are not numbers."""
    torch.manual_seed(heads + size)
    query_THD = torch.randn(sum(count for _, _, count in rows), heads, size)
    keys_GND, values_GND = (torch.full((groups, len(rows) * CAPACITY, size), torch.nan) for _ in "kv")
    for first, start, count in rows:
        for tensor in (keys_GND, values_GND):
            tensor[:, first : first + start + count] = torch.randn(groups, start + count, size)
    sink_H = torch.randn(heads) if sinks else None
    return query_THD.to(dtype), keys_GND.to(dtype), values_GND.to(dtype), sink_H


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "size"), SHAPES)
@torch.inference_mode()
def test_results_are_those_of_torch(heads, size, kind):
    kernel.operators()
    scores, sinks = KINDS[kind]
    feed = Pass.of(ROWS, CPU)
    given = parts(*heads, size, torch.float32, sinks)
    found, expected = (attend(feed, *given[:3], scores, given[3]) for attend in (kernel.attend, attend_rows))
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_in_bf16_they_are_as_near_to_the_exact_ones(size, kind):
    """Torch's attention rounds at the same places; exact is the result in fp64, of the rounded numbers."""
    kernel.operators()
    scores, sinks = KINDS[kind]
    feed = Pass.of(ROWS, CPU)
    given = parts(16, 2, size, torch.bfloat16, sinks)
    exact = attend_rows(feed, *(part.double() for part in given[:3]), scores, given[3])
    off = [
        float((attend(feed, *given[:3], scores, given[3]).double() - exact).norm() / exact.norm())
        for attend in (kernel.attend, attend_rows)
    ]
    assert off[0] <= 1.05 * off[1]


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "size"), [((16, 2), 128), ((16, 16), 64), ((3, 1), 80), ((20, 1), 20)])
@torch.inference_mode()
def test_prompts_have_the_results_of_torch_whatever_the_other_rows(heads, size, kind):
    kernel.operators()
    scores, sinks = KINDS[kind]
    feed = Pass.of(PROMPTS, CPU)
    query_THD, keys_GND, values_GND, sink_H = parts(*heads, size, torch.float32, sinks, PROMPTS)
    found, expected = (
        attend(feed, query_THD, keys_GND, values_GND, scores, sink_H)
        for attend in (kernel.attend, attend_rows)
    )
    most = TOLERANCE * expected.abs().max()
    assert (found - expected).abs().max() <= most
    begin = 0
    for row in PROMPTS:
        own = slice(begin, begin + row[2])
        by_itself = kernel.attend(Pass.of([row], CPU), query_THD[own], keys_GND, values_GND, scores, sink_H)
        assert torch.equal(by_itself, found[own])
        begin += row[2]
    feed.position_T[begin - 1] -= 1  # control: the last token does not see itself
    assert (
        kernel.attend(feed, query_THD, keys_GND, values_GND, scores, sink_H) - expected
    ).abs().max() > most


def alone(token: int) -> Pass:
    """A step of one of the tokens, whose row's slots have been written."""
    places = [(first, start + i, 1) for first, start, count in ROWS for i in range(count)]
    return Pass.of([places[token]], CPU)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(16, 2), (11, 1), (4, 4)])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_tokens_result_does_not_depend_on_others(kind, heads, dtype):
    """To the bit: with later tokens of its row, with other rows, and by itself."""
    kernel.operators()
    scores, sinks = KINDS[kind]
    query_THD, keys_GND, values_GND, sink_H = parts(*heads, 64, dtype, sinks)
    together = kernel.attend(Pass.of(ROWS, CPU), query_THD, keys_GND, values_GND, scores, sink_H)

    def same(token: int) -> bool:
        own = kernel.attend(alone(token), query_THD[[token]], keys_GND, values_GND, scores, sink_H)
        return torch.equal(own[0], together[token])

    assert all(same(token) for token in range(len(query_THD)))
    first, start, _ = ROWS[0]
    values_GND[:, first + start - 20] *= 1.5  # control: a value of its own row
    assert not same(0)
    assert same(len(query_THD) - 1)


# Drafts and siblings of rows, in slots that no text has; of ROWS and of as many tokens.
SIDES = [Sides(3, 2, 4600), NO_SIDES, Sides(2, 1, 4650), NO_SIDES, Sides(4, 3, 4700)]


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "size"), [((16, 2), 128), ((11, 1), 64), ((4, 4), 20), ((3, 1), 80)])
@torch.inference_mode()
def test_a_sibling_sees_what_is_before_its_draft_and_itself(heads, size, kind):
    """As if it stood in the draft's place; and drafts do not see it, to the bit."""
    kernel.operators()
    scores, sinks = KINDS[kind]
    drafts, keys_GND, values_GND, sink_H = parts(*heads, size, torch.float32, sinks)
    feed = Pass.of(ROWS, CPU, sides=SIDES)
    aside_T = feed.slot_T != feed.first_T + feed.position_T
    query_THD = torch.randn(len(aside_T), *heads[:1], size)
    query_THD[~aside_T] = drafts
    for tensor in (keys_GND, values_GND):
        tensor[:, feed.slot_T[aside_T]] = torch.randn(heads[1], int(aside_T.sum()), size)
    given = query_THD, keys_GND, values_GND, scores, sink_H
    found, by_torch = kernel.attend(feed, *given), attend_rows(feed, *given)
    expected = torch.cat([in_place(feed, token, *given) for token in range(len(aside_T))])
    most = TOLERANCE * expected.abs().max()
    assert (found - expected).abs().max() <= most
    assert (by_torch - expected).abs().max() <= most
    without = kernel.attend(Pass.of(ROWS, CPU), drafts, keys_GND, values_GND, scores, sink_H)
    assert torch.equal(found[~aside_T], without)
    values_GND[:, feed.slot_T[aside_T][0]] += 1  # control: the first sibling's own value
    changed_T = (kernel.attend(feed, *given) - found).abs().amax((1, 2)) > most
    assert changed_T.nonzero().tolist() == [[int(aside_T.nonzero()[0])]]


def in_place(
    feed: Pass, token: int, query_THD: Tensor, keys_GND: Tensor, values_GND: Tensor, scores: Scores,
    sink_H: Tensor | None,
) -> Tensor:  # fmt: skip
    """A token's result when its key and value are at its position, in a pass of its own."""
    first, position, slot = (int(each[token]) for each in (feed.first_T, feed.position_T, feed.slot_T))
    caches = [tensor.clone() for tensor in (keys_GND, values_GND)]
    for tensor in caches:
        tensor[:, first + position] = tensor[:, slot]
    return attend_rows(Pass.of([(first, position, 1)], CPU), query_THD[[token]], *caches, scores, sink_H)


def test_masks_of_siblings_are_sent_without_waiting():
    """To a device that is not the host, once in every layer."""
    queued: list[bool] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op is torch.ops.aten._to_copy.default:
                queued.append(bool(kwargs.get("non_blocking")))
            return op(*args, **kwargs or {})

    device = torch.device("meta")
    feed = Pass.of([(0, 5, 3)], device, sides=[Sides(2, 1, 20)])
    cache_GND = torch.empty(1, 24, 8, device=device)
    with Copies():
        attend_rows(feed, torch.empty(5, 2, 8, device=device), cache_GND, cache_GND, Scores(1.0), None)
    assert queued == [True]


def test_long_caches_begin_at_large_pages():
    """Each tensor in memory of its own: torch.compile need not ask which of those it writes overlap."""
    cache = SlotCache.of(1, 4096, [(2, 128), (1, 8)], torch.bfloat16, CPU, Tally())
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert [tensor.data_ptr() % PAGE for tensor in tensors[:2]] == [0, 0]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 4
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [float(tensor.float().mean()) for tensor in tensors] == [0, 1, 2, 3]
    assert not any(tensor.storage_offset() for tensor in tensors)
