"""Coupled rounds, held against the races that decide them: nothing is left to chance once the noise is known.

Wherever a round has decided on a token, it must be the winner of the race of the distribution that
verification used, in the noise of that very position; and each draft there the winner in its declared
distribution. The noise is asked for anew, by prompt and position, so that noise of another place shows as
well as a draft that was kept wrongly.
"""

from __future__ import annotations

from torch import Tensor

from llama_ssp.speculative.rng import Draws, Purpose, Slot
from llama_ssp.tasks.certify.recorder import Round
from llama_ssp.tasks.certify.rule_distribution import Node


def raced(draws: Draws, seen: Round, at: int) -> Node | None:
    """Whether the races say what was decided at this position of the round; None where nothing was."""
    assert seen.target_WV is not None and seen.draft_KV is not None
    if at > seen.accepted:
        return None
    slot = Slot((seen.key,), (len(seen.text) - seen.count + at,), Purpose.CORRECT)

    def winner(probs_V: Tensor) -> int:
        return int(draws.categorical(probs_V[None], slot)[0])

    decided = seen.drafted[at] if at < seen.accepted else seen.token
    right = winner(seen.target_WV[at]) == decided
    if at < seen.count:
        right = right and winner(seen.draft_KV[at]) == seen.drafted[at]
        right = right and (at < seen.accepted) == (decided == seen.drafted[at])
    return Node(float(not right), 0.0)
