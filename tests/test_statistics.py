"""Intervals against published figures, and against their coverage counted out exactly."""

from __future__ import annotations

from math import comb

import pytest
from scipy import stats

from llama_ssp.report.statistics import median_coverage, median_of, paired_difference, percentiles, wilson

NEWCOMBE_1998 = [  # Statistics in Medicine 17, 857-872, table I, the score method
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0000, 0.1611),
    (1, 29, 0.0061, 0.1718),
]
BONETT_PRICE = [  # gained, lost, n: Fagerland et al. 2014, table V; the documentation of R's statpsych
    (1, 7, 21, -0.2857, -0.508, -0.013, 3),
    (26, 4, 48, 0.4583, 0.2548067, 0.6251933, 7),
]


def binomial(n: int, p: float) -> list[float]:
    return [comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]


@pytest.mark.parametrize(("right", "n", "low", "high"), NEWCOMBE_1998)
def test_wilson_as_published(right: int, n: int, low: float, high: float) -> None:
    found = wilson(right, n)
    assert (found.value, round(found.low, 4), round(found.high, 4)) == (right / n, low, high)


@pytest.mark.parametrize("n", [1, 10, 4000])
def test_wilson_at_the_ends(n: int) -> None:
    none, every = wilson(0, n), wilson(n, n)
    assert none.low == 0 < none.high and every.low < 1 == every.high
    assert none.high == pytest.approx(1 - every.low)


@pytest.mark.parametrize("p", [0.1, 0.284, 0.5, 0.75, 0.95])
def test_wilson_covers_as_often_as_it_says(p: float) -> None:
    """On average over close sample sizes: the coverage of one size jumps with the whole numbers."""
    covered = [
        sum(chance for k, chance in enumerate(binomial(n, p)) if wilson(k, n).includes(p))
        for n in range(90, 111)
    ]
    assert sum(covered) / len(covered) == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize(("gained", "lost", "n", "value", "low", "high", "digits"), BONETT_PRICE)
def test_the_difference_as_published(
    gained: int, lost: int, n: int, value: float, low: float, high: float, digits: int
) -> None:
    found = paired_difference(gained, lost, n)
    assert found.value == pytest.approx(value, abs=5e-5)
    assert (round(found.low, digits), round(found.high, digits)) == (low, high)


def test_the_difference_turns_with_its_runs_and_is_never_certain() -> None:
    one, other = paired_difference(3, 9, 50), paired_difference(9, 3, 50)
    assert (one.value, one.low, one.high) == pytest.approx((-other.value, -other.high, -other.low))
    same = paired_difference(0, 0, 1000)
    assert same.value == 0 and same.low == -same.high and 0.002 < same.high < 0.004
    for n in (1, 2):
        every = paired_difference(n, 0, n)
        assert -1 <= every.low <= every.high <= 1


@pytest.mark.parametrize(
    ("more", "less"),
    [(0.01, 0.01), (0.1, 0.1), (0.2, 0.2), (0.3, 0.1), (0.4, 0.4), (0.3, 0.0), (0.001, 0.001)],
)
def test_the_difference_covers_nearly_as_often_as_it_says(more: float, less: float) -> None:
    """`more` and `less` are the chances that a prompt is right in the one run alone, or in the other."""
    n, same, covered = 40, 1 - more - less, 0.0
    for gained in range(n + 1):
        for lost in range(n + 1 - gained):
            if paired_difference(gained, lost, n).includes(more - less):
                ways = comb(n, gained) * comb(n - gained, lost)
                covered += ways * more**gained * less**lost * same ** (n - gained - lost)
    assert covered >= 0.93  # the least is 0.938, where all that changes changes one way


@pytest.mark.parametrize(("n", "coverage"), [(1, 0.0), (2, 0.5), (5, 0.9375), (6, 0.96875), (9, 0.9609375)])
def test_the_medians_interval_covers_what_it_says(n: int, coverage: float) -> None:
    """Against the binomial distribution of how many values are below the median."""
    found = median_of([float(i) for i in range(n)])
    left_out = int(found.low)
    assert found.high == n - 1 - left_out
    assert median_coverage(n) == pytest.approx(1 - 2 * stats.binom.cdf(left_out, n, 0.5)) == coverage
    assert n < 6 or coverage >= 0.95


def test_the_medians_interval_is_the_narrowest_that_covers() -> None:
    for n in range(6, 60):
        left_out = int(median_of([float(i) for i in range(n)]).low)
        covers, narrower = (1 - 2 * stats.binom.cdf(left_out + more, n, 0.5) for more in (0, 1))
        assert covers >= 0.95 > narrower


def test_percentiles() -> None:
    assert percentiles([float(i) for i in range(101)], (50, 90, 99)) == [50, 90, 99]
    assert percentiles([3.0], (50, 99)) == [3, 3] and percentiles([], (50,)) == [None]
