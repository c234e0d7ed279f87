"""Are two sets of texts drawn from one distribution? A permutation test on tokens, n-grams and beginnings.

Under one distribution the texts of a prompt may change their labels freely, so the share of shuffles that
look as different as the labels do is a false-alarm rate that holds at any size. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Texts = Sequence[Sequence[int]]
Features = Callable[[list[int]], list[tuple[int, ...]]]
Table = NDArray[np.float32]
Rows = NDArray[np.int64]
END = -1  # pads a text that ended before the others
FEWEST = 5  # tokens or n-grams that are rarer than this in all sets together are pooled
SHUFFLES = 20_000
PART = 2048  # shuffles that are weighted at once
MIXES = 100  # random mixtures that a share of wrong texts is tried with
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
POWER = 0.95
FAMILIES: dict[str, Features] = {
    "tokens by position": lambda text: list(enumerate(text)),
    "n-grams": lambda text: [tuple(text[i : i + n]) for n in (2, 3) for i in range(len(text) - n + 1)],
    "beginnings": lambda text: [tuple(text[: i + 1]) for i in range(len(text))],
}


@dataclass(frozen=True)
class Comparison:
    """For each family its p value, and the statistic beyond which it would reject."""

    p_values: dict[str, float]
    critical: dict[str, float]
    level: float

    @property
    def rejects(self) -> bool:
        return any(p <= self.level for p in self.p_values.values())


class Samples:
    """Regular texts, the subject's and those of a wrong sampler, for the same prompts."""

    def __init__(
        self, regular: Sequence[Texts], subject: Sequence[Texts], wrong: Sequence[Texts], length: int
    ) -> None:
        self._prompts = [
            _PromptTexts(*(np.asarray([[*t, *[END] * (length - len(t))] for t in texts]) for texts in three))
            for three in zip(regular, subject, wrong, strict=True)
        ]

    def compare(self, others: str, false_alarm: float, seed: int, shuffles: int = SHUFFLES) -> Comparison:
        """The regular texts with those of the `others`: "subject" or "wrong"."""
        level = false_alarm / len(FAMILIES)
        total = {name: np.zeros(shuffles + 1) for name in FAMILIES}
        random = np.random.Generator(np.random.Philox(seed))
        for prompt in self._prompts:
            for name, statistic in prompt.statistics(getattr(prompt, others), random, shuffles).items():
                total[name] += statistic
        # The labels are among their own shuffles; rounding must not separate equal statistics.
        p_values = {name: float(np.mean(t >= t[0] * (1 - 1e-6))) for name, t in total.items()}
        rank = max(1, int(level * (shuffles + 1)))
        return Comparison(p_values, {name: float(np.sort(t[1:])[-rank]) for name, t in total.items()}, level)

    def smallest_share(self, found: Comparison, seed: int) -> float | None:
        """The least share of wrong texts among the subject's that nearly always shows; None if none does."""
        random = np.random.Generator(np.random.Philox(seed))
        for share in SHARES:
            if sum(self._sees(share, found, random) for _ in range(MIXES)) >= POWER * MIXES:
                return share
        return None

    def _sees(self, share: float, found: Comparison, random: np.random.Generator) -> bool:
        total = dict.fromkeys(FAMILIES, 0.0)
        for prompt in self._prompts:
            for name, statistic in prompt.statistics(prompt.mixed(share, random), random, 0).items():
                total[name] += float(statistic[0])
        return any(total[name] > found.critical[name] for name in FAMILIES)


class _PromptTexts:
    """One prompt's texts, regular ones first, and how often each has each feature."""

    def __init__(self, regular: Rows, subject: Rows, wrong: Rows) -> None:
        texts = np.concatenate([regular, subject, wrong])
        ends = len(regular), len(regular) + len(subject)
        self.regular, self.subject, self.wrong = np.split(np.arange(len(texts)), ends)
        self._tables = {name: _table(features, texts.tolist()) for name, features in FAMILIES.items()}

    def statistics(
        self, other: Rows, random: np.random.Generator, shuffles: int
    ) -> dict[str, NDArray[np.float64]]:
        """Of each family, for the regular texts and the others: as they are labelled, then shuffled."""
        rows = np.concatenate([self.regular, other])
        own = np.arange(len(rows)) < len(self.regular)
        labels = np.concatenate([own[None], random.permuted(np.tile(own, (shuffles, 1)), axis=1)])
        return {name: _statistic(table[rows], labels) for name, table in self._tables.items()}

    def mixed(self, share: float, random: np.random.Generator) -> Rows:
        """The subject's texts, of which a share is replaced by wrong ones."""
        spoiled = random.random(len(self.subject)) < share
        picked = random.choice(self.wrong, len(self.subject), replace=len(self.subject) > len(self.wrong))
        return np.where(spoiled, picked, self.subject)


def _table(features: Features, texts: list[list[int]]) -> Table:
    """How often each text has each feature; rare features are pooled."""
    counts = [Counter(features(text)) for text in texts]
    pooled: Counter[tuple[int, ...]] = Counter()
    for own in counts:
        pooled.update(own)
    names = [name for name, count in pooled.items() if count >= FEWEST]
    column = {name: number for number, name in enumerate(names)}
    table = np.zeros((len(texts), len(names) + 1), dtype=np.float32)
    for row, own in enumerate(counts):
        for name, count in own.items():
            table[row, column.get(name, len(names))] += count
    return table


def _statistic(table: Table, labels: NDArray[np.bool_]) -> NDArray[np.float64]:
    """For each labelling, the sum over features of (excess over its share)^2 / sqrt(count).

    Divided by the count itself, as in a chi-square test, many rare features would hide the frequent ones.
    """
    total, share = table.sum(0), labels[0].mean()
    weight = 1 / np.sqrt(np.maximum(total, 1))
    parts = [
        ((labels[first : first + PART].astype(np.float32) @ table - share * total) ** 2 @ weight)
        for first in range(0, len(labels), PART)
    ]
    return np.concatenate(parts).astype(np.float64)
