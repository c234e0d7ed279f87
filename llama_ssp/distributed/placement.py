"""Which ranks hold target and draft, resolved once, in the same way on every rank. No torch.

Rank 0 leads: it holds a part of the target, decides, and alone prints and writes. The draft is on ranks of
the target (the leader alone, a copy on each, or split over the first ones) or on ranks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llama_ssp.config import DraftSeat, PlacementConf, Splitting
from llama_ssp.errors import DistributedError

LEADER = 0


@dataclass(frozen=True)
class Placement:
    """The ranks of each role. `draft` is empty where no model drafts.

    Each rank of `draft` holds a part of the model or, with `copies`, the whole model.
    """

    splitting: Splitting
    world: int
    target: tuple[int, ...]
    draft: tuple[int, ...] = ()
    copies: bool = False

    @property
    def draft_degree(self) -> int:
        """Returns how many ranks one draft model is split over."""
        return 1 if self.copies else max(len(self.draft), 1)

    @property
    def draft_apart(self) -> bool:
        """Returns whether the draft has ranks, and so GPUs, of its own."""
        return bool(self.draft) and self.draft[0] not in self.target

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> Placement:
        """Returns a placement that came as a message: JSON of its fields."""
        return Placement(
            splitting=Splitting(plain["splitting"]),
            world=plain["world"],
            target=tuple(plain["target"]),
            draft=tuple(plain["draft"]),
            copies=plain["copies"],
        )

    def in_words(self) -> str:
        """For logs and tables: "target 0-5, draft 6-7 (own)"."""
        if self.splitting is Splitting.layers:
            return "target by layers, draft on the first" if self.draft else "target by layers"
        target = f"target {spans(self.target)}"
        if not self.draft:
            return target
        if self.draft_apart:
            return f"{target}, draft {spans(self.draft)} (own)"
        if self.copies:
            how = "copies"
        else:
            how = "split" if len(self.draft) > 1 else "whole"
        return f"{target}, draft {spans(self.draft)} ({how})"


def resolve(conf: PlacementConf, world: int, drafts: bool) -> Placement:
    """Returns the placement for this many ranks; `drafts` says whether a draft model takes part at all.

    `auto` puts the draft on the leader here; a plan, which knows sizes and speeds, chooses better. Raises
    DistributedError if the configuration does not fit the ranks.
    """
    seat = DraftSeat.leader if conf.draft is DraftSeat.auto else conf.draft
    if conf.splitting is Splitting.layers and world > 1:
        raise DistributedError(
            "placement.splitting=layers is for one process, which spreads the layers itself",
            found=f"{world} ranks",
            allowed="1",
            fix="start it without torchrun, or use placement=auto",
        )
    if conf.splitting is Splitting.deepspeed and seat not in (DraftSeat.leader, DraftSeat.replicated):
        raise DistributedError(
            "DeepSpeed splits the target over all ranks, so the draft cannot be split or have its own",
            found=f"placement.draft={seat.value}",
            allowed="leader, replicated",
            fix="use placement.splitting=tensor",
        )
    apart = drafts and seat is DraftSeat.own
    default = 1 if seat in (DraftSeat.leader, DraftSeat.own) else 0  # 0: all of the target's ranks
    degree = len(conf.draft_ranks or ()) or conf.draft_degree or default
    if apart and conf.draft_ranks is None and degree >= world:
        raise DistributedError(
            "no rank is left for the target",
            found=f"{world} ranks, {degree} of them the draft's own",
            allowed=f"at least {degree + 1} ranks",
            fix=f"write ranks={degree + 1}",
        )
    draft = _listed("draft_ranks", conf.draft_ranks, world)
    if draft is None and apart:
        draft = tuple(range(world - degree, world))
    target = _listed("target_ranks", conf.target_ranks, world)
    if target is None:
        target = tuple(rank for rank in range(world) if not (apart and draft and rank in draft))
    if draft is None:  # among the target's
        if degree > len(target):
            raise DistributedError(
                "placement.draft_degree exceeds the target's ranks",
                found=degree,
                allowed=f"1..{len(target)}",
                fix="lower it, or start more ranks",
            )
        draft = target[:1] if seat is DraftSeat.leader else target[: degree or len(target)]
    copies = drafts and seat is DraftSeat.replicated
    placement = Placement(conf.splitting, world, target, draft if drafts else (), copies)
    _check(placement, seat)
    return placement


def _listed(key: str, ranks: list[int] | None, world: int) -> tuple[int, ...] | None:
    if ranks is None:
        return None
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world)):
        raise DistributedError(
            f"placement.{key} does not fit the ranks",
            found=ranks,
            allowed=f"different ones of 0..{world - 1}",
            fix=f"correct it, or start {max(ranks, default=0) + 1} ranks with torchrun",
        )
    return tuple(ranks)


def _check(placement: Placement, seat: DraftSeat) -> None:
    target = placement.target
    draft = placement.draft
    inside = [rank for rank in draft if rank in target]
    own = seat is DraftSeat.own
    if inside and (own or len(inside) < len(draft)):
        wrong = "placement.draft=own, but its ranks are" if own else "the draft is partly on"
        raise DistributedError(
            f"{wrong} the target's",
            found=f"target {list(target)}, draft {list(draft)}",
            allowed="none of them" if own else "none or all of them",
            fix="change placement.*_ranks",
        )
    for role, ranks in (("target", target), ("draft", draft if inside else ())):
        if ranks and ranks[0] != LEADER:
            raise DistributedError(
                f"the {role}'s ranks do not begin with the leader",
                found=list(ranks),
                allowed="rank 0 first: it decides and writes",
                fix=f"change placement.{role}_ranks",
            )
    idle = sorted(set(range(placement.world)) - set(target) - set(draft))
    if idle:
        raise DistributedError(
            "ranks would hold nothing",
            found=f"ranks {', '.join(map(str, idle))} of {placement.world}",
            allowed="every rank holds a part of the target or of the draft",
            fix=f"start {placement.world - len(idle)} ranks, or name these in placement.*_ranks",
        )


def spans(ranks: Sequence[int]) -> str:
    """Returns 0-2,5,6 for 0, 1, 2, 5, 6."""
    groups = groupby(enumerate(ranks), lambda place: place[1] - place[0])
    runs = [[rank for _, rank in group] for _, group in groups]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
