"""What a run does, decided once before anything is loaded, each with who decided it. No torch.

A run without a plan, on a machine of which no figures are known, is decided by defaults. Ranks of one run
take the leader's decision. What depends on the prompts, on the free memory of each GPU, or on a measurement,
is decided later, in the order that docs/plan.md gives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

from llama_ssp.config import (
    USUAL_CHUNK,
    USUAL_K,
    Drafting,
    DraftSeat,
    Dtype,
    GenerateConf,
    PlacementConf,
    RunConf,
    SpeculationConfig,
    Steps,
)
from llama_ssp.distributed.placement import Placement, resolve
from llama_ssp.errors import DistributedError, ModelError, UsageError
from llama_ssp.placing.draft_length import KEPT, Drafts, Why, decided_drafts
from llama_ssp.placing.request import PairFiles, is_free, options, plannable
from llama_ssp.planner.search import Option, PlanRequest
from llama_ssp.planner.workload import TARGET

log = logging.getLogger(__name__)
ValueT = TypeVar("ValueT")

COMPILED = "compiled"
EAGER = "eager"


@dataclass(frozen=True, kw_only=True)
class Chosen(Generic[ValueT]):
    """One decision: its value, who made it, and the reason in words if there is one."""

    value: ValueT
    why: Why
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RunDecision:
    """How one pair runs. `engines` and `formats` are by role, and empty where the plan knows no machine.

    `rows` is None where the prompts decide it, and `chunk` where the free memory does.
    """

    ranks: Chosen[int]
    placement: Chosen[Placement]
    engines: dict[str, Chosen[str]]
    formats: dict[str, Chosen[Dtype]]
    drafts: Chosen[SpeculationConfig]
    rows: Chosen[int | None]
    chunk: Chosen[int | None]

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Yields the lines of a table: what is decided, the value, and who decided it."""
        yield "ranks", str(self.ranks.value), self.ranks.why
        yield "placement", self.placement.value.in_words(), self.placement.why
        for role, engine in self.engines.items():
            reason = f" ({engine.reason})" if engine.reason else ""
            yield f"{role} steps", f"{engine.value}{reason}", engine.why
        for role, dtype in self.formats.items():
            yield f"{role} format", dtype.value.value, dtype.why
        spec = self.drafts.value
        k = f"adaptive, up to {spec.longest}" if spec.fixed_k is None else str(spec.fixed_k)
        yield "K", k, self.drafts.why
        if spec.drafter is Drafting.model and spec.may_draft:
            source, why = self._drafted_from()
            yield "drafted from", source, why
        yield "rows", "by the prompts" if self.rows.value is None else str(self.rows.value), self.rows.why
        chunk = "by the free memory" if self.chunk.value is None else str(self.chunk.value)
        yield "prompt chunk", chunk, self.chunk.why

    def _drafted_from(self) -> tuple[str, Why]:
        """Returns from which of its tokens a draft draws, and who decided it."""
        top = self.drafts.value.draft_top
        source = "all tokens" if top is None else f"its likeliest {top}"
        if self.drafts.why is Why.kept:
            return source, Why.kept
        return source, Why.default if top is None else Why.asked

    def document(self) -> dict[str, Any]:
        """Returns the decision as JSON, for the run folder."""
        spec = self.drafts.value
        drafts = {
            "k": spec.k,
            "adaptive": spec.adaptive,
            "k_max": spec.k_max,
            "cost_ratio": spec.cost_ratio,
            "draft_top": spec.draft_top,
        }
        return {
            "ranks": _plain(self.ranks),
            "placement": {**_plain(self.placement), "value": self.placement.value.in_words()},
            "engines": {role: _plain(engine) for role, engine in self.engines.items()},
            "formats": {
                role: {**_plain(one), "value": one.value.value} for role, one in self.formats.items()
            },
            "drafts": {**drafts, "why": self.drafts.why.value},
            "rows": _plain(self.rows),
            "prompt_chunk": _plain(self.chunk),
        }


def _plain(chosen: Chosen[Any]) -> dict[str, Any]:
    plain = {"value": chosen.value, "why": chosen.why.value}
    return {**plain, "reason": chosen.reason} if chosen.reason else plain


def decide(files: PairFiles, worlds: list[int], least_k: int = 0) -> tuple[RunConf, RunDecision]:
    """Decides how the pair runs on one of these numbers of ranks; returns its run with the decided K, too.

    The plan, where there is one, is of prompts of a usual length, as none is read yet. It does not choose a
    smaller K than `least_k`. Where drafting does not pay, the pair runs without its draft model.
    """
    request, best = planned_best(files, worlds)
    drafts = decided_drafts(files.run, best, least_k)
    run = replace(files.run, speculation=drafts.speculation)
    if files.run.has_draft_model and not run.has_draft_model:
        log.info("drafting does not pay here, by the plan: K = 0; speculation.k=%d drafts", USUAL_K)
        request, best = planned_best(files._replace(run=run), worlds)
    return run, _decision(run, worlds[-1], drafts, request, best)


def planned_best(files: PairFiles, worlds: list[int]) -> tuple[PlanRequest | None, Option | None]:
    """Returns what is planned for the pair, and the fastest that fits; None where nothing is known."""
    with suppress(UsageError, DistributedError, ModelError):  # a GPU without known figures; DeepSpeed
        request = plannable(files)
        if request is not None:
            return request, options(request, files.run.placement, worlds)[0]
    return None, None


def _decision(
    run: RunConf, world: int, drafts: Drafts, request: PlanRequest | None, best: Option | None
) -> RunDecision:
    """Returns the decision, from the plan's best option where there is one."""
    if best is not None:
        placement = best.placement
    else:
        placement = resolve(_usual_place(run), world, run.has_draft_model)
    return RunDecision(
        ranks=Chosen(value=placement.world, why=_why_ranks(run, best)),
        placement=Chosen(value=placement, why=_why_placed(run.placement, best)),
        engines={} if request is None else _engines(run, request, placement),
        formats={} if request is None else _formats(run, request),
        drafts=Chosen(value=drafts.speculation, why=drafts.why),
        rows=_rows(run),
        chunk=_chunk(run, best),
    )


def _usual_place(run: RunConf) -> PlacementConf:
    """Returns where models go without a plan: a head that reads the target's cache is split with it."""
    conf = run.placement
    if run.draft is not None and run.draft.head_shares_cache and is_free(conf):
        return replace(conf, draft=DraftSeat.sharded)
    return conf


def _engines(run: RunConf, request: PlanRequest, placement: Placement) -> dict[str, Chosen[str]]:
    """Returns by role whether steps are compiled."""
    who = Why.default if run.engine is Steps.auto else Why.asked
    engines = {}
    for role in request.roles:
        reason = request.why_eager(role, placement)
        if reason is None:
            engines[role.role] = Chosen(value=COMPILED, why=who)
        else:
            engines[role.role] = Chosen(value=EAGER, why=who, reason=reason)
    return engines


def _formats(run: RunConf, request: PlanRequest) -> dict[str, Chosen[Dtype]]:
    """Returns the number formats by role."""
    formats = {}
    for role in request.roles:
        conf = run.model if role.role == TARGET else run.draft
        is_open = conf is None or conf.dtype is Dtype.auto
        formats[role.role] = Chosen(value=role.dtype, why=Why.default if is_open else Why.asked)
    return formats


def _why_ranks(run: RunConf, best: Option | None) -> Why:
    if run.ranks is not None:
        return Why.asked
    return Why.planned if best is not None else Why.default


def _why_placed(conf: PlacementConf, best: Option | None) -> Why:
    if not is_free(conf):
        return Why.asked
    return Why.planned if best is not None else Why.default


def _rows(run: RunConf) -> Chosen[int | None]:
    """Returns the rows of the task; None of a batch job that leaves them to the plan and its prompts."""
    task = run.task
    rows = task.batch_size
    if rows is None:
        return Chosen(value=None, why=Why.planned)
    usual = type(task).batch_size
    if isinstance(task, GenerateConf) and task.prompt_file is None and rows < (usual or 1):
        prompts = len(task.prompts or [""])
        return Chosen(value=rows, why=Why.prompts if rows == prompts else Why.asked)
    return Chosen(value=rows, why=Why.default if rows == usual else Why.asked)


def _chunk(run: RunConf, best: Option | None) -> Chosen[int | None]:
    """Returns how many tokens of a prompt a pass reads."""
    chunk = run.task.prefill_chunk
    if chunk is not None:
        is_usual = chunk == type(run.task).prefill_chunk  # of a task without such a key
        return Chosen(value=chunk, why=Why.default if is_usual else Why.asked)
    if best is not None:
        return Chosen(value=best.prefill_chunk, why=Why.planned)
    return Chosen(value=USUAL_CHUNK, why=Why.default)


def as_asked(run: RunConf, placement: Placement) -> RunDecision:
    """Returns the decision of a run that was decided by hand, in a benchmark or a test."""
    return RunDecision(
        ranks=Chosen(value=placement.world, why=Why.asked),
        placement=Chosen(value=placement, why=Why.asked),
        engines={},
        formats={},
        drafts=Chosen(value=run.speculation, why=Why.asked),
        rows=_rows(run),
        chunk=_chunk(run, None),
    )


def for_ranks(decision: RunDecision) -> dict[str, Any]:
    """Returns what ranks take of the leader's decision, as JSON: where models are, and what is drafted."""
    drafts = {name: getattr(decision.drafts.value, name) for name in KEPT}
    return {"placement": asdict(decision.placement.value), "drafts": drafts}


def of_leader(decision: RunDecision, plain: dict[str, Any]) -> RunDecision:
    """Returns the decision with that of the leader, which came as JSON."""
    placement = Placement.of_plain(plain["placement"])
    spec = replace(decision.drafts.value, **plain["drafts"])
    return replace(
        decision,
        ranks=replace(decision.ranks, value=placement.world),
        placement=replace(decision.placement, value=placement),
        drafts=replace(decision.drafts, value=spec),
    )
