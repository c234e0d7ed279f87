"""The pairs of a run, with shapes, files and placement checked: its own, or presets by name. No torch."""

import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from llama_ssp import config
from llama_ssp.config import (
    MAX_COST_RATIO,
    USUAL_K,
    Drafting,
    DraftSeat,
    Dtype,
    ModelConf,
    Overlap,
    PlacementConf,
    RunConf,
    SpeculationConfig,
    Splitting,
)
from llama_ssp.config import validation as checks
from llama_ssp.config.compose import composed
from llama_ssp.distributed.placement import LEADER, Placement, resolve
from llama_ssp.errors import DistributedError, ModelError, UsageError
from llama_ssp.models.checkpoint import complete, folder_at_hand, outlined
from llama_ssp.models.kept_files import compiler
from llama_ssp.models.own_sampling import OwnSampling, left_open
from llama_ssp.models.sharding import is_planned, require_deepspeed, require_split
from llama_ssp.planner.gpus import gpus_here
from llama_ssp.planner.run_plan import request_of
from llama_ssp.planner.search import Option, PlanRequest, option, search
from llama_ssp.planner.storage import CPU
from llama_ssp.planner.workload import DRAFT, GIB, TARGET
from llama_ssp.text.compatibility import diagnose
from llama_ssp.text.vocabulary import read_vocabularies

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairSpec:
    """One pair: its run, the folders of the models' files (None: synthetic), and which ranks hold what."""

    run: RunConf
    target_path: Path | None
    draft_path: Path | None
    placement: Placement
    sampling: OwnSampling = field(
        default_factory=OwnSampling
    )  # what the target recommends of what the user has left open

    @property
    def files(self) -> dict[str, Path | None]:
        """The folders of the models that take part, by role."""
        draft = {"draft": self.draft_path} if self.run.has_draft_model else {}
        return {"model": self.target_path, **draft}

    @property
    def target(self) -> str:
        return self.run.model.name

    @property
    def drafter(self) -> str | None:
        return self.run.drafter_name

    @property
    def name(self) -> str:
        """TARGET, or TARGET/DRAFTER."""
        return self.target if self.drafter is None else f"{self.target}/{self.drafter}"


class PairFiles(NamedTuple):
    """A pair's run with the shapes of its models, and the folders of their files."""

    run: RunConf
    target_path: Path | None
    draft_path: Path | None
    sampling: OwnSampling = OwnSampling()


def pair_specs(run: RunConf, folders: list[Path], world: int) -> tuple[PairSpec, ...]:
    """Every pair of the run on `world` ranks; `folders` are private ones that may hold presets, too."""
    return tuple(placed(files, [world], least_k=1) for files in pair_files(run, folders))


def pair_files(run: RunConf, folders: list[Path], dry: bool = False) -> list[PairFiles]:
    """Every pair of the run, with the shapes of its models; `dry`: their files need not be here."""
    runs = [_with_presets(run, name, folders) for name in run.task.pairs] or [run]
    return [_completed(one, dry) for one in runs]


def _completed(run: RunConf, dry: bool) -> PairFiles:
    models = dict[str, tuple[ModelConf, Path | None]]()
    for role, conf in ((TARGET, run.model), (DRAFT, run.draft)):
        if conf is None:
            continue
        if dry:
            model, path = outlined(conf, role, run.download), folder_at_hand(conf)
        else:
            model, path = complete(conf, role, run.download)
        models[role] = _in_codes(run, model, path), path
    draft, draft_path = models.get(DRAFT, (None, None))
    target, target_path = models[TARGET]
    own = left_open(run.sampling, target, target_path)
    whole = replace(run, model=target, draft=draft, sampling=run.sampling.over(own.usual))
    checks.check_context(whole)
    return PairFiles(whole, target_path, draft_path, own)


def _in_codes(run: RunConf, model: ModelConf, path: Path | None) -> ModelConf:
    """The model: by default codes of a file stay codes on a CPU that has a compiler for their kernel."""
    conf = run.placement
    is_open = model.dtype is Dtype.auto and conf.splitting is Splitting.tensor and is_planned(model)
    is_coded = path is not None and model.code_bits and not model.experts
    if not (is_open and is_coded and compiler()):
        return model
    has_gpu = conf.target_device != CPU and (run.cluster.gpu not in (None, CPU) or gpus_here())
    return model if has_gpu else replace(model, dtype=Dtype.packed)


def placed(files: PairFiles, worlds: list[int], least_k: int = 0) -> PairSpec:
    """The pair on one of these numbers of ranks: where each model is, and with how many drafts a round.

    The plan does not choose a smaller K than `least_k`.
    """
    run = files.run
    if run.draft is not None and run.draft.is_head:
        require_head(run.draft, run.model, run.placement, worlds[-1])
    placement, speculation = choose(files, worlds, least_k)
    if placement.splitting is Splitting.deepspeed:
        require_deepspeed(run.model, placement.world)
    elif len(placement.target) > 1:
        require_split(run.model, len(placement.target))
    if run.draft is not None and placement.draft_degree > 1:
        require_split(run.draft, placement.draft_degree, "draft")
    if placement.draft not in ((), (LEADER,)) and is_bridged(files):
        require_whole(placement.draft)
    require_own_ranks(run, placement)
    return PairSpec(
        run=replace(run, speculation=speculation),
        target_path=files.target_path,
        draft_path=files.draft_path,
        placement=placement,
        sampling=files.sampling,
    )


def require_own_ranks(run: RunConf, placement: Placement) -> None:
    """Refuses a draft that shall run ahead on the target's ranks, where it would delay the target."""
    if run.speculation.overlap is Overlap.ahead and run.has_draft_model and not placement.draft_apart:
        what, found = "a draft runs ahead on ranks of its own only", f"ahead, with {placement.in_words()}"
        fix = "use placement=own on two ranks or more, or speculation.overlap=auto"
        raise UsageError(what, "speculation.overlap", found, "auto, off", fix)


def require_whole(ranks: tuple[int, ...]) -> None:
    """Refuses a draft of another tokenizer elsewhere than on the leader, which decides, and translates."""
    if ranks != (LEADER,):
        what, found = "a draft of another tokenizer is on the leader, whole", ", ".join(map(str, ranks))
        fix = "use placement=leader"
        raise UsageError(what, "placement.draft", f"ranks {found}", f"rank {LEADER}", fix)


def require_head(draft: ModelConf, target: ModelConf, placement: PlacementConf, world: int) -> None:
    """Refuses a head of another target, and a place where it has no hidden states."""
    if draft.head_inputs % target.dim:
        what, where = "the head is not one of this target", f"draft {draft.name}"
        found = f"it reads {draft.head_inputs} numbers a token, of layers of {target.dim}"
        allowed, fix = f"a multiple of {target.dim}", "use a head that was trained for this target"
        raise ModelError(what, where, found, allowed, fix)
    if placement.splitting is not Splitting.tensor:
        what, found = "a head drafts only for a target that is split by tensors", placement.splitting.value
        raise UsageError(what, "placement.splitting", found, "tensor", "use placement=auto")
    if world > 1 and placement.draft not in (DraftSeat.auto, DraftSeat.leader):
        what, found = "a head reads the target's hidden states: it is on the leader", placement.draft.value
        raise UsageError(what, "placement.draft", found, "leader", "use placement=leader or placement=auto")


def is_bridged(files: PairFiles) -> bool:
    """Whether the draft is known to have another tokenizer, so that its text is translated."""
    run, target, draft, _ = files
    if target is None or draft is None or run.draft is None:
        return False
    own, other = read_vocabularies(target, draft)
    widths = run.model.vocab, run.draft.vocab
    return own is not None and other is not None and diagnose(own, other, widths).bridged


def is_free(conf: PlacementConf) -> bool:
    """Whether the configuration leaves the draft's place to the plan."""
    named = (conf.draft_degree, conf.target_ranks, conf.draft_ranks)
    return conf.splitting is Splitting.tensor and conf.draft is DraftSeat.auto and not any(named)


def choose(files: PairFiles, worlds: list[int], least_k: int) -> tuple[Placement, SpeculationConfig]:
    """Which ranks hold what, and how many tokens are drafted: as configured, else what is planned fastest.

    The prompts are not read yet, so the plan is of prompts of a usual length.
    """
    run, spec, world, best = files.run, files.run.speculation, worlds[-1], None
    with suppress(UsageError, DistributedError, ModelError):  # a GPU without known figures; DeepSpeed
        request = plannable(files)
        best = None if request is None else options(request, run.placement, worlds)[0]
    placement = best.placement if best else resolve(run.placement, world, run.has_draft_model)
    if spec.k is None:
        adaptive = spec.adaptive or (run.task.chooses_k and run.drafter_name is not None)
        planned = max(best.k, least_k) if best else USUAL_K
        spec = replace(spec, k=planned if run.given_k is None else run.given_k, adaptive=adaptive)
        if spec.k == 0 and not spec.adaptive and run.has_draft_model:
            log.info("drafting does not pay here, by the plan: K = 0; speculation.k=%d drafts", USUAL_K)
            return choose(files._replace(run=replace(run, speculation=spec)), worlds, least_k)
    is_open = spec.adaptive and run.has_draft_model and spec.cost_ratio is None
    if best and is_open and not run.task.measures_costs:
        ratio = best.times.proposal_s(1) / best.times.verify[0]
        spec = replace(spec, cost_ratio=min(ratio, MAX_COST_RATIO))
    return placement, spec


def plannable(files: PairFiles, gpus: int | None = None, free: int | None = None) -> PlanRequest | None:
    """What to plan for the pair, on this many GPUs of these free bytes; None where nothing is known.

    Without a calibration the plan does not know what messages cost on a CPU, which is most.
    """
    run = files.run
    if not all(is_planned(model) for model in (run.model, run.draft) if model is not None):
        return None
    if gpus is not None:
        gib = min((size for size in (run.cluster.gib, free and free / GIB) if size), default=None)
        run = replace(run, cluster=replace(run.cluster, gpus=gpus, nodes=1, gib=gib))
    request = request_for(files._replace(run=run))
    return None if request.machine.is_cpu and run.cluster.times.layer_us is None else request


def request_for(files: PairFiles) -> PlanRequest:
    """Returns what to plan for the pair, also where its tokenizers differ."""
    request = request_of(files.run)
    return replace(request, bridged=request.draft is not None and is_bridged(files))


def options(request: PlanRequest, conf: PlacementConf, worlds: list[int]) -> list[Option]:
    """What the configuration allows on these numbers of ranks; the fastest that fits first.

    A placement that it names is that of the last number.
    """
    if is_free(conf):
        return search(request, worlds)
    return [option(request, resolve(conf, worlds[-1], request.draft is not None), request.k)]


def _with_presets(run: RunConf, name: str, folders: list[Path]) -> RunConf:
    """The run with the models of TARGET or TARGET/DRAFT; a target alone has n-grams or no drafts."""
    target, _, draft = name.partition("/")
    preset = composed([f"model={target}", f"draft={draft or 'none'}"], folders)
    for role, model in (("model", preset.model), ("draft", preset.draft)):
        is_read = model is not None and model.weights is config.Weights.checkpoint
        if model is not None and is_read and not (model.path or model.repo or model.package):
            fix = f"leave out task.pairs and write {role}={model.name} {role}.path=FOLDER"
            raise UsageError(f"task.pairs: {model.name} has no files of its own", found=repr(name), fix=fix)
    spec = run.speculation
    if not draft and spec.drafter is Drafting.model:
        spec = replace(spec, drafter=Drafting.none)
    return replace(run, model=preset.model, draft=preset.draft, speculation=spec)
