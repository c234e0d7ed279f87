"""How much would fit, and what to change where it does not, found by trying each change. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from llama_ssp.config import Dtype, Splitting
from llama_ssp.distributed.placement import Placement
from llama_ssp.errors import DistributedError
from llama_ssp.planner.fit import FitVerdict, bill_of, worst
from llama_ssp.planner.search import Asked, Option, search
from llama_ssp.planner.weights import BYTES
from llama_ssp.planner.workload import Role, Workload

MOST_ROWS, MOST_K, LEAST_CONTEXT, SMALL_CHUNK = 4096, 64, 64, 128
MOST_ADVICE = 4


@dataclass(frozen=True)
class Largest:
    """What the placement has room for when only this one thing grows; 0 is nothing."""

    context: int
    rows: int
    k: int


def largest(asked: Asked, chosen: Option) -> Largest:
    """By bisection: a larger one never needs less."""
    work, context = replace(asked.work, k=chosen.k), asked.target.model.context
    new = min(work.new_tokens, context)

    def fits(**changes: int) -> bool:
        return _fits(asked, chosen.placement, replace(work, **changes))

    prompt = _most(lambda n: fits(prompt_tokens=n), context - new)
    return Largest(
        context=prompt + new if prompt else 0,
        rows=_most(lambda n: fits(rows=n), MOST_ROWS),
        k=_most(lambda n: fits(k=n), MOST_K) if asked.draft is not None or asked.text_drafts else 0,
    )


def advice(asked: Asked, chosen: Option, worlds: list[int]) -> list[str]:
    """Changes that make it fit, each on its own; empty where it fits already, or none was found."""
    if chosen.verdict is FitVerdict.fits:
        return []
    return [words for words, _ in zip(_tried(asked, chosen, worlds), range(MOST_ADVICE), strict=False)]


def overrides(placement: Placement) -> str:
    """How the placement is asked for on the command line."""
    if placement.splitting is Splitting.layers:
        return "placement=layers"
    if not placement.draft:
        return "placement=auto"
    if placement.draft_apart:
        return f"placement=own placement.draft_degree={len(placement.draft)}"
    if placement.copies:
        return "placement=replicated"
    if len(placement.draft) == 1:
        return "placement=leader"
    degree = len(placement.draft)
    whole = degree == len(placement.target)
    return "placement=sharded" + ("" if whole else f" placement.draft_degree={degree}")


def _tried(asked: Asked, chosen: Option, worlds: list[int]) -> Iterator[str]:
    better = _best(asked, worlds)
    if better is not None:
        yield _moved(chosen.placement, better.placement)
    yield from _in_narrower_formats(asked, worlds)
    room = largest(asked, chosen)
    if room.rows:
        yield f"{room.rows} row{'s' * (room.rows > 1)} instead of {asked.work.rows} (task.batch_size)"
    if room.context >= LEAST_CONTEXT:
        yield f"context {room.context} instead of {asked.work.slots} (prompt and new tokens)"
    chunk = asked.work.prefill_chunk
    smaller = replace(asked.work, k=chosen.k, prefill_chunk=SMALL_CHUNK)
    if chunk > SMALL_CHUNK and _fits(asked, chosen.placement, smaller):
        yield f"task.prefill_chunk={SMALL_CHUNK} instead of {chunk}"
    if asked.draft is not None and _best(replace(asked, draft=None), worlds) is not None:
        yield "draft=none: the target alone fits"
    nodes = asked.machine.nodes
    for more in (2 * nodes, 4 * nodes):
        larger = replace(asked, machine=replace(asked.machine, nodes=more))
        if not asked.machine.is_cpu and _best(larger, [larger.machine.world]) is not None:
            yield f"cluster.nodes={more} instead of {nodes}"
            return


def _fits(asked: Asked, placement: Placement, work: Workload) -> bool:
    bills = bill_of(asked.machine, asked.target, asked.draft, placement, work)
    return worst(bills).verdict is FitVerdict.fits


def _best(asked: Asked, worlds: list[int]) -> Option | None:
    """The fastest of the most telling placements that fits, if there is one."""
    with suppress(DistributedError):
        best = search(asked, worlds, every=False)[0]
        return best if best.verdict is FitVerdict.fits else None
    return None


def _in_narrower_formats(asked: Asked, worlds: list[int]) -> Iterator[str]:
    """One model in the widest format that makes it fit; if that helps with neither, both in the narrowest."""
    found = False
    for role in asked.roles:
        for dtype in _narrower(asked, role):
            held = _best(_with_dtype(asked, role, dtype), worlds)
            if held is not None:
                found = True
                yield f"{role.role}.dtype={dtype.value} ({held.placement.in_words()})"
                break
    if not found and asked.draft is not None:
        both = _with_dtype(_with_dtype(asked, asked.target, Dtype.nf4), asked.draft, Dtype.nf4)
        held = _best(both, worlds)
        if held is not None:
            yield f"model.dtype=nf4 draft.dtype=nf4 ({held.placement.in_words()})"


def _narrower(asked: Asked, role: Role) -> list[Dtype]:
    """Formats of fewer bytes, the widest first."""
    formats = Dtype.bf16 if asked.machine.bf16 else Dtype.fp16, Dtype.int8, Dtype.nf4
    return [dtype for dtype in formats if BYTES[dtype] < BYTES[role.dtype]]


def _with_dtype(asked: Asked, role: Role, dtype: Dtype) -> Asked:
    other = replace(role, dtype=dtype, model=replace(role.model, dtype=dtype))
    return replace(asked, target=other) if role is asked.target else replace(asked, draft=other)


def _moved(now: Placement, better: Placement) -> str:
    """What is different there, in a few words, and how to ask for it."""
    words = []
    if len(now.target) != len(better.target):
        words.append(f"target over {len(better.target)} ranks instead of {len(now.target)}")
    if better.draft and (now.draft_degree, now.draft_apart, now.copies) != (
        better.draft_degree, better.draft_apart, better.copies,
    ):  # fmt: skip
        degree = better.draft_degree
        words.append(
            f"draft on {len(better.draft)} of its own" if better.draft_apart
            else f"draft split over {degree}" if degree > 1 else "draft whole on the leader"
        )  # fmt: skip
    ranks = f"{better.world} rank{'s' * (better.world > 1)}"
    return f"{' and '.join(words) or better.in_words()} ({overrides(better)} on {ranks})"


def _most(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` for which it holds, given that it holds for all smaller ones."""
    if most < 1 or not holds(1):
        return 0
    if holds(most):
        return most
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
