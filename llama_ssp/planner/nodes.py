"""What a placement sends over the network between nodes, and what a plan says of it. No torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llama_ssp.distributed.placement import LEADER, Placement
from llama_ssp.planner.advice import overrides
from llama_ssp.planner.fit import FitVerdict
from llama_ssp.planner.search import NOTABLE, Option, PlanRequest, cost_of, option, sent_bytes
from llama_ssp.planner.workload import DRAFT, TARGET, Role

IN_WORDS = {TARGET: "target", DRAFT: "draft"}
ANOTHER_GROUP = (
    "a further node adds as many tokens to a batch job, by a second group with copies of both models"
)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The sums of one role's pass that go over the network: how many, and the bytes of one token in all."""

    role: str
    sums: int
    bytes_per_token: float

    def in_words(self) -> str:
        """Returns what a pass sends."""
        size = in_bytes(self.bytes_per_token)
        return f"each pass of the {IN_WORDS[self.role]} crosses the network {self.sums} times, {size} a token"


def crossings(request: PlanRequest, placement: Placement) -> list[Crossing]:
    """Returns what passes of each role send between nodes; nothing of a role whose ranks are on one node."""
    result = list[Crossing]()
    for role in _placed(request, placement):
        cost = cost_of(request, role, placement)
        if cost.crossings:
            size = cost.crossings * cost.sent(1)
            result.append(Crossing(role=role.role, sums=cost.crossings, bytes_per_token=size))
    return result


def _placed(request: PlanRequest, placement: Placement) -> list[Role]:
    """Returns the roles that have ranks."""
    return [role for role in request.roles if role.role == TARGET or placement.draft]


def is_draft_far(request: PlanRequest, placement: Placement) -> bool:
    """Returns whether the draft has ranks of its own, and the first is on another node than the leader."""
    return placement.draft_apart and request.machine.nodes_of((LEADER, placement.draft[0])) > 1


def on_one_node(options: Sequence[Option]) -> Option | None:
    """Returns the fastest option that fits one node; None where none does. The options are sorted."""
    fitting = (planned for planned in options if planned.verdict is FitVerdict.fits)
    return next((planned for planned in fitting if planned.nodes == 1), None)


def over_nodes(options: Sequence[Option]) -> Option | None:
    """Returns the fastest option that fits and takes several nodes; None where none does."""
    fitting = (planned for planned in options if planned.verdict is FitVerdict.fits)
    return next((planned for planned in fitting if planned.nodes > 1), None)


def said_of_nodes(
    request: PlanRequest,
    chosen: Option,
    one: Option | None,
    several: Option | None,
    narrower: tuple[str, Option] | None,
) -> Iterator[str]:
    """Yields what a plan for several nodes says of the network, a line each.

    `one` is the fastest option on one node, and `several` the fastest on more, where they fit. `narrower` are
    number formats, in the command line's words, in which it fits one node, with the plan of that.
    """
    if request.machine.nodes == 1:
        return
    times = request.machine.times
    figures = f"{times.network * 1e6:g} us more for each all-reduce, {times.network_per_s / 1e9:g} GB/s"
    known = "cluster.between_us, cluster.between_gb_s: assumed by kind of network, measured by calibrate"
    yield f"between nodes: {figures} ({known})"
    yield from said_of_placement(request, chosen)
    if chosen.nodes > 1 and chosen.runs:
        taken = network_ms(request, chosen)
        yield f"the network takes {taken:.2f} of {chosen.ms_per_token:.2f} ms/token"

    if chosen.nodes == 1:
        if several is not None and several.ms_per_token < chosen.ms_per_token:
            gain = chosen.ms_per_token / several.ms_per_token - 1
            yield f"more than one node gains {gain:.0%}, within the error: {_timed(several)}"
        elif several is not None:
            yield f"more than one node is slower: {_timed(several)} at best"
        yield f"one node is enough, and nothing crosses the network; {ANOTHER_GROUP} (docs/cluster.md)"
    elif one is None and narrower is not None:
        words, planned = narrower
        faster = ""
        if chosen.runs and chosen.ms_per_token >= planned.ms_per_token * (1 + NOTABLE):
            times_as_fast = chosen.ms_per_token / planned.ms_per_token
            faster = f", {times_as_fast:.1f} times as fast as this (the texts are those of narrower models)"
        yield f"nothing fits one node as it is asked for, but {words} does{faster}: {_timed(planned)}"
    elif one is None:
        yield "nothing fits one node, in narrower formats either"
    else:
        gain = chosen.ms_per_token / one.ms_per_token
        if gain >= 1 + NOTABLE:
            yield f"one node is planned {gain:.1f} times as fast: {_timed(one)} ({overrides(one.placement)})"
        else:
            yield f"one node takes {_timed(one)}: {ANOTHER_GROUP} (docs/cluster.md)"


def said_of_placement(request: PlanRequest, planned: Option) -> Iterator[str]:
    """Yields what the placement sends between nodes, a line each; nothing on one node."""
    for crossing in crossings(request, planned.placement):
        yield crossing.in_words()
    if request.draft is not None and is_draft_far(request, planned.placement) and planned.k:
        size = planned.k * sent_bytes(request, request.draft.model.vocab)
        yield f"the draft is on another node: a round trip and {in_bytes(size)} of probabilities a round"


def network_ms(request: PlanRequest, planned: Option) -> float:
    """Returns how many of a token's milliseconds a network that cost nothing would save."""
    times = replace(request.machine.times, network=0.0, network_per_s=math.inf)
    free = replace(request, machine=replace(request.machine, times=times))
    return planned.ms_per_token - option(free, planned.placement, planned.k).ms_per_token


def _timed(planned: Option) -> str:
    return f"{planned.placement.in_words()}, {planned.ms_per_token:.2f} ms/token"


def in_bytes(size: float) -> str:
    """Returns a size in the unit that gives it one to three digits before the point."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
