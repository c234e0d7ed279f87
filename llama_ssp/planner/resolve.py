"""The pairs of a run, with shapes, files and placement checked: its own, or presets by name. No torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from llama_ssp import config
from llama_ssp.config import (
    Drafting,
    DraftSeat,
    ModelConf,
    Overlap,
    PlacementConf,
    RunConf,
    Splitting,
)
from llama_ssp.config import validation as checks
from llama_ssp.config.compose import composed
from llama_ssp.distributed.placement import LEADER, Placement, resolve
from llama_ssp.errors import ModelError, UsageError
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.sharding import require_deepspeed, require_split
from llama_ssp.planner.run_plan import request_of
from llama_ssp.planner.search import search
from llama_ssp.text.compatibility import diagnose
from llama_ssp.text.vocabulary import read_vocabularies


@dataclass(frozen=True)
class PairSpec:
    """One pair: its run, the folders of the models' files (None: synthetic), and which ranks hold what."""

    run: RunConf
    target_path: Path | None
    draft_path: Path | None
    placement: Placement

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


def pair_specs(run: RunConf, folders: list[Path], world: int) -> tuple[PairSpec, ...]:
    """Every pair of the run on `world` ranks; `folders` are private ones that may hold presets, too."""
    runs = [_with_presets(run, name, folders) for name in run.task.named_pairs] or [run]
    return tuple(_completed(one, world) for one in runs)


def _completed(run: RunConf, world: int) -> PairSpec:
    model, target_path = complete(run.model, "model", run.download)
    draft, draft_path = (None, None) if run.draft is None else complete(run.draft, "draft", run.download)
    whole = replace(run, model=model, draft=draft)
    checks.check_context(whole)
    seat = run.placement.draft
    if draft is not None and draft.is_head:
        require_head(draft, model, run.placement, world)
        seat = DraftSeat.leader  # every target rank has the hidden states; one head is enough
    elif world > 1 and is_free(run.placement) and is_bridged(whole, target_path, draft_path):
        seat = DraftSeat.leader  # which translates the text of a draft with another tokenizer
    placement = choose_placement(replace(whole, placement=replace(run.placement, draft=seat)), world)
    if placement.splitting is Splitting.deepspeed:
        require_deepspeed(model, placement.world)
    elif len(placement.target) > 1:
        require_split(model, len(placement.target))
    if draft is not None and placement.draft_degree > 1:
        require_split(draft, placement.draft_degree, "draft")
    require_own_ranks(whole, placement)
    return PairSpec(whole, target_path, draft_path, placement)


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
    require_head_of(target, draft)
    if placement.splitting is not Splitting.tensor:
        what, found = "a head drafts only for a target that is split by tensors", placement.splitting.value
        raise UsageError(what, "placement.splitting", found, "tensor", "use placement=auto")
    if world > 1 and placement.draft not in (DraftSeat.auto, DraftSeat.leader):
        what, found = "a head reads the target's hidden states: it is on the leader", placement.draft.value
        raise UsageError(what, "placement.draft", found, "leader", "use placement=leader or placement=auto")


def require_head_of(target: ModelConf, draft: ModelConf) -> None:
    """Refuses a head of another target."""
    if draft.is_head and draft.head_inputs % target.dim:
        what, where = "the head is not one of this target", f"draft {draft.name}"
        found = f"it reads {draft.head_inputs} numbers a token, of layers of {target.dim}"
        allowed, fix = f"a multiple of {target.dim}", "use a head that was trained for this target"
        raise ModelError(what, where, found, allowed, fix)


def is_bridged(run: RunConf, target: Path | None, draft: Path | None) -> bool:
    """Whether the draft is known to have another tokenizer, so that its text is translated."""
    if target is None or draft is None or run.draft is None:
        return False
    own, other = read_vocabularies(target, draft)
    widths = run.model.vocab, run.draft.vocab
    return own is not None and other is not None and diagnose(own, other, widths).bridged


def is_free(conf: PlacementConf) -> bool:
    """Whether the configuration leaves the draft's place to the plan."""
    named = (conf.draft_degree, conf.target_ranks, conf.draft_ranks)
    return conf.splitting is Splitting.tensor and conf.draft is DraftSeat.auto and not any(named)


def choose_placement(run: RunConf, world: int) -> Placement:
    """Which ranks hold what: as configured, or where that is left open the fastest that fits.

    The prompts are not read yet, so the plan is of prompts of a usual length.
    """
    if world > 1 and run.has_draft_model and is_free(run.placement):
        with suppress(UsageError):  # a GPU without known figures
            request = request_of(run)
            # Without a calibration the plan does not know what messages cost on a CPU, which is most.
            if not request.machine.is_cpu or run.cluster.times.layer_us is not None:
                return search(request, [world])[0].placement
    return resolve(run.placement, world, run.has_draft_model)


def _with_presets(run: RunConf, name: str, folders: list[Path]) -> RunConf:
    """The run with the models of TARGET or TARGET/DRAFT; a target alone has n-grams or no drafts."""
    target, _, draft = name.partition("/")
    preset = composed([f"model={target}", f"draft={draft or 'none'}"], folders)
    for role, model in (("model", preset.model), ("draft", preset.draft)):
        if model and model.weights is config.Weights.checkpoint and model.path is None and model.repo is None:
            fix = f"leave out task.pairs and write {role}={model.name} {role}.path=FOLDER"
            raise UsageError(f"task.pairs: {model.name} has no files of its own", found=repr(name), fix=fix)
    spec = run.speculation
    if not draft and spec.drafter is Drafting.model:
        spec = replace(spec, drafter=Drafting.none)
    return replace(run, model=preset.model, draft=preset.draft, speculation=spec)
