"""Which ranks hold which role: the placement of a pair, resolved once and alike on every rank. No torch.

Rank 0 leads: it holds a part of the target, decides, and alone prints and writes. The draft sits beside
it (on the leader alone, in copies, or split over the target's first ranks) or on ranks of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from llama_ssp.config import DraftSeat, PlacementConf, Splitting
from llama_ssp.errors import DistributedError

LEADER = 0
START = "torchrun --nproc-per-node {} launch/run.py"


@dataclass(frozen=True)
class Placement:
    """The ranks of each role. `draft` is empty where no model drafts.

    The ranks of `draft` hold a share each, or, with `copies`, the whole model each.
    """

    splitting: Splitting
    world: int
    target: tuple[int, ...]
    draft: tuple[int, ...] = ()
    copies: bool = False

    @property
    def draft_degree(self) -> int:
        """Over how many ranks one draft model is split."""
        return 1 if self.copies else max(len(self.draft), 1)

    @property
    def draft_apart(self) -> bool:
        """Whether the draft has ranks, and so GPUs, of its own."""
        return bool(self.draft) and self.draft[0] not in self.target

    def as_plain(self) -> dict[str, Any]:
        """For messages between ranks."""
        return {**asdict(self), "splitting": self.splitting.value}

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> Placement:
        ranks = {key: tuple(plain[key]) for key in ("target", "draft")}
        return Placement(**{**plain, **ranks, "splitting": Splitting(plain["splitting"])})

    def in_words(self) -> str:
        """For logs and tables: "target 0-5, draft 6-7 (own)"."""
        if self.splitting is Splitting.layers:
            return f"target by layers{', draft on the first' * bool(self.draft)}"
        target = f"target {_spans(self.target)}"
        if not self.draft:
            return target
        if self.draft_apart:
            return f"{target}, draft {_spans(self.draft)} (own)"
        how = "copies" if self.copies else "split" if len(self.draft) > 1 else "whole"
        return f"{target}, draft {_spans(self.draft)} ({how})"


def resolve(conf: PlacementConf, world: int, drafts: bool) -> Placement:
    """The table for this many ranks; `drafts` says whether a draft model takes part at all.

    `auto` puts the draft on the leader here; who knows sizes and speeds chooses better (plan).
    """
    seat = DraftSeat.leader if conf.draft is DraftSeat.auto else conf.draft
    if conf.splitting is Splitting.layers and world > 1:
        raise DistributedError(
            "placement.splitting=layers is for one process, which spreads the layers itself",
            found=f"{world} ranks", allowed="1", fix="start it without torchrun, or use placement=auto",
        )  # fmt: skip
    if conf.splitting is Splitting.deepspeed and seat not in (DraftSeat.leader, DraftSeat.replicated):
        raise DistributedError(
            "DeepSpeed splits the target over all ranks, so the draft cannot be split or have its own",
            found=f"placement.draft={seat.value}", allowed="leader, replicated",
            fix="use placement.splitting=tensor",
        )  # fmt: skip
    everyone = tuple(range(world))
    apart = drafts and seat is DraftSeat.own
    degree = _degree(conf, seat)
    if apart and conf.draft_ranks is None and degree >= world:
        raise DistributedError(
            "no rank is left for the target", found=f"{world} ranks, {degree} of them the draft's own",
            allowed=f"at least {degree + 1} ranks", fix=START.format(degree + 1),
        )  # fmt: skip
    draft = _listed("draft_ranks", conf.draft_ranks, world)
    if draft is None and apart:
        draft = everyone[world - degree :]
    target = _listed("target_ranks", conf.target_ranks, world)
    if target is None:
        target = tuple(rank for rank in everyone if not (apart and draft and rank in draft))
    if draft is None:
        draft = _beside(target, seat, degree)
    placement = Placement(
        conf.splitting, world, target, draft if drafts else (), seat is DraftSeat.replicated and drafts
    )
    _check(placement, seat)
    return placement


def _degree(conf: PlacementConf, seat: DraftSeat) -> int:
    """Over how many ranks the draft is to be spread; 0 is all of the target's."""
    if conf.draft_ranks is not None:
        return len(conf.draft_ranks)
    return conf.draft_degree or int(seat in (DraftSeat.leader, DraftSeat.own))


def _beside(target: tuple[int, ...], seat: DraftSeat, degree: int) -> tuple[int, ...]:
    if degree > len(target):
        raise DistributedError(
            "placement.draft_degree exceeds the target's ranks", found=degree,
            allowed=f"1..{len(target)}", fix="lower it, or start more ranks",
        )  # fmt: skip
    if seat is DraftSeat.leader:
        return target[:1]
    return target[: degree or len(target)]


def _listed(key: str, ranks: list[int] | None, world: int) -> tuple[int, ...] | None:
    if ranks is None:
        return None
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world)):
        raise DistributedError(
            f"placement.{key} does not fit the ranks there are", found=ranks,
            allowed=f"different ones of 0..{world - 1}",
            fix=f"correct it, or start {max(ranks, default=0) + 1} ranks with torchrun",
        )  # fmt: skip
    return tuple(ranks)


def _check(placement: Placement, seat: DraftSeat) -> None:
    target, draft = placement.target, placement.draft
    if target[0] != LEADER:
        raise DistributedError(
            "placement.target_ranks does not begin with the leader", found=list(target),
            allowed="rank 0 first: it decides, and writes what comes out", fix="number the ranks so",
        )  # fmt: skip
    inside = [rank for rank in draft if rank in target]
    if inside and len(inside) < len(draft):
        raise DistributedError(
            "the draft sits partly on the target's ranks",
            found=f"target {list(target)}, draft {list(draft)}",
            allowed="all of its ranks are the target's, or none is", fix="change placement.draft_ranks",
        )  # fmt: skip
    if draft and seat is DraftSeat.own and inside:
        raise DistributedError(
            "placement.draft=own, but its ranks are the target's", found=f"ranks {inside}",
            allowed="ranks that do not hold the target", fix="change placement.draft_ranks or target_ranks",
        )  # fmt: skip
    if inside and draft[0] != LEADER:
        raise DistributedError(
            "the draft's ranks do not begin with the leader", found=list(draft),
            allowed="rank 0 first, where the draft shares the target's ranks",
            fix="change placement.draft_ranks",
        )  # fmt: skip
    idle = sorted(set(range(placement.world)) - set(target) - set(draft))
    if idle:
        raise DistributedError(
            "ranks would hold nothing", found=f"ranks {', '.join(map(str, idle))} of {placement.world}",
            allowed="every rank holds a part of the target or of the draft",
            fix=f"start {placement.world - len(idle)} ranks, or name these in placement.*_ranks",
        )  # fmt: skip


def _spans(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))
