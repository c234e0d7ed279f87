"""Draws for the coupled rule: draft and target draw a position's token with the same noise.

The noise of a position is one exponential per token, keyed by (run seed, prompt id, position). The drawn
token is the one with the least exponential / probability, which has the given distribution. Draft and target
mostly draw the same token; where they do not, the target's is committed (verification.CoupledRule). So a text
depends on the noise and on the target's distributions alone: any draft model, K and placement give the same
tokens, and so does no draft.

Other draws must be keyed by the round as well (rng.py), because a draft that block verification discards has
taken part in a decision, and drawing it again would bias the text. Here a draft only decides how many tokens
a round commits. The committed token is the winner of the target's race in the noise of its position, and no
earlier token depends on that noise: the text's distribution is the product of the target's distributions,
however often the noise is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from llama_ssp.models.transfer import sent
from llama_ssp.speculative.rng import POSITIONS, CounterDraws, Slot
from llama_ssp.speculative.verification import Rule

HELD_NUMBERS = 2**24  # of noise kept for its next use: 128 MiB


@dataclass
class CoupledDraws(CounterDraws):
    """Every token is the winner of a race with the noise of its position, whatever its purpose."""

    shared_noise = True
    _noise: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def categorical(self, probs_BV: Tensor, slot: Slot) -> Tensor:
        noise = [
            self._exponentials(key, base + slot.offset, probs_BV.shape[1])
            for key, base in zip(slot.keys, slot.bases, strict=True)
        ]
        return winner(probs_BV, sent(torch.from_numpy(np.stack(noise)), probs_BV.device))

    def _exponentials(self, key: int, position: int, count: int) -> np.ndarray:
        """Longer noise starts with the shorter one, so padding the vocabulary changes nothing."""
        held = self._noise.get((key, position))
        if held is None or len(held) < count:
            if (len(self._noise) + 1) * count > HELD_NUMBERS:
                self._noise.clear()
            held = -np.log1p(self._row(key, position, count, POSITIONS) * -(2.0**-53))
            self._noise[key, position] = held
        return held[:count]


def winner(probs_BV: Tensor, noise_BV: Tensor) -> Tensor:
    """The token with the least noise / probability in each row, (B,); never one of probability 0."""
    probs_BV = probs_BV.double()
    return torch.where(probs_BV > 0, noise_BV / probs_BV, torch.inf).argmin(-1)


def source(rule: Rule, seed: int) -> CounterDraws:
    """The draws that the rule needs; target and draft use the same kind."""
    return CoupledDraws(seed) if rule.shared_noise else CounterDraws(seed)
