"""How much would fit, and which changes make it fit, found by trying each. No torch."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from llama_ssp.config import MAX_K, MOST_ROWS, Dtype, PlacementConf, Splitting
from llama_ssp.distributed.placement import Placement, resolve
from llama_ssp.errors import DistributedError, ModelError
from llama_ssp.planner.fit import FitVerdict, worst
from llama_ssp.planner.search import Option, PlanRequest, search
from llama_ssp.planner.storage import BYTES
from llama_ssp.planner.workload import Role, Workload

LEAST_CONTEXT = 64
SMALL_CHUNK = 128
MOST_ADVICE = 4
MOST_FORMATS = 2  # of these


@dataclass(frozen=True)
class Largest:
    """The largest of each that still fits, when only it changes; 0: nothing fits."""

    context_tokens: int
    rows: int
    k: int
    is_model_limit: bool  # the context is all that the model has: memory is not what limits it


def largest(request: PlanRequest, chosen: Option) -> Largest:
    """Finds by bisection how much fits: more never needs less memory."""
    work = replace(request.work, k=chosen.k)
    context = request.target.model.context
    new = min(work.new_tokens, context)

    def fits(**changes: int) -> bool:
        return _fits(request, chosen.placement, replace(work, **changes))

    prompt = _most(lambda n: fits(prompt_tokens=n), context - new)
    return Largest(
        is_model_limit=0 < prompt == context - new,
        context_tokens=prompt + new if prompt else 0,
        rows=_most(lambda n: fits(rows=n), MOST_ROWS),
        k=_most(lambda n: fits(k=n), MAX_K) if request.draft is not None or request.text_drafts else 0,
    )


def advice(request: PlanRequest, chosen: Option, worlds: list[int]) -> list[str]:
    """Returns changes each of which makes it fit; empty where it fits already."""
    if chosen.verdict is FitVerdict.fits:
        return []
    changes = list(islice(_tried(request, chosen, worlds), MOST_ADVICE))
    if len(changes) < MOST_ADVICE and not _first(_on_more_gpus(request)):
        changes += _first(_on_more_nodes(request))
    return changes


def overrides(placement: Placement) -> str:
    """Returns the words that select the placement on the command line."""
    if placement.splitting is Splitting.layers:
        return "placement=layers"
    if not placement.draft:
        return "placement=auto"
    if placement.copies:
        return "placement=replicated"
    if placement.draft_apart:
        return f"placement=own placement.draft_degree={len(placement.draft)}"
    if len(placement.draft) == 1:
        return "placement=leader"
    if len(placement.draft) < len(placement.target):
        return f"placement=sharded placement.draft_degree={len(placement.draft)}"
    return "placement=sharded"


def _tried(request: PlanRequest, chosen: Option, worlds: list[int]) -> Iterator[str]:
    if better := _best(request, worlds):
        yield _moved(chosen.placement, better.placement)
    for words, best in narrower_formats(request, worlds)[:MOST_FORMATS]:
        yield f"{words} ({best.placement.in_words()})"
    room = largest(request, chosen)
    if room.rows:
        rows = f"{room.rows} row{'s' if room.rows > 1 else ''}"
        yield f"{rows} instead of {request.work.rows} (task.batch_size)"
    if room.context_tokens >= LEAST_CONTEXT:
        yield f"context {room.context_tokens} instead of {request.work.slots} (prompt and new tokens)"
    chunk = request.work.prefill_chunk
    smaller = replace(request.work, k=chosen.k, prefill_chunk=SMALL_CHUNK)
    if chunk > SMALL_CHUNK and _fits(request, chosen.placement, smaller):
        yield f"task.prefill_chunk={SMALL_CHUNK} instead of {chunk}"
    if request.draft is not None and _best(replace(request, draft=None), worlds):
        yield "draft=none: the target alone fits"
    yield from _first(_on_more_gpus(request))
    if not request.machine.is_cpu and request.draft is None:
        layers = resolve(PlacementConf(splitting=Splitting.layers), 1, drafts=False)
        with suppress(DistributedError, ModelError):
            if _fits(request, layers, replace(request.work, k=0)):
                yield "placement=layers: one process, which spreads the layers over all GPUs, is slower"


# Words, and what is planned with them.
Changed = Iterator[tuple[str, PlanRequest]]


def _on_more_gpus(request: PlanRequest) -> Changed:
    """Yields the same on more GPUs of such a node."""
    machine = request.machine
    if machine.is_cpu:
        return
    for gpus in range(machine.gpus + 1, machine.gpus_of_node + 1):
        yield f"cluster.gpus={gpus} instead of {machine.gpus}", _on(request, gpus, machine.nodes)


def _on_more_nodes(request: PlanRequest) -> Changed:
    """Yields the same on more nodes, all of whose GPUs are used. These are machines to get, not a setting."""
    machine = request.machine
    gpus = max(machine.gpus, machine.gpus_of_node)
    each = f"{gpus} GPUs each" if gpus > 1 else "a GPU each"
    whole = f" cluster.gpus={gpus}" if gpus > machine.gpus else ""
    if machine.is_cpu:
        return
    for nodes in (2 * machine.nodes, 4 * machine.nodes):
        words = (
            f"{nodes} nodes with {each} (plan with{whole} cluster.nodes={nodes}: it prints their commands)"
        )
        yield words, _on(request, gpus, nodes)


def _first(changed: Changed) -> list[str]:
    """Returns the words of the first that fits."""
    fitting = (words for words, request in changed if _best(request, [request.machine.world]))
    return list(islice(fitting, 1))


def _on(request: PlanRequest, gpus: int, nodes: int) -> PlanRequest:
    return replace(request, machine=replace(request.machine, gpus=gpus, nodes=nodes))


def _fits(request: PlanRequest, placement: Placement, work: Workload) -> bool:
    return worst(request.memories(placement, work)).verdict is FitVerdict.fits


def _best(request: PlanRequest, worlds: list[int]) -> Option | None:
    """Returns the fastest that fits of a few placements of each kind, if there is one."""
    with suppress(DistributedError, ModelError):
        best = search(request, worlds, every=False)[0]
        return best if best.verdict is FitVerdict.fits else None
    return None


def narrower_formats(request: PlanRequest, worlds: list[int]) -> list[tuple[str, Option]]:
    """Returns formats that make it fit: one model in the widest that does, and both in 8 or in 4 bit.

    Each is given by the words of the command line, with its plan. The widest of the target are first, since
    its texts are what counts; of equally wide ones the fastest.
    """
    fitting = list[tuple[str, float, Option]]()  # words, bytes of a number of the target, the plan
    for role in request.roles:
        kept = [Dtype.packed] if role.model.code_bits else []
        for dtype in (Dtype.bf16 if request.machine.bf16 else Dtype.fp16, *kept, Dtype.int8, Dtype.nf4):
            if BYTES[dtype] >= BYTES[role.dtype]:
                continue
            best = _best(_with_dtype(request, role, dtype), worlds)
            if best is not None:
                width = BYTES[dtype] if role is request.target else BYTES[request.target.dtype]
                fitting.append((f"{role.role}.dtype={dtype.value}", width, best))
                break

    if request.draft is not None:
        for dtype in (Dtype.int8, Dtype.int4, Dtype.nf4):
            best = _both_in(request, dtype, worlds)
            if best is not None and (dtype is not Dtype.nf4 or not fitting):
                fitting.append((f"model.dtype={dtype.value} draft.dtype={dtype.value}", BYTES[dtype], best))
    fitting.sort(key=lambda each: (-each[1], each[2].ms_per_token))
    return [(words, best) for words, _, best in fitting]


def _both_in(request: PlanRequest, dtype: Dtype, worlds: list[int]) -> Option | None:
    """Returns the fastest placement of both models in this format, if it fits and both become smaller."""
    both = request
    for role in request.roles:
        if BYTES[dtype] >= BYTES[role.dtype]:
            return None
        both = _with_dtype(both, role, dtype)
    return _best(both, worlds)


def _with_dtype(request: PlanRequest, role: Role, dtype: Dtype) -> PlanRequest:
    other = replace(role, dtype=dtype, model=replace(role.model, dtype=dtype))
    return replace(request, target=other) if role is request.target else replace(request, draft=other)


def _moved(now: Placement, better: Placement) -> str:
    """Returns the differences in a few words, and the command line's words for the better one."""
    words = []
    if len(now.target) != len(better.target):
        words.append(f"target over {len(better.target)} ranks instead of {len(now.target)}")
    before, after = ((place.draft_degree, place.draft_apart, place.copies) for place in (now, better))
    if better.draft and before != after:
        seat = "whole on the leader"
        if better.draft_apart:
            seat = f"on {len(better.draft)} of its own"
        elif better.draft_degree > 1:
            seat = f"split over {better.draft_degree}"
        words.append(f"draft {seat}")
    return f"{' and '.join(words) or better.in_words()} ({overrides(better)} ranks={better.world})"


def _most(holds: Callable[[int], bool], limit: int) -> int:
    """Returns the largest number up to `limit` for which it holds, as for all smaller ones; 0: for none."""
    return bisect_left(range(1, limit + 1), True, key=lambda n: not holds(n))
