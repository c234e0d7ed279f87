"""Shares, their differences, and medians, with intervals. Closed form, no torch, no scipy."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, exp, inf, isfinite, log, nan, prod, sqrt
from statistics import NormalDist, median, quantiles

LEVEL = 0.95
QUANTILE = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True)
class Estimate:
    """A figure and the interval that holds the true one, at the level LEVEL."""

    value: float
    low: float
    high: float

    def includes(self, value: float) -> bool:
        return self.low <= value <= self.high

    def figures(self, name: str) -> dict[str, float | None]:
        """Returns value and interval under the names of the JSON interface; None for what is not finite."""
        ends = {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}
        return {key: end if isfinite(end) else None for key, end in ends.items()}


def wilson(right: int, n: int) -> Estimate:
    """Returns a share and its score interval (Wilson 1927), which also holds near 0 and 1.

    The Wald interval has no width at a score of 0 or 100 %, which a few prompts often reach.
    """
    share = right / n
    z = QUANTILE
    whole = 1 + z * z / n
    middle = (share + z * z / (2 * n)) / whole
    reach = z / whole * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if right == 0 else middle - reach  # exactly so; the sum leaves a rounding error
    high = 1.0 if right == n else middle + reach
    return Estimate(share, low, high)


def paired_difference(gained: int, lost: int, n: int) -> Estimate:
    """Returns how much the share of right answers changes between two runs on the same n prompts.

    `gained` prompts are right in the second run alone, `lost` in the first alone. The interval is that
    of Bonett and Price (2012): a Wald interval after one more pair of each kind. Two runs that never
    differ get an interval of about 2.8 / n to both sides, where Wald's own would claim certainty.
    """
    whole = n + 2  # with one more pair of each kind
    more = (gained + 1) / whole
    less = (lost + 1) / whole
    middle = more - less
    reach = QUANTILE * sqrt((more + less - middle**2) / whole)
    return Estimate((gained - lost) / n, low=max(-1.0, middle - reach), high=min(1.0, middle + reach))


def ratio_of_sums(over: Sequence[Sequence[float]], under: Sequence[Sequence[float]]) -> Estimate:
    """Returns the product of the sums of `over` over that of `under`; each holds a figure of every item.

    The interval is over items, which were drawn at random: the logarithm's, by linearisation. With one item,
    and where a sum is 0, nothing is known: the interval has no end.
    """
    n = len(over[0])
    over_sums = [sum(figures) for figures in over]
    under_sums = [sum(figures) for figures in under]
    if not (prod(over_sums) and prod(under_sums)):
        return Estimate(nan, low=0.0, high=inf)
    value = prod(over_sums) / prod(under_sums)
    if n < 2:
        return Estimate(value, low=0.0, high=inf)

    # What each item adds to the logarithm of the ratio, to first order.
    slopes = []
    for item in range(n):
        upper = sum(figures[item] / total for figures, total in zip(over, over_sums, strict=True))
        lower = sum(figures[item] / total for figures, total in zip(under, under_sums, strict=True))
        slopes.append(upper - lower)
    reach = QUANTILE * sqrt(n / (n - 1) * sum(slope**2 for slope in slopes))
    return Estimate(value, low=value * exp(-reach), high=value * exp(reach))


def median_of(values: list[float]) -> Estimate:
    """Returns the median and its interval by order statistics, which assumes no distribution of the values.

    With fewer than 6 values no such interval reaches 95 %: it is then from the least to the greatest,
    and `median_coverage` says what it reaches.
    """
    ranked = sorted(values)
    outer = _outer_rank(len(values))
    return Estimate(median(ranked), low=ranked[outer], high=ranked[-1 - outer])


def median_coverage(n: int) -> float:
    """Returns the chance that `median_of` n values holds the true median (0 for a single value)."""
    return 1 - 2 * _tail(n, _outer_rank(n))


def percentiles(values: list[float], levels: tuple[int, ...]) -> list[float | None]:
    """Returns percentiles with linear interpolation; None without values."""
    if not values:
        return [None] * len(levels)
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return [cuts[level - 1] for level in levels]


def _outer_rank(n: int) -> int:
    """Returns how many of the ranked values may be left out on either side."""
    rank = 0
    while rank + 1 <= (n - 1) // 2 and 1 - 2 * _tail(n, rank + 1) >= LEVEL:
        rank += 1
    return rank


def _tail(n: int, rank: int) -> float:
    """Returns the chance that at most `rank` of n values are below the true median."""
    return sum(comb(n, i) for i in range(rank + 1)) / 2.0**n


def uniform_band(n: int, false_alarm: float) -> float:
    """Returns how far n uniform draws' distribution function may be from the true one (Massart 1990)."""
    return sqrt(log(2 / false_alarm) / (2 * n))
