"""The plan of a run that is about to load, and afterwards its comparison with what was measured. No torch.

`predict` plans the run, `require_fit` refuses it before anything is loaded, `compare_with_plan` is for
summary.json and the log.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llama_ssp.config import MOST_ROWS, RunConf, Splitting
from llama_ssp.distributed.placement import Placement
from llama_ssp.errors import MemoryFull, UsageError
from llama_ssp.models.sharding import is_planned
from llama_ssp.placing.request import USUAL, Known, request_of
from llama_ssp.planner.advice import advice
from llama_ssp.planner.fit import LIBRARIES, FitVerdict, RankMemory, communicators
from llama_ssp.planner.memory import SEGMENTS
from llama_ssp.planner.plan import worlds_of
from llama_ssp.planner.search import Option, PlanRequest, draft_bytes, option, round_times, warnings_of_codes
from llama_ssp.planner.speed import RoundTimes
from llama_ssp.planner.storage import WEIGHTS
from llama_ssp.planner.weights import CACHE, ModelPart, tensors
from llama_ssp.planner.workload import DRAFT, GIB, TARGET

log = logging.getLogger(__name__)

HOST_BYTES = 2**29  # of a rank that has loaded torch: libraries of the GPU, tokenizers
MOST_CPU_ROWS = 32  # that are taken on a CPU where no one says how many
LEAST_GAIN = 1.1  # tokens a second of twice as many rows, over those of the rows
SMALLER = "take a smaller model, fewer rows (task.batch_size) or shorter texts (task.max_new_tokens)"
# What is counted of a rank's memory, each more than the one before.
HELD_BYTES = "held_bytes"
TENSORS = "tensor_bytes"
RESERVED = "reserved_bytes"
DEVICE = "device_bytes"
COUNTED = HELD_BYTES, TENSORS, RESERVED, DEVICE
Bytes = dict[str, int | None]  # for each of COUNTED; None where it is not known


@dataclass(frozen=True)
class Prediction:
    """The plan of this very run."""

    request: PlanRequest
    option: Option

    @property
    def round_s(self) -> float:
        """Returns the seconds of a round."""
        return self.option.times.round_s(self.option.k, self.request.acceptance)

    def rows_that_pay(self, most: int) -> int:
        """Returns the rows, `most` or less: doubled while they fit and twice as many bring LEAST_GAIN.

        Speed is that of the best K at each number of rows. Planned times of a CPU are often those of another
        machine, so rows are MOST_CPU_ROWS at most there.
        """
        most = min(most, MOST_CPU_ROWS if self.request.machine.is_cpu else MOST_ROWS)
        rows = 1
        while rows < most:
            more = min(2 * rows, most)
            work = replace(self.request.work, rows=more)
            fits = option(replace(self.request, work=work), self.option.placement, self.option.k).verdict
            _, ms = self.ms_per_token(rows, None, None)
            _, twice_ms = self.ms_per_token(2 * rows, None, None)
            if fits is not FitVerdict.fits or twice_ms > ms / LEAST_GAIN:
                break
            rows = more
        return rows

    def times(self, rows: int) -> RoundTimes:
        """Returns what rounds of so many rows take."""
        request = replace(self.request, work=replace(self.request.work, rows=rows))
        return round_times(request, self.option.placement)

    def ms_per_token(self, rows: int, k: int | None, acceptance: float | None) -> tuple[int, float]:
        """Returns K and milliseconds a token. None: the best K, the request's acceptance."""
        times = self.times(rows)
        known = self.request.acceptance if acceptance is None else acceptance
        k = times.best_k(known) if k is None else min(k, len(times.verify) - 1)
        return k, times.ms_per_token(known, k)


def predict(run: RunConf, placement: Placement, known: Known = USUAL) -> Prediction | None:
    """Returns memory and speed of the run with this placement.

    It is None, with a log line, if it cannot be planned: other architectures, other ways of splitting, an
    unknown GPU.
    """
    models = [run.model]
    if run.draft is not None and run.has_draft_model:
        models.append(run.draft)
    if placement.splitting is not Splitting.tensor or not all(map(is_planned, models)):
        return None
    try:
        request = request_of(run, known)
    except UsageError as error:
        log.info("not planned: %s", error)
        return None
    most_drafts = request.k_max if run.speculation.adaptive else request.work.k
    chosen = option(request, placement, most_drafts)
    work = replace(request.work, prefill_chunk=chosen.prefill_chunk)
    return Prediction(replace(request, work=work), chosen)


def require_fit(prediction: Prediction | None, enforce: bool) -> None:
    """Refuses a run that does not fit, with advice; warns where it is uncertain, or not enforced."""
    if prediction is None or prediction.option.verdict is FitVerdict.fits:
        return
    request = prediction.request
    chosen = prediction.option
    worst = chosen.worst
    where = f"rank {worst.rank} of {chosen.placement.in_words()}"
    if len(set(request.machine.capacities)) > 1:
        where += ", whose ranks have different memory"
    else:
        where += f", {request.machine.in_words()}"
    needed = f"{worst.total / GIB:.2f} GiB"
    there = f"{worst.capacity / GIB:.2f} GiB"
    if chosen.verdict is FitVerdict.uncertain or not enforce:
        log.warning("it may not fit: %s: %s needed of %s", where, needed, there)
        return
    raise MemoryFull(
        "the models do not fit",
        where=where,
        found=f"{needed} needed",
        allowed=there,
        fix=f"{_changes(request, chosen)}; or plan.enforce=false to try all the same",
    )


def require_host(prediction: Prediction, ranks: int, free: int) -> None:
    """Refuses a run of GPUs whose `ranks` on this machine need more of its memory than the `free` bytes.

    Each stages a tensor of the weights twice; a draft apart writes its probabilities thrice.
    """
    request = prediction.request
    place = prediction.option.placement
    degrees = {TARGET: len(place.target), DRAFT: place.draft_degree}
    parts = [(ModelPart.of(role.model, degrees[role.role]), role.dtype) for role in request.roles]
    staged = 2 * max(size for part, dtype in parts for _, size, _ in tensors(part, dtype))
    needed = ranks * (HOST_BYTES + staged)
    if place.draft_apart:
        law = draft_bytes(request.target.model.vocab, request.draft_top)
        needed += 3 * request.work.rows * prediction.option.k * law
    if needed > free:
        raise MemoryFull(
            "the memory of the host is short",
            where=f"{ranks} ranks",
            found=f"{needed / GIB:.1f} GiB needed",
            allowed=f"{free / GIB:.1f} GiB that are free",
            fix="start fewer ranks on this machine, or take fewer rows (task.batch_size) or placement=leader",
        )


def _changes(request: PlanRequest, chosen: Option) -> str:
    """Returns what makes it fit, in words."""
    world = chosen.placement.world  # a GPU machine may have more
    max_world = world if request.machine.is_cpu else max(world, request.machine.world)
    return "; or ".join(advice(request, chosen, worlds_of(max_world)) or [SMALLER])


def fitting(prediction: Prediction, rank: int, available: int, needed: int) -> tuple[int, str]:
    """Returns what was planned for a rank whose GPU is full, in bytes, and which changes would have fitted.

    `available` are the bytes that its tensors could have, `needed` those that it would have taken at least:
    where these exceed the plan, every other plan is taken to be as far off.
    """
    request = prediction.request
    chosen = prediction.option
    planned = chosen.ranks[rank].total
    taken = request.machine.taken
    there = taken["context"] + taken["nccl"] * communicators(chosen.placement, rank)
    capacity = available + there - max(0, needed + there - planned)
    machine = replace(request.machine, capacity=max(0, capacity), capacities=())
    request = replace(request, machine=machine)
    return planned, _changes(request, option(request, chosen.placement, chosen.k))


def warn_of_codes(prediction: Prediction) -> None:
    """Logs which role is slower for being quantised."""
    chosen = prediction.option
    for line in warnings_of_codes(prediction.request, chosen.placement, chosen.k):
        log.warning("%s", line)


@dataclass(frozen=True, kw_only=True)
class RunMeasurement:
    """One way in which texts were generated: rows and drafts a round, speed, acceptance.

    `k` is None where it was chosen while running. `held_bytes` are weights and caches on this rank. A round
    of a row had so many drafts and tokens in the mean: n-grams often draft nothing, whatever K is.
    """

    name: str
    prediction: Prediction | None
    rows: int
    k: int | None
    ms_per_token: float | None
    acceptance: float | None
    held_bytes: int = 0
    drafts_a_round: float | None = None
    tokens_a_round: float | None = None


def compare_with_plan(runs: Sequence[RunMeasurement], measured: Sequence[Bytes]) -> dict[str, Any] | None:
    """Returns predicted and measured figures, for `plan` in the summary; None where the run was not planned.

    `measured` is the most that each rank has held.
    """
    predictions = list({id(one.prediction): one.prediction for one in runs if one.prediction}.values())
    if not predictions:
        return None
    fullest = max(predictions, key=lambda one: one.option.worst.total)
    verdict = max((one.option.verdict for one in predictions), key=lambda verdict: verdict.rank)
    return {
        "verdict": verdict.value,
        "placement": fullest.option.placement.in_words(),
        "band": max(one.request.band(one.option.placement) for one in predictions),
        "ways": [_speed(one, one.prediction) for one in runs if one.prediction],
        "memory": [_memory(rank, held, predictions) for rank, held in enumerate(measured)],
    }


def _speed(run: RunMeasurement, prediction: Prediction) -> dict[str, Any]:
    k, ms = prediction.ms_per_token(run.rows, run.k, run.acceptance)
    if run.drafts_a_round is not None and run.tokens_a_round:
        times = prediction.times(run.rows)
        seconds = times.mean_round_s(run.drafts_a_round, run.acceptance or 0.0)
        ms = 1000 * seconds / (run.rows * run.tokens_a_round)
    return {
        "name": run.name,
        "placement": prediction.option.placement.in_words(),
        "rows": run.rows,
        "k": k,
        "acceptance": run.acceptance,
        "ms_per_token": _both(ms, run.ms_per_token),
    }


def _memory(rank: int, held: Bytes, predictions: list[Prediction]) -> dict[str, Any]:
    """Compares a rank's bytes; of several pairs in turn those of the one that needs most."""
    counts = [counted(one.option.ranks[rank]) for one in predictions]
    most = {name: max(count[name] for count in counts) for name in COUNTED}
    return {"rank": rank, **{name: _both(most[name], held[name]) for name in COUNTED}}


def counted(memory: RankMemory) -> dict[str, int]:
    """Sums a rank's bytes: weights and caches; all tensors; with the allocator's segments; with libraries."""
    own = [line for line in memory.lines if line.role != LIBRARIES]
    return {
        HELD_BYTES: sum(line.bytes for line in own if line.name in (*WEIGHTS, CACHE)),
        TENSORS: sum(line.bytes for line in own if line.name != SEGMENTS),
        RESERVED: sum(line.bytes for line in own),
        DEVICE: memory.total,
    }


def _both(predicted: float, measured: float | None) -> dict[str, Any]:
    ratio = predicted / measured if measured else None
    return {"predicted": predicted, "measured": measured, "predicted_over_measured": ratio}
