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
        ranks = {key: tuple(plain[key]) for key in ("target", "draft")}
        return Placement(**{**plain, **ranks, "splitting": Splitting(plain["splitting"])})

    def in_words(self) -> str:
        """For logs and tables: "target 0-5, draft 6-7 (own)"."""
        if self.splitting is Splitting.layers:
            return f"target by layers{', draft on the first' * bool(self.draft)}"
        target = f"target {spans(self.target)}"
        if not self.draft:
            return target
        if self.draft_apart:
            return f"{target}, draft {spans(self.draft)} (own)"
        how = "copies" if self.copies else "split" if len(self.draft) > 1 else "whole"
        return f"{target}, draft {spans(self.draft)} ({how})"


def resolve(conf: PlacementConf, world: int, drafts: bool) -> Placement:
    """Returns the placement for this many ranks; `drafts` says whether a draft model takes part at all.

    `auto` puts the draft on the leader here; a plan, which knows sizes and speeds, chooses better. Raises
    DistributedError if the configuration does not fit the ranks.
    """
    seat = DraftSeat.leader if conf.draft is DraftSeat.auto else conf.draft
    if conf.splitting is Splitting.layers and world > 1:
        what = "placement.splitting=layers is for one process, which spreads the layers itself"
        fix = "start it without torchrun, or use placement=auto"
        raise DistributedError(what, "", f"{world} ranks", "1", fix)
    if conf.splitting is Splitting.deepspeed and seat not in (DraftSeat.leader, DraftSeat.replicated):
        what = "DeepSpeed splits the target over all ranks, so the draft cannot be split or have its own"
        found, fix = f"placement.draft={seat.value}", "use placement.splitting=tensor"
        raise DistributedError(what, "", found, "leader, replicated", fix)
    apart = drafts and seat is DraftSeat.own
    default = 1 if seat in (DraftSeat.leader, DraftSeat.own) else 0  # 0: all of the target's ranks
    degree = len(conf.draft_ranks or ()) or conf.draft_degree or default
    if apart and conf.draft_ranks is None and degree >= world:
        found, fix = f"{world} ranks, {degree} of them the draft's own", f"write ranks={degree + 1}"
        allowed = f"at least {degree + 1} ranks"
        raise DistributedError("no rank is left for the target", "", found, allowed, fix)
    draft = _listed("draft_ranks", conf.draft_ranks, world)
    if draft is None and apart:
        draft = tuple(range(world - degree, world))
    target = _listed("target_ranks", conf.target_ranks, world)
    if target is None:
        target = tuple(rank for rank in range(world) if not (apart and draft and rank in draft))
    if draft is None:  # among the target's
        if degree > len(target):
            what, fix = "placement.draft_degree exceeds the target's ranks", "lower it, or start more ranks"
            raise DistributedError(what, "", degree, f"1..{len(target)}", fix)
        draft = target[:1] if seat is DraftSeat.leader else target[: degree or len(target)]
    copies = drafts and seat is DraftSeat.replicated
    placement = Placement(conf.splitting, world, target, draft if drafts else (), copies)
    _check(placement, seat)
    return placement


def _listed(key: str, ranks: list[int] | None, world: int) -> tuple[int, ...] | None:
    if ranks is None:
        return None
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world)):
        what, allowed = f"placement.{key} does not fit the ranks", f"different ones of 0..{world - 1}"
        fix = f"correct it, or start {max(ranks, default=0) + 1} ranks with torchrun"
        raise DistributedError(what, "", ranks, allowed, fix)
    return tuple(ranks)


def _check(placement: Placement, seat: DraftSeat) -> None:
    target, draft = placement.target, placement.draft
    inside = [rank for rank in draft if rank in target]
    own = seat is DraftSeat.own
    if inside and (own or len(inside) < len(draft)):
        wrong = "placement.draft=own, but its ranks are" if own else "the draft is partly on"
        found, allowed = f"target {list(target)}, draft {list(draft)}", f"none{' or all' * (not own)} of them"
        raise DistributedError(f"{wrong} the target's", "", found, allowed, "change placement.*_ranks")
    for role, ranks in (("target", target), ("draft", draft if inside else ())):
        if ranks and ranks[0] != LEADER:
            what, fix = f"the {role}'s ranks do not begin with the leader", f"change placement.{role}_ranks"
            raise DistributedError(what, "", list(ranks), "rank 0 first: it decides and writes", fix)
    idle = sorted(set(range(placement.world)) - set(target) - set(draft))
    if idle:
        found = f"ranks {', '.join(map(str, idle))} of {placement.world}"
        allowed = "every rank holds a part of the target or of the draft"
        fix = f"start {placement.world - len(idle)} ranks, or name these in placement.*_ranks"
        raise DistributedError("ranks would hold nothing", "", found, allowed, fix)


def spans(ranks: Sequence[int]) -> str:
    """Returns 0-2,5,6 for 0, 1, 2, 5, 6."""
    groups = groupby(enumerate(ranks), lambda place: place[1] - place[0])
    runs = [[rank for _, rank in group] for _, group in groups]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
