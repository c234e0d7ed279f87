"""Are two sets of texts drawn from one distribution? A permutation test on tokens, n-grams and beginnings.

Under one distribution the texts of a prompt may change their labels freely, so the share of shuffles that
look as different as the labels do is a false-alarm rate that holds at any size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llama_ssp.config import CertifyConf
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.certify.verdict import Check, control, judged
from llama_ssp.tasks.certify.watch import Sampler

Texts = Sequence[Sequence[int]]
Table = NDArray[np.float32]
END = -1  # pads a text that ended before the others
RAREST = 5  # tokens or n-grams that are rarer than this in both sets together are pooled
SHUFFLES = 20_000
PART = 2048  # shuffles that are weighted at once
FAMILIES: dict[str, Callable[[list[int]], list[tuple[int, ...]]]] = {
    "tokens by position": lambda text: list(enumerate(text)),
    "n-grams": lambda text: [tuple(text[i : i + n]) for n in (2, 3) for i in range(len(text) - n + 1)],
    "beginnings": lambda text: [tuple(text[: i + 1]) for i in range(len(text))],
}


def check_samples(
    subject: Sampler, regular: Sampler, wrong: Sampler, prompts: Sequence[Prompt], task: CertifyConf,
    seed: int, level: float, leads: bool,
) -> list[Check]:  # fmt: skip
    """Compares the subject's texts with regular ones, and those of a wrong rule, which must differ from them.

    Every rank samples, the leader judges.
    """
    regular_texts, subject_texts, wrong_texts = (
        _drawn(sampler, word, prompts, task)
        for sampler, word in ((regular, "regular"), (subject, "subject"), (wrong, "wrong"))
    )
    if not leads:
        return []
    length, texts = task.max_new_tokens, task.samples * len(prompts)
    subject_test = compare(regular_texts, subject_texts, length, level, seed)
    wrong_test = compare(regular_texts, wrong_texts, length, level, seed)
    least = min(subject_test.p_values.values())
    figures = {
        "texts_each": texts,
        "tokens_a_text": length,
        "p_values": subject_test.p_values,
        "p_value_that_fails": subject_test.level,
    }
    fault = f"the texts differ from regular ones: p value {least:.2g}, {texts} texts each"
    right = f"no difference from regular texts: least p value {least:.2g} of {texts} texts each"
    against = f"from regular sampling (p value {min(wrong_test.p_values.values()):.2g})"
    return [
        judged("two samples", [(subject_test.rejects, fault)], right, figures),
        control(wrong.name, wrong_test.rejects, against, {"p_values": wrong_test.p_values}),
    ]


def _drawn(
    sampler: Sampler, word: str, prompts: Sequence[Prompt], task: CertifyConf
) -> list[list[list[int]]]:
    """Samples each prompt's texts, with random streams of their own: two samples must not share one."""
    numbers = range(task.samples)
    copies = [replace(prompt, id=f"{prompt.id} {word} {number}") for prompt in prompts for number in numbers]
    texts = sampler.texts(copies, task.max_new_tokens)
    return [texts[first : first + task.samples] for first in range(0, len(texts), task.samples)]


@dataclass(frozen=True)
class Comparison:
    """The p value of each family; a family rejects at the level."""

    p_values: dict[str, float]
    level: float

    @property
    def rejects(self) -> bool:
        return any(p <= self.level for p in self.p_values.values())


def compare(
    regular: Sequence[Texts], others: Sequence[Texts], length: int, false_alarm: float, seed: int,
    shuffles: int = SHUFFLES,
) -> Comparison:  # fmt: skip
    """Compares two sets of texts, each by prompt, of at most `length` tokens."""
    total = {name: np.zeros(shuffles + 1) for name in FAMILIES}
    random = np.random.Generator(np.random.Philox(seed))
    for ours, theirs in zip(regular, others, strict=True):
        rows = [[*text, *[END] * (length - len(text))] for text in (*ours, *theirs)]
        is_ours = np.arange(len(rows)) < len(ours)
        labels = np.concatenate([is_ours[None], random.permuted(np.tile(is_ours, (shuffles, 1)), axis=1)])
        for name, features in FAMILIES.items():
            total[name] += _statistic(_table([features(row) for row in rows]), labels)
    # The labels are among their own shuffles; rounding must not separate equal statistics.
    p_values = {name: float(np.mean(t >= t[0] * (1 - 1e-6))) for name, t in total.items()}
    return Comparison(p_values, false_alarm / len(FAMILIES))


def _table(features: list[list[tuple[int, ...]]]) -> Table:
    """Counts how often each text has each feature; rare features are pooled."""
    counts = [Counter(row) for row in features]
    total = sum(counts, Counter[tuple[int, ...]]())
    column = {name: number for number, name in enumerate(n for n, count in total.items() if count >= RAREST)}
    table = np.zeros((len(counts), len(column) + 1), dtype=np.float32)
    for row, count in enumerate(counts):
        for name, times in count.items():
            table[row, column.get(name, len(column))] += times
    return table


def _statistic(table: Table, labels: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Sums, for each labelling, (excess over its share)^2 / sqrt(count) over the features.

    Divided by the count itself, as in a chi-square test, many rare features would hide the frequent ones.
    """
    total, share = table.sum(0), labels[0].mean()
    weight = 1 / np.sqrt(np.maximum(total, 1))
    parts = [
        ((labels[first : first + PART].astype(np.float32) @ table - share * total) ** 2 @ weight)
        for first in range(0, len(labels), PART)
    ]
    return np.concatenate(parts).astype(np.float64)
