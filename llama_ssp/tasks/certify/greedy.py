"""Greedy texts, speculative and plain: are they equal, and is a difference only rounding?

A model that is fed K+1 tokens at once rounds differently from one that is fed them one by one, so in bf16 or
fp16 two tokens of nearly equal logits may trade places. This module tells rounding from every other cause:

1. The band d: the largest |logit fed singly - logit fed K+1 at a time| over the texts' positions. Prompts are
   prefilled as in a run, and rows are fed in a batch and alone. Epsilon is twice the band: if plain decoding
   prefers a, verification prefers b, and no logit differs by more than d between the two, then a and b are at
   most 2d apart in either.
2. The replay: every token of the speculative text must be within epsilon of the best when that text is fed
   singly. Where the two texts part, plain decoding's token must be within epsilon, too.

Two kinds of faults are not seen: one whose tokens all stay within epsilon of the best; and one of the block
pass itself, such as a wrong mask, which gives blocks wrong logits, hence a wide band, in which everything
counts as rounding. So the band is reported: look at it, too.

The logits are the model's own, without penalties, biases, bans or a minimum length. These move the argmax:
texts written with them are found unexplained where a token is another for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest

import numpy as np
from torch import Tensor

from llama_ssp.config import CertifyConf
from llama_ssp.models.interface import Model
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.certify.law import Text, fed
from llama_ssp.tasks.certify.samples import Samplers
from llama_ssp.tasks.certify.verdict import Check, control, judged

Texts = Sequence[Sequence[int]]
Finding = Enum("Finding", ["equal", "near_tie", "unexplained"])  # what is said of a text, best to worst


@dataclass(frozen=True)
class TextReport:
    """One prompt's finding, and its evidence.

    `fork` is the first position at which the texts differ, counted from the first generated token. `margins`
    has a number for each speculative token: how far its logit is below the best one of its position; at the
    fork, the larger of its margin and that of plain decoding's token. Where one text is the beginning of the
    other, an infinite margin is appended.
    """

    fork: int | None
    margins: list[float]
    finding: Finding


@dataclass(frozen=True)
class GreedyReport:
    """All prompts' findings, and how far rounding moves a logit between single tokens and blocks."""

    band: float
    positions: int
    texts: tuple[TextReport, ...]

    @property
    def epsilon(self) -> float:
        """Two tokens this close may trade places between plain decoding and verification."""
        return 2 * self.band

    @property
    def verdict(self) -> Finding:
        """The worst finding."""
        return max((text.finding for text in self.texts), key=list(Finding).index, default=Finding.equal)

    def count(self, finding: Finding) -> int:
        return sum(text.finding is finding for text in self.texts)


def check_greedy_texts(
    model: Model | None, samplers: Samplers, k: int, prompts: Sequence[Prompt], task: CertifyConf, chunk: int
) -> list[Check]:
    """Compares greedy texts with and without speculation; a wrong rule's must differ. All ranks call it."""
    subject, regular, wrong = samplers
    plain_texts = regular.texts(prompts, task.greedy_tokens)
    subject_texts = subject.texts(prompts, task.greedy_tokens)
    wrong_texts = wrong.texts(prompts, task.greedy_tokens) if wrong is not None else []
    if model is None:
        return []

    rows = min(task.batch_size, len(prompts))
    report = check_greedy(model, list(prompts), plain_texts, subject_texts, k, rows, chunk)
    counts = {finding: report.count(finding) for finding in Finding}
    figures = {
        "texts": len(prompts),
        **{f"texts_{finding.name}": count for finding, count in counts.items()},
        "rounding_band_logit": report.band,
        "positions_of_band": report.positions,
    }
    findings = ", ".join(f"{count} {finding.name.replace('_', ' ')}" for finding, count in counts.items())
    says = f"of {len(prompts)} greedy texts: {findings}"
    checks = [judged("greedy", [(report.verdict is Finding.unexplained, says)], says, figures)]

    if wrong is not None:
        wrong_report = check_greedy(model, list(prompts), plain_texts, wrong_texts, k, rows, chunk)
        differs = wrong_report.verdict is Finding.unexplained
        checks.append(control(wrong.name, differs, "from greedy decoding", {}))
    return checks


def check_greedy(
    model: Model, prompts: list[Prompt], plain: Texts, drafted: Texts, k: int, rows: int = 8, chunk: int = 512
) -> GreedyReport:
    """Compares plain and speculative texts, of at most `k` drafts a round, by running the model again."""
    texts = [
        Text((*prompt.token_ids, *new), len(prompt.token_ids), len(new))
        for new_texts in (drafted, plain)
        for prompt, new in zip(prompts, new_texts, strict=True)
    ]
    singly: list[Tensor] = []  # logits of each text, fed token by token, (W, V)
    moved = [0.0]
    for first in range(0, len(texts), rows):
        batch = texts[first : first + rows]
        order = range(len(batch))
        by_token = fed(model, batch, order, width=1, rows=rows, chunk=chunk)
        by_block = fed(model, batch, order, width=k + 1, rows=rows, chunk=chunk)
        alone = fed(model, batch, order, width=k + 1, rows=1, chunk=chunk)
        for token_WV, block_WV, alone_WV in zip(by_token, by_block, alone, strict=True):
            moved.append(float((block_WV - token_WV).abs().max()))
            moved.append(float((alone_WV - token_WV).abs().max()))
        singly += by_token

    band = float(np.max(moved))
    reports = [
        _text_report(ours, theirs, logit_WV, band)
        for ours, theirs, logit_WV in zip(drafted, plain, singly[: len(prompts)], strict=True)
    ]
    return GreedyReport(band, sum(map(len, singly)), tuple(reports))


def _text_report(drafted: Sequence[int], plain: Sequence[int], logit_WV: Tensor, band: float) -> TextReport:
    """Explains a speculative text by its own logits, fed token by token, and the band of rounding."""
    # The first position at which they differ, or one has ended.
    fork = next((at for at, (a, b) in enumerate(zip_longest(plain, drafted)) if a != b), None)
    margins = list[float]()
    for at, token in enumerate(drafted):
        tokens = [token]
        if at == fork:
            tokens += plain[at : at + 1]
        margins.append(float((logit_WV[at].max() - logit_WV[at][tokens]).max()))
    if fork == min(len(drafted), len(plain)):
        margins.append(math.inf)

    # NaN is within no band.
    if not math.isfinite(band) or not all(margin <= 2 * band for margin in margins):
        finding = Finding.unexplained
    elif fork is None:
        finding = Finding.equal
    else:
        finding = Finding.near_tie
    return TextReport(fork, margins, finding)
