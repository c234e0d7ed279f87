"""Greedy texts of low precision: is a difference from plain decoding only rounding?

A model that is fed K+1 tokens at once rounds differently from one that is fed them one by one, so in bf16 or
fp16 two tokens of nearly equal logits may trade places. Exact speculation can show no other difference, and
this module tells that one from every other:

1. The band: |logit fed singly - logit fed K+1 at a time| over many positions, prompts prefilled as in a run,
rows
   in a batch and alone; epsilon is twice the largest. If plain decoding prefers a, verification prefers b,
   and no logit differs by more than d between the two, then a and b are at most 2d apart in either.
2. The fork: where two texts part, both tokens must be within epsilon of the best, fed singly. If there is a
wide
   (fp32) copy of the model, it judges too: within twice the largest difference between its logits and the
   narrow model's, by the same argument.
3. The replay: every token of the speculative text must be within epsilon of the best when that text is fed
singly.
   This covers what follows the first fork.

It judges a text from outside, so it sees faults of any kind: of the cache, the masks, the rule. A fault that
makes a block's logits wrong would widen the band and so excuse itself; the wide copy, for which rounding is
no excuse, must therefore give blocks and single tokens the same logits. Faults that move no token out of the
band are not seen, nor faults of this module.

It uses bare logits: of texts written with penalties, biases, bans or a minimum length, which move the argmax,
it can only say that they are unexplained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from llama_ssp.speculative.model_runner import Model, ModelRunner
from llama_ssp.speculative.state import Prompt

WIDE_TOLERANCE = 1e-3  # of the largest logit: how much rounding may move those of the wide copy
Texts = Sequence[Sequence[int]]


class Finding(Enum):
    """What is said of one text, from best to worst."""

    equal = "equal"
    near_tie = "near_tie"
    unexplained = "UNEXPLAINED"


@dataclass(frozen=True)
class Band:
    """How far rounding moves a logit.

    `narrow`: between single tokens and blocks of `width`; `wide`: between the model and its wide copy;
    `wide_narrow`: between single tokens and blocks in the wide copy; `largest`: the largest logit there.
    """

    width: int
    positions: int
    narrow: float
    wide: float | None = None
    wide_narrow: float = 0.0
    largest: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether the measured differences can be rounding."""
        return math.isfinite(self.narrow) and self.wide_narrow <= WIDE_TOLERANCE * self.largest

    @property
    def epsilon(self) -> float:
        """Two tokens this close may trade places between plain decoding and verification."""
        return 2 * self.narrow

    @property
    def wide_epsilon(self) -> float | None:
        """Two tokens this close in the wide copy may trade places in the narrow model."""
        return None if self.wide is None else 2 * self.wide


@dataclass(frozen=True)
class Fork:
    """Where two texts part, counted from the first generated token; None stands for an end.

    A margin is how far the worse of the two tokens is below the best: infinite where a text just ends.
    """

    position: int
    plain: int | None
    speculative: int | None
    margin: float
    wide_margin: float | None


@dataclass(frozen=True)
class Replay:
    """The token of the speculative text that is furthest below the best one of its position."""

    position: int
    token: int
    margin: float


@dataclass(frozen=True)
class TextReport:
    """One prompt's finding, and its evidence."""

    prompt_id: str
    finding: Finding
    fork: Fork | None
    replay: Replay | None


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
    wide: Model | None = None, positions: int = 1000, rows: int = 8, chunk: int = 512,
) -> GreedyReport:  # fmt: skip
    """Compares the tokens that plain and speculative decoding with at most `k` drafts gave each prompt.

    The model is run again, with the runs' batch size (`rows`) and prefill `chunk`.
    """
    starts = [len(prompt.token_ids) for prompt in prompts]
    shown, texts = (
        [[*prompt.token_ids, *new] for prompt, new in zip(prompts, ours, strict=True)]
        for ours in (plain, speculative)
    )
    sizes = {"rows": rows, "chunk": chunk}
    band = noise_band(model, [*shown, *texts], starts * 2, k + 1, wide=wide, positions=positions, **sizes)
    forks = [first_difference(a, b) for a, b in zip(plain, speculative, strict=True)]
    judged = _judge(model, texts, starts, plain, forks, **sizes)
    wide_judged = _judge(wide, texts, starts, plain, forks, **sizes) if wide else None
    reports = []
    for row, prompt in enumerate(prompts):
        fork, at, (replay, margin) = None, forks[row], judged[row]
        if at is not None:
            wide_margin = wide_judged[row][1] if wide_judged else None
            fork = Fork(at, _token(plain[row], at), _token(speculative[row], at), margin, wide_margin)
        reports.append(TextReport(prompt.id, finding_of(fork, replay, band), fork, replay))
    return GreedyReport(band, tuple(reports))


def noise_band(
    model: Model, texts: Texts, starts: Sequence[int], width: int, *,
    wide: Model | None = None, positions: int = 1000, rows: int = 8, chunk: int = 512,
) -> Band:  # fmt: skip
    """Measures the band on the texts, the first `starts` tokens of which are prompts.

    Random texts of the same shape are added until there are enough positions.
    """
    texts, starts = _enough(texts, starts, model, positions)
    narrow, across, wide_narrow, largest = [0.0], [0.0], [0.0], [0.0]
    seen = 0
    for first in range(0, len(texts), rows):
        batch, prefilled = texts[first : first + rows], starts[first : first + rows]
        here = _ways(model, batch, prefilled, width, chunk)
        exact = _ways(wide, batch, prefilled, width, chunk) if wide else itertools.repeat(None)
        for ways, wide_ways in zip(here, exact, strict=False):
            narrow += [_distance(ways[0], other_V) for other_V in ways[1:]]
            seen += 1
            if wide_ways is not None:
                across += [_distance(one_V, wide_ways[0]) for one_V in ways]
                wide_narrow += [_distance(one_V, wide_ways[0]) for one_V in wide_ways[1:]]
                largest.append(float(wide_ways[0].abs().max()))
    if wide is None:
        return Band(width, seen, largest_of(narrow))
    return Band(width, seen, *map(largest_of, (narrow, across, wide_narrow, largest)))


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
        longest = max(self._lengths)
        padded = [[*text, *[0] * (longest - len(text))] for text in texts]
        self._token_BS = torch.tensor(padded, dtype=torch.int64, device=model.device)
        self._runner = ModelRunner(model, chunk)
        self._runner.start(len(texts), longest)
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


def _ways(
    model: Model, texts: Texts, starts: Sequence[int], width: int, chunk: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each position's logits: fed singly, fed in blocks, fed in blocks without the other rows."""
    singly, in_blocks = Feeder(model, texts, starts, chunk), Feeder(model, texts, starts, chunk)
    alone = [Feeder(model, [text], [start], chunk) for text, start in zip(texts, starts, strict=True)]
    while not in_blocks.done:
        block = in_blocks.feed(width)
        pairs = zip(alone, block, strict=True)
        own = [feeder.feed(width)[0] if len(logits) else logits for feeder, logits in pairs]
        for offset in range(max(map(len, block))):
            for row, logits in enumerate(singly.feed(1)):
                if len(logits):
                    yield logits[0], block[row][offset], own[row][offset]


def _judge(
    model: Model,
    texts: Texts,
    starts: list[int],
    plain: Texts,
    forks: list[int | None],
    rows: int,
    chunk: int,
) -> list[tuple[Replay | None, float]]:
    """Feeds each text singly: its worst token, and the margin at its fork, infinite where it just ends."""
    replays: list[Replay | None] = [None] * len(texts)
    margins = [math.inf] * len(texts)
    for first in range(0, len(texts), rows):
        batch, prompt = texts[first : first + rows], starts[first : first + rows]
        feeder = Feeder(model, batch, prompt, chunk)
        for number in range(max(len(text) - n for text, n in zip(batch, prompt, strict=True))):
            for row, logits in enumerate(feeder.feed(1), start=first):
                token = _token(texts[row], starts[row] + number)
                if token is None:
                    continue
                margin, worst = _margin(logits[0], token), replays[row]
                if worst is None or margin > worst.margin or math.isnan(margin):
                    replays[row] = Replay(number, token, margin)
                other = _token(plain[row], number)
                if number == forks[row] and other is not None:
                    margins[row] = max(margin, _margin(logits[0], other))
    return list(zip(replays, margins, strict=True))


def finding_of(fork: Fork | None, replay: Replay | None, band: Band) -> Finding:
    """What a fork and a replay amount to under a band. NaN is within no band."""
    if not band.sound:
        return Finding.unexplained
    if replay is not None and not replay.margin <= band.epsilon:
        return Finding.unexplained
    if fork is None:
        return Finding.equal
    if not fork.margin <= band.epsilon:
        return Finding.unexplained
    if fork.wide_margin is not None and band.wide_epsilon is not None:
        return Finding.near_tie if fork.wide_margin <= band.wide_epsilon else Finding.unexplained
    return Finding.near_tie


def _margin(logit_V: Tensor, token: int) -> float:
    return float(logit_V.max() - logit_V[token])


def _distance(one_V: Tensor, other_V: Tensor) -> float:
    return float((one_V - other_V.to(one_V.device)).abs().max())


def _token(text: Sequence[int], position: int) -> int | None:
    return text[position] if position < len(text) else None


def largest_of(values: list[float]) -> float:
    """The maximum; NaN if there is one (which `max` would pass over)."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _enough(
    texts: Texts, starts: Sequence[int], model: Model, positions: int
) -> tuple[list[list[int]], list[int]]:
    found, prompts = [list(text) for text in texts], list(starts)
    length, start = max(map(len, found)), max(prompts)
    if length - start < 16:
        length = min(model.context, start + 16)
        start = max(1, length - 16)
    generator = torch.Generator().manual_seed(0)
    missing = positions - sum(len(text) - n + 1 for text, n in zip(found, prompts, strict=True))
    for _ in range(-(-missing // (length - start + 1))):
        found.append(torch.randint(0, model.vocab, (length,), generator=generator).tolist())
        prompts.append(start)
    return found, prompts
