"""Loads this rank's part of a pair, and makes engines of it."""

import gc
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from llama_ssp.config import (
    USUAL_CHUNK,
    Drafting,
    OnDraftLoss,
    PlacementConf,
    RunConf,
    SpeculationConfig,
    Splitting,
)
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.roles import Roles, roles_of
from llama_ssp.errors import UsageError
from llama_ssp.models.adapter import adapter_folder
from llama_ssp.models.deepspeed_tp import load_deepspeed
from llama_ssp.models.device_map import load_layers
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.folder import adapter_fingerprint, fingerprint
from llama_ssp.models.graph_sizes import rewinds_of
from llama_ssp.models.heads.load import TargetOfHead, load_head, table_on_disk
from llama_ssp.models.heads.model import AssistantModel, HeadModel
from llama_ssp.models.interface import Model
from llama_ssp.models.loader import DRAFT, load, load_given
from llama_ssp.models.model_config import config_of
from llama_ssp.models.steps import SteppedModel, has_kernels
from llama_ssp.pair.placements import ModelPlacement, Placements
from llama_ssp.pair.trial import Trial
from llama_ssp.planner.memory import widest_steps
from llama_ssp.planner.workload import TARGET
from llama_ssp.report.console import Progress, waiting
from llama_ssp.speculative.drafters.ahead import AheadDrafter, AheadDraftShard
from llama_ssp.speculative.drafters.cross_vocab import IntersectionDrafter
from llama_ssp.speculative.drafters.head import AssistantShard, head_drafter
from llama_ssp.speculative.drafters.local import Drafter, DraftShard, ModelDrafter, Sampler
from llama_ssp.speculative.drafters.ngram import TEXT_DRAFTERS
from llama_ssp.speculative.drafters.own import MakeDrafter, own_drafter
from llama_ssp.speculative.drafters.remote import RemoteDrafter
from llama_ssp.speculative.engine import Engine, RankEngine
from llama_ssp.speculative.follower import Follower
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.verification import RULES, Rule
from llama_ssp.text.tokenizer import Tokens
from llama_ssp.text.translation import Intersection

log = logging.getLogger(__name__)
COMPILED = "compiled"
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class RankModels:
    """Holds this rank's models. A model is None if only other ranks hold it, or the pair has none.

    `vocab` and `context` are the target's; `draft_context` and `draft_dtype` are the draft model's or the
    head's. `trials` has the trial of each model's compiled steps by role, if one was made, passed or failed.
    """

    target: Model | None
    draft: Model | None
    head: HeadModel | None
    devices: dict[str, str]
    roles: Roles
    vocab: int
    context: int
    draft_context: int
    draft_dtype: torch.dtype
    trials: dict[str, Trial]
    prefill_chunk: int = USUAL_CHUNK  # tokens of a prompt that one pass reads

    @property
    def loaded(self) -> dict[str, Model | HeadModel]:
        """The models that this rank holds, by role."""
        models = {TARGET: self.target, DRAFT: self.draft or self.head}
        return {role: model for role, model in models.items() if model}

    @property
    def engines(self) -> dict[str, str]:
        """How steps of this rank's models run, for records; where a trial has failed, also why."""
        eager = {role: f"eager: {trial}" for role, trial in self.trials.items()}
        return {
            role: COMPILED if model.is_compiled else eager.get(role, "eager")
            for role, model in self.loaded.items()
        }

    @property
    def held_bytes(self) -> int:
        """The most bytes that weights and caches have taken on this rank."""
        return sum(model.held_bytes for model in self.loaded.values())


@dataclass
class HeldModel:
    """A model that this rank holds with its `group`; `trial` is what its compiled steps had to pass."""

    placed: ModelPlacement
    group: Ranks
    compiled: bool
    trial: Trial | None
    model: Model | None = None  # once it is loaded


class ModelCache:
    """Loads pairs, and keeps the models of the last one for the next."""

    def __init__(self, ranks: Ranks, placement: PlacementConf) -> None:
        self._ranks = ranks
        self._essential = placement.on_draft_loss is OnDraftLoss.stop
        self._patience_s = placement.draft_timeout_s
        self._roles: dict[tuple[tuple[int, ...], tuple[int, ...], bool], Roles] = {}
        self._held: list[HeldModel] = []
        self._head: tuple[Placements, HeadModel] | None = None  # a head, with its pair

    def open(self, placements: Placements) -> RankModels:
        """Loads this rank's part of the pair, after freeing the models that the pair does not need."""
        if self._held:
            self._held = [held for held in self._held if held.placed in placements]
            self._head = self._head if self._head and self._head[0] == placements else None
            gc.collect()
            torch.cuda.empty_cache()
        self._ranks.enter("load")
        formats = {placed.role: placed.dtype.value for placed in placements}
        self._ranks.require_same("number formats", json.dumps(formats))
        require_same_files(placements, self._ranks)
        self._ranks.barrier()  # every rank has checked that the pair fits
        roles = self._roles_of(placements)
        self._held = self._tried(placements, roles)
        for held in self._held:
            held.model = held.model or _loaded(held)
        models = {held.placed.role: held.model for held in self._held}
        target = models.get(TARGET)
        draft = models.get(DRAFT)
        head = None
        if placements.head and roles.draft is not None and target is not None:
            self._head = self._head or (
                placements,
                _loaded_head(placements.head, placements.target, target, roles.draft),
            )
            head = self._head[1]
        if target is not None:
            target.tap(head.taps if head and roles.leads else ())
        own = (target.vocab, target.context) if target else (0, 0)
        drafter = draft or head
        drafting = placements.drafter or placements.target
        of_ranks = self._ranks.gather_ints([*own, drafter.context if drafter else 0])
        vocab, context, draft_context = map(max, zip(*of_ranks, strict=True))

        return RankModels(
            target=target,
            draft=draft,
            head=head,
            devices={placed.role: placed.in_words() for placed in placements},
            roles=roles,
            vocab=vocab,
            context=context,
            draft_context=draft_context,
            draft_dtype=TORCH_DTYPES[drafting.dtype],
            trials={held.placed.role: held.trial for held in self._held if held.trial},
        )

    def _roles_of(self, placements: Placements) -> Roles:
        """Returns the roles; makes groups and the link to a draft only once, since they cost connections."""
        drafter = placements.drafter
        key = placements.target.ranks, drafter.ranks if drafter else (), bool(drafter and drafter.copies)
        if key not in self._roles:
            self._roles[key] = roles_of(*key, self._ranks, self._essential, self._patience_s)
            # These two groups sum; a compiled step would not connect them. The order is that of all ranks.
            for group in (self._roles[key].target, self._roles[key].draft):
                if group is not None:
                    group.connect()
        self._ranks.may_lose(() if self._essential else self._roles[key].apart)
        return self._roles[key]

    def _tried(self, placements: Placements, roles: Roles) -> list[HeldModel]:
        """Returns the models to load, after trials, which need the GPU memory that weights take later."""
        result = list[HeldModel]()
        for placed, group in ((placements.target, roles.target), (placements.draft, roles.draft)):
            if placed is None or group is None:
                continue
            held = next((held for held in self._held if held.placed == placed), None)
            if held is None:
                compiled, trial = _all_compile(placed, group)
                held = HeldModel(placed=placed, group=group, compiled=compiled, trial=trial)
                if held.trial:
                    held.compiled = held.trial.passes()
            result.append(held)
        return result


def prepare(
    pair: RankModels, speculation: SpeculationConfig, rows: int, slots: int, ks: Sequence[int] = ()
) -> None:
    """Compiles the models' steps before anything is timed; those on trial are compared with eager ones.

    CUDA graphs are captured for rounds of up to `speculation.longest` drafts, of any rows. With `ks` the
    target's are only those of rounds in which each row has one of these numbers of drafts: `prepare_anew`
    follows, once it is known how many drafts the run has.
    """
    compiled = {role: model for role, model in pair.loaded.items() if model.is_compiled}
    if not compiled:
        return
    widest = widest_steps(speculation.longest)
    with Progress("compile", len(compiled), "models", ends_in_log=False, ticks=True) as progress:
        for role, model in compiled.items():
            rewinds = rewinds_of(speculation.longest, role != TARGET and pair.roles.drafts_apart)
            widths = list(range(1, widest[role] + 1))
            is_ragged = role != TARGET or not ks
            if not is_ragged:
                widths = [k + 1 for k in ks]
            capacity = min(slots, model.context)
            trial = pair.trials.get(role)
            _prepare_model(model, trial, widths, rows, capacity, rewinds=rewinds, is_ragged=is_ragged)
            progress.advance(1)


def prepare_anew(pair: RankModels, speculation: SpeculationConfig, rows: int, slots: int) -> None:
    """Captures what rounds of up to `speculation.longest` drafts need, in place of all that is captured.

    That is the target's alone: a draft's steps do not depend on K. All ranks of the target call it.
    """
    target = pair.target
    if target is None or not target.has_graphs:
        return
    target.drop_graphs()

    widths = list(range(1, widest_steps(speculation.longest)[TARGET] + 1))
    rewinds = rewinds_of(speculation.longest, ahead=False)
    capacity = min(slots, target.context)
    with waiting("capturing CUDA graphs"):
        trial = pair.trials.get(TARGET)
        _prepare_model(target, trial, widths, rows, capacity, rewinds=rewinds, is_ragged=True)


def _prepare_model(
    model: Model | HeadModel,
    trial: Trial | None,
    widths: list[int],
    rows: int,
    capacity: int,
    rewinds: int,
    is_ragged: bool,
) -> None:
    """Prepares the steps of one model, and compares them with eager ones if they are on trial."""
    with trial.blamed() if trial else nullcontext():
        model.prepare(widths, rows, capacity, ragged=is_ragged, rewinds=rewinds)
    if trial and isinstance(model, SteppedModel) and model.is_compiled:
        trial.check(model, sorted({1, max(widths)}), rows, capacity)


def require_same_files(placements: Iterable[ModelPlacement], ranks: Ranks) -> None:
    """Raises DistributedError where ranks have other files of a model, wherever these lie. All call it."""
    if ranks.world == 1:
        return
    prints = {placed.role: fingerprint(placed.path) if placed.path else "" for placed in placements}
    adapters = {placed.role: adapter_folder(placed.model) for placed in placements}
    prints |= {f"{role} adapter": adapter_fingerprint(at) for role, at in adapters.items() if at}
    ranks.require_same("the models' files", json.dumps(prints))


def load_alone(placed: ModelPlacement, ranks: Ranks) -> Model:
    """Loads one model by itself, with eager steps, for passes over whole texts."""
    require_same_files([placed], ranks)
    return _loaded(HeldModel(placed=placed, group=ranks, compiled=False, trial=None))


def _loaded(held: HeldModel) -> Model:
    """Loads this rank's part of the model by the engine that the placement names."""
    placed = held.placed
    # From Hopper on, torch prefers cuDNN's attention where there is a mask, and cuDNN plans each new shape
    # anew, for some 0.4 s. Prompts and eager steps have a new shape in every pass.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if placed.given is not None:
        return load_given(placed.given, placed.model, placed.dtype, placed.role, held.compiled)
    what = (placed.model, placed.path, placed.dtype)
    name = f"{placed.role} {placed.model.name}"
    if placed.splitting is Splitting.layers:
        with waiting(f"{name}: reading weights"):
            return load_layers(*what, placed.max_memory or placed.room, placed.offload, placed.role)
    if placed.splitting is Splitting.deepspeed and held.group.world > 1:
        with waiting(f"{name}: reading weights"):
            return load_deepspeed(*what, placed.device, placed.role, held.group)
    return load(*what, placed.device, placed.role, held.group, held.compiled, partial(_reading, held.group))


def _all_compile(placed: ModelPlacement, group: Ranks) -> tuple[bool, Trial | None]:
    """Returns whether every rank can compile, and the trial that compiled steps have to pass, if any."""
    if group.world == 1:
        return placed.compiled, None  # `load` sees to it
    model = placed.model
    heads = model.n_heads, model.n_kv_heads, model.head_dim
    able = placed.compiled and has_kernels(model.name, placed.dtype, placed.device, heads, model)
    facts = group.gather_ints([int(able), int(placed.on_trial)])
    all_able = all(is_able for is_able, _ in facts)
    if able and not all_able:
        log.warning("engine: %s runs eagerly: another rank cannot compile its steps", model.name)
    on_trial = all_able and any(is_on_trial for _, is_on_trial in facts)
    if not on_trial:
        return all_able, None
    return all_able, Trial(name=model.name, dtype=placed.dtype, device=placed.device, ranks=group)


def _loaded_head(placed: ModelPlacement, below: ModelPlacement, target: Model, ranks: Ranks) -> HeadModel:
    """Loads a head, or this rank's part. It may be given tables of the target, placed `below` it."""

    def tables(output: bool) -> tuple[Tensor, bool]:
        table = target.table(output)
        if table is not None:
            return table, True
        return table_on_disk(below.path, below.model, output), False

    path = placed.path or Path()
    layers = below.model.n_layers
    told = None
    if placed.model.head_shares_cache:
        require_same_memory(placed, below, target)
        config = config_of(below.model, below.path, TARGET)
        told = TargetOfHead(config=config, look_up=target.look_up if ranks.world > 1 else None)
    return load_head(
        path,
        placed.dtype,
        placed.device,
        layers,
        tables,
        placed.model.name,
        placed.compiled,
        target=told,
        ranks=ranks,
    )


def require_same_memory(placed: ModelPlacement, below: ModelPlacement, target: Model) -> None:
    """Refuses a head that could not read the target's cache: on another device, or in another format."""
    numbers = TORCH_DTYPES[placed.dtype]
    if placed.device == below.device and numbers == target.dtype:
        return
    raise UsageError(
        "a head that reads the target's cache has its device and its number format",
        where="placement.draft_device, draft.dtype",
        found=f"{placed.device} and {numbers}".replace("torch.", ""),
        allowed=f"{below.device} and {target.dtype}".replace("torch.", ""),
        fix="leave both out",
    )


@contextmanager
def _reading(ranks: Ranks, name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows how much of a model's weights has been read; the other ranks see that this one gets on."""
    read = 0
    with Progress(name, total, "bytes", ends_in_log=False) as progress:

        def advance(count: int) -> None:
            nonlocal read
            read += count
            ranks.note(f"{read / MB:.1f} of {total / MB:.1f} MB read of {name}")
            progress.advance(count)

        yield advance
    ranks.note("")


def engine_for(
    pair: RankModels,
    run: RunConf,
    tokens: Tokens,
    ends: frozenset[int],
    seed: int,
    rule: Rule | None = None,
    make_drafter: MakeDrafter | None = None,
) -> RankEngine:
    """Returns an engine with its own caches and draws; `rule` replaces the run's. Raises UsageError.

    `make_drafter` makes what drafts where the run has a drafter of the script's own.
    """
    first = next(iter(pair.loaded.values()))
    vocab = min(pair.vocab, tokens.size)
    replay = first.replay if first.has_graphs else None
    transform = SamplingTransform(run.sampling, tuple(sorted(ends)), vocab, replay)
    if transform.forbids_all:
        raise UsageError(
            "no token is allowed",
            where="sampling.bad_tokens, sampling.min_new_tokens",
            found=f"all {vocab} are forbidden",
            fix="leave at least one",
        )
    roles = pair.roles
    rewinds = rewinds_of(run.most_drafts, ahead=False)
    target = ModelRunner(pair.target, pair.prefill_chunk, rewinds) if pair.target else None
    bridge = tokens.paired.bridge if tokens.paired else None
    wide = torch.promote_types((pair.target or first).dtype, torch.float32)
    draws = CounterDraws(seed, first.replay)
    sampler = Sampler(transform, draws, wide, top=run.speculation.draft_top)
    drafter = _drafter(pair, run, sampler, target, bridge, make_drafter)
    if not run.has_draft_model and not roles.drafts_apart:
        roles = replace(roles, drafting=None)
    if target is not None and roles.leads:
        rule = rule or RULES[run.speculation.verification]
        return Engine(target, drafter or Drafter(), sampler, rule, roles)
    return Follower(target, drafter, sampler, roles, pair.context, first.device)


def _drafter(
    pair: RankModels,
    run: RunConf,
    sampler: Sampler,
    target: ModelRunner | None,
    bridge: Intersection | None,
    make_drafter: MakeDrafter | None,
) -> Drafter | None:
    """Returns this rank's part in drafting; None where it has none."""
    roles = pair.roles
    spec = run.speculation
    if pair.target and roles.leads and run.drafts_from_text:
        if make_drafter is not None and spec.drafter is Drafting.own:
            return own_drafter(make_drafter, sampler)
        return TEXT_DRAFTERS[spec.drafter](spec, sampler)
    if not run.has_draft_model:
        return Drafter() if pair.draft and roles.drafts_apart else None
    if pair.head is not None and target is not None:
        if roles.leads:
            return head_drafter(pair.head, target, sampler)
        assert isinstance(pair.head, AssistantModel), "other heads are on the leader alone"
        return AssistantShard(pair.head, target)
    if roles.client:
        wide = torch.promote_types(pair.draft_dtype, torch.float32)
        return RemoteDrafter(roles.client, pair.draft_context, sampler.vocab, wide)
    if pair.draft is None:
        return None
    rewinds = rewinds_of(run.most_drafts, ahead=roles.drafts_apart)
    runner = ModelRunner(pair.draft, pair.prefill_chunk, rewinds)
    if roles.server:
        return AheadDrafter(runner, sampler, roles.server.group, roles.server, spec.overlap)
    if roles.draft is not None and not roles.draft.is_leader:
        apart = roles.drafts_apart
        return AheadDraftShard(runner, roles.draft, spec.overlap) if apart else DraftShard(runner)
    if bridge is not None:
        return IntersectionDrafter(runner, sampler, bridge)
    return ModelDrafter(runner, sampler)


def draft_alone(pair: RankModels) -> RankModels | None:
    """Returns the draft in the target's place, on the ranks that share it with the leader; else None."""
    group = pair.roles.draft
    if pair.draft is None or group is None or (group.world == 1 and not pair.roles.leads):
        return None
    roles = Roles(everyone=pair.roles.everyone if group.world == 1 else group, target=group, draft=None)
    return replace(
        pair, target=pair.draft, draft=None, roles=roles, vocab=pair.draft.vocab, context=pair.draft_context
    )
