"""Draws of which a text knows nothing but the seed: draft and target race with the same noise.

The noise of a position is one exponential a token, keyed by (run seed, prompt id, position in the text); a
law's token there is the one with the least exponential over its chance, which is drawn from the distribution.
The draft's token and the target's have the same noise, so they are mostly the same, and where they are not
the target's stands (verification.CoupledRule). Hence a text is a function of the noise and of the target's
distributions alone: whoever drafts, however much, wherever it sits, the same tokens come out, and so they do
without a draft.

Why that may be keyed by position alone, while other draws must be keyed by the round as well (rng.py):
there, a draft that block verification discards has had a part in a decision, and to draw it again would bias
the text. Here no draft has a part in anything but how many tokens a round brings. The token that is committed
at a position is the winner of the target's race in the noise of that position, which no token before it has
seen: the distribution of the text is the product of the target's distributions, whatever else that noise was
asked in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from llama_ssp.models.transfer import sent
from llama_ssp.speculative.rng import POSITIONS, CounterDraws, Slot
from llama_ssp.speculative.verification import CoupledRule, Rule

HELD_NUMBERS = 2**24  # of the noise kept for the next distribution that asks for it: 128 MiB


@dataclass
class CoupledDraws(CounterDraws):
    """Tokens are winners of races in the noise of their position, whatever they are drawn for."""

    _noise: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def categorical(self, probs_BV: Tensor, slot: Slot) -> Tensor:
        noise = [
            self._exponentials(key, base + slot.offset, probs_BV.shape[1])
            for key, base in zip(slot.keys, slot.bases, strict=True)
        ]
        return winner(probs_BV, sent(torch.from_numpy(np.stack(noise)), probs_BV.device))

    def _exponentials(self, key: int, position: int, count: int) -> np.ndarray:
        """A longer noise starts with the shorter one, so that a padded vocabulary changes nothing."""
        held = self._noise.get((key, position))
        if held is None or len(held) < count:
            if (len(self._noise) + 1) * count > HELD_NUMBERS:
                self._noise.clear()
            held = -np.log1p(self._row(key, position, count, POSITIONS) * -(2.0**-53))
            self._noise[key, position] = held
        return held[:count]


def winner(probs_BV: Tensor, noise_BV: Tensor) -> Tensor:
    """The token whose exponential over its chance is the least; never one of chance 0."""
    probs_BV = probs_BV.double()
    return torch.where(probs_BV > 0, noise_BV / probs_BV, torch.inf).argmin(-1)


def source(rule: Rule, seed: int) -> CounterDraws:
    """The draws that the rule wants: target and draft must have theirs from the same."""
    return CoupledDraws(seed) if isinstance(rule, CoupledRule) else CounterDraws(seed)
