"""task=plan: from the configuration to a plan, printed, drawn and kept. No torch, no weights, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_ssp.config import Drafting, Output, PlacementConf, PlanConf, RunConf, Splitting
from llama_ssp.config import validation as checks
from llama_ssp.config.compose import composed, model_words
from llama_ssp.config.overrides import check_arguments
from llama_ssp.distributed.placement import Placement, resolve
from llama_ssp.errors import FAILED_CHECK, OK, ModelError
from llama_ssp.models.checkpoint import folder_at_hand, outlined
from llama_ssp.models.sharding import require_planned
from llama_ssp.planner.fit import FitVerdict
from llama_ssp.planner.hardware import machine_of, require_world
from llama_ssp.planner.outcome import Plan, outcome
from llama_ssp.planner.run_plan import is_free
from llama_ssp.planner.search import Asked
from llama_ssp.planner.search import require_planned as require_planned_splitting
from llama_ssp.planner.table import rendered
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from llama_ssp.report.run_folder import Console, NoConsole, RunFolder, config_sha256, versions
from llama_ssp.text.compatibility import diagnose
from llama_ssp.text.pairing import Pairing, pair
from llama_ssp.text.vocabulary import read_vocabularies

NOT_AT_HAND = "vocabularies: not at hand"


def plan(
    model: str | Path,
    draft: str | Path | None = None,
    *,
    cluster: str = "local",
    overrides: Sequence[str] = (),
) -> Plan:
    """Whether a pair fits on a cluster, where its parts go, and how fast it is. Loads no weights, no torch.

    `model` and `draft` are names of presets, folders, or ids on the Hugging Face hub; `cluster` is a preset's
    name, `local` this machine. `overrides` are those of the command line. Raises UsageError or ModelError.
    """
    words = [
        *model_words("model", model),
        *(model_words("draft", draft) if draft is not None else ["draft=none"]),
    ]
    words += ["task=plan", f"cluster={cluster}", *overrides]
    check_arguments(words)
    return planned(composed(words), 1)[1]


def planned(run: RunConf, ranks: int) -> tuple[RunConf, Plan]:
    """The run with its models' shapes, and its plan."""
    draft = None if run.draft is None else outlined(run.draft, DRAFT)
    run = replace(run, model=outlined(run.model, TARGET), draft=draft)
    checks.check_context(run)
    for role, model in ((TARGET, run.model), (DRAFT, run.draft)):
        if model is not None:
            require_planned(model, role)
    asked = asked_of(run)
    require_world(asked.machine, ranks)
    return run, outcome(asked, fixed_placement(run.placement, asked))


def execute(run: RunConf, ranks: int, is_leader: bool) -> int:
    """Plans; the exit code, which asks for more than an answer only with task.require_fit."""
    task = run.task
    assert isinstance(task, PlanConf)
    run, plan = planned(run, ranks)
    vocabulary, words = vocabularies(run)
    folder = RunFolder(run if is_leader else replace(run, out=None), run.seed)
    summary = {
        "task": task.name,
        "status": "done",
        "config_sha256": config_sha256(run),
        "seed": run.seed,
        "versions": versions(),
        **plan.document(),
        "vocabulary": vocabulary,
        "run_folder": str(folder.path) if folder.path else None,
    }
    console = Console() if is_leader else NoConsole()
    try:
        folder.close(summary)
    finally:  # a full disk must not cost the plan
        if run.output is not Output.json:
            if words:
                console.line(words)
            console.write(rendered(plan, console.is_terminal))
        console.document(summary, run.output is Output.json)
    failed = task.require_fit and plan.chosen.verdict is not FitVerdict.fits
    return FAILED_CHECK if failed else OK


def vocabularies(run: RunConf) -> tuple[dict[str, Any] | None, str]:
    """How the pair's tokenizers go together, if both are at hand; a run would be refused for some."""
    if run.draft is None:
        return None, ""
    folders = folder_at_hand(run.model), folder_at_hand(run.draft)
    if folders[0] is None or folders[1] is None:
        return None, NOT_AT_HAND
    target, draft = read_vocabularies(folders[0], folders[1])
    if target is None or draft is None:
        return None, NOT_AT_HAND
    widths = run.model.vocab, run.draft.vocab
    try:
        found = pair(target, draft, widths, Pairing.of(run))
    except ModelError as refusal:
        found_anyway = diagnose(target, draft, widths)
        record = {**found_anyway.record(), "bridge": None, "refused": str(refusal)}
        return record, f"vocabularies: {found_anyway.in_words()}; a run is refused: {refusal}"
    return {**found.record(), "refused": None}, found.in_words()


def asked_of(run: RunConf) -> Asked:
    """What the plan is about, every figure in its place."""
    task, spec = run.task, run.speculation
    assert isinstance(task, PlanConf)
    machine = machine_of(run.cluster)
    speculates = spec.k > 0 or spec.adaptive
    drafts = speculates and spec.drafter is Drafting.model and run.draft is not None
    return Asked(
        machine=machine,
        target=Role(TARGET, run.model, machine.dtype(run.model.dtype)),
        draft=Role(DRAFT, run.draft, machine.dtype(run.draft.dtype)) if drafts and run.draft else None,
        work=Workload(task.batch_size, task.prompt_tokens, task.max_new_tokens, spec.k, task.prefill_chunk),
        acceptance=task.acceptance,
        k_max=spec.k_max,
        text_drafts=speculates and spec.drafter is Drafting.ngram,
        overlap=spec.overlap,
    )


def fixed_placement(conf: PlacementConf, asked: Asked) -> Placement | None:
    """The one placement that was asked for; None where it is to be found."""
    require_planned_splitting(conf.splitting)
    if is_free(conf):
        return None
    world = 1 if conf.splitting is Splitting.layers else asked.machine.world  # one process spreads them
    return resolve(conf, world, drafts=asked.draft is not None)
