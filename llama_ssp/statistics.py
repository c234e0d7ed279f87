"""Shares of right answers and their differences, with intervals. Closed form, no torch, no scipy."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and the interval that holds the true one, at the level asked for."""

    value: float
    low: float
    high: float

    def includes(self, value: float) -> bool:
        return self.low <= value <= self.high


def wilson(right: int, n: int, level: float = LEVEL) -> Estimate:
    """A share and its score interval (Wilson 1927), which also holds near 0 and 1.

    The Wald interval has no width at a score of 0 or 100 %, which a few prompts often reach.
    """
    if not 0 <= right <= n or not n:
        raise ValueError(f"{right} of {n} is no share")
    share, z = right / n, _quantile(level)
    whole = 1 + z * z / n
    middle = (share + z * z / (2 * n)) / whole
    reach = z / whole * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if right == 0 else middle - reach  # exactly so; the sum leaves a rounding error
    high = 1.0 if right == n else middle + reach
    return Estimate(share, low, high)


def paired_difference(gained: int, lost: int, n: int, level: float = LEVEL) -> Estimate:
    """How much the share of right answers changes between two runs on the same n prompts.

    `gained` prompts are right in the second run alone, `lost` in the first alone. The interval is that
    of Bonett and Price (2012): a Wald interval after one more pair of each kind. Two runs that never
    differ get an interval of about 2.8 / n to both sides, where Wald's own would claim certainty.
    """
    if min(gained, lost) < 0 or gained + lost > n or not n:
        raise ValueError(f"{gained} gained and {lost} lost of {n} are no counts")
    more, less, whole = (gained + 1) / (n + 2), (lost + 1) / (n + 2), n + 2
    middle = more - less
    reach = _quantile(level) * sqrt((more + less - middle**2) / whole)
    return Estimate((gained - lost) / n, max(-1.0, middle - reach), min(1.0, middle + reach))


def _quantile(level: float) -> float:
    return NormalDist().inv_cdf((1 + level) / 2)
