"""What was drafted for a text that may come, what came of it, and whether it pays."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from llama_ssp.models.transfer import sent
from llama_ssp.speculative.drafters.local import Drawn
from llama_ssp.speculative.state import State


@dataclass
class Memo:
    """Proposals for texts that may come. `drawn[i]` is every row's draft number i, where it has one."""

    state: State  # the batch as it will be if all was guessed right
    count: tuple[int, ...]  # how many drafts are worth drawing, row by row
    drawn: list[Drawn] = field(default_factory=list)

    def stands(self, state: State, row: int) -> bool:
        """Whether the row's text is the one that was guessed. Nothing else may decide this."""
        return state.keys[row] == self.state.keys[row] and state.texts[row] == self.state.texts[row]

    def held(self, row: int) -> int:
        """How many of the row's drafts are drawn."""
        return min(len(self.drawn), self.count[row])


@dataclass
class Tally:
    """What came of drafting ahead, in drafts and rows."""

    rows: int = 0  # that were asked to draft, round by round
    rows_ready: int = 0  # of which all drafts were there
    drafted: int = 0
    used: int = 0


HOPED, MEMORY, TRY_EVERY = 1.0, 0.95, 16


class Pays:
    """Whether drafting ahead has paid lately, in passes of the draft model, a round.

    A draft that is used saves one; some are lost by waiting. Where it does not pay it is tried now and then.
    """

    def __init__(self) -> None:
        self._gain, self._rests = HOPED, 0

    def __bool__(self) -> bool:
        self._rests = 0 if self._gain > 0 or self._rests == TRY_EVERY else self._rests + 1
        return self._rests == 0

    def learn(self, used: int, lost: float) -> None:
        """From a round before which it went ahead."""
        self._gain = MEMORY * self._gain + (1 - MEMORY) * (used - lost)


def merged(first: list[bool], one: Drawn, other: Drawn) -> Drawn:
    """Rows of the one where so marked, and of the other elsewhere."""
    first_B = sent(first, one.token_B.device)
    return Drawn(
        torch.where(first_B, one.token_B, other.token_B),
        torch.where(first_B[:, None], one.probs_BV, other.probs_BV),
    )
