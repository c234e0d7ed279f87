"""placement=layers: which of one node's GPUs holds which layers, as accelerate deals them out. No torch.

Each GPU may take an even part and a layer and a quarter more. They are filled in order, whole layers only;
the first leaves room for the largest module that is still to come, the last takes what is left. The draft
sits on the first, where texts go in and distributions come out. One GPU computes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llama_ssp.config import Dtype, ModelConf, Splitting
from llama_ssp.distributed.placement import LEADER, Placement
from llama_ssp.planner.activations import LAWS, LOGITS, Kernels
from llama_ssp.planner.memory import Peak, phases, segments, tensor_lines, worst_lines
from llama_ssp.planner.weights import (
    CACHE,
    EMBEDDING,
    HEAD,
    HELD,
    LAYERS,
    NORMS,
    POSITIONS,
    SCALES,
    Part,
    held,
)
from llama_ssp.planner.workload import TARGET, Line, Role, Workload

ROOM = 1.25  # layers that a GPU may take beyond its even part
ALONE = Placement(Splitting.tensor, 1, (LEADER,))


@dataclass(frozen=True)
class Stage:
    """What one GPU holds: so many layers, and perhaps what is before the first or behind the last."""

    layers: int
    embedding: bool
    norm: bool
    head: bool


def stages(model: ModelConf, dtype: Dtype, gpus: int) -> list[Stage]:
    """What each GPU holds. Empty ones are left out."""
    sizes = _sizes(model, dtype)
    names = [EMBEDDING, *[LAYERS] * model.n_layers, NORMS, *[HEAD] * (not model.tied)]
    room = sum(sizes[name] for name in names) // gpus + int(ROOM * sizes[LAYERS])
    dealt: list[list[str]] = [[]]
    used = 0
    for at, name in enumerate(names):
        kept = max((sizes[other] for other in names[at + 1 :]), default=0) if len(dealt) == 1 else 0
        if len(dealt) < gpus and used + sizes[name] > room - kept:
            dealt.append([])
            used = 0
        dealt[-1].append(name)
        used += sizes[name]
    return [
        Stage(one.count(LAYERS), EMBEDDING in one, NORMS in one, (EMBEDDING if model.tied else HEAD) in one)
        for one in dealt
        if one
    ]


def stage_lines(
    target: Role, draft: Role | None, work: Workload, gpus: int, kernels: Kernels
) -> Iterator[tuple[Line, ...]]:
    """Every GPU's bill but for what libraries take."""
    dealt = stages(target.model, target.dtype, gpus)
    for at, stage in enumerate(dealt):
        part = replace(target, model=replace(target.model, n_layers=max(stage.layers, 1)))
        other = draft if at == 0 else None
        place = replace(ALONE, draft=(LEADER,)) if other is not None else ALONE
        whole = tensor_lines(part, other, place, work, LEADER, kernels)
        peaks = [_passing(peak, at, stage) for peak in phases(part, other, place, work, LEADER, kernels)]
        lines = [*_held(whole, part.model, target.dtype, stage), *worst_lines(peaks)]
        if not kernels.cpu:
            lines.append(segments(part, other, place, work, LEADER))
        yield tuple(line for line in lines if line.bytes)


def _held(lines: tuple[Line, ...], model: ModelConf, dtype: Dtype, stage: Stage) -> Iterator[Line]:
    """Weights and caches of a model with the stage's layers, without what other stages have."""
    missing = {
        *(() if stage.embedding else (EMBEDDING, POSITIONS)),
        *(() if stage.head else (HEAD,)),
        *(() if stage.layers else (LAYERS, SCALES, CACHE, NORMS)),
    }
    last_norm = held(Part.of(model), dtype)[NORMS] - _of_a_layer(model, dtype, NORMS) * model.n_layers
    for line in lines:
        if line.name not in (*HELD, CACHE):
            continue
        if line.role == TARGET and line.name in missing:
            continue
        if line.role == TARGET and line.name == NORMS and not stage.norm:
            line = replace(line, bytes=line.bytes - last_norm)
        yield line


def _passing(peak: Peak, at: int, stage: Stage) -> Peak:
    """Laws are made on the first GPU, logits on the one with the head, and brought to the first."""
    elsewhere = {*((LAWS,) if at else ()), *((LOGITS,) if at and not stage.head else ())}
    return replace(peak, parts=tuple((name, size) for name, size in peak.parts if name not in elsewhere))


def _sizes(model: ModelConf, dtype: Dtype) -> dict[str, int]:
    """Bytes of a module of each kind as accelerate reckons them: quantised ones without scales."""
    whole = held(Part.of(model), dtype)
    layer = sum(_of_a_layer(model, dtype, group) for group in (LAYERS, NORMS))
    return {
        EMBEDDING: whole[EMBEDDING] + whole.get(POSITIONS, 0),
        LAYERS: layer,
        NORMS: whole[NORMS] - _of_a_layer(model, dtype, NORMS) * model.n_layers,
        HEAD: whole.get(HEAD, 0),
    }


def _of_a_layer(model: ModelConf, dtype: Dtype, group: str) -> int:
    """What one layer adds to a group."""
    one, two = (held(Part.of(replace(model, n_layers=n)), dtype).get(group, 0) for n in (1, 2))
    return two - one
