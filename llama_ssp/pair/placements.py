"""Who sits where: each role's model, files, device and number format, refused here if it cannot be."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from llama_ssp.config import Drafting, Dtype, ModelConf, RunConf, Splitting, Steps
from llama_ssp.distributed.placement import LEADER, Placement
from llama_ssp.errors import UsageError
from llama_ssp.models.devices import TORCH_DTYPES, describe, device_of, dtype_of, every_device, memory_of
from llama_ssp.models.kernels.build import compiler
from llama_ssp.models.loader import DRAFT, require_supported
from llama_ssp.models.sharding import is_planned
from llama_ssp.planner.fit import require_capacity
from llama_ssp.planner.resolve import PairSpec
from llama_ssp.planner.run_plan import Prediction, predict, require_fit
from llama_ssp.planner.weights import parameters
from llama_ssp.planner.workload import Role
from llama_ssp.text.pairing import Paired, Pairing
from llama_ssp.text.tokenizer import Tokens, paired, read_tokens

log = logging.getLogger(__name__)

# Which steps are compiled rests on the configuration and the machine alone, never on a clock: compiled and
# eager steps round differently in 16 bit, and a text should not depend on how busy the machine was.
COMPILED_DTYPES = (Dtype.bf16, Dtype.fp32, Dtype.int8)
# What compiled steps save, and what compiling costs, on two cores (bench/fast.py): for `auto` alone.
SAVED_S_PER_BYTE, SAVED_S_PER_LAYER = 1 / 20e9, 2e-4
COMPILING_S, COMPILING_S_PER_LAYER = 20.0, 2.5


@dataclass(frozen=True)
class ModelPlacement:
    """One role's model, its files, and where and how it is held: by which ranks, and on this one's device."""

    role: str
    model: ModelConf
    path: Path | None
    device: torch.device
    dtype: Dtype
    splitting: Splitting
    world: int
    ranks: tuple[int, ...]
    copies: bool
    max_memory: dict[str, str]
    offload: str | None
    pairing: Pairing
    compiled: bool = False
    quickened: bool = False

    @property
    def degree(self) -> int:
        """Over how many ranks the model is split."""
        return 1 if self.copies else len(self.ranks)

    def in_words(self) -> str:
        """Device, number format and ranks, for records."""
        over = f", over {self.degree} ranks" if self.degree > 1 else ""
        copies = f", {len(self.ranks)} copies" if len(self.ranks) > self.degree else ""
        return f"{describe(self.device)}, {self.dtype.value}{over}{copies}"


def model_placements(entry: PairSpec) -> list[ModelPlacement]:
    """The roles this pair needs, each with its device and number format."""
    found = [_seat(entry, "model", entry.run.model, entry.target_path)]
    if entry.run.draft is not None and entry.placement.draft:
        found.append(_seat(entry, DRAFT, entry.run.draft, entry.draft_path))
    _warn(found, entry.run)
    return found


def _seat(entry: PairSpec, role: str, model: ModelConf, path: Path | None) -> ModelPlacement:
    asked, placement = entry.run.placement, entry.placement
    key, name = (
        ("draft_device", asked.draft_device) if role == DRAFT else ("target_device", asked.target_device)
    )
    device = device_of(name, f"placement.{key}")
    dtype = dtype_of(model.dtype, device, f"{role}.dtype")
    if role == DRAFT:  # other engines spread the target alone
        how = Splitting.tensor, placement.world, placement.draft, placement.copies
    else:
        how = placement.splitting, placement.world, placement.target, False
    splitting, _, ranks, copies = how
    compiled = compiles(entry.run, role, model, device, dtype, splitting, 1 if copies else len(ranks))
    memory = {str(key): size for key, size in asked.max_memory.items()}, asked.offload_folder
    quickened = not compiled and quickens(entry.run, dtype, splitting)
    return ModelPlacement(
        role, model, path, device, dtype, *how, *memory, Pairing.of(entry.run), compiled, quickened
    )


def tokens_of(found: list[ModelPlacement]) -> Tokens:
    """The target's tokenizer, after a look at how the draft's goes with it."""
    for seat in found:
        if seat.path is not None:  # first: a tokenizer is chosen by config.json, too
            require_supported(seat.path)
    own = [read_tokens(seat.path, seat.model.vocab) for seat in found]
    for other, seat in zip(own[1:], found[1:], strict=True):
        own[0].paired = paired(own[0], other, (found[0].model.vocab, seat.model.vocab), seat.pairing)
        if own[0].paired is not None:
            odd = own[0].paired.diagnosis.notes or own[0].paired.bridge
            log.log(logging.WARNING if odd else logging.INFO, "%s", own[0].paired.in_words())
            require_bridgeable(seat, own[0].paired)
    return own[0]


def require_bridgeable(draft: ModelPlacement, found: Paired) -> None:
    """Texts are translated where the decisions are taken."""
    if found.bridge is not None and draft.ranks != (LEADER,):
        raise UsageError(
            "a draft of another tokenizer sits with the leader, whole", where="placement.draft",
            found=f"ranks {', '.join(map(str, draft.ranks))}", allowed=f"rank {LEADER}",
            fix="use placement=leader",
        )  # fmt: skip


def require_loadable(
    found: list[ModelPlacement], run: RunConf, rows: int, slots: int, caches: tuple[int, int] = (1, 1)
) -> Prediction | None:
    """Refuses what cannot be run or does not fit, before weights are read; else what the plan says of it.

    `caches` are how many of the target's and of the draft's there will be at once.
    """
    for seat in found:
        if seat.path is not None:
            require_supported(seat.path)
    prediction = _predicted(found, run, rows, slots, caches)
    if prediction is not None:
        require_fit(prediction, run.plan.enforce)
    elif run.plan.enforce:
        _require_room(found, run, rows * max(caches), slots)
    return prediction


def _predicted(
    found: list[ModelPlacement], run: RunConf, rows: int, slots: int, caches: tuple[int, int]
) -> Prediction | None:
    """The plan of this run; None where it has none: other layers, devices of their own, engines not ours."""
    target, draft = found[0], found[1] if len(found) > 1 else None
    if draft is not None and draft.device != target.device and target.world == 1:
        return None
    drafting = (draft.ranks, draft.copies) if draft is not None else ((), False)
    return predict(
        run, Placement(target.splitting, target.world, target.ranks, *drafting), rows=rows, slots=slots,
        dtypes=[seat.dtype for seat in found], caches=caches, capacity=memory_of(target.device),
        on_cpu=target.device.type == "cpu",
    )  # fmt: skip


def _require_room(found: list[ModelPlacement], run: RunConf, rows: int, slots: int) -> None:
    """Weights and caches alone, device by device; a model that accelerate spreads, over all there is."""
    by_device: dict[torch.device | None, list[Role]] = {}
    for seat in found:
        if not is_planned(seat.model):
            log.info("%s: what %s takes is not known beforehand", seat.role, seat.model.family)
            continue
        spread = seat.splitting is Splitting.layers
        if not (spread and seat.offload):  # what is offloaded has a disk's room
            place = None if spread else seat.device
            by_device.setdefault(place, []).append(Role(seat.role, seat.model, seat.dtype))
    for device, roles in by_device.items():
        gib, name = run.cluster.gib, "all devices together" if device is None else str(device)
        room = sum(map(memory_of, every_device())) if device is None else memory_of(device)
        capacity = room if gib is None or device is None else int(gib * 2**30)
        require_capacity(roles, rows, slots, name, capacity, run.cluster.reserve)


def _warn(found: list[ModelPlacement], run: RunConf) -> None:
    target, draft = found[0], found[1] if len(found) > 1 else None
    if run.sampling.top_k > target.model.vocab:
        log.warning(
            "sampling.top_k=%d exceeds the vocabulary of %d: off",
            run.sampling.top_k,
            target.model.vocab,
        )
    if target.dtype in (Dtype.int8, Dtype.nf4) and run.sampling.temperature == 0:
        name = target.dtype.value
        log.warning("%s logits depend on what is computed beside them: greedy equality is not promised", name)
    for seat in found:
        if seat.device.type == "cpu" and TORCH_DTYPES[seat.dtype] is torch.float16:
            log.warning("%s.dtype=fp16 is several times slower than bf16 on a CPU", seat.role)
    if draft is None:
        if run.draft is None and run.speculation.drafter is Drafting.model and run.speculation.may_draft:
            log.info("no draft model: plain decoding")
        return
    if draft.path is not None and target.path is not None and draft.path.samefile(target.path):
        log.warning("the draft is the target itself: exact, but no gain is expected")
    elif parameters(draft.model) >= parameters(target.model):
        log.warning(
            "draft %s is no smaller than target %s: drafting pays only if acceptance exceeds the cost ratio",
            draft.model.name, target.model.name,
        )  # fmt: skip


def compiles(
    run: RunConf, role: str, model: ModelConf, device: torch.device, dtype: Dtype, splitting: Splitting,
    degree: int,
) -> bool:  # fmt: skip
    """Whether this role's steps are compiled. Where that was asked for and cannot be, the log says why."""
    if run.engine is Steps.eager:
        return False
    reason = impossible(device, dtype, splitting, degree)
    if reason is None and run.engine is Steps.auto:
        reason = unproven(device) or unprofitable(run, model, dtype)
        if reason is None:
            log.info("engine: %s %s has compiled steps", role, model.name)
    elif reason is not None:
        level = logging.DEBUG if run.engine is Steps.auto else logging.WARNING
        log.log(level, "engine: %s %s runs eagerly: %s", role, model.name, reason)
    return reason is None


def quickens(run: RunConf, dtype: Dtype, splitting: Splitting) -> bool:
    """Whether 8-bit layers have our kernel, also where steps cannot be compiled: over ranks."""
    return run.engine is Steps.compiled and dtype is Dtype.int8 and splitting is Splitting.tensor


def impossible(device: torch.device, dtype: Dtype, splitting: Splitting, degree: int) -> str | None:
    """What keeps steps from being compiled; None where nothing is known to."""
    if degree > 1 or splitting is not Splitting.tensor:
        return "the model is spread over ranks or devices"
    if dtype not in COMPILED_DTYPES:
        return f"steps are compiled in bf16, fp32 and int8, not in {dtype.value}"
    if device.type == "cpu" and compiler() is None:
        return "there is no C++ compiler (CXX, g++ or clang++)"
    return None


def unproven(device: torch.device) -> str | None:
    """What `auto` leaves alone until it has been seen to work there."""
    return None if device.type == "cpu" else f"graphs on {device.type} have to be asked for: engine=compiled"


def unprofitable(run: RunConf, model: ModelConf, dtype: Dtype) -> str | None:
    """Whether a run of so many tokens would spend more on compiling than it saves."""
    width = {Dtype.bf16: 2, Dtype.int8: 1}.get(dtype, 4)
    saved = SAVED_S_PER_BYTE * width * parameters(model) + SAVED_S_PER_LAYER * model.n_layers
    cost = COMPILING_S + COMPILING_S_PER_LAYER * model.n_layers
    tokens = tokens_at_once(run)
    if tokens * saved < cost:
        return f"{tokens} tokens save less than compiling takes"
    return None


def tokens_at_once(run: RunConf) -> int:
    """How many steps a run has at least, by its settings."""
    repeats: int = getattr(run.task, "repeats", 1)
    new: int = getattr(run.task, "max_new_tokens", 0)
    return repeats * new
