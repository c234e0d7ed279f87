"""Which pairs a run is about, with their shapes and files checked: its own, or presets by name. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from llama_ssp.config import Drafting, DraftSeat, EvalConf, ModelConf, Overlap, RunConf, Splitting, Weights
from llama_ssp.config import validation as checks
from llama_ssp.config.compose import composed
from llama_ssp.distributed.placement import Placement, resolve
from llama_ssp.distributed.signals import GUARD
from llama_ssp.errors import UsageError
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.sharding import require_deepspeed, require_split
from llama_ssp.planner.hardware import CPU, machine_of
from llama_ssp.planner.run_plan import asked_of_run, is_free, placed
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from llama_ssp.text.compatibility import diagnose
from llama_ssp.text.vocabulary import read_vocabularies

USUAL_TOKENS = 512  # of a prompt, for plans that are made before there is one


@dataclass(frozen=True)
class PairSpec:
    """One pair: its run, where the models' files are (None: synthetic), and which ranks hold what."""

    run: RunConf
    target_path: Path | None
    draft_path: Path | None
    placement: Placement

    @property
    def files(self) -> dict[str, Path | None]:
        """The folders of the models that take part, by role."""
        draft = {"draft": self.draft_path} if drafts(self.run) else {}
        return {"model": self.target_path, **draft}

    @property
    def target(self) -> str:
        return _name(self.run.model, self.target_path)

    @property
    def drafter(self) -> str | None:
        """Who drafts, in a word; None where nobody does."""
        spec = self.run.speculation
        if spec.drafter is Drafting.ngram and (spec.k or spec.adaptive):
            return "ngram"
        return _name(self.run.draft, self.draft_path) if self.run.draft and drafts(self.run) else None


def drafts(run: RunConf) -> bool:
    """Whether a draft model takes part."""
    spec = run.speculation
    return run.draft is not None and spec.drafter is Drafting.model and (spec.k > 0 or spec.adaptive)


def pair_specs(run: RunConf, folders: list[Path], world: int) -> tuple[PairSpec, ...]:
    """Every pair of the run on so many ranks; `folders` are private ones that may hold presets, too."""
    named = run.task.pairs if isinstance(run.task, EvalConf) else []
    runs = [_with_presets(run, name, folders) for name in named] or [run]
    return tuple(_completed(one, world) for one in runs)


def _completed(run: RunConf, world: int) -> PairSpec:
    model, target_path = complete(run.model, "model")
    draft, draft_path = (None, None) if run.draft is None else complete(run.draft, "draft")
    whole = replace(run, model=model, draft=draft)
    checks.check_context(whole)
    placement = _placement(_seated(whole, target_path, draft_path, world), world)
    if placement.splitting is Splitting.deepspeed:
        require_deepspeed(model, placement.world)
    elif len(placement.target) > 1:
        require_split(model, len(placement.target))
    if draft is not None and placement.draft_degree > 1:
        require_split(draft, placement.draft_degree, "draft")
    require_apart(whole, placement)
    return PairSpec(whole, target_path, draft_path, placement)


def require_apart(run: RunConf, placement: Placement) -> None:
    """A draft runs ahead on ranks of its own; elsewhere it would take the target's time."""
    if run.speculation.overlap is Overlap.ahead and drafts(run) and not placement.draft_apart:
        raise UsageError(
            "a draft runs ahead on ranks of its own only", where="speculation.overlap",
            found=f"ahead, with {placement.in_words()}", allowed="auto, off",
            fix="use placement=own on two ranks or more, or speculation.overlap=auto",
        )  # fmt: skip


def _seated(run: RunConf, target: Path | None, draft: Path | None, world: int) -> RunConf:
    """A draft of another tokenizer goes to the leader, which translates, where its place is left open."""
    if world == 1 or not is_free(run.placement) or not is_bridged(run, target, draft):
        return run
    return replace(run, placement=replace(run.placement, draft=DraftSeat.leader))


def is_bridged(run: RunConf, target: Path | None, draft: Path | None) -> bool:
    """Whether the draft is known to have another tokenizer, so that what it says is translated."""
    if target is None or draft is None or run.draft is None:
        return False
    mine, other = read_vocabularies(target, draft)
    if mine is None or other is None:
        return False
    return diagnose(mine, other, (run.model.vocab, run.draft.vocab)).bridged


def _placement(run: RunConf, world: int) -> Placement:
    """Who holds what: as asked for, and where that is left open what the plan finds fastest.

    The prompts are not read yet, so it plans with prompts of a usual length.
    """
    draft = run.draft if drafts(run) else None
    if world == 1 or draft is None or not is_free(run.placement):
        return resolve(run.placement, world, draft is not None)
    if run.placement.target_device == CPU and run.cluster.gpu is None:
        run = replace(run, cluster=replace(run.cluster, gpu=CPU))
    try:
        machine = machine_of(run.cluster)
    except UsageError:  # nothing is known of this GPU
        return resolve(run.placement, world, drafts=True)
    if machine.is_cpu and run.cluster.times.layer_us is None:  # what its ranks say to each other costs most
        return resolve(run.placement, world, drafts=True)
    roles = (
        Role(TARGET, run.model, machine.dtype(run.model.dtype)),
        Role(DRAFT, draft, machine.dtype(draft.dtype)),
    )
    new = min(getattr(run.task, "max_new_tokens", USUAL_TOKENS), run.model.context - 1)
    work = Workload(
        getattr(run.task, "batch_size", 1), min(USUAL_TOKENS, run.model.context - new), new,
        run.speculation.k, getattr(run.task, "prefill_chunk", USUAL_TOKENS),
    )  # fmt: skip
    return placed(run.placement, asked_of_run(run, roles, work), world, drafts=True)


def _with_presets(run: RunConf, name: str, folders: list[Path]) -> RunConf:
    """The run with the models of TARGET or TARGET/DRAFT; a target alone is sampled regularly."""
    target, _, draft = name.partition("/")
    with GUARD.held():
        preset = composed([f"model={target}", f"draft={draft or 'none'}"], folders)
    for role, model in (("model", preset.model), ("draft", preset.draft)):
        if model and model.weights is Weights.checkpoint and model.path is None and model.repo is None:
            raise UsageError(
                f"task.pairs: {model.name} has no files of its own", found=repr(name),
                fix=f"leave out task.pairs and write {role}={model.name} {role}.path=FOLDER",
            )  # fmt: skip
    spec = run.speculation if draft else replace(run.speculation, drafter=Drafting.none)
    return replace(run, model=preset.model, draft=preset.draft, speculation=spec)


def _name(model: ModelConf, path: Path | None) -> str:
    """The preset's name; any folder, preset `local`, is called by its own."""
    return path.name if model.name == "local" and path is not None else model.name
