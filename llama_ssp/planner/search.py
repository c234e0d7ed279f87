"""Every placement of the pair on a cluster, with its bill and pace, the fastest that fits first. No torch.

The target is split over the ranks that are its own, evenly or not; the draft sits on the leader, is split
over some or all of the target's ranks, is copied, or has ranks of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from llama_ssp.config import DraftSeat, Overlap, PlacementConf, Splitting
from llama_ssp.distributed.placement import Placement, resolve
from llama_ssp.errors import DistributedError, ModelError
from llama_ssp.models.sharding import require_quantised, require_split
from llama_ssp.planner.fit import FitVerdict, GpuBill, bill_of, worst
from llama_ssp.planner.hardware import Machine
from llama_ssp.planner.speed import Pace, Share, band_of, forward_s, share_of
from llama_ssp.planner.workload import Role, Workload

MOST_RANKS = 4096  # of a plan; placement.draft_degree has the same bound
MANY_RANKS = 256  # over more of them a draft is split over powers of two only
LAW_BYTES = 4  # of a probability, on its way to the leader


@dataclass(frozen=True)
class Asked:
    """What a plan is about. `text_drafts` where drafts are looked up in the text instead (n-grams)."""

    machine: Machine
    target: Role
    draft: Role | None
    work: Workload
    acceptance: float
    k_max: int = 16
    text_drafts: bool = False
    overlap: Overlap = Overlap.auto

    @property
    def roles(self) -> list[Role]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def band(self) -> float:
        return band_of(self.machine.times, self.roles)


@dataclass(frozen=True)
class Option:
    """One placement. `k` and `ms_per_token` are the best at the asked acceptance."""

    placement: Placement
    bills: tuple[GpuBill, ...]
    pace: Pace
    k: int
    ms_per_token: float

    @property
    def worst(self) -> GpuBill:
        return worst(self.bills)

    @property
    def verdict(self) -> FitVerdict:
        return self.worst.verdict

    @property
    def regular_ms(self) -> float:
        """The same placement without drafting."""
        return self.pace.ms_per_token(0.0, 0)


def placements(world: int, drafts: bool, every: bool = True) -> Iterator[Placement]:
    """Every placement over exactly so many ranks, or only the most telling of each kind."""
    if not drafts:
        yield resolve(PlacementConf(), world, drafts=False)
        return
    seats = [(DraftSeat.leader, 1)]
    if world > 1:
        split, own = [world], [1]
        if every:
            own = [2**n for n in range((world - 1).bit_length())]
            own = own if world > MANY_RANKS else list(range(1, world))
            split = [*own[1:], world]
        seats += [(DraftSeat.sharded, degree) for degree in split]
        seats += [(DraftSeat.own, degree) for degree in own]
        seats += [(DraftSeat.replicated, world)] * every
    for seat, degree in seats:
        yield resolve(PlacementConf(draft=seat, draft_degree=degree), world, drafts=True)


def option(asked: Asked, placement: Placement, k: int | None = None) -> Option:
    """The placement's bill and pace, at the best K or a given one; refused where it cannot be."""
    require_possible(asked, placement)
    pace = pace_of(asked, placement)
    k = pace.best_k(asked.acceptance) if k is None else min(k, len(pace.verify) - 1)
    work = replace(asked.work, k=k)
    bills = bill_of(asked.machine, asked.target, asked.draft, placement, work)
    return Option(placement, bills, pace, k, pace.ms_per_token(asked.acceptance, k))


def require_possible(asked: Asked, placement: Placement) -> None:
    """Refuses a split that the models do not allow."""
    require_planned(placement.splitting)
    degrees = len(placement.target), placement.draft_degree
    for role, degree in zip(asked.roles, degrees, strict=False):
        if degree > 1:
            require_split(role.model, degree, role.role)
        else:
            require_quantised(role.model)


def require_splittable(asked: Asked, world: int) -> None:
    """Refuses more ranks than any placement of these models could use, before there is a table of them."""
    if world > sum(role.model.n_heads for role in asked.roles):
        require_split(asked.target.model, world, asked.target.role)
    if world > MOST_RANKS:
        raise DistributedError(
            "a placement over too many ranks is not planned", found=f"{world} ranks",
            allowed=f"at most {MOST_RANKS} ranks", fix="lower cluster.nodes or cluster.gpus",
        )  # fmt: skip


def require_planned(splitting: Splitting) -> None:
    """Refuses DeepSpeed, which loads the whole model on every rank and cuts it by rules of its own."""
    if splitting is Splitting.deepspeed:
        raise DistributedError(
            "what DeepSpeed holds is not planned", found=f"placement.splitting={splitting.value}",
            allowed=f"{Splitting.tensor.value}, {Splitting.layers.value}",
            fix="plan placement=auto, leader, sharded, replicated, own or layers",
        )  # fmt: skip


def search(asked: Asked, worlds: list[int], every: bool = True) -> list[Option]:
    """The placements over these numbers of ranks: fitting ones first, the fastest first, fewer ranks first.

    Of those that do not fit, the one that lacks least comes first. If none is possible, the reason of the
    last is raised.
    """
    found: list[Option] = []
    reason: DistributedError | ModelError | None = None
    for world in worlds:
        try:
            require_splittable(asked, world)
        except (DistributedError, ModelError) as error:
            reason = error
            continue
        for placement in placements(world, asked.draft is not None, every):
            try:
                found.append(option(asked, placement))
            except (DistributedError, ModelError) as error:
                reason = error
    if not found and reason is not None:
        raise reason
    return sorted(found, key=_order)


def best_placement(asked: Asked, world: int) -> Option:
    """What placement=auto means for this many ranks: the fastest that fits."""
    return search(asked, [world])[0]


def pace_of(asked: Asked, placement: Placement) -> Pace:
    """Seconds of a draft's step, and of verifying 0, 1, ... drafts, on this placement."""
    times, work, draft = asked.machine.times, asked.work, asked.draft
    slots = work.prompt_tokens + work.new_tokens / 2  # halfway through the texts
    target = share_of(asked.target, len(placement.target))
    messages = 2 * times.message if placement.world > 1 else 0.0
    step = 0.0
    if draft is not None and placement.draft:
        share = share_of(draft, placement.draft_degree)
        probs = work.rows * share.vocab
        step = forward_s(share, times, work.rows, 1, slots) + probs * times.probs
        if placement.draft_apart:
            step += probs * LAW_BYTES / times.link_per_s
    drafts = (draft is not None and bool(placement.draft)) or asked.text_drafts
    most = asked.k_max if drafts else 0
    verify = tuple(_verify_s(asked, target, k, slots) + messages for k in range(most + 1))
    return Pace(step, verify, work.rows, asked.overlap if placement.draft_apart else Overlap.off)


def regular_ms(asked: Asked, options: list[Option], worlds: list[int]) -> float:
    """Regular sampling at its best on the cluster: the target alone where it fits, else as in the options."""
    alone = replace(asked, draft=None, text_drafts=False)
    with suppress(DistributedError):
        best = search(alone, worlds)[0]
        if best.verdict is not FitVerdict.does_not_fit:
            return best.ms_per_token
    return min(one.regular_ms for one in options)


def _verify_s(asked: Asked, target: Share, k: int, slots: float) -> float:
    times, rows = asked.machine.times, asked.work.rows
    laws = rows * (k + 1) * target.vocab
    spent = forward_s(target, times, rows, k + 1, slots) + laws * times.probs + times.round
    return spent + (times.check + laws * times.accept if k else 0.0)


def _order(one: Option) -> tuple[int, float, int, int]:
    if one.verdict is FitVerdict.does_not_fit:  # how fast it would be is nobody's question
        return one.verdict.rank, float(-one.worst.margin), one.placement.world, 0
    # Times that print alike are alike: then fewer ranks and a smaller bill are better.
    return one.verdict.rank, round(one.ms_per_token, 3), one.placement.world, one.worst.total
