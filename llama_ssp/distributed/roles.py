"""One rank's place in a placement: with whom it holds the target, and with whom the draft."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.distributed.draft_messages import DraftClient, DraftServer, Relay
from llama_ssp.distributed.placement import LEADER


class LeaderChannel(Protocol):
    """Whoever is told by the leader, seen from either side."""

    def broadcast_ints(self, values: list[int]) -> list[int]:
        """The leader's integers; what others pass is not looked at."""


@dataclass(frozen=True)
class Roles:
    """The groups that this rank is in; None where it is not.

    `target` shares the target, `draft` shares one draft model. `asked` is whom the leader asks for drafts, or
    with whom this rank is asked: the leader and ranks that draft with it, or those of a draft apart, which
    the leader asks by `line`.
    """

    everyone: Ranks
    target: Ranks | None
    draft: Ranks | None
    asked: LeaderChannel | None = None
    line: DraftClient | DraftServer | None = None  # between the leader and the first rank of a draft apart
    apart: tuple[int, ...] = ()  # the ranks of a draft apart

    @property
    def leads(self) -> bool:
        return self.everyone.is_leader

    @property
    def drafts_apart(self) -> bool:
        """Whether the drafts come to the leader from other ranks."""
        return bool(self.apart)


SOLE = Roles(ALONE, ALONE, ALONE)


def roles_of(target: tuple[int, ...], draft: tuple[int, ...], copies: bool, ranks: Ranks) -> Roles:
    """The rank's groups, given who holds what (placement). Every rank makes all groups, in one order."""
    holding = ranks.among(target)
    if copies:
        drafting: Ranks | None = ALONE if ranks.rank in draft else None
    else:
        drafting = ranks.among(draft) if draft else None
    if draft and LEADER not in draft:
        return _apart(Roles(ranks, holding, drafting, apart=draft))
    others = tuple(rank for rank in draft if rank != LEADER)
    asked = ranks.among((LEADER, *others)) if others else None
    return Roles(ranks, holding, drafting, asked)


def _apart(crew: Roles) -> Roles:
    """With a line from the leader to the draft's first rank, which tells the others."""
    link = crew.everyone.link(LEADER, crew.apart[0])
    if link is not None and crew.leads:
        line = DraftClient(link, crew.everyone.patience_s)
        return replace(crew, asked=line, line=line)
    if link is not None and crew.draft is not None:
        answerer = DraftServer(link)
        asked = Relay(answerer, crew.draft) if crew.draft.world > 1 else answerer
        return replace(crew, asked=asked, line=answerer)
    return replace(crew, asked=crew.draft)
