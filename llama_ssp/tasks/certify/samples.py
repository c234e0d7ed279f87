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

from llama_ssp.config import CertifyConf
from llama_ssp.pair.batches import TimedRun, require_numbers, texts_of
from llama_ssp.speculative.array_ops import Array
from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.engine import Observer, RankEngine
from llama_ssp.speculative.generate import Limits
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


@dataclass
class EngineSampler:
    """Samples with an engine, in timed batches of `batch_size` texts at most; `watch` sees its rounds."""

    name: str
    engine: RankEngine
    lookahead: Callable[[int], DraftLength]
    ends: frozenset[int]
    batch_size: int
    advance: Callable[[int], None] = lambda _: None  # is called with the number of texts after each batch
    watch: RoundObserver | None = None
    counts: Counts = field(default_factory=Counts)
    rows: int = 0  # of the largest batch so far

    def __post_init__(self) -> None:
        self.engine.observer = self.watch or Observer()

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        result: list[list[int]] = []
        for first in range(0, len(prompts), self.batch_size):
            batch = list(prompts[first : first + self.batch_size])
            run = TimedRun(self.engine, batch, max_new_tokens, self.counts)
            state = run.state
            for _ in run.rounds(Limits(max_new_tokens, self.ends), self.lookahead(state.rows)):
                pass
            self.rows = max(self.rows, state.rows)
            require_numbers(*texts_of(state))
            result += [state.generated(row) for row in range(state.rows)]
            self.advance(state.rows)
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
        names = [f"{prompt.id} {word} {number}" for prompt in prompts for number in range(task.samples)]
        copies = [replace(prompts[n // task.samples], id=name) for n, name in enumerate(names)]
        texts = sampler.texts(copies, task.max_new_tokens)
        return [texts[first : first + task.samples] for first in range(0, len(texts), task.samples)]

    subject, regular, wrong = samplers
    assert wrong is not None
    regular_texts, subject_texts = drawn(regular, "regular"), drawn(subject, "subject")
    wrong_texts = drawn(wrong, "wrong")
    if not leads:
        return []
    length, texts = task.max_new_tokens, task.samples * len(prompts)
    p_values, of_wrong = (compare(regular_texts, own, length, seed) for own in (subject_texts, wrong_texts))
    least, of_a_family = min(p_values.values()), level / len(FAMILIES)
    least_of_wrong = min(of_wrong.values())
    figures: dict[str, Any] = {"texts_each": texts, "tokens_a_text": length}
    figures |= {"p_values": p_values, "p_value_that_fails": of_a_family}
    fault = f"the texts differ from regular ones: p value {least:.2g}, {texts} texts each"
    # Differences of a distribution function that are smaller than this may be chance (Massart 1990).
    detectable = min(1.0, math.sqrt(math.log(2 / level) / texts))
    right = f"no difference from regular texts: least p value {least:.2g} of {texts} texts each; "
    right += f"less than {detectable:.0%} would not show"
    against = f"from regular sampling (p value {least_of_wrong:.2g})"
    return [
        judged("two samples", [(least <= of_a_family, fault)], right, figures),
        control(wrong.name, least_of_wrong <= of_a_family, against, {"p_values": of_wrong}),
    ]


def compare(
    regular: Sequence[Texts], others: Sequence[Texts], length: int, seed: int, shuffles: int = 20_000
) -> dict[str, float]:
    """Compares two sets of texts by prompt, of at most `length` tokens; returns p values by family."""
    total = {name: np.zeros(shuffles + 1) for name in FAMILIES}
    random = np.random.Generator(np.random.Philox(seed))
    for ours, theirs in zip(regular, others, strict=True):
        rows = [[*text, *[END] * (length - len(text))] for text in (*ours, *theirs)]
        is_ours = np.arange(len(rows)) < len(ours)
        labels = np.concatenate([is_ours[None], random.permuted(np.tile(is_ours, (shuffles, 1)), axis=1)])
        for name, features in FAMILIES.items():
            # The sum over the features of (excess over the label's share)^2 / sqrt(count). Divided by the
            # count itself, as in a chi-square test, many rare features would hide the frequent ones.
            table = _table([features(row) for row in rows])
            count, share = table.sum(0), labels[0].mean()
            excess = labels.astype(np.float32) @ table - share * count
            total[name] += excess**2 @ (1 / np.sqrt(np.maximum(count, 1)))
    # The labels are among their own shuffles; rounding must not separate equal statistics.
    return {name: float(np.mean(t >= t[0] * (1 - 1e-6))) for name, t in total.items()}


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
