"""One rank's groups in a placement: the ranks it holds the target with, and the draft."""

from dataclasses import dataclass, replace

from llama_ssp.distributed.comm import ALONE, LeaderChannel, Ranks
from llama_ssp.distributed.draft_messages import DraftClient, DraftServer
from llama_ssp.distributed.placement import LEADER


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The groups that this rank is in, and its end of the link to a draft on ranks of its own (apart).

    `target` holds the target, `draft` holds one draft model, and the ranks of `drafting` draft together:
    with the leader, or apart. With a draft apart the leader has the `client`, and the draft's first rank
    the `server`. A field is None where this rank has no part in it.
    """

    everyone: Ranks
    target: Ranks | None
    draft: Ranks | None
    drafting: Ranks | None = None
    client: DraftClient | None = None
    server: DraftServer | None = None
    apart: tuple[int, ...] = ()  # the ranks of a draft apart

    @property
    def draft_channel(self) -> LeaderChannel | None:
        """Returns what carries requests for drafts."""
        return self.client or self.server or self.drafting

    @property
    def leads(self) -> bool:
        return self.everyone.is_leader

    @property
    def drafts_apart(self) -> bool:
        """Returns whether the drafts come to the leader from other ranks."""
        return bool(self.apart)


SOLE = Roles(everyone=ALONE, target=ALONE, draft=ALONE)


def roles_of(
    target: tuple[int, ...], draft: tuple[int, ...], copies: bool, ranks: Ranks, required: bool, wait_s: float
) -> Roles:
    """Returns this rank's groups, given the ranks of each role. Every rank makes all groups, in one order.

    For a draft apart, `required` says whether the run ends when the draft is lost, and `wait_s` says how long
    the leader waits for its reply (0: as long as ranks wait for one another).
    """
    target_group = ranks.among(target)
    if copies:
        draft_group: Ranks | None = ALONE if ranks.rank in draft else None
    else:
        draft_group = ranks.among(draft) if draft else None
    if not draft or LEADER in draft:
        others = tuple(rank for rank in draft if rank != LEADER)
        return Roles(
            everyone=ranks,
            target=target_group,
            draft=draft_group,
            drafting=ranks.among((LEADER, *others)) if others else None,
        )
    roles = Roles(everyone=ranks, target=target_group, draft=draft_group, drafting=draft_group, apart=draft)
    link = ranks.link(LEADER, draft[0])
    if link is None:
        return roles
    if draft_group is not None:
        return replace(roles, server=DraftServer(link, draft_group))
    client = DraftClient(link=link, patience_s=wait_s or ranks.patience_s, essential=required)
    return replace(roles, client=client)
