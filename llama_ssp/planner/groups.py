"""A job that groups of ranks share, over several nodes: which groups, how fast, at what price. No torch.

Groups share nothing but the job's folder: each takes one shard after the other (batch/journal.py). So the
time of a job is that of the shards which one group answers, one after the other.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llama_ssp.distributed.placement import Placement
from llama_ssp.errors import DistributedError, ModelError
from llama_ssp.planner.advice import overrides
from llama_ssp.planner.plan import target_prefill_s
from llama_ssp.planner.search import Option, PlanRequest, cost_of, search, step_s, step_times
from llama_ssp.planner.speed import LAUNCHING, forward_parts, prefill_s
from llama_ssp.planner.workload import Role
from llama_ssp.speculative.draft_length import tokens_per_round

PROMPTS, DECIDING = "prompts", "probabilities"  # what time goes to, besides the parts of a pass
MOST_NODES = 8  # of a group
NOTABLE = 0.1  # share of the time that an uneven end costs, from which on it is named
Spent = dict[str, float]  # seconds


@dataclass(frozen=True)
class JobSize:
    """What is to be done: records, each as the workload has it, in shards of at most `shard_size`."""

    records: int
    shard_size: int

    @property
    def shards(self) -> int:
        return -(-self.records // self.shard_size)

    @property
    def largest(self) -> int:
        """Records of the largest shard; shards are as even as can be."""
        return -(-self.records // self.shards)


@dataclass(frozen=True)
class GroupPlan:
    """A group of `gpus` GPUs: its placement, and what a record takes, by what the time goes to."""

    gpus: int
    option: Option
    spent: Spent

    @property
    def record_s(self) -> float:
        """Seconds a record, of all rows together."""
        return sum(self.spent.values())

    def shares(self) -> list[tuple[str, float]]:
        """What the time goes to, the largest share first."""
        found = [(name, seconds / self.record_s) for name, seconds in self.spent.items()]
        return sorted(found, key=lambda one: -one[1])

    def shard_s(self, records: int, rows: int) -> float:
        """Seconds of a shard: a round takes as long when rows are empty at its end."""
        return -(-records // rows) * rows * self.record_s


@dataclass(frozen=True)
class JobPlan:
    """A job on several numbers of nodes, with the groups that end first; named as in the JSON interface.

    `groups`: what one group of each width would do. A price is in the currency of the cluster's.
    """

    size: JobSize
    request: PlanRequest
    price_per_gpu_hour: float | None
    groups: list[GroupPlan]
    nodes: list[dict[str, Any]]

    def sentences(self) -> Iterator[str]:
        """Which groups are best on how many nodes."""
        for gpus, those in groupby(self.nodes, key=lambda one: one["gpus_per_group"]):
            found = list(those)
            span = "-".join(str(n) for n in sorted({found[0]["nodes"], found[-1]["nodes"]}))
            yield f"{span} node{'s' * (span != '1')}: groups of {gpus} GPU{'s' * (gpus > 1)} end first"

    def document(self) -> dict[str, Any]:
        """The figures under the names of the JSON interface."""
        work = self.request.work
        groups = [
            {
                "gpus": one.gpus,
                "placement": one.option.placement.in_words(),
                "overrides": overrides(one.option.placement),
                "verdict": one.option.verdict.value,
                "k": one.option.k,
                "ms_per_token": one.option.ms_per_token if one.option.runs else None,
                "tokens_per_s": work.new_tokens / one.record_s if one.option.runs else None,
                "time_shares": dict(one.shares()) if one.option.runs else {},
            }
            for one in self.groups
        ]
        return {
            "records": self.size.records,
            "shards": self.size.shards,
            "price_per_gpu_hour": self.price_per_gpu_hour,
            "groups": groups,
            "nodes": self.nodes,
        }


def plan_job(
    request: PlanRequest, size: JobSize, nodes: list[int], price_per_gpu_hour: float | None
) -> JobPlan:
    """The job on each of these numbers of nodes, with the groups that end it first, placed as is fastest.

    Where nothing fits, `nodes` is empty.
    """
    groups = list(_groups(request, max(nodes)))
    found = [_on_nodes(request, size, count, groups, price_per_gpu_hour) for count in sorted(nodes)]
    return JobPlan(size, request, price_per_gpu_hour, groups, [one for one in found if one is not None])


def job_s(shards: int, shard_s: float, groups: int) -> float:
    """Seconds until the last shard is done: each group takes the next one when it has ended one."""
    return -(-shards // groups) * shard_s


def _on_nodes(
    request: PlanRequest, size: JobSize, nodes: int, groups: list[GroupPlan], price: float | None
) -> dict[str, Any] | None:
    """With the groups that end first; of equal ones the narrowest."""
    gpus, rows = nodes * request.machine.gpus, request.work.rows
    fitting = [group for group in groups if group.option.runs and group.gpus <= gpus]
    if not fitting:
        return None
    ends = [job_s(size.shards, group.shard_s(size.largest, rows), gpus // group.gpus) for group in fitting]
    spent, group = min(zip(ends, fitting, strict=True), key=lambda one: (one[1].option.verdict.rank, one[0]))
    count = gpus // group.gpus
    cost = None if price is None else price * gpus * spent / 3600
    tokens = size.records * request.work.new_tokens
    return {
        "nodes": nodes,
        "gpus": gpus,
        "groups": count,
        "gpus_per_group": group.gpus,
        "job_s": spent,
        "tokens_per_s": tokens / spent,
        "tokens_per_s_per_gpu": tokens / spent / gpus,
        "job_price": cost,
        "price_per_million_tokens": None if cost is None else 1e6 * cost / tokens,
        "limited_by": _limit(size, count, group),
    }


def _limit(size: JobSize, groups: int, group: GroupPlan) -> str:
    """What to change first, if the job is to end sooner."""
    if groups > size.shards:
        return f"only {size.shards} shard{'s' * (size.shards > 1)}"
    rounds = size.shards / groups
    if 1 - rounds / -(-size.shards // groups) > NOTABLE:
        return f"{rounds:.1f} shards a group"
    name, share = group.shares()[0]
    return f"{name}, {share:.0%}"


def _groups(request: PlanRequest, most: int) -> Iterator[GroupPlan]:
    """Groups that fill a node; of several nodes only if none fits on one. A CPU is not shared."""
    gpus, fits = request.machine.gpus, False
    widths = [gpus] if request.machine.is_cpu else [n for n in range(1, gpus + 1) if gpus % n == 0]
    for width in widths:
        for group in _group(request, width):
            fits = fits or group.option.runs
            yield group
    nodes = 2
    while not fits and nodes <= min(most, MOST_NODES):
        for group in _group(request, nodes * gpus):
            fits = group.option.runs
            yield group
        nodes *= 2


def _group(request: PlanRequest, world: int) -> Iterator[GroupPlan]:
    """The best group over `world` ranks, if one is possible."""
    with suppress(DistributedError, ModelError):
        found = search(request, [world], every=False)[0]
        yield GroupPlan(world, found, _spent(request, found))


def _spent(request: PlanRequest, found: Option) -> Spent:
    """Seconds of a record: its rounds, shared by all rows, and its prompt, which the others wait for."""
    work, times, place = request.work, found.times, found.placement
    rounds = work.new_tokens / tokens_per_round(request.acceptance, found.k) / work.rows
    spent = _step(request, request.target, place, found.k + 1)
    if request.draft is not None and found.k:
        width = request.draft.model.head_block
        each = _step(request, request.draft, place, width + 1)
        for name, seconds in each.items():
            spent[name] = spent.get(name, 0.0) + (1 if width else found.k) * seconds
    whole = times.round_s(found.k, request.acceptance)
    rest = whole - sum(spent.values())
    if rest < 0:  # the draft runs while the target verifies
        spent = {name: seconds * whole / (whole - rest) for name, seconds in spent.items()}
    spent[DECIDING] = max(rest, 0.0)
    prompts = target_prefill_s(request, place, 1)
    if request.draft is not None and place.draft:
        cost, sizes = cost_of(request, request.draft, place), (1, work.prompt_tokens, work.prefill_chunk)
        prompts += prefill_s(cost, request.machine.times, *sizes)
    return {**{name: rounds * seconds for name, seconds in spent.items()}, PROMPTS: prompts}


def _step(request: PlanRequest, role: Role, place: Placement, each: int) -> Spent:
    """Seconds of a step by what they go to."""
    cost, work = cost_of(request, role, place), request.work
    slots = work.prompt_tokens + work.new_tokens / 2
    spent = forward_parts(cost, step_times(request, role, place, cost), work.rows, each, slots)
    return spent | {LAUNCHING: step_s(request, role, place, cost, each) - sum(spent.values())}
