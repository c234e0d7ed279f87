"""The real source of randomness: its statistics, and that a draw depends on its key alone.

Each statistical check has a false-alarm rate of 1e-9, a fixed seed, a negative control that must be
rejected, and enough draws to reject a total variation of 0.03 with a probability above 0.999.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from llama_ssp.draws import CounterDraws, Purpose, Slot, heat, inverse_cdf, prompt_key, race

FALSE_ALARM = 1e-9
CPU = torch.device("cpu")
DRAWS = 60_000


def g_test(counts: np.ndarray, law: np.ndarray) -> float:
    """The p-value of a G-test; tokens of probability 0 must not occur."""
    assert not counts[law == 0].any()
    seen = law > 0
    return float(stats.power_divergence(counts[seen], law[seen] * counts.sum(), lambda_="log-likelihood")[1])


def test_a_race_has_its_law_and_never_ends_with_the_impossible():
    for vocab in (1, 2, 5, 9, 10):
        law = torch.rand(vocab, generator=torch.Generator().manual_seed(vocab)) + 0.05
        law[1::3] = -0.0
        law /= law.sum()
        noise = (
            -torch.rand(200_000, 2 * heat(vocab), generator=torch.Generator().manual_seed(1)).double().log()
        )
        found = torch.bincount(race(law.expand(200_000, vocab), noise), minlength=vocab) / 200_000
        assert (found[law == 0] == 0).all() and float((found - law).abs().max()) < 0.006


def draws_of(law: torch.Tensor, purpose: Purpose = Purpose.CORRECT, seed: int = 0) -> np.ndarray:
    """Counts over many positions of one text, as a run would make them."""
    source, rows = CounterDraws(seed), 200
    counts = np.zeros(len(law), dtype=int)
    for first in range(0, DRAWS, rows):
        slot = Slot((7,) * rows, tuple(range(first, first + rows)), purpose)
        counts += np.bincount(source.categorical(law.expand(rows, -1), slot).numpy(), minlength=len(law))
    return counts


def power(law: np.ndarray, other: np.ndarray) -> float:
    """The probability that the G-test rejects `law` when `other` is drawn from."""
    seen = law > 0
    noncentrality = DRAWS * float(((other - law)[seen] ** 2 / law[seen]).sum())
    freedom = int(seen.sum()) - 1
    return float(stats.ncx2.sf(stats.chi2.isf(FALSE_ALARM, freedom), freedom, noncentrality))


def random_law(seed: int, size: int = 27) -> torch.Tensor:
    law = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2
    law[::9] = 0
    return law / law.sum()


@pytest.mark.few(1)
@pytest.mark.parametrize("purpose", list(Purpose))
def test_categorical_draws_its_law(purpose):
    law = random_law(0)
    assert g_test(draws_of(law, purpose), law.numpy()) > FALSE_ALARM


@pytest.mark.slow
def test_a_law_3_percent_away_is_rejected():
    law = random_law(0)
    moved = law.clone()
    moved[1] += 0.03
    moved[law.argmax()] -= 0.03
    assert power(law.numpy(), moved.numpy()) > 0.999
    assert g_test(draws_of(moved), law.numpy()) < FALSE_ALARM


@pytest.mark.few(1)
@pytest.mark.parametrize("chance", [0.02, 0.5, 0.97])
def test_bernoulli_passes_at_its_chance(chance):
    source, passed = CounterDraws(1), 0
    for base in range(DRAWS // 8):
        passed += int(source.bernoulli(torch.full((1, 8), chance), Slot((3,), (base,), Purpose.ACCEPT)).sum())
    assert stats.binomtest(passed, DRAWS // 8 * 8, chance).pvalue > FALSE_ALARM
    assert (
        stats.binomtest(passed, DRAWS // 8 * 8, chance * 0.97 if chance > 0.5 else chance + 0.03).pvalue
        < FALSE_ALARM
    )


@pytest.mark.slow
def test_draws_with_different_keys_are_independent():
    """Accept and correct of one position, neighbouring positions, and equal positions of two prompts."""
    source, half = CounterDraws(2), torch.tensor([[0.5, 0.5]])
    pairs = {"purpose": [], "base": [], "prompt": []}
    for base in range(4000):

        def bit(key: int, at: int, purpose: Purpose) -> int:
            return int(source.categorical(half, Slot((key,), (at,), purpose)))

        here = bit(1, base, Purpose.ACCEPT)
        pairs["purpose"].append((here, bit(1, base, Purpose.CORRECT)))
        pairs["base"].append((here, bit(1, base + 1, Purpose.ACCEPT)))
        pairs["prompt"].append((here, bit(2, base, Purpose.ACCEPT)))
    for both in pairs.values():
        table = np.zeros((2, 2))
        np.add.at(table, tuple(np.array(both).T), 1)
        assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_a_draw_depends_on_its_key_alone():
    """Whatever was drawn before, in whichever batch, however many at a time."""
    law = random_law(3)
    alone = [
        int(CounterDraws(9).categorical(law[None], Slot((k,), (5,), Purpose.DRAFT, 2))) for k in range(6)
    ]
    source = CounterDraws(9)
    source.bernoulli(torch.rand(6, 40), Slot(tuple(range(6)), (5,) * 6, Purpose.ACCEPT))
    together = source.categorical(law.expand(6, -1), Slot(tuple(range(6)), (5,) * 6, Purpose.DRAFT, 2))
    assert together.tolist() == alone
    assert len(set(alone)) > 1
    assert prompt_key("a") != prompt_key("b")


def test_never_a_token_of_probability_zero():
    law = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    for uniform in (0.0, 1e-300, 0.3 - 1e-12, 0.3, 1 - 2**-53):
        assert int(inverse_cdf(law, torch.tensor([[uniform]], dtype=torch.float64))) in (1, 3)


def test_no_uniform_reaches_a_token_of_probability_zero_or_none():
    """Laws of many sizes with zeros everywhere, vanishing shares among them, at both ends of the uniforms."""
    generator = torch.Generator().manual_seed(4)
    ends = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-52, 1 - 2.0**-53], dtype=torch.float64)
    for size in (1, 2, 33, 1000):
        for dtype in (torch.float32, torch.float64):
            law = torch.rand(len(ends), size, generator=generator, dtype=dtype) ** 40
            law[:, torch.rand(size, generator=generator) < 0.5] = 0
            law[:, size // 2] += 1e-38
            token = inverse_cdf(law, ends[:, None])
            assert (law.gather(1, token[:, None]) > 0).all()


def test_what_is_no_law_gives_some_token():
    """Its row ends with an error; the rows beside it go on."""
    law = torch.tensor([[0.5, 0.5, 0.0], [torch.nan] * 3])
    token = inverse_cdf(law, torch.tensor([[0.6], [0.6]], dtype=torch.float64))
    assert token[0] == 1 and 0 <= token[1] < 3


def test_a_chance_of_one_always_passes_and_of_zero_never():
    slot = Slot((1,) * 1000, tuple(range(1000)), Purpose.ACCEPT)
    assert CounterDraws(0).bernoulli(torch.ones(1000, 4), slot).all()
    assert not CounterDraws(0).bernoulli(torch.zeros(1000, 4), slot).any()


def test_every_bit_of_seed_and_prompt_counts():
    """Also beside a number of 64 bits, which numpy would turn into a float with its neighbour."""

    def first(seed: int, key: int) -> float:
        return float(CounterDraws(seed)._uniforms(Slot((key,), (1,), Purpose.DRAFT), 1, CPU))

    seeds, keys = (0, 1, 2**62, 2**62 + 1, 2**63 - 1), (0, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1)
    assert len({first(seed, key) for seed in seeds for key in keys}) == len(seeds) * len(keys)
