"""Which other texts may come, the likeliest first: what a draft that runs ahead drafts for in spare time.

A round ends where the first draft falls, with another token in its place, or behind the last draft. So a text
that may come is a place and a token. The token is sought as the leader will draw it, by the same noise from
the draft's law, less what was thought of there already: the draft that fell, or the guess (`Rivals`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.sending import sent

PRIOR_RATE, PRIOR_WEIGHT, MEMORY = 0.7, 4.0, 0.98
RIGHT = 0.5  # how often the best guess among the tokens that are left is taken to be right


class Place(NamedTuple):
    """Where a text may part from what was guessed: at which draft, and the how-manieth other token it is."""

    draft: int
    number: int


class Hopes:
    """How often a draft has stood lately."""

    def __init__(self) -> None:
        self._tried, self._stood = PRIOR_WEIGHT, PRIOR_RATE * PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self._stood / self._tried

    def learn(self, stood: int, drafted: int) -> None:
        """From a row's round; of what lies behind the first that fell nothing is known."""
        self._tried = MEMORY * self._tried + min(stood + 1, drafted)
        self._stood = MEMORY * self._stood + stood


def likeliest(drafted: int, rate: float, most: int) -> list[Place]:
    """Where the text of a row with so many drafts may part from the guess, behind the last draft too."""
    chances = {
        Place(draft, number): rate**draft * (1 - rate) * (1 - RIGHT) ** number
        for draft in range(drafted + 1)
        for number in range(most)
    }
    return sorted(chances, key=lambda place: -chances[place])[:most]


class Rivals:
    """The laws at every draft of a round, and behind the last, less the tokens that were thought of there."""

    def __init__(
        self, law_BKV: Tensor, drafted: list[list[int]], guess_BV: Tensor | None, guessed: list[int | None]
    ) -> None:
        """`guess_BV` are the laws behind the drafts, `guessed` the tokens that were thought of there."""
        rows, k, vocab = law_BKV.shape
        self._law_BWV = law_BKV.new_zeros(rows, k + 1, vocab)
        self._law_BWV[:, :k] = law_BKV
        for row, (tokens, guess) in enumerate(zip(drafted, guessed, strict=True)):
            end = len(tokens)
            self._law_BWV[row, end:] = 0
            if guess is not None and guess_BV is not None:
                self._law_BWV[row, end] = guess_BV[row]
                self.strike(row, end, guess)
            for draft, token in enumerate(tokens):
                self.strike(row, draft, token)

    def strike(self, row: int, draft: int, token: int) -> None:
        """Thinks of this one too."""
        self._law_BWV[row, draft, token] = 0

    def laws(self, drafts: list[int]) -> tuple[Tensor, list[bool]]:
        """The law at one place of each row, and in which rows there is anything left to draw."""
        place_B = sent(drafts, self._law_BWV.device)
        law_BV = self._law_BWV[torch.arange(len(drafts), device=place_B.device), place_B]
        return law_BV, (law_BV.sum(-1) > 0).tolist()


def parting(one: list[int], other: list[int], start: int = 0) -> int:
    """Up to where two texts are the same, which they are up to `start`."""
    end = min(len(one), len(other))
    return next((i for i in range(start, end) if one[i] != other[i]), end)
