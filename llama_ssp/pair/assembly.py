"""The pair a task runs on, in memory: this rank's part of it, and engines made of that."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from llama_ssp.config import (
    USUAL_COST_RATIO,
    OnDraftLoss,
    PlacementConf,
    RunConf,
    SpeculationConfig,
    Splitting,
    home_expanded,
)
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.draft_messages import DraftClient, DraftServer
from llama_ssp.distributed.roles import Roles, roles_of
from llama_ssp.errors import UsageError
from llama_ssp.models.deepspeed_tp import load_deepspeed
from llama_ssp.models.device_map import load_layers
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.folder import fingerprint
from llama_ssp.models.heads.load import load_head, table_of, table_on_disk
from llama_ssp.models.heads.model import HeadModel
from llama_ssp.models.interface import Model
from llama_ssp.models.loader import DRAFT, load
from llama_ssp.models.steps import SteppedModel, has_kernels
from llama_ssp.pair.placements import ModelPlacement
from llama_ssp.pair.trial import Trial
from llama_ssp.planner.activations import widest_steps
from llama_ssp.planner.workload import TARGET
from llama_ssp.report.console import Progress, waiting
from llama_ssp.speculative.draft_length import AdaptiveDraftLength, Costs, DraftLength, FixedDraftLength
from llama_ssp.speculative.drafters.ahead import AheadDrafter, AheadDraftShard
from llama_ssp.speculative.drafters.cross_vocab import IntersectionDrafter
from llama_ssp.speculative.drafters.head import head_drafter
from llama_ssp.speculative.drafters.local import Drafter, DraftShard, ModelDrafter, Sampler
from llama_ssp.speculative.drafters.ngram import NgramDrafter
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


@dataclass(frozen=True)
class RankModels:
    """This rank's models; None for a model that only other ranks hold, or that there is not.

    `vocab` and `context` are the target's, `draft_context` and `draft_dtype` the draft model's. `trials` are
    those that this rank's models had to pass before their steps were compiled, by role.
    """

    target: Model | None
    draft: Model | HeadModel | None
    devices: dict[str, str]
    roles: Roles
    vocab: int
    context: int
    draft_context: int
    draft_dtype: torch.dtype
    trials: dict[str, Trial]

    @property
    def engines(self) -> dict[str, str]:
        """How steps of this rank's models are run, for records; of a role on trial that failed also why."""
        models = {TARGET: self.target, DRAFT: self.draft}
        eager = {role: f"eager: {self.trials[role]}" if role in self.trials else "eager" for role in models}
        return {
            role: COMPILED if model.is_compiled else eager[role] for role, model in models.items() if model
        }

    @property
    def held_bytes(self) -> int:
        """The most that weights and caches have taken on this rank."""
        return sum(model.held_bytes for model in (self.target, self.draft) if model)


class ModelCache:
    """Loads pairs, and keeps the models of the last one for the next."""

    def __init__(self, ranks: Ranks, placement: PlacementConf) -> None:
        self._ranks = ranks
        self._essential = placement.on_draft_loss is OnDraftLoss.stop
        self._patience_s = placement.draft_timeout_s
        self._roles: dict[tuple[tuple[int, ...], tuple[int, ...], bool], Roles] = {}
        self._held: list[tuple[ModelPlacement, Model]] = []
        self._head: tuple[list[ModelPlacement], HeadModel] | None = None  # a head, with its pair
        self._trials: list[tuple[ModelPlacement, Trial]] = []  # of the models that are held

    def open(self, found: list[ModelPlacement]) -> RankModels:
        """Loads this rank's part of the pair, after freeing the models that the pair does not need."""
        if self._held:
            self._held = [(placed, model) for placed, model in self._held if placed in found]
            self._head = self._head if self._head and self._head[0] == found else None
            gc.collect()
            torch.cuda.empty_cache()
        self._ranks.enter("load")
        formats = {placed.role: placed.dtype.value for placed in found}
        self._ranks.require_same("number formats", json.dumps(formats))
        if self._ranks.world > 1:
            prints = {placed.role: fingerprint(placed.path) if placed.path else "" for placed in found}
            self._ranks.require_same("the models' files", json.dumps(prints))
        self._ranks.barrier()  # every rank has checked that the pair fits
        roles = self._roles_of(found)
        compiled, trials = self._tried(found, roles)
        target = self._model(found[0], roles, compiled)
        has_head = found[-1].model.is_head
        draft: Model | HeadModel | None = None
        if has_head and roles.draft is not None and target is not None:
            if self._head is None:
                self._head = found, _loaded_head(found, target)
            draft = self._head[1]
        elif len(found) > 1 and not has_head:
            draft = self._model(found[1], roles, compiled)
        if target is not None:
            target.tap(draft.taps if isinstance(draft, HeadModel) else ())
        sizes = [(model.vocab, model.context) if model else (0, 0) for model in (target, draft)]
        every = self._ranks.gather_ints([*sizes[0], *sizes[1]])
        vocab, context, _, draft_context = map(max, *every, [0, 0, 0, 0])
        devices = {placed.role: placed.in_words() for placed in found}
        draft_dtype = TORCH_DTYPES[found[-1].dtype]
        sizes_known = vocab, context, draft_context, draft_dtype
        return RankModels(target, draft, devices, roles, *sizes_known, trials)

    def _roles_of(self, found: list[ModelPlacement]) -> Roles:
        """Process groups are made once, as each costs connections; so is the connection to the draft."""
        draft = found[1].ranks if len(found) > 1 else ()
        key = found[0].ranks, draft, found[-1].copies
        if key not in self._roles:
            self._roles[key] = roles_of(*key, self._ranks, self._essential, self._patience_s)
        self._ranks.may_lose(() if self._essential else self._roles[key].apart)
        return self._roles[key]

    def _tried(self, found: list[ModelPlacement], roles: Roles) -> tuple[dict[str, bool], dict[str, Trial]]:
        """Whether the steps of each model are compiled, and the trials of those that need one, by role.

        Before any weights are read: a trial needs memory on the GPU, too.
        """
        compiled, trials = {}, {}
        self._trials = [(placed, trial) for placed, trial in self._trials if placed in found]
        for placed in found:
            group = _group(placed, roles)
            if group is None or placed.model.is_head:
                continue
            trial = next((trial for known, trial in self._trials if known == placed), None)
            if trial is None and not any(known == placed for known, _ in self._held):
                compiled[placed.role], on_trial = _all_compile(placed, group)
                if on_trial:
                    trial = Trial(placed.model.name, placed.dtype, placed.device, group)
                    compiled[placed.role] = trial.passes()
                    self._trials.append((placed, trial))
            if trial is not None:
                trials[placed.role] = trial
        return compiled, trials

    def _model(self, placed: ModelPlacement, roles: Roles, compiled: dict[str, bool]) -> Model | None:
        """This rank's part of the model; None where it has none."""
        group = _group(placed, roles)
        if group is None:
            return None
        for known, model in self._held:
            if known == placed:
                return model
        model = _loaded(placed, group, compiled[placed.role])
        self._held.append((placed, model))
        return model


def prepare(pair: RankModels, speculation: SpeculationConfig, rows: int, slots: int) -> None:
    """Compiles the models' steps before anything is timed; graphs for steps of the widths that will come."""
    widest = widest_steps(speculation.longest)
    wanted: list[Callable[[], None]] = [
        partial(
            _prepare, model, pair.trials.get(role), widest[role], rows, min(slots, model.context)
        )
        for role, model in ((TARGET, pair.target), (DRAFT, pair.draft))
        if isinstance(model, SteppedModel)
    ]  # fmt: skip
    if isinstance(pair.draft, HeadModel) and pair.draft.is_compiled:
        wanted.append(pair.draft.prepare)
    if wanted:
        with Progress("compile", len(wanted), "models", ends_in_log=False, ticks=True) as progress:
            for make in wanted:
                make()
                progress.advance(1)


def _prepare(model: SteppedModel, trial: Trial | None, width: int, rows: int, capacity: int) -> None:
    """Makes the model's steps of up to `width` tokens a row; those on trial are compared with eager ones."""
    with trial.blamed() if trial else nullcontext():
        model.prepare(range(1, width + 1), rows, capacity)
    if trial and model.is_compiled:
        trial.check(model, sorted({1, width}), rows, capacity)


def _loaded(placed: ModelPlacement, group: Ranks, compiled: bool) -> Model:
    """By the engine that the placement names."""
    # From Hopper on, torch prefers cuDNN's attention where there is a mask, and cuDNN plans each new shape
    # anew, for some 0.4 s. Prompts and eager steps have a new shape in every pass.
    torch.backends.cuda.enable_cudnn_sdp(False)
    what, name = (placed.model, placed.path, placed.dtype), f"{placed.role} {placed.model.name}"
    if placed.splitting is Splitting.layers:
        offload = home_expanded(placed.offload) if placed.offload else None
        with waiting(f"{name}: reading weights"):
            return load_layers(*what, placed.max_memory, offload, placed.role, placed.room)
    if placed.splitting is Splitting.deepspeed and group.world > 1:
        with waiting(f"{name}: reading weights"):
            return load_deepspeed(*what, placed.device, placed.role, group)
    return load(*what, placed.device, placed.role, group, compiled, _reading)


def _group(placed: ModelPlacement, roles: Roles) -> Ranks | None:
    """The ranks that hold the model; None where this one does not."""
    return roles.draft if placed.role == DRAFT else roles.target


def _all_compile(placed: ModelPlacement, group: Ranks) -> tuple[bool, bool]:
    """Whether every rank can compile, and whether compiled steps have to pass a trial on all."""
    if group.world == 1:
        return placed.compiled, False  # `load` sees to it
    model = placed.model
    heads = model.n_heads, model.n_kv_heads, model.head_dim
    able = placed.compiled and has_kernels(model.name, placed.dtype, placed.device, heads)
    facts = group.gather_ints([int(able), int(placed.on_trial)])
    every = all(own for own, _ in facts)
    if able and not every:
        log.warning("engine: %s runs eagerly: another rank cannot compile its steps", model.name)
    return every, every and any(own for _, own in facts)


def _loaded_head(found: list[ModelPlacement], target: Model) -> HeadModel:
    """A head without tables of its own is given the target's."""
    above, placed = found
    path, name = placed.path or Path(), placed.model.name

    def tables(output: bool) -> tuple[Tensor, bool]:
        table = table_of(target, output)
        if table is not None:
            return table, True
        return table_on_disk(above.path, above.model, output), False

    layers = above.model.n_layers
    return load_head(path, placed.dtype, placed.device, layers, tables, name, placed.compiled)


@contextmanager
def _reading(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows how much of a model's weights has been read."""
    with Progress(name, total, "bytes", ends_in_log=False) as progress:
        yield progress.advance


def rule_of(run: RunConf) -> Rule:
    """The rule that accepts drafts, as configured."""
    return RULES[run.speculation.verification.value]


def engine_for(
    pair: RankModels, run: RunConf, tokens: Tokens, end_ids: frozenset[int], seed: int, chunk: int,
    rule: Rule | None = None,
) -> RankEngine:  # fmt: skip
    """One engine with caches and draws of its own; only real tokens are drawn. `rule` replaces the run's."""
    transform = SamplingTransform(run.sampling, tuple(sorted(end_ids)), min(pair.vocab, tokens.size))
    if transform.forbids_all:
        what, where = "no token is allowed", "sampling.bad_tokens, sampling.min_new_tokens"
        raise UsageError(what, where, f"all {transform.vocab} are forbidden", fix="leave at least one")
    first = next(model for model in (pair.target, pair.draft) if model)
    draws = CounterDraws(seed, first.replay)
    roles, bridge = pair.roles, tokens.paired.bridge if tokens.paired else None
    target = ModelRunner(pair.target, chunk) if pair.target else None
    drafter = _drafter(pair, run, Sampler(transform, draws), target, chunk, bridge)
    if not run.has_draft_model and not roles.drafts_apart:
        roles = replace(roles, draft_channel=None)
    if target is not None and roles.leads:
        rule = rule or rule_of(run)
        return Engine(target, drafter or Drafter(), transform, rule, draws, roles)
    return Follower(target, drafter, transform, draws, roles, pair.context, first.device)


def _drafter(
    pair: RankModels, run: RunConf, sampler: Sampler, target: ModelRunner | None, chunk: int,
    bridge: Intersection | None,
) -> Drafter | None:  # fmt: skip
    """This rank's part in drafting; None where it has none."""
    roles, wide = pair.roles, partial(torch.promote_types, torch.float32)
    spec, vocab = run.speculation, sampler.transform.vocab
    if pair.target and roles.leads and run.drafts_from_text:
        return NgramDrafter(spec.ngram_min, spec.ngram_max, vocab, wide(pair.target.dtype))
    if not run.has_draft_model:
        return Drafter() if pair.draft and roles.drafts_apart else None
    if pair.draft is None:
        if not isinstance(roles.draft_channel, DraftClient):
            return None
        return RemoteDrafter(roles.draft_channel, pair.draft_context, vocab, wide(pair.draft_dtype))
    if isinstance(pair.draft, HeadModel):
        return head_drafter(pair.draft, target, sampler) if target else None
    runner = ModelRunner(pair.draft, chunk)
    if roles.draft is not None and not roles.draft.is_leader:
        apart = roles.drafts_apart
        return AheadDraftShard(runner, roles.draft, spec.overlap) if apart else DraftShard(runner)
    if isinstance(roles.draft_channel, DraftServer) and roles.draft is not None:
        return AheadDrafter(runner, sampler, roles.draft, roles.draft_channel, spec.overlap)
    if bridge is not None:
        return IntersectionDrafter(runner, sampler, bridge)
    return ModelDrafter(runner, sampler)


def draft_alone(pair: RankModels) -> RankModels | None:
    """The draft in the target's place, on the ranks that share it with the leader; None on others.

    A head cannot stand there: it reads a target's hidden states.
    """
    group = pair.roles.draft
    if (
        pair.draft is None
        or isinstance(pair.draft, HeadModel)
        or group is None
        or (group.world == 1 and not pair.roles.leads)
    ):
        return None
    roles = Roles(pair.roles.everyone if group.world == 1 else group, group, None)
    return replace(
        pair, target=pair.draft, draft=None, roles=roles, vocab=pair.draft.vocab, context=pair.draft_context
    )


def lookahead_for(run: RunConf, rows: int, costs: Costs | None = None) -> DraftLength:
    """How K is chosen for a batch of this many rows; an adaptive choice goes by `costs`, if known."""
    spec = run.speculation
    if not spec.adaptive:
        return FixedDraftLength(spec.k or 0, rows)
    fits = costs is not None and costs.k_max <= spec.k_max
    if costs is None or not fits or spec.cost_ratio is not None or not run.has_draft_model:
        ratio = USUAL_COST_RATIO if spec.cost_ratio is None else spec.cost_ratio
        at_once = run.draft is not None and run.draft.head_block > 0
        costs = Costs.of_ratio(ratio, spec.k_max, at_once)
    return AdaptiveDraftLength(costs, rows)
