"""placement=layers: which of one node's GPUs holds which layers, as accelerate assigns them. No torch.

Each GPU may take an even share and a layer and a quarter more. They are filled in order, whole layers only;
the first leaves room for the largest module that is still to come, the last takes what is left. The draft
is on the first, where texts go in and distributions come out. One GPU computes at a time.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from llama_ssp.config import Dtype, ModelConf, Splitting
from llama_ssp.distributed.placement import LEADER, Placement
from llama_ssp.models.layout import EMBEDDING, EXPERTS, HEAD, LAYERS, NORMS, POSITIONS
from llama_ssp.planner.activations import LOGITS, PROBS, Kernels
from llama_ssp.planner.memory import peak_lines, peaks, rank_work, segments, tensor_lines
from llama_ssp.planner.storage import SCALES, WEIGHTS
from llama_ssp.planner.weights import CACHE, ModelPart, held
from llama_ssp.planner.workload import TARGET, MemoryLine, Role, Workload

EXTRA_LAYERS = 1.25  # that a GPU may take beyond its even share


Stage = Counter[str]  # how many modules of each kind a GPU holds


def stages(model: ModelConf, dtype: Dtype, gpus: int) -> list[Stage]:
    """What each GPU holds; GPUs that hold nothing are left out."""
    sizes = _module_bytes(model, dtype)
    names = [EMBEDDING, *[LAYERS] * model.n_layers, NORMS, *[HEAD] * (not model.tied)]
    limit = sum(sizes[name] for name in names) // gpus + int(EXTRA_LAYERS * sizes[LAYERS])
    assigned: list[list[str]] = [[]]
    for at, name in enumerate(names):
        to_come = [sizes[other] for other in names[at + 1 :]] if len(assigned) == 1 else []
        used = sum(sizes[other] for other in assigned[-1])
        if len(assigned) < gpus and used + sizes[name] > limit - max(to_come, default=0):
            assigned.append([])
        assigned[-1].append(name)
    found = [Counter(own) for own in assigned if own]
    return [own | Counter({HEAD: own[EMBEDDING]}) if model.tied else own for own in found]


def layers_lines(
    target: Role, draft: Role | None, work: Workload, gpus: int, kernels: Kernels
) -> Iterator[tuple[MemoryLine, ...]]:
    """The memory lines of every GPU, without those of libraries."""
    for at, stage in enumerate(stages(target.model, target.dtype, gpus)):
        part = replace(target, model=_of_layers(target.model, max(stage[LAYERS], 1)))
        other = draft if at == 0 else None
        alone = Placement(Splitting.tensor, 1, (LEADER,), () if other is None else (LEADER,))
        own = rank_work(part, other, alone, work, LEADER, kernels)
        # Distributions are made on the first GPU; logits on that with the head, then copied to the first.
        elsewhere = {PROBS, *[LOGITS] * (not stage[HEAD])} if at else {}
        here = {
            phase: {name: size for name, size in parts.items() if name not in elsewhere}
            for phase, parts in peaks(own).items()
        }
        lines = [
            *_held(tensor_lines(own), part.model, target.dtype, stage),
            *peak_lines(here),
            *([] if kernels.cpu else [segments(own)]),
        ]
        yield tuple(line for line in lines if line.bytes)


def _held(
    lines: tuple[MemoryLine, ...], model: ModelConf, dtype: Dtype, stage: Stage
) -> Iterator[MemoryLine]:
    """Weights and caches of a model with the stage's layers, without those of other stages."""
    groups = {EMBEDDING: [POSITIONS], HEAD: [], LAYERS: [EXPERTS, SCALES, CACHE, NORMS]}
    missing = {name for kind in groups if not stage[kind] for name in (kind, *groups[kind])}
    for line in lines:
        if line.name not in (*WEIGHTS, CACHE) or (line.role == TARGET and line.name in missing):
            continue
        if line.role == TARGET and line.name == NORMS and not stage[NORMS]:
            line = replace(line, bytes=line.bytes - _module_bytes(model, dtype)[NORMS])
        yield line


def _module_bytes(model: ModelConf, dtype: Dtype) -> dict[str, int]:
    """Bytes of the embedding, a layer, the last norm and the head, quantised ones without scales."""
    one, two = (held(ModelPart.of(_of_layers(model, n)), dtype) for n in (1, 2))
    layer = {group: two.get(group, 0) - one.get(group, 0) for group in (LAYERS, EXPERTS, NORMS)}
    return {
        EMBEDDING: one[EMBEDDING] + one.get(POSITIONS, 0),
        LAYERS: sum(layer.values()),
        NORMS: one[NORMS] - layer[NORMS],
        HEAD: one.get(HEAD, 0),
    }


def _of_layers(model: ModelConf, layers: int) -> ModelConf:
    """The model with fewer layers, all of them with experts if any has."""
    return replace(model, n_layers=layers, dense_layers=0)
