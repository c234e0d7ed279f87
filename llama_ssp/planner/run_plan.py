"""The plan of a run that is about to load: where its draft sits, whether it fits, and afterwards how right
it was. No torch.

    asked = asked_of_run(run, roles, work, capacity)     # None: nothing is known of this GPU
    placement = placed(run.placement, asked, world)      # what placement=auto means here
    prediction = predict(run, asked, placement)
    require_fit(prediction, run.plan.enforce)            # before anything is loaded
    beside(ways, measured)                               # comparison.py: for summary.json and for people
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from llama_ssp.config import Drafting, DraftSeat, PlacementConf, RunConf, Splitting
from llama_ssp.distributed.placement import Placement, resolve
from llama_ssp.errors import DistributedError, UsageError
from llama_ssp.planner.advice import advice
from llama_ssp.planner.fit import FitVerdict
from llama_ssp.planner.hardware import machine_of
from llama_ssp.planner.room import GIB
from llama_ssp.planner.search import Asked, Option, best_placement, option, pace_of
from llama_ssp.planner.speed import Pace
from llama_ssp.planner.workload import Role, Workload

log = logging.getLogger(__name__)

SMALLER = "take a smaller model, fewer rows (task.batch_size) or shorter texts (task.max_new_tokens)"


@dataclass(frozen=True)
class Prediction:
    """What the plan says of this very run."""

    asked: Asked
    option: Option

    def pace(self, rows: int) -> Pace:
        """With so many rows a batch."""
        return pace_of(replace(self.asked, work=replace(self.asked.work, rows=rows)), self.option.placement)


def asked_of_run(
    run: RunConf, roles: tuple[Role, Role | None], work: Workload, capacity: int | None = None
) -> Asked | None:
    """What a plan of this run is about; None, with a word, where the device's figures are not known.

    `capacity` is what the device has left, in bytes, as measured; cluster.gib goes before it.
    """
    try:
        machine = machine_of(run.cluster, capacity)
    except UsageError as error:
        log.info("not planned: %s", error)
        return None
    spec = run.speculation
    looks_up = spec.drafter is Drafting.ngram and (spec.k > 0 or spec.adaptive)
    most = max(spec.k_max, spec.k)
    return Asked(
        machine, *roles, work, run.plan.acceptance, k_max=most, text_drafts=looks_up, overlap=spec.overlap
    )


def placed(conf: PlacementConf, asked: Asked | None, world: int, drafts: bool) -> Placement:
    """Which ranks hold what: as asked for, and where that is left open the fastest that fits."""
    if world > 1 and is_free(conf) and asked is not None and asked.draft is not None:
        return best_placement(asked, world).placement
    return resolve(conf, world, drafts)


def is_free(conf: PlacementConf) -> bool:
    """Whether the configuration leaves to the plan where the draft sits."""
    named = (conf.draft_degree, conf.target_ranks, conf.draft_ranks)
    return conf.splitting is Splitting.tensor and conf.draft is DraftSeat.auto and not any(named)


def predict(run: RunConf, asked: Asked | None, placement: Placement) -> Prediction | None:
    """The run's own bill and pace; None where nothing can be said."""
    if asked is None or placement.splitting is not Splitting.tensor:
        return None
    return Prediction(
        asked, option(asked, placement, asked.k_max if run.speculation.adaptive else asked.work.k)
    )


def require_fit(prediction: Prediction | None, enforce: bool) -> None:
    """Refuses a run that does not fit, with the plan's advice; where it is uncertain, says so."""
    if prediction is None or prediction.option.verdict is FitVerdict.fits:
        return
    asked, worst = prediction.asked, prediction.option.worst
    where = f"rank {worst.rank} of {prediction.option.placement.in_words()}, {asked.machine.in_words()}"
    found, allowed = f"{worst.total / GIB:.2f} GiB needed", f"{worst.capacity / GIB:.2f} GiB"
    if prediction.option.verdict is FitVerdict.uncertain or not enforce:
        log.warning("it may not fit: %s: %s of %s", where, found, allowed)
        return
    changes = advice(asked, prediction.option, [prediction.option.placement.world])
    raise DistributedError(
        "the models do not fit", where=where, found=found, allowed=allowed,
        fix="; or ".join([*(changes or [SMALLER]), "plan.enforce=false to try all the same"]),
    )  # fmt: skip
