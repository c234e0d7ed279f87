"""Every placement of the pair on a cluster with its memory and speed, the fastest that fits first. No torch.

The target is split over the ranks that are its own, evenly or not; the draft is on the leader, split over
some or all of the target's ranks, copied, or on ranks of its own.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from llama_ssp.config import DraftSeat, Dtype, Overlap, PlacementConf, Splitting
from llama_ssp.distributed.placement import LEADER, Placement, resolve
from llama_ssp.errors import DistributedError, ModelError
from llama_ssp.models.sharding import (
    require_module,
    require_quantised,
    require_split,
    require_transformers,
)
from llama_ssp.planner.engine import LAYER_OPERATIONS, ROW_OPERATIONS, launching_s
from llama_ssp.planner.fit import FitVerdict, RankMemory, device_lines, rank_memories, worst
from llama_ssp.planner.hardware import Machine
from llama_ssp.planner.memory import rank_work
from llama_ssp.planner.speed import (
    HOST_BYTES_PER_S,
    WIDE_BAND,
    PassCost,
    RoundTimes,
    Times,
    forward_s,
    hops,
    pass_cost,
)
from llama_ssp.planner.storage import BYTES, WEIGHTS
from llama_ssp.planner.weights import CACHE
from llama_ssp.planner.workload import ALL_COMPILED, TARGET, Role, StepRule, Workload
from llama_ssp.speculative.draft_length import AcceptanceCurve, PairAcceptance

MOST_RANKS = 4096  # of a plan; placement.draft_degree has the same bound
MANY_RANKS = 256  # over more of them a draft is split over powers of two only
# Of a probability that is sent to the leader; of its token, where few of them are sent.
PROB_BYTES = 4
ID_BYTES = 4
# Of what an eager step takes on a CPU, besides reading weights and arithmetic, a compiled one takes this
# share (bench/results/plan_speed_compiled_epyc-2-cores_202611.md).
COMPILED_SHARE = 0.25
IN_A_STEP = "layer", "step", "round", "check", "probs", "accept"
NOTABLE = 0.05  # by how much a step must be slower to be named
FURTHER_NODES = 1.1  # how many times as fast several nodes have to be to be taken in place of one


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is planned. `text_drafts`: tokens are drafted by n-gram lookup, without a model.

    `bridged`: the draft has another tokenizer. `draft_top` is that of the run. `k` is the K that will run;
    None: the best. Prompts are read in chunks of `least_chunk` where the work does not fit; None: in those of
    the work.
    """

    machine: Machine
    target: Role
    draft: Role | None
    work: Workload
    acceptance: PairAcceptance
    k_max: int = 16
    text_drafts: bool = False
    overlap: Overlap = Overlap.auto
    steps: StepRule = ALL_COMPILED
    bridged: bool = False
    draft_top: int | None = None
    k: int | None = None
    least_chunk: int | None = None
    is_acceptance_assumed: bool = False

    @property
    def roles(self) -> list[Role]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def acceptance_source(self) -> str | None:
        """Returns the folder of the run that measured the acceptance; None of one that was given."""
        return self.acceptance.source if isinstance(self.acceptance, AcceptanceCurve) else None

    @property
    def acceptance_in_words(self) -> str:
        """Returns what is planned with."""
        if isinstance(self.acceptance, AcceptanceCurve):
            return f"acceptance as measured in {self.acceptance.source}"
        return f"acceptance {self.acceptance:.2f}"

    def band(self, placement: Placement) -> float:
        """Returns how far off the predicted times with this placement may be."""
        quantised = any(BYTES[role.dtype] < BYTES[Dtype.bf16] for role in self.roles)
        eager = any(self.why_eager(role, placement) is not None for role in self.roles)
        launched = eager and not self.machine.is_cpu  # what a launch takes is estimated
        return WIDE_BAND if quantised or launched else self.machine.times.band

    def why_eager(self, role: Role, placement: Placement) -> str | None:
        """Returns why the role's steps run eagerly with this placement; None if they are compiled."""
        splitting = placement.splitting if role.role == TARGET else Splitting.tensor
        return self.steps.why_eager(role, splitting)

    def memories(self, placement: Placement, work: Workload) -> tuple[RankMemory, ...]:
        """Returns the memory of every rank, for this work."""
        compiled = tuple(role.role for role in self.roles if self.why_eager(role, placement) is None)
        return rank_memories(self.machine, self.target, self.draft, placement, work, compiled)

    def room_by_layers(self) -> tuple[int, int, int]:
        """With placement=layers: a GPU's bytes beside weights and caches, the first's and another's, with the
        draft on the first; and the bytes of the caches of a layer."""
        work = replace(self.work, k=self.k_max if self.k is None else self.k)
        rooms = list[int]()
        caches = 0
        for draft in (self.draft, None):
            place = resolve(PlacementConf(), 1, drafts=draft is not None)
            lines = device_lines(rank_work(self.target, draft, place, work, LEADER, self.machine.kernels))
            sizes = {line.name: line.bytes for line in lines if line.role == TARGET}
            caches = sizes[CACHE]
            weights = sum(sizes.get(name, 0) for name in WEIGHTS)
            rooms.append(sum(line.bytes for line in lines) - weights - caches)
        return rooms[0], rooms[1], -(-caches // self.target.model.n_layers)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One placement, planned. `k` and `ms_per_token` are the best at the requested acceptance."""

    placement: Placement
    ranks: tuple[RankMemory, ...]
    times: RoundTimes
    k: int
    ms_per_token: float
    prefill_chunk: int
    nodes: int = 1  # that it takes

    @property
    def worst(self) -> RankMemory:
        return worst(self.ranks)

    @property
    def verdict(self) -> FitVerdict:
        return self.worst.verdict

    @property
    def runs(self) -> bool:
        """Returns whether it fits, or may fit."""
        return self.verdict is not FitVerdict.does_not_fit

    @property
    def order(self) -> tuple[int, float, int, int]:
        """Returns what options are sorted by: the fastest that fits is first.

        Several nodes are worth it only where that is FURTHER_NODES times as fast: less is within the error.
        """
        if not self.runs:  # its speed does not matter
            return self.verdict.rank, float(-self.worst.margin), self.placement.world, 0
        # Times are compared as they are printed; of equal ones fewer ranks and less memory are better.
        ms = round(self.ms_per_token if self.nodes == 1 else FURTHER_NODES * self.ms_per_token, 3)
        return self.verdict.rank, ms, self.placement.world, self.worst.total

    @property
    def regular_ms(self) -> float:
        """Returns ms/token of the same placement without drafting."""
        return self.times.ms_per_token(0.0, 0)


def placements(world: int, drafts: bool, every: bool = True) -> Iterator[Placement]:
    """Yields every placement over exactly `world` ranks, or only a few of each kind."""
    if not drafts:
        yield resolve(PlacementConf(), world, drafts=False)
        return
    seats = [(DraftSeat.leader, 1)]
    if world > 1:
        degrees = list(range(1, world)) if every else [1]
        if every and world > MANY_RANKS:
            degrees = [2**n for n in range((world - 1).bit_length())]
        seats += [(DraftSeat.sharded, degree) for degree in (*degrees[1:], world)]
        seats += [(DraftSeat.own, degree) for degree in degrees]
        if every:
            seats.append((DraftSeat.replicated, world))
    for seat, degree in seats:
        yield resolve(PlacementConf(draft=seat, draft_degree=degree), world, drafts=True)


def option(request: PlanRequest, placement: Placement, k: int | None = None) -> Option:
    """Plans a placement at the best K or a given one: its memory and speed. Raises where it is impossible."""
    require_possible(request, placement)
    times = round_times(request, placement)
    k = times.best_k(request.acceptance) if k is None else min(k, len(times.verify) - 1)
    work = replace(request.work, k=k)
    ranks = request.memories(placement, work)
    if request.least_chunk and worst(ranks).verdict is not FitVerdict.fits:
        work = replace(work, prefill_chunk=request.least_chunk)
        ranks = request.memories(placement, work)
    ms = times.ms_per_token(request.acceptance, k)
    return Option(
        placement=placement,
        ranks=ranks,
        times=times,
        k=k,
        ms_per_token=ms,
        prefill_chunk=work.prefill_chunk,
        nodes=request.machine.nodes_of((*placement.target, *placement.draft)),
    )


def require_possible(request: PlanRequest, placement: Placement) -> None:
    """Refuses a split that the models do not allow."""
    if placement.splitting is Splitting.deepspeed:  # it loads the whole model, and splits it by its own rules
        raise DistributedError(
            "what DeepSpeed holds is not planned",
            found="placement.splitting=deepspeed",
            allowed="tensor, layers",
            fix="plan placement=auto, leader, sharded, replicated, own or layers",
        )
    if placement.splitting is Splitting.layers:
        target = request.target
        require_module(target.model.family, f"{target.role} {target.model.name}")
        require_transformers(target.model.name, target.dtype)
    reason = ""
    draft = None if request.draft is None else request.draft.model
    if draft is not None and draft.head_shares_cache:
        require_with_target(placement)
    elif draft is not None and draft.is_head and placement.draft != (LEADER,):
        reason = "a head reads the target's hidden states: it is on the leader"
    elif request.bridged and placement.draft not in ((), (LEADER,)):
        reason = "a draft of another tokenizer is on the leader, whole"
    if reason:
        raise DistributedError(
            reason,
            where="placement.draft",
            found=placement.in_words(),
            allowed="leader",
            fix="use placement=leader",
        )

    degrees = len(placement.target), placement.draft_degree
    for role, degree in zip(request.roles, degrees, strict=False):
        if degree > 1:
            require_split(role.model, degree, role.role)
        else:
            require_quantised(role.model)


def require_with_target(placement: Placement) -> None:
    """Refuses a head that reads the target's cache on other ranks: each of the target's has some keys."""
    is_copied = placement.copies and len(placement.target) > 1
    if placement.draft and (placement.draft != placement.target or is_copied):
        raise DistributedError(
            "a head that reads the target's cache is split with the target",
            where="placement.draft",
            found=placement.in_words(),
            allowed="sharded, over the target's ranks",
            fix="use placement=sharded or placement=auto",
        )


def search(request: PlanRequest, worlds: list[int], every: bool = True) -> list[Option]:
    """Returns the placements over these numbers of ranks, sorted: by fit, by speed, by ranks.

    Of those that do not fit, the one that lacks least is first. If none is possible, raises the last reason.
    """
    options: list[Option] = []
    reason: Exception | None = None
    heads = sum(role.model.n_heads for role in request.roles)
    max_ranks = min(MOST_RANKS, heads)  # that a placement could use
    for world in worlds:
        if world > max_ranks:
            continue
        for placement in placements(world, request.draft is not None, every):
            try:
                options.append(option(request, placement, request.k))
            except (DistributedError, ModelError) as error:
                reason = error

    if not options and worlds[-1] > max_ranks:
        if worlds[-1] > heads:
            require_split(request.target.model, worlds[-1], request.target.role)
        raise DistributedError(
            "a placement over too many ranks is not planned",
            where="cluster",
            found=f"{worlds[-1]} ranks",
            allowed=f"at most {MOST_RANKS} ranks",
            fix="lower cluster.nodes or cluster.gpus",
        )
    if not options and reason is not None:
        raise reason
    return sorted(options, key=lambda planned: planned.order)


def cost_of(request: PlanRequest, role: Role, placement: Placement) -> PassCost:
    """Returns what a pass of the role costs with this placement."""
    ranks = ranks_of_one(role, placement)
    store = request.machine.store(request.why_eager(role, placement) is None)
    return pass_cost(role, len(ranks), store, request.machine.nodes_of(ranks))


def ranks_of_one(role: Role, placement: Placement) -> tuple[int, ...]:
    """Returns the ranks over which one model of the role is split; of copies the first one's."""
    if role.role == TARGET:
        return placement.target
    return placement.draft[: placement.draft_degree]


def step_s(request: PlanRequest, role: Role, placement: Placement, cost: PassCost, each: int) -> float:
    """Returns the seconds of a step over `each` tokens of each row, halfway through the texts."""
    work = request.work
    slots = work.prompt_tokens + work.new_tokens / 2
    spent = forward_s(cost, step_times(request, role, placement, cost), work.rows, each, slots)
    launched = not request.machine.is_cpu and request.why_eager(role, placement) is not None
    return max(spent, launching_s(cost.layers, work.rows, cost.sums)) if launched else spent


def step_times(request: PlanRequest, role: Role, placement: Placement, cost: PassCost) -> Times:
    """Returns the machine's constants for the role's steps, from those of the steps that `of_constants` says.

    On a CPU an eager step of plain weights attends one row after the other, and one of codes all at once.
    """
    times = request.machine.times
    if not request.machine.is_cpu:
        return times
    if request.why_eager(role, placement) is None:
        return replace(times, **{name: COMPILED_SHARE * getattr(times, name) for name in IN_A_STEP})
    more = 0.0 if cost.coded else (request.work.rows - 1) * ROW_OPERATIONS / LAYER_OPERATIONS
    return replace(times, layer=(1 + more) * times.layer)


def slower_than_16_bit(request: PlanRequest, placement: Placement, k: int) -> dict[str, float]:
    """Returns of each role that is slower for being quantised the time of a step over that in 16 bit.

    A step of the target verifies K drafts; the draft's has one token.
    """
    slower = {}
    for role in request.roles:
        if BYTES[role.dtype] >= BYTES[Dtype.bf16] or (role.role != TARGET and not placement.draft):
            continue
        each = k + 1 if role.role == TARGET else 1
        wide = replace(role, dtype=request.machine.dtype(Dtype.auto))
        wide_s = step_s(request, wide, placement, cost_of(request, wide, placement), each)
        seconds = step_s(request, role, placement, cost_of(request, role, placement), each)
        if seconds > wide_s * (1 + NOTABLE):
            slower[role.role] = seconds / wide_s
    return slower


def warnings_of_codes(request: PlanRequest, placement: Placement, k: int) -> Iterator[str]:
    """Yields a line for each role that is slower for being quantised."""
    slower = slower_than_16_bit(request, placement, k)
    wide = request.machine.dtype(Dtype.auto).value
    for role in request.roles:
        if role.role not in slower:
            continue
        tokens = request.work.rows * (k + 1 if role.role == TARGET else 1)
        step = f"a step of {tokens} token{'s' if tokens > 1 else ''}"
        what = f"{role.role}.dtype={role.dtype.value} saves memory, but is slower than {wide} here"
        yield f"{what}: by the plan {step} takes {slower[role.role]:.1f} times as long"


def round_times(request: PlanRequest, placement: Placement) -> RoundTimes:
    """Returns the seconds of a draft step, and of verifying 0, 1, ... drafts, with this placement."""
    rows = request.work.rows
    step = once = sending = 0.0
    draft = request.draft
    max_k = request.k_max
    if draft is not None and placement.draft:
        cost = cost_of(request, draft, placement)
        times = step_times(request, draft, placement, cost)
        block = draft.model.head_block
        forward = step_s(request, draft, placement, cost, block + 1)
        probs = rows * cost.vocab
        sent = sent_bytes(request, cost.vocab)
        step = probs * times.probs
        if block:  # a head gives all drafts in one pass
            once = forward
            max_k = min(max_k, block)
        else:
            step += forward
        if placement.draft_apart:
            sending = sent / HOST_BYTES_PER_S
            if request.machine.nodes_of((LEADER, placement.draft[0])) > 1:
                sending += sent / times.network_per_s
            if placement.draft_degree > 1:  # its first rank tells the others of each pass (drafters/ahead.py)
                step += times.message + way_s(request, placement.draft)

    has_drafts = (draft is not None and bool(placement.draft)) or request.text_drafts
    ks = range(max_k + 1 if has_drafts else 1)
    target = cost_of(request, request.target, placement)
    return RoundTimes(
        draft=step,
        verify=tuple(_verify_s(request, placement, target, k) for k in ks),
        rows=rows,
        overlap=request.overlap if placement.draft_apart else Overlap.off,
        once=once,
        sending=sending,
    )


def _verify_s(request: PlanRequest, placement: Placement, cost: PassCost, k: int) -> float:
    """Returns the seconds of a round without its drafting: the target's pass, the decision, messages."""
    times = step_times(request, request.target, placement, cost)
    probs = request.work.rows * (k + 1) * cost.vocab
    seconds = step_s(request, request.target, placement, cost, k + 1) + probs * times.probs
    seconds += times.round
    if k:
        seconds += times.check + probs * times.accept
    ways = messages(placement, k)
    return seconds + len(ways) * times.message + sum(way_s(request, (LEADER, *ranks)) for ranks in ways)


def messages(placement: Placement, k: int) -> list[tuple[int, ...]]:
    """Returns the messages that a round of K drafts waits for: the ranks that each goes to or comes from.

    The leader sends the target's other ranks what was decided and drafted. Before that it asks the other
    ranks that draft, if there are any. From ranks of the draft's own the drafts come back
    (speculative/round_protocol.py).
    """
    ways = list[tuple[int, ...]]()
    if len(placement.target) > 1:
        ways.append(placement.target)
    if placement.draft not in ((), (LEADER,)):
        ways.append(placement.draft)
    if placement.draft_apart and k > 0:
        ways.append(placement.draft[:1])
    return ways


def way_s(request: PlanRequest, ranks: tuple[int, ...]) -> float:
    """Returns what the network adds to a message among these ranks: half of what it adds to a sum.

    A sum goes there and back. It is 0 on one node.
    """
    nodes = request.machine.nodes_of(ranks)
    return hops(nodes) * request.machine.times.network / 2


def sent_bytes(request: PlanRequest, vocab: int) -> int:
    """Returns the bytes that a draft on ranks of its own sends for one draft of each row."""
    return request.work.rows * draft_bytes(vocab, request.draft_top)


def draft_bytes(vocab: int, top: int | None = None) -> int:
    """Returns the bytes of the probabilities of one draft, which a draft on ranks of its own sends.

    `top` is speculation.draft_top. Few are sent with their tokens, unless that takes more
    (speculative/drafters/remote.py).
    """
    whole = vocab * PROB_BYTES
    return whole if top is None else min(whole, top * (PROB_BYTES + ID_BYTES))


@dataclass(frozen=True, kw_only=True)
class Regular:
    """Sampling without drafts, which speed-ups are over: its time, and on how many ranks it is so fast."""

    ms_per_token: float
    ranks: int


def regular_sampling(request: PlanRequest, options: list[Option], worlds: list[int]) -> Regular:
    """Returns the best regular sampling: the target alone where it fits, else in an option."""
    alone = replace(request, draft=None, text_drafts=False, k=None)
    with suppress(DistributedError):
        best = search(alone, worlds)[0]
        if best.runs:
            return Regular(ms_per_token=best.ms_per_token, ranks=best.placement.world)
    fastest = min(options, key=lambda planned: planned.regular_ms)
    return Regular(ms_per_token=fastest.regular_ms, ranks=fastest.placement.world)
