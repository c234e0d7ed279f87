"""task=plan: from the configuration to a plan, printed, drawn and kept. No torch, no weights, no GPU."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from llama_ssp.config import BatchConf, Output, PlanConf, RunConf, Scheduler, Splitting
from llama_ssp.config.arguments import in_full
from llama_ssp.config.compose import composed, pair_words
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import DISTRIBUTED, FAILED_CHECK, OK, ModelError, StorageError, UsageError
from llama_ssp.models.checkpoint import SHIPPED, folder_at_hand, inspect, read_config
from llama_ssp.models.families import TESTED
from llama_ssp.models.folder import weights_here
from llama_ssp.models.sharding import architecture, is_planned
from llama_ssp.models.support import line as support_line
from llama_ssp.models.wrapped import WHOLE
from llama_ssp.placing.decision import RunDecision
from llama_ssp.placing.pairs import PairSpec, pair_files, require_head, require_own_ranks, require_whole
from llama_ssp.placing.request import PairFiles, has_another_size, is_free, request_for
from llama_ssp.placing.start import Start, command_lines, to_paste
from llama_ssp.planner.fit import FitVerdict
from llama_ssp.planner.hardware import require_world
from llama_ssp.planner.one_process import OneProcess, one_process
from llama_ssp.planner.plan import Plan, make_plan
from llama_ssp.planner.search import PlanRequest
from llama_ssp.planner.table import drawing, heading
from llama_ssp.planner.workload import DRAFT, TARGET
from llama_ssp.report.console import Console
from llama_ssp.report.run_folder import RunFolder
from llama_ssp.report.tables import aligned
from llama_ssp.report.terminal import rich_console
from llama_ssp.text.compatibility import diagnose, pair
from llama_ssp.text.vocabulary import read_vocabularies

log = logging.getLogger(__name__)


def plan(
    model: str | Path,
    draft: str | Path | None = None,
    *,
    cluster: str = "local",
    overrides: Sequence[str] | Mapping[str, Any] = (),
) -> Plan:
    """Returns whether a pair fits on a cluster, where its parts go, and how fast it is. Loads no weights.

    `model` and `draft` are names of presets, folders, GGUF files, or ids on the Hugging Face hub; `cluster`
    is a preset's name, `local` this machine. `overrides` are those of the command line, or a mapping of them.
    Raises UsageError or ModelError.
    """
    words = in_full(["task=plan", f"cluster={cluster}"])
    _, made = planned(composed([*words, *pair_words(model, draft, overrides)]), 1)
    if isinstance(made, OneProcess):
        raise ModelError(
            "an architecture without a row has no Plan, whose times are those of known layers",
            found=", ".join(
                architecture(role.model) for role in made.request.roles if role.role in made.numbers
            ),
            allowed=TESTED,
            fix="write llama-ssp plan, which prints its bytes",
        )
    return made


def planned(run: RunConf, ranks: int) -> tuple[RunConf, Plan | OneProcess]:
    """Returns the run with its models' shapes, and its plan. Raises RunError for what could never run.

    `ranks` is how many have been started, by torchrun or alone.
    """
    (files,) = pair_files(run, [], dry=True)  # one pair; its models' files need not be here
    run = files.run
    request = request_for(files)
    require_world(request.machine, ranks)
    if unknown := numbers_of_unknown(request, files):
        return run, one_process(request, unknown)
    if run.ranks is not None:
        request = replace(request, machine=request.machine.of_ranks(run.ranks))
    # A target that is split by layers has one rank, with all GPUs.
    world = 1 if run.placement.splitting is Splitting.layers else request.machine.world
    if run.draft is not None and run.draft.is_head:
        require_head(run.draft, run.model, run.placement, world)

    if is_free(run.placement):  # the plan chooses the placement
        return run, make_plan(request)
    placement = resolve(run.placement, world, drafts=request.draft is not None)
    if request.bridged:
        require_whole(placement.draft)
    require_own_ranks(run, placement)
    return run, make_plan(request, placement)


def numbers_of_unknown(request: PlanRequest, files: PairFiles) -> dict[str, int]:
    """Returns how many numbers the models have that cannot be planned in full, by role, as headers say."""
    folders = {TARGET: files.target_path, DRAFT: files.draft_path}
    numbers = {}
    for role in request.roles:
        if is_planned(role.model):
            continue
        folder = folders[role.role]
        tensors = inspect(folder).tensors if folder is not None and weights_here(folder) else {}
        if not tensors:
            raise ModelError(
                "an architecture without a row is planned by the headers of its weights, which are not here",
                where=f"{role.role} {role.model.name}",
                found=architecture(role.model),
                allowed=TESTED,
                fix="fetch it with download=true, or give its folder",
            )
        numbers[role.role] = sum(prod(shape) for _, shape in tensors.values())
    return numbers


def dry_run(pairs: Sequence[PairSpec], start: Start, is_leader: bool, words: Sequence[str]) -> int:
    """Prints what a run would start, pair by pair. Returns exit code 5 if it does not fit.

    `words` are those of the command line, for the command to paste.
    """
    console = Console(silent=not is_leader)
    fits = True
    gpus = 1  # on each node; all pairs are on the same nodes
    for spec in pairs:
        slots = None
        if isinstance(spec.run.task, BatchConf):
            from llama_ssp.batch.preview import preview  # it imports numpy, which other plans do without

            job = preview(spec)
            spec = job.pair
            slots = job.slots
        files = PairFiles(spec.run, spec.target_path, spec.draft_path)
        request = request_for(files, slots)
        gpus = start.ranks
        if request.machine.nodes > 1:
            gpus = request.machine.gpus
        elif not request.machine.is_cpu:
            request = replace(request, machine=replace(request.machine, gpus=gpus))
        plan: Plan | OneProcess
        if unknown := numbers_of_unknown(request, files):
            plan = one_process(request, unknown)
        else:
            plan = make_plan(request, spec.placement)
        fits = fits and plan.runs
        _show(plan, console)
        console.line("\n".join(["", *decided(spec.decision)]))
    if fits:
        is_shared = any(_is_shared(spec.run) for spec in pairs)
        console.line(to_paste(command_lines(words, start.ranks, gpus, is_shared)))
    return OK if fits else DISTRIBUTED


def _is_shared(run: RunConf) -> bool:
    """Returns whether several groups of ranks write the job."""
    return run.cluster.groups > 1 or run.cluster.scheduler is not Scheduler.none


def decided(decision: RunDecision) -> list[str]:
    """Returns what a run will do, a line each, with who decided it."""
    return aligned([["what runs", "", "who decided"], *map(list, decision.lines())], words=3)


def _show(plan: Plan | OneProcess, console: Console) -> None:
    """Prints the plan, on a terminal fitted to its width."""
    if isinstance(plan, OneProcess):
        console.line(f"{heading(plan.request, plan.numbers)}\n{plan.sentence()}")
        return
    console.show(drawing(plan, rich_console().width) if console.is_terminal else drawing(plan))


def execute(
    run: RunConf,
    ranks: int,
    is_leader: bool,
    words: Sequence[str],
    place: Path | None = None,
    given: Sequence[str] = (),
) -> int:
    """Prints the plan and keeps it in a run folder, which a sweep names (`place`).

    `given` are the overrides that the user gave, with their keys in full.

    Returns exit code 1 if task.require_fit is set and the pair does not fit.
    """
    task = run.task_as(PlanConf)
    run, plan = planned(run, ranks)
    vocabulary, matching = vocabularies(run)
    folder = _run_folder(run if is_leader else replace(run, out=None), place, given)
    world = 1 if isinstance(plan, OneProcess) else plan.chosen.placement.world
    commands = command_lines(words, world, plan.request.machine.gpus)
    figures = {
        **plan.document(),
        "vocabulary": vocabulary,
        "command": "\n".join(commands) if plan.runs else None,
    }
    summary = folder.summary("done", figures)

    console = Console(silent=not is_leader)
    try:
        folder.close(summary)
    finally:  # a full disk must not cost the plan
        if run.output is not Output.json:
            if matching:
                console.line(matching)
            _show(plan, console)
            if plan.runs:
                console.line(to_paste(commands))
            for folder_line in folder_lines(run):
                console.line(folder_line)
        console.document(summary, run.output)
    failed = task.require_fit and plan.verdict is not FitVerdict.fits
    return FAILED_CHECK if failed else OK


def folder_lines(run: RunConf) -> Iterator[str]:
    """Gives a line for each model of a folder: how its architecture runs, and what may draft for it."""
    for role, model in ((TARGET, run.model), (DRAFT, run.draft)):
        if model is None or model.path is None or model.path.startswith(SHIPPED) or model.is_head:
            continue
        folder = folder_at_hand(model)
        whole = read_config(folder).get(WHOLE) if folder is not None else None
        yield support_line(role, model, whole)


def _run_folder(run: RunConf, place: Path | None, given: Sequence[str]) -> RunFolder:
    """Returns the folder that keeps the plan; none, with a warning, where the usual place cannot be written.

    Raises StorageError where the user has named the place.
    """
    try:
        return RunFolder(run, run.seed, place, given)
    except StorageError as error:
        if run.out != RunConf.out:
            raise
        log.warning("the plan is not kept: %s", error)
        return RunFolder(replace(run, out=None), run.seed)


def vocabularies(run: RunConf) -> tuple[dict[str, Any] | None, str]:
    """Returns how the pair's tokenizers match: for JSON, and as a line of text.

    For JSON it is None without a draft, and where one of the tokenizers is not on this machine.
    """
    if run.draft is None:
        return None, ""
    target_folder = folder_at_hand(run.model)
    draft_folder = folder_at_hand(run.draft)
    target = draft = None
    if target_folder is not None and draft_folder is not None:
        target, draft = read_vocabularies(target_folder, draft_folder)
    if target is None or draft is None:
        words = "vocabularies: not at hand"
        if not run.draft.is_head and has_another_size(run.model, run.draft):
            sizes = f"{run.model.vocab:,} and {run.draft.vocab:,} tokens"
            words += f"; with {sizes} not of one tokenizer, so drafts are translated, or refused"
        return None, words

    widths = run.model.vocab, run.draft.vocab
    try:
        match = pair(target, draft, widths, run.speculation.bridge)
    except (ModelError, UsageError) as refusal:
        match = diagnose(target, draft, widths)
        words = f"{match.in_words()}; a run is refused: {refusal}"
        return {**match.record(), "refused": str(refusal)}, words
    return {**match.record(), "refused": None}, match.in_words()
