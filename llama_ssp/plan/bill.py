"""The bill of one rank: what it holds of each role, line by line."""

from __future__ import annotations

from llama_ssp.placement import Placement
from llama_ssp.plan.asked import Kind, Line, Role, Workload
from llama_ssp.plan.room import bill
from llama_ssp.ranges import head_ranges


def tensor_lines(
    target: Role, draft: Role | None, placement: Placement, work: Workload, rank: int
) -> tuple[Line, ...]:
    """Weights, caches, and what passes through memory at the worst moment, on this rank."""
    lines: list[Line] = []
    if rank in placement.target:
        lines += _held(target, len(placement.target), placement.target.index(rank), target, work)
    if draft is not None and rank in placement.draft:
        lines += _held(draft, placement.draft_degree, placement.draft.index(rank), target, work)
    return tuple(lines)


def _held(role: Role, world: int, index: int, target: Role, work: Workload) -> list[Line]:
    slots = min(work.slots, target.model.context, role.model.context)
    whole = bill(role.role, role.model, role.dtype, work.rows, slots)
    index = index if world > 1 else 0
    kvs = head_ranges(role.model.n_heads, role.model.n_kv_heads, world, index).kvs
    return [
        Line(role.role, "weights", -(-whole.weights // world), Kind.exact),
        Line(role.role, "cache", whole.cache * kvs // role.model.n_kv_heads, Kind.exact),
    ]
