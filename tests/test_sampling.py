"""The vectorised distribution against the plain one, and what must hold for every law."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_ssp.config import SamplingConfig
from llama_ssp.speculative import sampling as shipped
from llama_ssp.speculative.array_ops import HEAP
from llama_ssp.speculative.sampling import Prefix, SamplingTransform, has_nan
from tests.proofs.reference import reference_law

VOCAB, SLOTS, ENDS = 11, 16, frozenset({4, 9})
quiet = settings(derandomize=True, deadline=None, database=None, max_examples=150)

controls = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 10, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.4, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    presence_penalty=st.sampled_from([0.0, 0.8]),
    logit_bias=st.sampled_from([{}, {2: 1.5, 7: -3.0}]),
    bad_tokens=st.sampled_from([[], [0], [1, 10]]),
    min_new_tokens=st.sampled_from([0, 1, 5]),
)


def batch(seed: int) -> tuple[torch.Tensor, Prefix]:
    """Three rows of five positions with ragged prefixes, and garbage behind each prefix."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 5, VOCAB, generator=generator, dtype=torch.float64) * 3
    tokens = torch.randint(0, VOCAB, (3, SLOTS), generator=generator)
    prompt = torch.tensor([3, 1, 6])
    start = prompt[:, None] + torch.tensor([[0], [4], [2]])
    return logits, Prefix(tokens, start + torch.arange(5), prompt)


@quiet
@given(controls, st.integers(0, 10**6))
def test_equals_the_plain_law_at_every_position(sampling, seed):
    logits, prefix = batch(seed)
    transform = SamplingTransform(sampling, tuple(ENDS), VOCAB)(logits, prefix)
    for row in range(3):
        for column in range(5):
            text = prefix.token_BS[row, : int(prefix.length_BW[row, column])].tolist()
            plain = reference_law(
                logits[row, column].tolist(), text, int(prefix.prompt_B[row]), sampling.controls, ENDS
            )
            expected = torch.tensor(plain, dtype=torch.float64)
            assert torch.allclose(transform[row, column], expected, rtol=0, atol=1e-12)


@quiet
@given(controls, st.integers(0, 10**6))
def test_laws_are_laws(sampling, seed):
    logits, prefix = batch(seed)
    transform = SamplingTransform(sampling, tuple(ENDS), VOCAB)(logits.to(torch.bfloat16), prefix)
    assert transform.dtype == torch.float32
    assert (transform >= 0).all() and torch.allclose(transform.sum(-1), torch.ones(3, 5), atol=1e-5)
    assert (transform[..., sampling.bad_tokens] == 0).all()


@quiet
@given(st.integers(0, 10**6), st.sampled_from([(3, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.3), (4, 0.8, 0.1)]))
def test_filters_do_not_depend_on_the_order_of_tokens(seed, cut):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randint(0, 4, (1, VOCAB), generator=generator).double(), -1)  # many ties
    order = torch.randperm(VOCAB, generator=generator)
    assert torch.allclose(
        shipped.filtered(probs, *cut)[:, order], shipped.filtered(probs[:, order], *cut), rtol=0, atol=1e-15
    )


def filtered_by_sorting(probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Top-k and top-p as they are defined: all tokens in order."""
    if 0 < top_k < probs.shape[-1]:
        kept = torch.where(probs >= probs.sort(-1, descending=True).values[..., top_k - 1 : top_k], probs, 0)
        probs = kept / kept.sum(-1, keepdim=True)
    if top_p < 1:
        down = probs.sort(-1, descending=True).values
        least = torch.where(down.cumsum(-1) - down < top_p, down, 1).amin(-1, keepdim=True)
        kept = torch.where(probs >= least, probs, 0)
        probs = kept / kept.sum(-1, keepdim=True)
    return probs


SPREADS = st.sampled_from([0.0, 0.3, 2.0, 8.0])


@quiet
@given(
    st.integers(0, 10**6), st.sampled_from([300, 1100, 5000, 20000]),
    st.sampled_from([torch.float32, torch.float64]), st.sampled_from([0, 1, 40, 600, 4500]),
    st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1 - 1e-6, 1 - 1e-7, 1.0]),
    st.tuples(SPREADS, SPREADS), st.sampled_from([0, 2, 30]),
)  # fmt: skip
def test_filters_without_a_sort_keep_what_sorting_keeps(seed, size, dtype, top_k, top_p, spread, levels):
    """To the bit: flat distributions and steep ones, ties at the edge, nuclei of one token and of nearly
    all. Each row has a spread of its own: what is enough for one is not for the other."""
    generator = torch.Generator().manual_seed(seed)
    logits = (
        torch.randn(2, size, generator=generator, dtype=dtype) * torch.tensor(spread, dtype=dtype)[:, None]
    )
    if levels:
        logits = (logits * levels).round() / levels
    probs = torch.softmax(logits, -1)
    assert torch.equal(shipped.filtered(probs, top_k, top_p, 0.0), filtered_by_sorting(probs, top_k, top_p))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["steep first", "flat first"])
def test_a_flat_distribution_keeps_its_nucleus_in_a_batch_with_a_steep_one(order):
    """The steep one's nucleus has 2 tokens, the flat one's 3,728 of 4,096."""
    logits = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    probs = torch.softmax(logits * torch.tensor([[8.0], [0.3]]), -1)[list(order)]
    kept = shipped.filtered(probs, 0, 0.95, 0.0)
    assert torch.equal(kept, filtered_by_sorting(probs, 0, 0.95))
    assert sorted((kept > 0).sum(-1).tolist())[1] > 3000


def test_a_nucleus_ends_where_its_sum_is_reached():
    """The sum of the first token is top_p: the second is outside."""
    probs = torch.tensor([[0.25, 0.5, 0.25]])
    assert shipped.filtered(probs, 0, 0.5, 0.0).tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("top_p", [5e-324, 1e-50, 6e-46, 1e-30, 1e-12])
def test_the_smallest_top_p_keeps_the_likeliest(top_p: float, dtype: torch.dtype):
    probs = torch.tensor([[0.2, 0.3, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4]], dtype=dtype)
    kept = torch.tensor([[0, 0.5, 0.5, 0], [0, 0, 0, 1]], dtype=dtype)
    assert torch.equal(shipped.filtered(probs, 0, top_p, 0.0), kept)


def test_a_law_of_nan_stays_one_beside_laws_that_are_filtered():
    probs = torch.softmax(torch.arange(4000.0).view(1, -1) / 100, -1).repeat(2, 1)
    probs[1] = torch.nan
    for cut in ((5, 1.0), (600, 1.0), (0, 0.9), (7, 0.5)):
        found = shipped.filtered(probs, *cut, 0.0)
        assert torch.equal(found[0], filtered_by_sorting(probs[:1], *cut)[0]) and found[1].isnan().all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_bias_does_not_lift_a_ban(temperature):
    logits, prefix = batch(2)
    sampling = SamplingConfig(temperature=temperature, bad_tokens=[3], logit_bias={3: 50.0, 5: 1.0})
    probs = SamplingTransform(sampling, (), VOCAB)(logits, prefix)
    assert (probs[..., 3] == 0).all() and (probs.sum(-1) > 0.999).all()


def test_temperature_zero_takes_the_first_of_tied_tokens():
    """In 16 bit the first place is often shared. transformers' argmax takes the lowest token id."""
    logits, prefix = batch(3)
    logits[..., [7, 2, 10]] = logits.amax(-1, keepdim=True) + 1
    for dtype in (torch.float64, torch.bfloat16):
        probs = SamplingTransform(SamplingConfig(temperature=0.0), (), VOCAB)(logits.to(dtype), prefix)
        assert (probs[..., 2] == 1).all(), dtype


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_every_token_is_forbidden_there_is_no_law(temperature: float):
    logits, prefix = batch(1)
    banned = SamplingConfig(temperature=temperature, bad_tokens=list(range(VOCAB)))
    assert SamplingTransform(banned, (), VOCAB)(logits, prefix).isnan().all()


def test_each_row_of_a_batch_has_its_own_controls():
    """Wherever it stands, whatever its neighbours ask for, also when a row's text is followed by another.

    Rows that all ask for the same are computed by a graph, whatever the run's controls are.
    """
    logits, prefix = batch(6)
    logits = logits.repeat(3, 1, 1)
    prefix = Prefix(prefix.token_BS.repeat(3, 1), prefix.length_BW.repeat(3, 1), prefix.prompt_B.repeat(3))
    usual, cool, few = SamplingConfig(), SamplingConfig(temperature=0.5), SamplingConfig(top_k=2)
    graphs = list[object]()
    transform = SamplingTransform(usual, (), VOCAB, lambda of, *given: graphs.append(of) or of(*given))
    for asked in (
        [few] * 9,
        [cool, usual, few, usual, cool, few, few, usual, cool],
        [usual, few, few, cool] * 2 + [usual],
    ):
        for row, sampling in enumerate(asked):
            transform.assign(row, sampling)
        found = transform(logits, prefix)
        for row, sampling in enumerate(asked):
            assert torch.equal(found[row], SamplingTransform(sampling, (), VOCAB)(logits, prefix)[row])
        assert len(graphs) == 1, asked


@pytest.mark.parametrize("width", [VOCAB - 3, VOCAB + 3])
def test_a_padded_vocabulary_is_cut_or_filled(width):
    """A draft's logits beyond the target's vocabulary are never drawn; missing ones have no chance."""
    logits, prefix = batch(3)
    changed = torch.nn.functional.pad(logits, (0, width - VOCAB), value=50.0)
    transform = SamplingTransform(SamplingConfig(), (), VOCAB)(changed, prefix)
    assert transform.shape[-1] == VOCAB and torch.allclose(
        transform.sum(-1), torch.ones(3, 5, dtype=torch.float64)
    )
    assert (transform[..., width:] == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0.0),
        SamplingConfig(temperature=0.7, top_k=3),
        SamplingConfig(top_p=0.5, min_p=0.1),
        SamplingConfig(bad_tokens=[5]),
        SamplingConfig(min_new_tokens=9),
        SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.1, presence_penalty=0.1),
    ],
    ids=["plain", "greedy", "top_k", "nucleus", "bad tokens", "least length", "penalties"],
)
def test_only_damaged_logits_are_marked(sampling, bad):
    """Throughout their row, also where a control forbids the very token that is damaged."""
    logits, prefix = batch(4)
    logits[1, 2, 5] = bad
    transform = SamplingTransform(sampling, (5,), VOCAB)(logits, prefix)
    assert has_nan(transform).nonzero().tolist() == [[1, 2]]
    assert torch.equal(transform.isnan(), has_nan(transform)[..., None].expand_as(transform))


def plain_likeliest(probs: list[Fraction], count: int) -> list[Fraction]:
    """The law over the first `count` tokens in the order of probability, then id."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = set(order[:count])
    whole = sum(probs[token] for token in kept)
    return [share / whole if token in kept else Fraction(0) for token, share in enumerate(probs)]


@quiet
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any), st.integers(1, 13))
def test_the_likeliest_tokens_are_those_of_a_plain_order(parts: list[int], count: int):
    """In fractions, number by number, with many ties and zeros; the same tokens in fp32 and fp64."""
    exact = [Fraction(part, sum(parts)) for part in parts]
    wanted = plain_likeliest(exact, count)
    assert shipped.likeliest(np.array([exact], dtype=object), count).tolist() == [wanted]
    for dtype in (torch.float32, torch.float64):
        found = shipped.likeliest(torch.tensor([[*map(float, exact)]], dtype=dtype), count)[0]
        assert found.double().tolist() == pytest.approx([*map(float, wanted)], abs=1e-6)
        assert (found > 0).tolist() == [share > 0 for share in wanted]


def test_of_tied_tokens_those_with_lower_ids_are_the_likeliest():
    """Never more than that many: the message of a draft apart has so many places."""
    flat = torch.full((2, 3, 8), 1 / 8)
    found = shipped.likeliest(flat, 4)
    assert torch.equal(found[..., :4], torch.full((2, 3, 4), 1 / 4)) and not found[..., 4:].any()
    mixed = torch.tensor([[0.1, 0.3, 0.1, 0.3, 0.1, 0.1]])
    assert (shipped.likeliest(mixed, 3) > 0).tolist() == [[True, True, False, True, False, False]]


def test_what_has_no_more_tokens_stays_as_it_is():
    probs = torch.rand(2, 5)
    assert shipped.likeliest(probs, None) is probs and shipped.likeliest(probs, 5) is probs
    certain = shipped.one_hot(torch.tensor([2, 4]), probs)
    assert torch.equal(shipped.likeliest(certain, 3), certain), "a greedy draft has one token"
    damaged = probs.clone()
    damaged[1] = torch.nan
    found = shipped.likeliest(damaged, 3)
    assert found[1].isnan().all() and torch.equal(found[0], shipped.likeliest(probs, 3)[0])


@pytest.mark.parametrize("wide", [600, 5000])
def test_more_likeliest_tokens_than_a_heap_takes(wide: int):
    """On a CPU others are found by another way (array_ops.HEAP)."""
    logits = torch.randn(3, wide, generator=torch.Generator().manual_seed(1))
    probs = logits.softmax(-1)
    for count in (HEAP, HEAP + 1, wide - 1):
        found = shipped.likeliest(probs, count)
        order = probs.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        kept = torch.zeros_like(probs).scatter_(1, order, 1.0) * probs
        assert torch.equal(found, kept / kept.sum(-1, keepdim=True))
