"""What a plan is asked for a run: machine, models and work, from its configuration. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from llama_ssp.config import (
    GPU_CHUNK,
    USUAL_CHUNK,
    USUAL_K,
    USUAL_ROWS,
    DraftSeat,
    Dtype,
    ModelConf,
    PlacementConf,
    PlanConf,
    RunConf,
    Splitting,
    Weights,
)
from llama_ssp.config.environment import rank_environment
from llama_ssp.distributed.placement import resolve
from llama_ssp.models.own_sampling import OwnSampling
from llama_ssp.models.sharding import is_planned
from llama_ssp.placing.accepted import curve_of
from llama_ssp.placing.draft_length import asked_k
from llama_ssp.placing.engine import step_rule, tokens_generated
from llama_ssp.placing.this_machine import machine_for, plans_for_cpu
from llama_ssp.planner.hardware import Machine
from llama_ssp.planner.search import Option, PlanRequest, option, search
from llama_ssp.planner.workload import DRAFT, GIB, TARGET, Role, Workload
from llama_ssp.speculative.draft_length import AcceptanceCurve, PairAcceptance
from llama_ssp.text.compatibility import diagnose
from llama_ssp.text.vocabulary import read_vocabularies

USUAL_TOKENS = 512  # of a prompt, where prompts are not read yet
PADDED = 0.02  # of a vocabulary: how far the sizes of one tokenizer's models differ
USUAL_ACCEPTANCE = 0.8  # of a draft, where the user does not say it


class PairFiles(NamedTuple):
    """A pair's run with the shapes of its models, and the folders of their files."""

    run: RunConf
    target_path: Path | None
    draft_path: Path | None
    sampling: OwnSampling = OwnSampling()


def is_bridged(files: PairFiles) -> bool:
    """Returns whether the draft is known to have another tokenizer, so that its text is translated."""
    run = files.run
    if run.draft is None or run.draft.is_head:
        return False
    if files.target_path is None or files.draft_path is None:
        return has_another_size(run.model, run.draft)
    own, other = read_vocabularies(files.target_path, files.draft_path)
    widths = run.model.vocab, run.draft.vocab
    return own is not None and other is not None and diagnose(own, other, widths).bridged


def has_another_size(target: ModelConf, draft: ModelConf) -> bool:
    """Returns whether the sizes alone say that two vocabularies are not those of one tokenizer.

    Models of one family pad their output matrices to different multiples: Qwen2.5 to 151,936 and 152,064.
    """
    is_synthetic = Weights.synthetic in (target.weights, draft.weights)
    less, more = sorted((target.vocab, draft.vocab))
    return not is_synthetic and more > (1 + PADDED) * less


def is_free(conf: PlacementConf) -> bool:
    """Whether the configuration leaves the draft's place to the plan."""
    named = (conf.draft_degree, conf.target_ranks, conf.draft_ranks)
    return conf.splitting is Splitting.tensor and conf.draft is DraftSeat.auto and not any(named)


def plannable(files: PairFiles, gpus: int | None = None, free: int | None = None) -> PlanRequest | None:
    """What to plan for the pair, on this many GPUs of these free bytes; None where nothing is known.

    Of a CPU that is not measured the plan does not know what messages cost, which is most.
    """
    run = files.run
    if not all(is_planned(model) for model in (run.model, run.draft) if model is not None):
        return None
    if gpus is not None:
        gib = min((size for size in (run.cluster.gib, free and free / GIB) if size), default=None)
        run = replace(run, cluster=replace(run.cluster, gpus=gpus, nodes=1, gib=gib))
    request = request_for(files._replace(run=run))
    return None if request.machine.is_borrowed else request


def request_for(files: PairFiles, slots: int | None = None) -> PlanRequest:
    """Returns what to plan for the pair, also where its tokenizers differ. `slots`: as in `Known`."""
    request = request_of(files.run, Known(slots=slots))
    return replace(request, bridged=request.draft is not None and is_bridged(files))


def options(request: PlanRequest, conf: PlacementConf, worlds: list[int]) -> list[Option]:
    """What the configuration allows on these numbers of ranks; the fastest that fits first.

    A placement that it names is that of the last number.
    """
    if is_free(conf):
        return search(request, worlds)
    return [option(request, resolve(conf, worlds[-1], request.draft is not None), request.k)]


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a run besides its configuration, when it is planned.

    `rows` and `slots` (the longest text, its new tokens included) are the task's own if None. `formats`
    are the number formats by role, else what the machine makes of `auto`; `caches` says how many of the
    target's and of the draft's there are at once. `measured` are the bytes that are free for this process on
    its device, and `connected` the groups of ranks that it has joined by then (planner/hardware.py).
    `capacities` are what the plan makes of the measured bytes of every rank, as ranks have told each other.
    """

    rows: int | None = None
    slots: int | None = None
    formats: Mapping[str, Dtype] = field(default_factory=dict)
    caches: tuple[int, int] = (1, 1)
    measured: int | None = None
    connected: int = 0
    capacities: tuple[int, ...] = ()
    on_cpu: bool = False


USUAL = Known()  # nothing besides the configuration


def request_of(run: RunConf, known: Known = USUAL) -> PlanRequest:
    """Returns what to plan for a run. Raises UsageError for a GPU without known figures."""
    task = run.task
    spec = run.speculation
    machine = machine_of_run(run, known)

    most_tokens = run.model.context if known.slots is None else known.slots
    new_tokens = min(task.max_new_tokens or task.usual_new_tokens, most_tokens - 1)
    if known.slots is None:
        prompt_tokens = task.prompt_tokens or min(USUAL_TOKENS, most_tokens - new_tokens)
    else:
        prompt_tokens = known.slots - new_tokens
    asked = asked_k(run)
    work = Workload(
        rows=known.rows or task.batch_size or USUAL_ROWS,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        k=USUAL_K if asked is None else asked,
        prefill_chunk=task.prefill_chunk or (USUAL_CHUNK if machine.is_cpu else GPU_CHUNK),
        target_caches=known.caches[0],
        draft_caches=known.caches[1],
    )

    acceptance, is_assumed = _acceptance(run)
    k_max = max(spec.k_max, spec.k or 0)
    if isinstance(acceptance, AcceptanceCurve):
        k_max = min(k_max, acceptance.k_max)
    target = Role(TARGET, run.model, known.formats.get(TARGET) or machine.dtype(run.model.dtype))
    draft = None
    if run.draft is not None and run.has_draft_model:
        draft = Role(DRAFT, run.draft, known.formats.get(DRAFT) or machine.dtype(run.draft.dtype))
    return PlanRequest(
        machine=machine,
        target=target,
        draft=draft,
        work=work,
        acceptance=acceptance,
        is_acceptance_assumed=is_assumed,
        k_max=k_max,
        text_drafts=run.drafts_from_text,
        overlap=spec.overlap,
        draft_top=spec.draft_top,
        steps=step_rule(run.engine, tokens_generated(run), machine.is_cpu),
        k=None if spec.adaptive else asked,
        least_chunk=USUAL_CHUNK if task.prefill_chunk is None else None,
    )


def machine_of_run(run: RunConf, known: Known = USUAL) -> Machine:
    """Returns the machine that the run is planned for. Raises UsageError for a GPU without known figures.

    A run that has begun has the nodes that its launcher has started it on, whatever the configuration says.
    """
    here = rank_environment()
    has_begun = here.world > 1
    machine = machine_for(
        run.cluster,
        known.measured,
        known.connected,
        ranks=here.world if has_begun else run.ranks or 1,
        on_cpu=known.on_cpu or plans_for_cpu(run),
    )
    if has_begun and not isinstance(run.task, PlanConf):
        if here.nodes > 1:
            machine = replace(machine, nodes=here.nodes, gpus=here.of_node)
        else:
            machine = replace(machine, nodes=1, gpus=machine.world)
    return replace(machine, capacities=known.capacities)


def _acceptance(run: RunConf) -> tuple[PairAcceptance, bool]:
    """Returns what a plan goes by, and whether it is assumed."""
    if run.task.acceptance_from is not None:
        return curve_of(run, run.task.acceptance_from, run.speculation.k), False
    given = run.plan.acceptance if run.task.acceptance is None else run.task.acceptance
    return USUAL_ACCEPTANCE if given is None else given, given is None
