"""The KV cache: where tokens of a pass stand, and what transformers' modules get of it."""

import torch
from torch import Tensor

from llama_ssp.models.causal_lm import ModuleCache
from llama_ssp.models.kv_cache import KVCache
from llama_ssp.models.passes import Pass, RowSpan, all_rows

CPU = torch.device("cpu")
ROWS, CAPACITY, HEADS, SIZE = 3, 8, 2, 4


def pass_of(*spans: tuple[int, int, int]) -> Pass:
    return Pass(spans=tuple(RowSpan(*span) for span in spans), device=CPU)


def masked_cache() -> KVCache:
    return KVCache(rows=ROWS, capacity=CAPACITY, device=CPU, is_masked=True)


def written(cache: KVCache, pass_: Pass, layer: int = 0) -> tuple[Tensor, Tensor]:
    """Random keys of the pass's columns, with NaN as padding, and what a module gets when it stores them."""
    new_BGWD = torch.randn(len(pass_.spans), HEADS, pass_.width, SIZE)
    for line, span in enumerate(pass_.spans):
        new_BGWD[line, :, span.tokens :] = torch.nan
    keys_BGSD, values_BGSD = ModuleCache(cache, pass_).update(new_BGWD, -new_BGWD, layer)
    assert torch.equal(values_BGSD, -keys_BGSD)
    return new_BGWD, keys_BGSD


def test_columns_without_padding():
    pass_ = pass_of((0, 5, 3), (1, 2, 1), (2, 4, 0))
    assert pass_.position_BW.tolist() == [[5, 6, 7], [2, 0, 0], [0, 0, 0]]
    assert pass_.column_T.tolist() == [0, 1, 2, 3]
    assert pass_.last_tokens().tolist() == [2, 3]
    assert (pass_.width, pass_.longest, pass_.has_padding) == (3, 8, True)


def test_a_text_is_long_as_given_or_by_now():
    spans = all_rows([5, 2], [2, 2])
    by_now = Pass(spans=spans, device=CPU).beyond(6)
    as_given = Pass(spans=spans, device=CPU, given=(3, 9)).beyond(6)
    assert by_now.tolist() == [[False, True], [False, False]]
    assert as_given.tolist() == [[False, True], [True, True]]


def test_a_position_has_its_slot_in_its_row():
    cache = masked_cache()
    several = cache.places(pass_of((0, 1, 2), (2, 5, 1)).spans)
    assert several.slot_T.tolist() == [1, 2, 2 * CAPACITY + 5]
    for row in range(ROWS):
        alone = cache.places([RowSpan(row, 3, 2)])
        assert alone.position_T.tolist() == [3, 4]
        assert alone.first_T.tolist() == [row * CAPACITY] * 2


def test_a_module_gets_the_texts_of_its_rows():
    """Also of a row that is fed alone; padding is written nowhere."""
    cache = masked_cache()
    first_BGWD, texts_BGSD = written(cache, pass_of((0, 0, 3), (1, 0, 1), (2, 0, 2)))
    assert texts_BGSD.shape == (ROWS, HEADS, 3, SIZE)
    texts_BGSD.view(ROWS * HEADS, 3, SIZE)  # as gpt_neox_japanese sees them
    for row, count in enumerate((3, 1, 2)):
        assert torch.equal(texts_BGSD[row, :, :count], first_BGWD[row, :, :count])
    assert not any(tensor.isnan().any() for layer in cache.layers for tensor in layer)

    next_BGWD, text_BGSD = written(cache, pass_of((1, 1, 4)))
    expected_GSD = torch.cat([first_BGWD[1, :, :1], next_BGWD[0]], 1)
    assert torch.equal(text_BGSD, expected_GSD[None])


def test_layers_are_made_when_they_are_first_used():
    """An architecture may number them as it likes; a cache has slots for its texts and no others."""
    cache = masked_cache()
    pass_ = pass_of((0, 0, 1), (1, 0, 1), (2, 0, 1))
    for number in (1, 4, 1):
        written(cache, pass_, number)
    assert len(cache.layers) == 2
    count = 2 * 2 * ROWS * CAPACITY * HEADS * SIZE
    assert cache.tally.now == count * torch.float32.itemsize


def test_a_cleared_row_leaves_no_nan():
    """Where masked slots are multiplied by 0; the other rows stay."""
    cache = masked_cache()
    written(cache, pass_of((0, 0, 2), (1, 0, 2), (2, 0, 2)))
    keys_RGCD, _ = cache.layers[0]
    before_RGCD = keys_RGCD.clone()
    keys_RGCD[1, :, :2] = torch.nan
    cache.clear(1)
    assert not keys_RGCD[1].any()
    assert torch.equal(keys_RGCD[[0, 2]], before_RGCD[[0, 2]])
