"""The pairs of a run, with shapes, files and placement checked: its own, or presets by name. No torch."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from llama_ssp import config
from llama_ssp.config import (
    Drafting,
    DraftSeat,
    Dtype,
    ModelConf,
    Overlap,
    PlacementConf,
    RunConf,
    Splitting,
)
from llama_ssp.config import validation as checks
from llama_ssp.config.compose import composed
from llama_ssp.config.presets import NAMES_OF_A_MODEL, UNNAMED, model_words, quoted
from llama_ssp.distributed.gpus import gpus_here
from llama_ssp.distributed.placement import LEADER, Placement
from llama_ssp.errors import ModelError, UsageError
from llama_ssp.models.adapter import require_for_module
from llama_ssp.models.checkpoint import complete, folder_at_hand, outlined
from llama_ssp.models.folder import weights_here
from llama_ssp.models.kept_files import compiler
from llama_ssp.models.own_sampling import OwnSampling, left_open
from llama_ssp.models.sharding import architecture, is_planned, require_deepspeed, require_split
from llama_ssp.placing.decision import RunDecision, decide
from llama_ssp.placing.request import PairFiles, is_bridged
from llama_ssp.planner.search import require_with_target
from llama_ssp.planner.storage import CPU
from llama_ssp.planner.workload import DRAFT, TARGET


@dataclass(frozen=True)
class PairSpec:
    """One pair: its run, the folders of the models' files (None: synthetic), and how it runs.

    `sampling` is what the target recommends of what the user has left open.
    """

    run: RunConf
    target_path: Path | None
    draft_path: Path | None
    decision: RunDecision
    sampling: OwnSampling = field(default_factory=OwnSampling)

    @property
    def placement(self) -> Placement:
        """Which ranks hold what."""
        return self.decision.placement.value

    @property
    def files(self) -> dict[str, Path | None]:
        """Returns the folders of the models that take part, by role."""
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
        """Returns TARGET, or TARGET/DRAFTER."""
        return self.target if self.drafter is None else f"{self.target}/{self.drafter}"


def pair_specs(run: RunConf, folders: list[Path], world: int) -> tuple[PairSpec, ...]:
    """Returns every pair of the run on `world` ranks; `folders` are private ones that may hold presets."""
    return tuple(placed(files, [world], least_k=1) for files in pair_files(run, folders))


def pair_files(run: RunConf, folders: list[Path], dry: bool = False) -> list[PairFiles]:
    """Returns every pair, with the shapes of its models; `dry`: their files need not be here."""
    runs = [_with_presets(run, name, folders) for name in run.task.pairs]
    runs += [_with_draft(run, name, folders) for name in run.task.drafts]
    return [_completed(one, dry) for one in runs or [run]]


def _completed(run: RunConf, dry: bool) -> PairFiles:
    models = dict[str, tuple[ModelConf, Path | None]]()
    for role, conf in ((TARGET, run.model), (DRAFT, run.draft)):
        if conf is None:
            continue
        path: Path | None
        # Texts and their log-probabilities may come from a machine that has the target, and this has not.
        if dry or (role == TARGET and run.task.replay is not None and not _is_whole(conf)):
            model = outlined(conf, role, run.download)
            path = folder_at_hand(conf)
        else:
            model, path = complete(conf, role, run.download)
        by_decoder = role == DRAFT or run.placement.splitting is Splitting.tensor
        if not (by_decoder and is_planned(model)):
            require_for_module(model, model.dtype, role)
        models[role] = _in_codes(run, model, path), path

    target, target_path = models[TARGET]
    draft, draft_path = models.get(DRAFT, (None, None))
    own = left_open(run.sampling, target, target_path)
    whole = replace(run, model=target, draft=draft, sampling=run.sampling.over(own.usual))
    checks.check_context(whole)
    return PairFiles(run=whole, target_path=target_path, draft_path=draft_path, sampling=own)


def _is_whole(conf: ModelConf) -> bool:
    """Returns whether the model's weights are on this machine, or are made here."""
    folder = folder_at_hand(conf)
    return conf.weights is config.Weights.synthetic or (folder is not None and weights_here(folder))


def _in_codes(run: RunConf, model: ModelConf, path: Path | None) -> ModelConf:
    """Returns the model: by default codes of a file stay codes on a CPU with a compiler for their kernel."""
    conf = run.placement
    is_open = model.dtype is Dtype.auto and conf.splitting is Splitting.tensor and is_planned(model)
    is_coded = path is not None and model.code_bits and not model.experts
    if not (is_open and is_coded and compiler()):
        return model
    has_gpu = conf.target_device != CPU and (run.cluster.gpu not in (None, CPU) or gpus_here())
    return model if has_gpu else replace(model, dtype=Dtype.packed)


def placed(files: PairFiles, worlds: list[int], least_k: int = 0) -> PairSpec:
    """Returns the pair on one of these numbers of ranks, as it is decided. See `decide` for `least_k`."""
    run = files.run
    if run.draft is not None and run.draft.is_head:
        require_head(run.draft, run.model, run.placement, worlds[-1])

    decided, decision = decide(files, worlds, least_k)
    placement = decision.placement.value
    if run.draft is not None and run.draft.head_shares_cache:
        require_with_target(placement)
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
        run=decided,
        target_path=files.target_path,
        draft_path=files.draft_path,
        decision=decision,
        sampling=files.sampling,
    )


def require_own_ranks(run: RunConf, placement: Placement) -> None:
    """Refuses a draft that shall run ahead on the target's ranks, where it would delay the target."""
    if run.speculation.overlap is Overlap.ahead and run.has_draft_model and not placement.draft_apart:
        raise UsageError(
            "a draft runs ahead on ranks of its own only",
            where="speculation.overlap",
            found=f"ahead, with {placement.in_words()}",
            allowed="auto, off",
            fix="use placement=own on two ranks or more, or speculation.overlap=auto",
        )


def require_whole(ranks: tuple[int, ...]) -> None:
    """Refuses a draft of another tokenizer elsewhere than on the leader, which decides, and translates."""
    if ranks != (LEADER,):
        raise UsageError(
            "a draft of another tokenizer is on the leader, whole",
            where="placement.draft",
            found=f"ranks {', '.join(map(str, ranks))}",
            allowed=f"rank {LEADER}",
            fix="use placement=leader",
        )


def require_head(draft: ModelConf, target: ModelConf, placement: PlacementConf, world: int) -> None:
    """Refuses a head of another target, and a place where it has no hidden states."""
    if draft.head_inputs % target.dim:
        raise ModelError(
            "the head is not one of this target",
            where=f"draft {draft.name}",
            found=f"it reads {draft.head_inputs} numbers a token, of layers of {target.dim}",
            allowed=f"a multiple of {target.dim}",
            fix="use a head that was trained for this target",
        )
    if draft.head_shares_cache:
        _require_own_target(draft, target)
    if placement.splitting is not Splitting.tensor:
        raise UsageError(
            "a head drafts only for a target that is split by tensors",
            where="placement.splitting",
            found=placement.splitting.value,
            allowed="tensor",
            fix="use placement=auto",
        )
    if draft.head_shares_cache:
        return  # its place follows the target's (planner/search.py)
    if world > 1 and placement.draft not in (DraftSeat.auto, DraftSeat.leader):
        raise UsageError(
            "a head reads the target's hidden states: it is on the leader",
            where="placement.draft",
            found=placement.draft.value,
            allowed="leader",
            fix="use placement=leader or placement=auto",
        )


def _require_own_target(draft: ModelConf, target: ModelConf) -> None:
    """Refuses a head that reads another target's keys and values, or those of a target without a decoder."""
    keys = ("family", "n_kv_heads", "head_dim", "full_kv_heads", "full_head_dim", "vocab")
    wrong = [
        f"{key} {getattr(draft, key)}, of the target {getattr(target, key)}"
        for key in keys
        if getattr(draft, key) != getattr(target, key)
    ]
    if draft.head_inputs != target.dim:
        wrong.append(f"states of {draft.head_inputs} numbers, of the target {target.dim}")
    if not is_planned(target):
        wrong.append(f"{architecture(target)}, which transformers runs")
    if wrong:
        raise ModelError(
            "the assistant does not read this target's keys and values",
            where=f"draft {draft.name}",
            found="; ".join(wrong),
            allowed="the target that it was made for, on the decoder",
            fix="use its own assistant, another draft, or n-grams",
        )


def _with_presets(run: RunConf, name: str, folders: list[Path]) -> RunConf:
    """Returns the run with the models of TARGET or TARGET/DRAFT; a target alone has n-grams or no drafts."""
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


def _with_draft(run: RunConf, name: str, folders: list[Path]) -> RunConf:
    """Returns the run with what drafts by this name: a model by any of its names, or what drafts from text.

    A preset may take its files from the target's, so it is composed with the run's own.
    """
    spec = run.speculation
    kinds = {kind.value: kind for kind in Drafting if kind not in (Drafting.model, Drafting.none)}
    if name in kinds:
        return replace(run, draft=None, speculation=replace(spec, drafter=kinds[name]))
    target = [
        f"model.{key}={_in_hydra(value)}" for key, value in vars(run.model).items() if key != "sampling"
    ]
    preset = composed([f"model={UNNAMED}", *target, *model_words("draft", name)], folders)
    if preset.draft is None:
        raise UsageError(
            "task.drafts: there is nothing that drafts",
            found=repr(name),
            allowed=f"{NAMES_OF_A_MODEL}, or {', '.join(kinds)}",
            fix="name what drafts",
        )
    return replace(run, draft=preset.draft, speculation=replace(spec, drafter=Drafting.model))


def _in_hydra(value: object) -> str:
    """Returns a setting of a model in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return quoted(value) if isinstance(value, str) else str(value)
