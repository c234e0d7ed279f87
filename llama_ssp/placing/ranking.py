"""How fast a pair would be on a cluster, by what was measured of its drafts at each K. No torch."""

import logging
from dataclasses import dataclass, replace

from llama_ssp.config import ClusterConf
from llama_ssp.errors import DistributedError, ModelError, UsageError
from llama_ssp.models.sharding import is_planned
from llama_ssp.placing.request import PairFiles, options, request_for
from llama_ssp.planner.plan import worlds_of
from llama_ssp.planner.search import regular_sampling
from llama_ssp.speculative.draft_length import AcceptanceCurve

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PlannedDrafts:
    """The plan of a pair on a cluster: its fastest placement, its best K there, and the time at each K.

    `speedup` is over the best regular sampling on the cluster.
    """

    cluster: str
    k: int
    ms_per_token: float
    speedup: float
    placement: str
    constants_from: str
    ms_by_k: tuple[float, ...]


def planned_drafts(
    files: PairFiles, curve: AcceptanceCurve, cluster: ClusterConf, prompt_tokens: int, new_tokens: int
) -> PlannedDrafts | None:
    """Returns the plan for texts of this length; None, with a log line, where there is none."""
    run = replace(files.run, cluster=cluster, ranks=None)
    if not all(is_planned(model) for model in (run.model, run.draft) if model is not None):
        log.info("%s: no plan: its architecture has no row", run.drafter_name)
        return None
    try:
        request = request_for(files._replace(run=run))
        work = replace(request.work, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        request = replace(request, work=work, acceptance=curve, k=None, k_max=curve.k_max)
        worlds = worlds_of(request.machine.world)
        ranked = options(request, run.placement, worlds)
    except (UsageError, DistributedError, ModelError) as error:
        log.info("%s on %s: no plan: %s", run.drafter_name, cluster.name, error)
        return None

    best = ranked[0]
    if not best.runs:
        log.info("%s on %s: no plan: it does not fit", run.drafter_name, cluster.name)
        return None
    regular_ms = regular_sampling(request, ranked, worlds).ms_per_token
    return PlannedDrafts(
        cluster=cluster.name,
        k=best.k,
        ms_per_token=best.ms_per_token,
        speedup=regular_ms / best.ms_per_token,
        placement=best.placement.in_words(),
        constants_from=request.machine.constants_from,
        ms_by_k=tuple(best.times.ms_per_token(curve, k) for k in range(len(best.times.verify))),
    )
