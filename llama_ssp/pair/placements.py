"""Decides where each model of a pair goes: device, number format, ranks, engine; raises if it cannot."""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from llama_ssp.config import Bridging, Drafting, Dtype, ModelConf, RunConf, Splitting, Steps, home_expanded
from llama_ssp.config.environment import rank_environment
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import UsageError
from llama_ssp.models.checkpoint import dtype_on_disk
from llama_ssp.models.device_map import Room
from llama_ssp.models.devices import TORCH_DTYPES, describe, device_of, dtype_of, every_device, memory_of
from llama_ssp.models.given import GivenModel
from llama_ssp.models.host_memory import memory_here
from llama_ssp.models.kept_files import compiler
from llama_ssp.models.model_config import require_supported
from llama_ssp.models.sharding import is_planned
from llama_ssp.pair.given import NOTHING, Given
from llama_ssp.placing.engine import COMPILES_ONCE, needs_trial, tokens_generated, why_eager
from llama_ssp.placing.pairs import PairSpec, require_whole
from llama_ssp.placing.prediction import Prediction, predict, require_fit, require_host, warn_of_codes
from llama_ssp.placing.request import Known, machine_of_run, request_of
from llama_ssp.planner.engine import launching_s
from llama_ssp.planner.fit import require_capacity
from llama_ssp.planner.hardware import CPU_RESERVE
from llama_ssp.planner.weights import ModelPart, held
from llama_ssp.planner.workload import DRAFT, GIB, TARGET, Role
from llama_ssp.text.tokenizer import Tokens, paired, read_tokens

log = logging.getLogger(__name__)

UNKNOWN = -1  # in place of bytes
SLOWER = "a token takes several times as long: install one (apt install g++), or name it with CXX"


@dataclass(frozen=True, kw_only=True)
class ModelPlacement:
    """One role's model and its files, the ranks that hold it, and how this rank holds it."""

    role: str
    model: ModelConf
    path: Path | None
    device: torch.device
    dtype: Dtype
    splitting: Splitting
    ranks: tuple[int, ...]
    copies: bool
    max_memory: dict[str, str]
    offload: Path | None
    bridge: Bridging
    room: Room = (0, 0, 0)  # that its weights leave on GPUs, with placement=layers
    compiled: bool = False
    on_trial: bool = False  # compiled if a trial of its steps over these ranks passes
    given: GivenModel | None = None  # that a script has loaded

    @property
    def degree(self) -> int:
        """The number of ranks that the model is split over."""
        return 1 if self.copies else len(self.ranks)

    def in_words(self) -> str:
        """Returns device, number format and ranks, for records."""
        over = f", over {self.degree} ranks" if self.degree > 1 else ""
        copies = f", {len(self.ranks)} copies" if len(self.ranks) > self.degree else ""
        return f"{describe(self.device)}, {self.dtype.value}{over}{copies}"


@dataclass(frozen=True)
class Placements:
    """The placement of each model: the target, and a draft model or a head that drafts for it."""

    target: ModelPlacement
    draft: ModelPlacement | None = None
    head: ModelPlacement | None = None

    @property
    def drafter(self) -> ModelPlacement | None:
        """The placement of what drafts."""
        return self.draft or self.head

    def __iter__(self) -> Iterator[ModelPlacement]:
        return (placed for placed in (self.target, self.draft, self.head) if placed)


def model_placements(spec: PairSpec, given: Given = NOTHING) -> Placements:
    """Returns where the models go; logs what is unusual. Raises UsageError or DistributedError."""
    target = _placed(spec, TARGET, spec.run.model, spec.target_path, given.models.get(TARGET))
    drafter: ModelPlacement | None = None
    if spec.run.draft is not None and spec.placement.draft:
        drafter = _placed(spec, DRAFT, spec.run.draft, spec.draft_path, given.models.get(DRAFT))
        conf = spec.run.placement
        elsewhere = conf.draft_device not in ("auto", "cuda", conf.target_device)
        if drafter.degree > 1 and target.device.type != "cpu" and elsewhere:  # NCCL takes GPUs alone
            raise UsageError(
                "a draft over several ranks is on the target's GPUs",
                where="placement.draft_device",
                found=f"{conf.draft_device}, with {spec.placement.in_words()}",
                allowed="auto",
                fix="leave it out, or use placement=leader",
            )
    _warn(target, drafter, spec.run)
    is_head = drafter is not None and drafter.model.is_head
    return Placements(target, head=drafter) if is_head else Placements(target, draft=drafter)


def placement_of(spec: PairSpec, role: str) -> ModelPlacement:
    """Returns where one model of the pair goes, by itself: nothing is asked of the other."""
    if role == DRAFT:
        assert spec.run.draft is not None
        return _placed(spec, role, spec.run.draft, spec.draft_path, None)
    return _placed(spec, role, spec.run.model, spec.target_path, None)


def _placed(
    spec: PairSpec, role: str, model: ModelConf, path: Path | None, given: GivenModel | None
) -> ModelPlacement:
    run = spec.run
    conf = spec.run.placement
    placement = spec.placement
    key = "draft_device" if role == DRAFT else "target_device"
    device = device_of(getattr(conf, key), f"placement.{key}")
    files = spec.target_path if model.is_head else path  # a head is lent the target's tables
    on_disk = None if files is None else dtype_on_disk(files)
    dtype = dtype_of(model.dtype, device, f"{role}.dtype", on_disk is Dtype.fp16)
    if dtype is Dtype.packed and model.package and device.type == "cpu" and compiler() is None:
        log.info("%s %s: fp32, as there is no C++ compiler for its codes", role, model.name)
        dtype = Dtype.fp32
    if on_disk is Dtype.fp16 and model.dtype is Dtype.auto and dtype is not Dtype.fp16:
        log.info("%s %s: fp16 on disk, %s here: a CPU is faster in it", role, model.name, dtype.value)
    is_rounded = on_disk is Dtype.fp32 and dtype in (Dtype.bf16, Dtype.fp16) and not model.code_bits
    if is_rounded and model.dtype is Dtype.auto and role != DRAFT:  # a draft decides no distribution
        log.info("%s %s: fp32 on disk, %s here; model.dtype=fp32 keeps it", role, model.name, dtype.value)
    if role == DRAFT:  # accelerate and DeepSpeed split the target alone
        splitting = Splitting.tensor
        degree = placement.draft_degree
        ranks = placement.draft
        copies = placement.copies
    else:
        splitting = placement.splitting
        degree = len(placement.target)
        ranks = placement.target
        copies = False
    memory = {str(key): size for key, size in conf.max_memory.items()}
    by_module = given is not None and bool(given.against)
    compiled = not by_module and compiles(run, role, model, device, dtype, splitting)
    on_trial = compiled and degree > 1 and needs_trial(run.engine, device.type == "cpu")

    return ModelPlacement(
        role=role,
        model=model,
        path=path,
        device=device,
        dtype=dtype,
        splitting=splitting,
        ranks=ranks,
        copies=copies,
        max_memory=memory,
        offload=home_expanded(conf.offload_folder) if conf.offload_folder else None,
        bridge=run.speculation.bridge,
        compiled=compiled,
        on_trial=on_trial,
        given=given,
    )


def tokens_of(placements: Placements, given: Given = NOTHING) -> Tokens:
    """Returns the target's tokenizer, matched with the draft model's. Raises ModelError or UsageError."""
    target = placements.target
    draft = placements.draft  # none of a head, which has the target's tokens
    for placed in (target, draft):
        if placed is not None and placed.path is not None:  # first: config.json chooses the tokenizer, too
            require_supported(placed.path)
    tokens = given.tokens(target.path, target.model.vocab)
    if tokens is None:
        tokens = read_tokens(target.path, target.model.vocab)
    if draft is None or not given.has_tokenizer:
        return tokens
    widths = target.model.vocab, draft.model.vocab
    theirs = tokens if draft.given else read_tokens(draft.path, widths[1])  # one tokenizer is given for both
    tokens.paired = match = paired(tokens, theirs, widths, draft.bridge)
    if match is not None:
        is_odd = match.notes or match.bridge
        log.log(logging.WARNING if is_odd else logging.INFO, "%s", match.in_words())
        if match.bridge is not None:
            require_whole(draft.ranks)
    return tokens


def require_loadable(
    spec: PairSpec, placements: Placements, ranks: Ranks, rows: int, slots: int, caches: tuple[int, int]
) -> tuple[Placements, Prediction | None]:
    """Returns the plan's prediction, if the run can be planned. Raises MemoryFull if it does not fit.

    `caches` says how many KV caches of the target and of the draft there are at once. All ranks call it. With
    placement=layers the target of the placements that are returned knows what its weights have to leave free.
    """
    run = spec.run
    target = placements.target
    prediction = None
    device = target.device
    splits = {placed.ranks for placed in placements if placed.degree > 1 and ranks.rank in placed.ranks}
    known = Known(
        rows=rows,
        slots=slots,
        formats={placed.role: placed.dtype for placed in placements},
        caches=caches,
        measured=memory_of(device, ranks) + _shared(placements, device),
        connected=sum(map(ranks.is_connected, splits)),
        on_cpu=device.type == "cpu",
    )
    known = replace(known, capacities=capacities_of(run, known, ranks))
    if target.splitting is Splitting.layers and all(is_planned(placed.model) for placed in placements):
        with suppress(UsageError):  # a GPU without known figures
            room = request_of(run, known).room_by_layers()
            placements = replace(placements, target=replace(target, room=room))
    # Plans are for devices of one kind.
    if spec.placement.world > 1 or all(placed.device == device for placed in placements):
        prediction = predict(run, spec.placement, known)
    if prediction is not None:
        require_fit(prediction, run.plan.enforce)
        if device.type == "cuda" and run.plan.enforce:
            require_host(prediction, rank_environment().of_node, memory_here())
        warn_of_codes(prediction)
    elif run.plan.enforce:
        require_room(placements, run, rows * max(caches), slots)
    return placements, prediction


def capacities_of(run: RunConf, known: Known, ranks: Ranks) -> tuple[int, ...]:
    """Returns what each rank's device has for the run, by its own figures; all ranks call it.

    GPUs may be of several kinds, and CPUs of several sizes. Of a rank that does not know its GPU's figures
    this rank's own are taken.
    """
    if ranks.world == 1:
        return ()
    own = UNKNOWN
    with suppress(UsageError):
        own = machine_of_run(run, known).capacity
    told = [capacity for (capacity,) in ranks.gather_ints([own])]
    return tuple(own if capacity == UNKNOWN else capacity for capacity in told)


def _shared(placements: Placements, device: torch.device) -> int:
    """Returns the bytes of given models on the device that their loading does not take anew.

    Compiled steps of a CPU have weights of their own, in another order.
    """
    return sum(
        placed.given.shared
        for placed in placements
        if placed.given is not None
        and placed.device == device
        and not (placed.compiled and device.type == "cpu")
    )


def require_room(placements: Placements, run: RunConf, rows: int, slots: int) -> None:
    """Checks weights and caches alone on each device, or on all together for a model that accelerate spreads.

    A model that DeepSpeed splits counts with a rank's part; each rank loads all of it on the host.
    """
    by_device: dict[torch.device | None, list[tuple[Role, int]]] = {}
    for placed in placements:
        if not is_planned(placed.model):
            log.info("%s: what %s takes is not known beforehand", placed.role, placed.model.family)
            continue
        spread = placed.splitting is Splitting.layers
        if not (spread and placed.offload):  # offloaded weights have the disk's room
            place = None if spread else placed.device
            role = Role(placed.role, placed.model, placed.dtype)
            ranks = 1
            if placed.splitting is Splitting.deepspeed:
                ranks = placed.degree
                sharing = rank_environment().of_node
                require_capacity([(role, 1)] * sharing, 0, 1, "the host", memory_here(), CPU_RESERVE)
            by_device.setdefault(place, []).append((role, ranks))
    for device, roles in by_device.items():
        if device is None:
            name = "all devices together"
            capacity = sum(map(memory_of, every_device()))
        else:
            name = str(device)
            gib = run.cluster.gib
            free = memory_of(device) + _shared(placements, device)
            capacity = free if gib is None else min(free, int(gib * GIB))
        reserve = CPU_RESERVE if run.cluster.reserve is None else run.cluster.reserve
        require_capacity(roles, rows, slots, name, capacity, reserve)


def _warn(target: ModelPlacement, draft: ModelPlacement | None, run: RunConf) -> None:
    """Logs settings that are allowed, but hardly meant."""
    k = run.sampling.controls.top_k
    if k > target.model.vocab:
        log.warning("sampling.top_k=%d exceeds the vocabulary of %d: off", k, target.model.vocab)
    if target.dtype in (Dtype.int8, Dtype.nf4) and run.sampling.controls.temperature == 0:
        name = target.dtype.value
        log.warning("%s logits depend on the other rows of a batch: greedy equality is not promised", name)
    for placed in (target, draft) if draft else (target,):
        if placed.device.type == "cpu" and TORCH_DTYPES[placed.dtype] is torch.float16:
            log.warning("%s.dtype=fp16 is several times slower than bf16 on a CPU", placed.role)
    if draft is None:
        if run.draft is None and run.speculation.drafter is Drafting.model and run.speculation.may_draft:
            log.debug("no draft model: plain decoding")
    elif draft.dtype is Dtype.int4 and 0 < target.model.code_bits <= 4:
        bits = target.model.code_bits
        log.warning("draft=int4: the target's file has codes of %d bits already, so it gains little", bits)
    elif draft.path and target.path and draft.dtype is target.dtype and draft.path.samefile(target.path):
        log.warning("the draft is the target itself: exact, but no gain is expected")
    elif _bytes(draft) >= _bytes(target):
        line = "draft %s is no smaller than target %s: drafting pays if acceptance exceeds the cost ratio"
        log.warning(line, draft.model.name, target.model.name)


def _bytes(placed: ModelPlacement) -> int:
    """Returns the bytes of the whole model's weights."""
    return sum(held(ModelPart.of(placed.model), placed.dtype).values())


def compiles(
    run: RunConf, role: str, model: ModelConf, device: torch.device, dtype: Dtype, splitting: Splitting
) -> bool:
    """Returns whether this role's steps are compiled. Logs why not, on a CPU where that is asked for.

    Warns of a target that would be several times faster if this machine had a compiler.
    """
    on_cpu = device.type == "cpu"
    reason = why_eager(run.engine, tokens_generated(run), model, dtype, splitting, on_cpu)
    lacking = impossible(device)
    if lacking is not None and role != DRAFT and run.engine is not Steps.eager:
        # Without a compiler codes are decoded, too, which costs most of a run that would be eager anyway.
        has_codes = bool(model.code_bits) and not model.experts and splitting is Splitting.tensor
        if reason is None or (has_codes and model.dtype in (Dtype.auto, Dtype.packed)):
            log.warning("engine: %s %s runs eagerly: %s; %s", role, model.name, lacking, SLOWER)
            return False
    reason = reason or lacking
    if reason is not None and not on_cpu:
        line = "engine: %s %s runs eagerly: %s; the host takes %.0f ms to launch a step"
        log.warning(line, role, model.name, reason, 1000 * launching_s(model.n_layers))
    elif reason is not None and run.engine is not Steps.eager:
        level = logging.DEBUG if run.engine is Steps.auto else logging.WARNING
        level = logging.INFO if COMPILES_ONCE in reason and role != DRAFT else level
        log.log(level, "engine: %s %s runs eagerly: %s", role, model.name, reason)
    return reason is None


def impossible(device: torch.device) -> str | None:
    """Returns why steps cannot be compiled here; None if they can."""
    if device.type == "cpu" and compiler() is None:
        command = os.environ.get("CXX")
        return f"there is no C++ compiler ({f'CXX={command}' if command else 'g++ 11 or later'})"
    return None
