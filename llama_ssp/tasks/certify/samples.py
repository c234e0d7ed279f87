"""Tests whether two samplers draw their texts from one distribution; the samplers are here, too.

A permutation test compares tokens, n-grams and beginnings. Under one distribution the texts of a prompt could
swap their labels. So the share of shuffled labels that differ as much as the true ones is a p value: it
bounds the false alarms, however few texts there are.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from llama_ssp.config import CertifyConf, SamplingConfig
from llama_ssp.pair.requests import requests_of, require_numbers
from llama_ssp.pair.run import Run, RunSettings
from llama_ssp.speculative.array_ops import Array
from llama_ssp.speculative.engine import Observer, RankEngine
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts
from llama_ssp.speculative.verification import BlockRule, DraftBlock
from llama_ssp.tasks.certify.decisions import RoundObserver
from llama_ssp.tasks.certify.verdict import Check, control, judged

Texts = Sequence[Sequence[int]]
Table = NDArray[np.float32]
END = -1  # pads a text that ended before the others
RAREST = 5  # tokens or n-grams that are rarer than this in both sets together are pooled
FAMILIES: dict[str, Callable[[list[int]], list[tuple[int, ...]]]] = {
    "tokens by position": lambda text: list(enumerate(text)),
    "n-grams": lambda text: [tuple(text[i : i + n]) for n in (2, 3) for i in range(len(text) - n + 1)],
    "beginnings": lambda text: [tuple(text[: i + 1]) for i in range(len(text))],
}


class TextSampler(Protocol):
    """Continues prompts. A black box, such as another library's `generate`, is judged by its texts alone."""

    name: str

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        """Returns the new tokens of each prompt, its end token included; each prompt draws for itself."""


@dataclass(kw_only=True)
class EngineSampler:
    """Samples with an engine, in timed batches of `settings.rows` texts at most; `watch` sees its rounds."""

    name: str
    engine: RankEngine
    sampling: SamplingConfig
    settings: RunSettings
    advance: Callable[[int], None] = lambda _: None  # is called with the number of texts after each batch
    watch: RoundObserver | None = None
    counts: Counts = field(default_factory=Counts)
    rows: int = 0  # of the largest batch so far

    def __post_init__(self) -> None:
        self.engine.observer = self.watch or Observer()

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        """Returns the new tokens of each prompt. Raises ModelError for logits that are not numbers."""
        rows = self.settings.rows
        result: list[list[int]] = []
        for first in range(0, len(prompts), rows):
            requests = requests_of(prompts[first : first + rows], self.sampling, max_new_tokens)
            text_run = Run(self.engine, requests, self.settings, self.counts)
            for _ in text_run.rounds():
                pass
            replies = text_run.replies.values()
            require_numbers(*(reply.outcome for reply in replies))
            result += [reply.token_ids for reply in replies]
            self.rows = max(self.rows, len(requests))
            self.advance(len(requests))
        return result


class KeepsEveryDraft(BlockRule):
    """Keeps every draft: the wrong rule that the negative control samples with."""

    name = "keeps every draft"

    def accept_chances(self, block: DraftBlock) -> Array:
        column_K = torch.arange(block.k, device=block.count_B.device)
        return (column_K < block.count_B[:, None]).to(torch.float64)


class Samplers(NamedTuple):
    """Holds the sampler that is judged, the regular one, and the control, which is wrong on purpose."""

    subject: TextSampler
    regular: TextSampler
    wrong: TextSampler | None


def check_samples(
    samplers: Samplers, prompts: Sequence[Prompt], task: CertifyConf, seed: int, level: float, leads: bool
) -> list[Check]:
    """Compares the subject's texts, and a wrong rule's, with regular ones. Every rank samples, one judges."""

    def drawn(sampler: TextSampler, word: str) -> list[list[list[int]]]:
        """Samples each prompt's texts, with random streams of their own: two samples must not share one."""
        copies = [
            replace(prompt, id=f"{prompt.id} {word} {number}")
            for prompt in prompts
            for number in range(task.samples)
        ]
        texts = sampler.texts(copies, task.max_new_tokens)
        return [texts[first : first + task.samples] for first in range(0, len(texts), task.samples)]

    subject, regular, wrong = samplers
    assert wrong is not None
    regular_texts = drawn(regular, "regular")
    subject_texts = drawn(subject, "subject")
    wrong_texts = drawn(wrong, "wrong")
    if not leads:
        return []

    length = task.max_new_tokens
    count = task.samples * len(prompts)
    p_values = compare(regular_texts, subject_texts, length, seed)
    least = min(p_values.values())
    failing = level / len(FAMILIES)  # each family has its part of the false alarms
    figures: dict[str, Any] = {
        "texts_each": count,
        "tokens_a_text": length,
        "p_values": p_values,
        "p_value_that_fails": failing,
    }
    fault = f"the texts differ from regular ones: p value {least:.2g}, {count} texts each"
    # Differences of a distribution function that are smaller than this may be chance (Massart 1990).
    detectable = min(1.0, math.sqrt(math.log(2 / level) / count))
    right = (
        f"no difference from regular texts: least p value {least:.2g} of {count} texts each; "
        f"less than {detectable:.0%} would not show"
    )
    two_samples = judged("two samples", [(least <= failing, fault)], right, figures)

    wrong_p_values = compare(regular_texts, wrong_texts, length, seed)
    wrong_least = min(wrong_p_values.values())
    against = f"from regular sampling (p value {wrong_least:.2g})"
    negative_control = control(wrong.name, wrong_least <= failing, against, {"p_values": wrong_p_values})
    return [two_samples, negative_control]


def compare(
    regular: Sequence[Texts], others: Sequence[Texts], length: int, seed: int, shuffles: int = 20_000
) -> dict[str, float]:
    """Compares two sets of texts by prompt, of at most `length` tokens; returns p values by family.

    Shapes: L labellings, the true one and then its shuffles; T texts of both sets; F features.
    """
    statistics_L = {family: np.zeros(shuffles + 1) for family in FAMILIES}
    random = np.random.Generator(np.random.Philox(seed))
    for regular_texts, other_texts in zip(regular, others, strict=True):
        texts = [[*text, *[END] * (length - len(text))] for text in (*regular_texts, *other_texts)]
        is_regular_T = np.arange(len(texts)) < len(regular_texts)
        shuffled_LT = random.permuted(np.tile(is_regular_T, (shuffles, 1)), axis=1)
        label_LT = np.concatenate([is_regular_T[None], shuffled_LT])
        for family, features in FAMILIES.items():
            # The sum over the features of (excess over the label's share)^2 / sqrt(count). Divided by the
            # count itself, as in a chi-square test, many rare features would hide the frequent ones.
            table_TF = _table([features(text) for text in texts])
            count_F = table_TF.sum(0)
            share = label_LT[0].mean()
            excess_LF = label_LT.astype(np.float32) @ table_TF - share * count_F
            statistics_L[family] += excess_LF**2 @ (1 / np.sqrt(np.maximum(count_F, 1)))

    # The labels are among their own shuffles; rounding must not separate equal statistics.
    return {
        family: float(np.mean(statistic_L >= statistic_L[0] * (1 - 1e-6)))
        for family, statistic_L in statistics_L.items()
    }


def _table(features_of_texts: list[list[tuple[int, ...]]]) -> Table:
    """Counts how often each text has each feature, (T, F); the last column pools the rare ones."""
    counts = [Counter(features) for features in features_of_texts]
    totals = sum(counts, Counter[tuple[int, ...]]())
    frequent = [feature for feature, total in totals.items() if total >= RAREST]
    columns = {feature: column for column, feature in enumerate(frequent)}

    table_TF = np.zeros((len(counts), len(columns) + 1), dtype=np.float32)
    for row, count in enumerate(counts):
        for feature, times in count.items():
            table_TF[row, columns.get(feature, len(columns))] += times
    return table_TF
