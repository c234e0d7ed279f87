"""The one source of randomness: `bernoulli` and `categorical`, keyed by what is drawn, not when.

A draw depends only on (run seed, prompt id, base, purpose, offset). `base` is the length of the text
when the round began. It grows every round, so no key is ever used twice, although block verification
may discard a drafted token whose value already took part in a decision. The text of a prompt
therefore does not depend on its batch, on a restart, or on the number of ranks.

Tests replace this source by one that walks every branch (tests/choices.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a draw decides."""

    DRAFT = 0
    ACCEPT = 1
    CORRECT = 2


@dataclass(frozen=True)
class Slot:
    """Names one draw per row: whose text (`keys`), at which length (`bases`), what for, and where."""

    keys: tuple[int, ...]
    bases: tuple[int, ...]
    purpose: Purpose
    offset: int = 0


class Draws(Protocol):
    """Everything random in a run goes through these two calls."""

    def bernoulli(self, chance_BN: Tensor, slot: Slot) -> Tensor:
        """Independent coins; column n of the result belongs to offset `slot.offset + n`."""

    def categorical(self, law_BV: Tensor, slot: Slot) -> Tensor:
        """One token a row from its law; the law need not be normalised."""


def prompt_key(prompt_id: str) -> int:
    """64 bits that stand for a prompt id, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "big")


@dataclass
class CounterDraws:
    """Philox, addressed by counter: (seed, prompt) is its key, the base its counter."""

    seed: int
    own: dict[int, int] = field(default_factory=dict)  # seeds of prompts that have one, by prompt key
    _tables: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def bernoulli(self, chance_BN: Tensor, slot: Slot) -> Tensor:
        uniform_BN = self._uniforms(slot, chance_BN.shape[1]).to(chance_BN.device)
        return uniform_BN < chance_BN  # strictly: a chance of 0 never passes, of 1 always does

    def categorical(self, law_BV: Tensor, slot: Slot) -> Tensor:
        uniform_B1 = self._uniforms(slot, 1).to(law_BV.device)
        return inverse_cdf(law_BV, uniform_B1)

    def _uniforms(self, slot: Slot, count: int) -> Tensor:
        rows = [
            [self._uniform(key, base, slot.purpose, slot.offset + n) for n in range(count)]
            for key, base in zip(slot.keys, slot.bases, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.float64)

    def _uniform(self, key: int, base: int, purpose: Purpose, offset: int) -> float:
        index = 3 * offset + purpose
        table = self._tables.get((key, base))
        if table is None or len(table) <= index:
            # A longer table starts with the shorter one, so its length never changes a draw.
            # As an array: of a list with a number beyond 2**63 numpy makes floats, which cut both keys.
            keys = np.array([self.own.get(key, self.seed), key], dtype=np.uint64)
            generator = np.random.Philox(key=keys, counter=[0, 0, 0, base])
            table = generator.random_raw(max(32, 2 * index)) >> np.uint64(11)
            if len(self._tables) > 4096:
                self._tables.clear()
            self._tables[key, base] = table
        return float(table[index]) * 2.0**-53


def inverse_cdf(law_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """The token at which the cumulated law first exceeds the uniform; never one of probability 0."""
    rising_BV = law_BV.double().cumsum(-1)
    top_B1 = rising_BV[:, -1:]
    mark_B1 = torch.minimum(uniform_B1 * top_B1, torch.nextafter(top_B1, torch.zeros_like(top_B1)))
    token_B1 = torch.searchsorted(rising_BV, mark_B1, right=True)
    # A parallel sum may round a token of probability 0 into a sliver; it must not be drawn even so.
    possible_B1 = law_BV.gather(1, token_B1) > 0
    return torch.where(possible_B1, token_B1, law_BV.argmax(-1, keepdim=True))[:, 0]
