"""The target's own distributions along texts, by separate regular passes, and how far rounding moves them.

Every text is fed anew to an empty cache: token by token, as regular sampling does, and, to see what rounding
does, in blocks and in one piece, each time in another batch, and alone. Every rank takes part in every pass.

Where filters cut a distribution, rounding may keep a token or drop it, and the distribution jumps. So a
recorded distribution is held against the distribution *before* its cut: what it keeps must be what some
change within rounding would keep, and on that the two distributions must agree. That excuses much at a single
position; so what recorded distributions differ by at most positions, cut and all, must not be a multiple of
what regular passes differ by there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llama_ssp.models.interface import Model
from llama_ssp.speculative.sampling import Prefix, SamplingTransform
from llama_ssp.tasks.certify.near_ties import Feeder, largest_of
from llama_ssp.tasks.certify.plain_filters import TINY, cut
from llama_ssp.tasks.certify.recorder import Round

QUANTILES = (0.5, 0.75)  # of the positions, at which recorded distributions and regular passes are compared
MULTIPLE = 3.0  # of the regular passes' quantile that is still rounding
PART_OF_LARGEST = 0.25  # passes may be equal, bit by bit, at most positions: so much is rounding everywhere
SAFETY = 2.0  # how often the largest difference between regular passes a recorded distribution may differ


@dataclass(frozen=True)
class Noise:
    """What regular passes differ by.

    At most: in total variation, and in a log probability, before any cut. At the QUANTILES of the positions:
    in total variation, cut and all.
    """

    total_variation: float
    log: float
    typical: tuple[float, ...] = (0.0,) * len(QUANTILES)


@dataclass(frozen=True)
class Departure:
    """How a recorded distribution differs from the target's own at one position.

    `total_variation` is the plain distance; `beyond` the distance on what the record keeps; `astray` the
    recorded mass on tokens that no rounding would keep, and the target's mass on tokens that the record drops
    and no rounding would drop.
    """

    total_variation: float
    beyond: float
    astray: float

    def within(self, noise: Noise) -> bool:
        return self.astray <= 0 and self.beyond <= tolerance(noise)


def tolerance(noise: Noise) -> float:
    """How far a recorded distribution may be from the target's own: what rounding does, and that of fp32 at
    least."""
    return max(SAFETY * noise.total_variation, 1e-6)


class Reference:
    """The target's logits at every position of the rounds, by four regular passes.

    The last has one row: a batch of few tokens may be multiplied by another kernel, which rounds differently.
    """

    def __init__(self, model: Model, rounds: Sequence[Round], width: int, rows: int, chunk: int) -> None:
        self._rounds = rounds
        order = list(range(len(rounds)))
        other, third = order[::-1], [*order[1::2], *order[::2]]
        longest = max((len(seen.text) for seen in rounds), default=0)
        self._ways = [
            _logits(model, rounds, order, 1, rows, chunk),
            _logits(model, rounds, other, width, rows, chunk),
            _logits(model, rounds, third, longest, rows, chunk),
            _logits(model, rounds, order, longest, 1, chunk),
        ]

    def noise(self, transform: SamplingTransform) -> Noise:
        """What the passes differ by."""
        uncut, far, log, whole = transform.uncut(), [0.0], [0.0], [0.0]
        for index, seen in enumerate(self._rounds):
            for at in range(seen.count + 1):
                first, *others = (self._probs(uncut, way, index, at) for way in range(len(self._ways)))
                far += [float((first - other).abs().sum()) / 2 for other in others]
                log += [_log_distance(first, other) for other in others]
                first, *others = (self._probs(transform, way, index, at) for way in range(len(self._ways)))
                whole += [float((first - other).abs().sum()) / 2 for other in others]
        return Noise(largest_of(far), largest_of(log), quantiles(whole))

    def departure(self, transform: SamplingTransform, noise: Noise, index: int, at: int) -> Departure:
        """How the distribution that verification used differs from the target's own at this position."""
        recorded_V = self._rounds[index].target_WV[at]
        uncut_V = self._probs(transform.uncut(), 0, index, at)
        plain_V = self._probs(transform, 0, index, at)
        sure_V, possible_V = _cut(uncut_V, transform, noise)
        kept_V = recorded_V > 0
        same_V = torch.where(kept_V, uncut_V, 0)
        mass = float(same_V.sum())
        beyond = 1.0 if mass <= 0 else float((recorded_V - same_V / mass).abs().sum()) / 2
        astray = float(recorded_V[~possible_V].sum() + uncut_V[sure_V & ~kept_V].sum())
        return Departure(float((recorded_V - plain_V).abs().sum()) / 2, beyond, astray)

    def _probs(self, transform: SamplingTransform, way: int, index: int, at: int) -> Tensor:
        """As regular sampling has it: one position, over its own prefix."""
        seen, logit_V = self._rounds[index], self._ways[way][index][at]
        token_BS = torch.tensor([seen.text], device=logit_V.device)
        length = len(seen.text) - seen.count + at
        length_BW, prompt_B = token_BS.new_tensor([[length]]), token_BS.new_tensor([seen.prompt_length])
        probs_V = transform(logit_V[None, None], Prefix(token_BS, length_BW, prompt_B))[0, 0].double().cpu()
        return probs_V / probs_V.sum()


def quantiles(values: list[float]) -> tuple[float, ...]:
    return tuple(np.quantile(values, QUANTILES).tolist())


def typical_excess(departures: Sequence[Departure], noise: Noise) -> bool:
    """Whether recorded distributions differ from the target's own by a multiple of what regular passes differ
    by."""
    found = quantiles([departure.total_variation for departure in departures])
    least = max(PART_OF_LARGEST * noise.total_variation, 1e-6)
    return any(own > MULTIPLE * usual + least for own, usual in zip(found, noise.typical, strict=True))


def _logits(
    model: Model, rounds: Sequence[Round], order: list[int], width: int, rows: int, chunk: int
) -> list[Tensor]:
    """The logits of each round's last count + 1 positions, fed `width` tokens at a time."""
    found: dict[int, Tensor] = {}
    for first in range(0, len(order), rows):
        part = order[first : first + rows]
        batch = [rounds[index] for index in part]
        feeder = Feeder(model, [seen.text for seen in batch], [seen.prompt_length for seen in batch], chunk)
        kept: list[list[Tensor]] = [[] for _ in batch]
        while not feeder.done:
            for row, logit_WV in enumerate(feeder.feed(width)):
                kept[row] = [*kept[row], *logit_WV.unbind(0)][-(batch[row].count + 1) :]
        found.update({index: torch.stack(own) for index, own in zip(part, kept, strict=True)})
    return [found[index] for index in range(len(rounds))]


def _cut(uncut_V: Tensor, transform: SamplingTransform, noise: Noise) -> tuple[Tensor, Tensor]:
    """The tokens that the filters keep whatever rounding does, and those that they may keep."""
    controls, slack, shift = transform.controls, math.exp(2 * SAFETY * noise.log), tolerance(noise)
    if controls.temperature == 0:
        return torch.zeros_like(uncut_V, dtype=torch.bool), uncut_V >= uncut_V.max() / slack
    probs = uncut_V.numpy()
    sure, possible = cut(probs, controls, -shift, slack), cut(probs, controls, shift, 1 / slack)
    return torch.from_numpy(sure & (probs > TINY * slack)), torch.from_numpy(possible & (probs > 0))


def _log_distance(one_V: Tensor, other_V: Tensor) -> float:
    both_V = (one_V > TINY) & (other_V > TINY)
    return float((one_V[both_V].log() - other_V[both_V].log()).abs().max())
