"""K, the number of drafts of a round: who decides it. No torch.

The first of these that says something decides:

1. the job that this run continues, which keeps its K (`kept_of_job`, batch/preview.py);
2. the user, by speculation.k, or speculation.adaptive, which leaves it to each row and round;
3. a batch job, which measures rounds on its first prompts, up to speculation.k_max;
4. n-grams, whose drafts cost nothing: NGRAM_K;
5. the plan: the fastest K at plan.acceptance;
6. USUAL_K, on a machine of which no times are known.

What was decided stands in the run's `speculation`, and nobody decides again. Of a batch job the measurement
follows when the models are loaded (speculative/measure_costs.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from llama_ssp.config import MAX_COST_RATIO, NGRAM_K, USUAL_K, RunConf, SpeculationConfig
from llama_ssp.planner.search import Option

KEPT = ("k", "cost_ratio", "adaptive")  # of speculation: what is decided, and what the leader tells ranks


class Why(StrEnum):
    """Who decided."""

    asked = "asked"
    kept = "kept by the job"
    measured = "measured"
    planned = "planned"
    prompts = "the prompts"
    default = "default"


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """The decided `speculation` of a run, and who decided its K."""

    speculation: SpeculationConfig
    why: Why


def decided_drafts(run: RunConf, best: Option | None, least_k: int) -> Drafts:
    """Decides K, where neither the user nor a job has. `best` is the plan, which takes `least_k` at least."""
    spec = run.speculation
    if spec.k is not None:
        why = Why.asked
    elif run.drafts_from_text:
        why = Why.default
        spec = replace(spec, k=NGRAM_K)
    elif best is not None:
        why = Why.planned
        spec = replace(spec, k=max(best.k, least_k))
    else:
        why = Why.default
        spec = replace(spec, k=USUAL_K)

    is_jobs = why is not Why.asked and run.task.chooses_k and run.drafter_name is not None
    if spec.adaptive or is_jobs:
        spec = replace(spec, adaptive=True, cost_ratio=_cost_ratio(run, best))
        why = _who_knows_costs(run, spec)
    return Drafts(speculation=spec, why=why)


def _who_knows_costs(run: RunConf, spec: SpeculationConfig) -> Why:
    """Returns who says what an adaptive K goes by."""
    if run.speculation.cost_ratio is not None:
        return Why.asked
    if spec.cost_ratio is not None:
        return Why.planned
    return Why.measured if run.task.measures_costs else Why.default


def _cost_ratio(run: RunConf, best: Option | None) -> float | None:
    """Returns what an adaptive K goes by where the task does not measure: the user's ratio, or the plan's."""
    given = run.speculation.cost_ratio
    if given is not None or best is None or run.task.measures_costs or not run.has_draft_model:
        return given
    return min(best.times.proposal_s(1) / best.times.verify[0], MAX_COST_RATIO)


def asked_k(run: RunConf) -> int | None:
    """Returns the K that is known before a plan: the user's, or that of n-grams; None if a plan chooses."""
    k = run.speculation.k
    return NGRAM_K if k is None and run.drafts_from_text else k


def kept_of_job(spec: SpeculationConfig, settings: Mapping[str, Any]) -> SpeculationConfig:
    """Returns the speculation of a job's `settings` where the user has left it open now."""
    given = {"k": spec.k, "cost_ratio": spec.cost_ratio, "adaptive": spec.k, "draft_top": spec.draft_top}
    kept = {name: settings.get(f"speculation.{name}") for name, value in given.items() if value is None}
    return replace(spec, **{name: value for name, value in kept.items() if value is not None})


def decided_words(spec: SpeculationConfig) -> list[str]:
    """Returns the words of the command line that give another process the same K."""
    chosen = {"k": spec.k, "cost_ratio": spec.cost_ratio, "adaptive": str(spec.adaptive).lower()}
    return [f"speculation.{name}={value}" for name, value in chosen.items() if value is not None]


def with_decided(run: RunConf, chosen: Mapping[str, Any]) -> RunConf:
    """Returns the run with what another process has decided: values by the names in KEPT."""
    return replace(run, speculation=replace(run.speculation, **chosen))
