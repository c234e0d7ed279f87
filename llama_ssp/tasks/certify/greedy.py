"""Greedy texts, speculative and plain: are they equal, and is a difference only rounding?

A model that is fed K+1 tokens at once rounds differently from one that is fed them one by one, so in bf16 or
fp16 two tokens of nearly equal logits may trade places. This module tells rounding from every other cause:

1. The band: the largest |logit fed singly - logit fed K+1 at a time| over the texts' positions, prompts
   prefilled as in a run, rows in a batch and alone; epsilon is twice that. If plain decoding prefers a,
   verification prefers b, and no logit differs by more than d between the two, then a and b are at most 2d
   apart in either.
2. The replay: every token of the speculative text must be within epsilon of the best when that text is fed
   singly; where the two texts part, so must plain decoding's token.

Faults that move no token out of the band are not seen, nor those that widen it: blocks with wrong logits.
The logits are bare: of texts written with penalties, biases, bans or a minimum length, which move the argmax,
it can only say that they are unexplained.
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
from llama_ssp.tasks.certify.law import fed
from llama_ssp.tasks.certify.samples import Samplers
from llama_ssp.tasks.certify.verdict import Check, control, judged

Texts = Sequence[Sequence[int]]
Finding = Enum("Finding", ["equal", "near_tie", "unexplained"])  # what is said of a text, best to worst


@dataclass(frozen=True)
class TextReport:
    """One prompt's finding, and its evidence.

    `fork` is the first position at which the texts differ, counted from the first generated token. `margins`
    say how far each speculative token is below the best one of its position; at the fork that is of the worse
    of the two tokens, and it is infinite where a text just ends.
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
    order = [regular, subject, *([wrong] if wrong else [])]
    plain, *others = [sampler.texts(prompts, task.greedy_tokens) for sampler in order]
    if model is None:
        return []
    rows = min(task.batch_size, len(prompts))
    reports = [check_greedy(model, list(prompts), plain, texts, k, rows, chunk) for texts in others]
    report = reports[0]
    counts = {finding: report.count(finding) for finding in Finding}
    figures = {
        "texts": len(prompts),
        **{f"texts_{finding.name}": count for finding, count in counts.items()},
        "rounding_band_logit": report.band,
        "positions_of_band": report.positions,
    }
    said = ", ".join(f"{count} {finding.name.replace('_', ' ')}" for finding, count in counts.items())
    says = f"of {len(prompts)} greedy texts: {said}"
    checks = [judged("greedy", [(report.verdict is Finding.unexplained, says)], says, figures)]
    if wrong is not None:
        differs = reports[1].verdict is Finding.unexplained
        checks.append(control(wrong.name, differs, "from greedy decoding", {}))
    return checks


def check_greedy(
    model: Model, prompts: list[Prompt], plain: Texts, drafted: Texts, k: int, rows: int = 8, chunk: int = 512
) -> GreedyReport:
    """Compares plain and speculative texts, of at most `k` drafts a round, by running the model again."""
    texts = [
        ((*prompt.token_ids, *new), len(prompt.token_ids), len(new))
        for ours in (drafted, plain)
        for prompt, new in zip(prompts, ours, strict=True)
    ]
    singly: list[Tensor] = []  # logits of each text, fed token by token
    moved, positions = [0.0], 0
    for first in range(0, len(texts), rows):
        part = texts[first : first + rows]
        sizes = (1, rows), (k + 1, rows), (k + 1, 1)
        ways = [fed(model, part, range(len(part)), *size, chunk) for size in sizes]
        for singly_WV, *block_2WV in zip(*ways, strict=True):
            moved += [float((block_WV - singly_WV).abs().max()) for block_WV in block_2WV]
            positions += len(singly_WV)
        singly += ways[0]
    band = float(np.max(moved))
    reports = []
    for row, (ours, theirs) in enumerate(zip(drafted, plain, strict=True)):
        # The first position at which they differ, or one has ended.
        fork = next((at for at, (a, b) in enumerate(zip_longest(theirs, ours)) if a != b), None)
        margins = list[float]()
        for at, token in enumerate(ours):
            logit_V = singly[row][at]
            tokens = [token, *(theirs[at : at + 1] if at == fork else [])]
            margins.append(float((logit_V.max() - logit_V[tokens]).max()))
        if fork == min(len(ours), len(theirs)):
            margins.append(math.inf)
        # NaN is within no band.
        if not math.isfinite(band) or not all(margin <= 2 * band for margin in margins):
            finding = Finding.unexplained
        else:
            finding = Finding.equal if fork is None else Finding.near_tie
        reports.append(TextReport(fork, margins, finding))
    return GreedyReport(band, positions, tuple(reports))
