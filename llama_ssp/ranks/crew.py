"""One rank's place in a placement: with whom it holds the target, and with whom the draft."""

from __future__ import annotations

from dataclasses import dataclass

from llama_ssp.placement import LEADER
from llama_ssp.ranks.protocol import ALONE, Ranks


@dataclass(frozen=True)
class Crew:
    """The groups that this rank is in; None where it is not.

    `target` shares the target, `draft` shares one draft model. `asked` is the leader and the ranks that
    draft with it or for it, where there are any: they are told how much to draft before they can.
    """

    everyone: Ranks
    target: Ranks | None
    draft: Ranks | None
    asked: Ranks | None = None
    drafted_at: int = LEADER  # who of `asked` draws the drafts

    @property
    def leads(self) -> bool:
        return self.everyone.is_leader

    @property
    def drafts_apart(self) -> bool:
        """Whether the drafts come to the leader from another rank."""
        return self.drafted_at != LEADER


SOLE = Crew(ALONE, ALONE, ALONE)


def crew_of(target: tuple[int, ...], draft: tuple[int, ...], copies: bool, ranks: Ranks) -> Crew:
    """The rank's groups, given who holds what (placement). Every rank makes all groups, in one order."""
    holding = ranks.among(target)
    if copies:
        drafting: Ranks | None = ALONE if ranks.rank in draft else None
    else:
        drafting = ranks.among(draft) if draft else None
    others = tuple(rank for rank in draft if rank != LEADER)
    asked = ranks.among((LEADER, *others)) if others else None
    return Crew(ranks, holding, drafting, asked, LEADER if LEADER in draft or not draft else 1)
