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

LEAST_CONTEXT, SMALL_CHUNK = 64, 128
MOST_ADVICE = 4


@dataclass(frozen=True)
class Largest:
    """The largest of each that still fits, when only it changes; 0: nothing fits."""

    context_tokens: int
    rows: int
    k: int
    is_model_limit: bool  # the context is all that the model has: memory is not what limits it


def largest(request: PlanRequest, chosen: Option) -> Largest:
    """By bisection: more never needs less memory."""
    work, context = replace(request.work, k=chosen.k), request.target.model.context
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
    """Changes that make it fit, each alone, or two together where none does; empty where it fits already."""
    if chosen.verdict is FitVerdict.fits:
        return []
    alone = list(islice(_tried(request, chosen, worlds), MOST_ADVICE))
    here = alone or list(islice(_together(request), MOST_ADVICE - 1))
    return here if len(here) == MOST_ADVICE else [*here, *_first(_on_more_nodes(request))]


def overrides(placement: Placement) -> str:
    """The words that select the placement on the command line."""
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
    partly = len(placement.draft) < len(placement.target)
    return "placement=sharded" + f" placement.draft_degree={len(placement.draft)}" * partly


def _tried(request: PlanRequest, chosen: Option, worlds: list[int]) -> Iterator[str]:
    if better := _best(request, worlds):
        yield _moved(chosen.placement, better.placement)
    yield from _in_narrower_formats(request, worlds)
    room = largest(request, chosen)
    if room.rows:
        yield f"{room.rows} row{'s' * (room.rows > 1)} instead of {request.work.rows} (task.batch_size)"
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
    """The same on more GPUs of such a node."""
    machine = request.machine
    for gpus in range(machine.gpus + 1, machine.gpus_of_node + 1) if not machine.is_cpu else ():
        yield f"cluster.gpus={gpus} instead of {machine.gpus}", _on(request, gpus, machine.nodes)


def _on_more_nodes(request: PlanRequest) -> Changed:
    """The same on more nodes, all of whose GPUs are used."""
    machine = request.machine
    gpus = max(machine.gpus, machine.gpus_of_node)
    whole = f"cluster.gpus={gpus} and " * (gpus > machine.gpus)
    for nodes in (2 * machine.nodes, 4 * machine.nodes) if not machine.is_cpu else ():
        yield f"{whole}cluster.nodes={nodes} instead of {machine.nodes}", _on(request, gpus, nodes)


def _first(changed: Changed) -> list[str]:
    """The words of the first that fits."""
    fitting = (words for words, request in changed if _best(request, [request.machine.world]))
    return list(islice(fitting, 1))


def _together(request: PlanRequest) -> Iterator[str]:
    """Narrower formats on the fewest more GPUs of the node that they fit on."""
    for words, larger in _on_more_gpus(request):
        if found := list(_in_narrower_formats(larger, [larger.machine.world])):
            yield from (f"{change} and {words}" for change in found)
            return


def _on(request: PlanRequest, gpus: int, nodes: int) -> PlanRequest:
    return replace(request, machine=replace(request.machine, gpus=gpus, nodes=nodes))


def _fits(request: PlanRequest, placement: Placement, work: Workload) -> bool:
    return worst(request.memories(placement, work)).verdict is FitVerdict.fits


def _best(request: PlanRequest, worlds: list[int]) -> Option | None:
    """The fastest that fits of a few placements of each kind, if there is one."""
    with suppress(DistributedError):
        best = search(request, worlds, every=False)[0]
        return best if best.verdict is FitVerdict.fits else None
    return None


def _in_narrower_formats(request: PlanRequest, worlds: list[int]) -> Iterator[str]:
    """One model in the widest format that makes it fit; if neither alone does, both in the narrowest."""
    found = False
    for role in request.roles:
        kept = [Dtype.packed] if role.model.code_bits else []
        for dtype in (Dtype.bf16 if request.machine.bf16 else Dtype.fp16, *kept, Dtype.int8, Dtype.nf4):
            narrower = BYTES[dtype] < BYTES[role.dtype]
            if narrower and (held := _best(_with_dtype(request, role, dtype), worlds)):
                found = True
                yield f"{role.role}.dtype={dtype.value} ({held.placement.in_words()})"
                break
    if not found and request.draft is not None:
        both = _with_dtype(_with_dtype(request, request.target, Dtype.nf4), request.draft, Dtype.nf4)
        if held := _best(both, worlds):
            yield f"model.dtype=nf4 draft.dtype=nf4 ({held.placement.in_words()})"


def _with_dtype(request: PlanRequest, role: Role, dtype: Dtype) -> PlanRequest:
    other = replace(role, dtype=dtype, model=replace(role.model, dtype=dtype))
    return replace(request, target=other) if role is request.target else replace(request, draft=other)


def _moved(now: Placement, better: Placement) -> str:
    """The differences in a few words, and the command line's words for the better one."""
    words = []
    if len(now.target) != len(better.target):
        words.append(f"target over {len(better.target)} ranks instead of {len(now.target)}")
    before, after = ((one.draft_degree, one.draft_apart, one.copies) for one in (now, better))
    if better.draft and before != after:
        split = f"split over {better.draft_degree}" if better.draft_degree > 1 else "whole on the leader"
        words.append(f"draft {f'on {len(better.draft)} of its own' if better.draft_apart else split}")
    return f"{' and '.join(words) or better.in_words()} ({overrides(better)} ranks={better.world})"


def _most(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` for which it holds, as for all smaller ones; 0: for none."""
    return bisect_left(range(1, most + 1), True, key=lambda n: not holds(n))
