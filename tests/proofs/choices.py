"""Follows every branch of the real loop: a source of draws that replays choices instead of drawing.

`every_branch` runs the loop again and again, each time with other outcomes of its coins and draws, until all
have been taken, and adds up the products of their probabilities (fp64). It works as all randomness of a run
goes through `bernoulli` and `categorical`. A key that is drawn twice would make two decisions depend on one
random number, which walking cannot see: so it is an error here, and test_draws.py proves that different keys
have different numbers. Control: two of the planted faults reuse a key (mutants.py, "not keyed by length").
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from llama_ssp.speculative.drafters.local import certain_where
from llama_ssp.speculative.rng import Purpose, Slot


@dataclass(frozen=True)
class RoundBySlot:
    """A round's draws, each asked of a source by its slot. Rows without a key have ended: they draw none."""

    source: Any
    slot: Slot

    def bernoulli(self, chance_BK: Tensor) -> Tensor:
        return self.source.bernoulli(chance_BK, self.slot)

    def categorical(self, probs_BV: Tensor) -> Tensor:
        ended_B = torch.tensor([key is None for key in self.slot.keys])
        return self.source.categorical(
            certain_where(ended_B, probs_BV), replace(self.slot, purpose=Purpose.CORRECT)
        )


class BySlot:
    """A source whose draws are all `bernoulli` or `categorical` of a slot."""

    def round(self, decide: Any, rule: Any, slot: Slot, *given: Tensor) -> Tensor:
        return decide(rule, RoundBySlot(self, slot), *given)


@dataclass
class ReplayDraws(BySlot):
    """Takes the given choices, then always the first; notes what there was to choose from."""

    choices: list[int]
    taken: list[int] = field(default_factory=list)
    options: list[int] = field(default_factory=list)
    weight: float = 1.0
    drawn: set[tuple[int, int, int, int]] = field(default_factory=set)

    def bernoulli(self, chance_BN: Tensor, slot: Slot) -> Tensor:
        outcome = [
            [self._choose([float(p), 1 - float(p)], slot, row, n) == 0 for n, p in enumerate(chances)]
            for row, chances in enumerate(chance_BN)
        ]
        return torch.tensor(outcome)

    def categorical(self, probs_BV: Tensor, slot: Slot) -> Tensor:
        laws = probs_BV.double() / probs_BV.double().sum(-1, keepdim=True)
        return torch.tensor([self._choose(probs.tolist(), slot, row, 0) for row, probs in enumerate(laws)])

    def _choose(self, probs: list[float], slot: Slot, row: int, column: int) -> int:
        assert all(share == share for share in probs), "a law holds NaN"
        possible = [index for index, share in enumerate(probs) if share > 0]
        if len(possible) == 1:
            return possible[0]
        key = (slot.keys[row], slot.bases[row], int(slot.purpose), slot.offset + column)
        assert key not in self.drawn, f"two draws share the key {key}"
        self.drawn.add(key)
        chosen = possible[self._next(len(possible))]
        self.weight *= probs[chosen]
        return chosen

    def _next(self, options: int) -> int:
        """The given choice, or the first."""
        if options == 1:
            return 0
        chosen = self.choices[len(self.options)] if len(self.options) < len(self.choices) else 0
        self.taken.append(chosen)
        self.options.append(options)
        return chosen


def every_branch(
    play: Callable[[Any], Hashable], limit: int = 200_000, source: type[ReplayDraws] = ReplayDraws
) -> tuple[dict, int]:
    """The exact distribution of what `play` returns, and how many branches it has."""
    probs: dict[Hashable, float] = {}
    choices: list[int] = []
    for branch in range(1, limit + 1):
        draws = source(choices)
        outcome = play(draws)
        probs[outcome] = probs.get(outcome, 0.0) + draws.weight
        taken = draws.taken
        while taken and taken[-1] + 1 == draws.options[len(taken) - 1]:
            taken.pop()
        if not taken:
            return probs, branch
        choices = [*taken[:-1], taken[-1] + 1]
    raise AssertionError(f"more than {limit} branches")


def distance(one: dict, other: dict) -> float:
    """Total variation between two distributions over the same outcomes."""
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2
