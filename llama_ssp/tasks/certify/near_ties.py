"""Greedy texts of low precision: is a difference from plain decoding only rounding?

A model that is fed K+1 tokens at once rounds differently from one that is fed them one by one, so in bf16 or
fp16 two tokens of nearly equal logits may trade places. Exact speculation can show no other difference, and
this module tells rounding from every other cause:

1. The band: |logit fed singly - logit fed K+1 at a time| over the texts' positions, prompts prefilled as in
   a run, rows in a batch and alone; epsilon is twice the largest. If plain decoding prefers a, verification
   prefers b, and no logit differs by more than d between the two, then a and b are at most 2d apart in
   either.
2. The replay: every token of the speculative text must be within epsilon of the best when that text is fed
   singly; where the two texts part, so must plain decoding's token.

It judges a text from outside, so it sees faults of any kind: of the cache, the masks, the rule. Faults that
move no token out of the band are not seen, nor those that widen the band: blocks with wrong logits.

It uses bare logits: of texts written with penalties, biases, bans or a minimum length, which move the argmax,
it can only say that they are unexplained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llama_ssp.models.interface import Model
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.state import Prompt

Texts = Sequence[Sequence[int]]


class Finding(Enum):
    """What is said of one text, from best to worst."""

    equal = "equal"
    near_tie = "near_tie"
    unexplained = "UNEXPLAINED"


@dataclass(frozen=True)
class Band:
    """How far rounding moves a logit: `narrow`, between single tokens and blocks of `width`."""

    width: int
    positions: int
    narrow: float

    @property
    def epsilon(self) -> float:
        """Two tokens this close may trade places between plain decoding and verification."""
        return 2 * self.narrow


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
    """All prompts' findings."""

    band: Band
    texts: tuple[TextReport, ...]

    @property
    def verdict(self) -> Finding:
        """The worst finding."""
        return max((text.finding for text in self.texts), key=list(Finding).index, default=Finding.equal)

    def count(self, finding: Finding) -> int:
        return sum(text.finding is finding for text in self.texts)


def check_greedy(
    model: Model, prompts: Sequence[Prompt], plain: Texts, speculative: Texts, k: int, *,
    rows: int = 8, chunk: int = 512,
) -> GreedyReport:  # fmt: skip
    """Compares the tokens that plain and speculative decoding with at most `k` drafts gave each prompt.

    The model is run again, with the runs' batch size (`rows`) and prefill `chunk`.
    """
    starts = [len(prompt.token_ids) for prompt in prompts]
    texts = [
        [*prompt.token_ids, *new]
        for ours in (speculative, plain)
        for prompt, new in zip(prompts, ours, strict=True)
    ]
    forks = [first_difference(a, b) for a, b in zip(plain, speculative, strict=True)]
    margins: list[list[float]] = [[] for _ in prompts]
    distances, positions = [0.0], 0
    for row, single_WV, *others in _ways(model, texts, starts * 2, k + 1, rows, chunk):
        distances += [float((other_WV - single_WV).abs().max()) for other_WV in others]
        positions += len(single_WV)
        if row < len(prompts):
            for logit_V in single_WV[: len(speculative[row]) - len(margins[row])]:
                at = len(margins[row])
                tokens = [speculative[row][at], *(plain[row][at : at + 1] if at == forks[row] else [])]
                margins[row].append(float((logit_V.max() - logit_V[tokens]).max()))
    band = Band(k + 1, positions, largest_of(distances))
    reports = []
    for row, fork in enumerate(forks):
        if fork == min(len(plain[row]), len(speculative[row])):
            margins[row].append(math.inf)
        finding = finding_of(fork, margins[row], band)
        reports.append(TextReport(fork, margins[row], finding))
    return GreedyReport(band, tuple(reports))


def _ways(
    model: Model, texts: Texts, starts: list[int], width: int, rows: int, chunk: int
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """A text's number and the logits of its next positions, (W, V), until all are fed: singly, in blocks,
    and in blocks without other rows."""
    for first in range(0, len(texts), rows):
        batch, prompts = texts[first : first + rows], starts[first : first + rows]
        singly, in_blocks = (Feeder(model, batch, prompts, chunk) for _ in range(2))
        alone = [Feeder(model, [text], [start], chunk) for text, start in zip(batch, prompts, strict=True)]
        while not in_blocks.done:
            blocks = in_blocks.feed(width)
            steps = [singly.feed(1) for _ in range(max(map(len, blocks)))]
            for row, block_WV in enumerate(blocks):
                if len(block_WV):
                    single_WV = torch.cat([step[row] for step in steps])
                    yield first + row, single_WV, block_WV, alone[row].feed(width)[0]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two texts differ, or one has ended; None if they are equal."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


class Feeder:
    """Feeds finished texts to a model, and returns the logits of each position."""

    def __init__(self, model: Model, texts: Texts, starts: Sequence[int], chunk: int) -> None:
        """Every prompt, the first `starts` tokens, is prefilled as in a run, without its last token."""
        self._lengths = [len(text) for text in texts]
        self._token_BS = pad_sequence([torch.tensor(text) for text in texts], True).to(model.device)
        self._runner = ModelRunner(model, chunk)
        self._runner.start(len(texts), max(self._lengths))
        self._runner.prefill(self._token_BS, [start - 1 for start in starts])

    @property
    def done(self) -> bool:
        return self._runner.cached == self._lengths

    def feed(self, width: int) -> list[Tensor]:
        """The logits of each row's next `width` positions, (W, V); fewer at a text's end, fp32 or wider."""
        cached = self._runner.cached
        ends = [min(c + width, n) for c, n in zip(cached, self._lengths, strict=True)]
        count = [e - c for e, c in zip(ends, cached, strict=True)]
        logit_BWV = self._runner.logits(self._token_BS, ends, count)
        wide = torch.promote_types(logit_BWV.dtype, torch.float32)
        return [logit_BWV[row, :n].to(wide) for row, n in enumerate(count)]


def finding_of(fork: int | None, margins: list[float], band: Band) -> Finding:
    """What a fork and margins amount to under a band. NaN is within no band."""
    if not math.isfinite(band.narrow) or not all(margin <= band.epsilon for margin in margins):
        return Finding.unexplained
    return Finding.equal if fork is None else Finding.near_tie


def largest_of(values: list[float]) -> float:
    """The maximum; NaN if there is one (which `max` would pass over)."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)
