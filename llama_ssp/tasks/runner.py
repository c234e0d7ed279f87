"""From checked inputs to a finished task: what every task shares."""

import json
import logging
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from llama_ssp.config import CalibrateConf
from llama_ssp.distributed.comm import Ranks, broadcast_json
from llama_ssp.distributed.cores import own_cores
from llama_ssp.distributed.gpus import gpus_here
from llama_ssp.errors import FAILED_CHECK, OK
from llama_ssp.models.devices import device_of
from llama_ssp.pair.hosts import say_nodes
from llama_ssp.pair.session import first_cause, ranks_of, require_same_code
from llama_ssp.placing.decision import for_ranks, of_leader
from llama_ssp.placing.draft_length import KEPT, with_decided
from llama_ssp.placing.pairs import PairSpec
from llama_ssp.placing.prediction import Bytes, compare_with_plan
from llama_ssp.planner.workload import DRAFT, TARGET
from llama_ssp.report.console import Console
from llama_ssp.report.run_folder import RunFolder, deciding, versions
from llama_ssp.report.tables import text_of
from llama_ssp.report.task_tables import plan_against_actual
from llama_ssp.tasks.agree import AgreeTask
from llama_ssp.tasks.batch import BatchTask
from llama_ssp.tasks.calibrate import CalibrateTask, require_place
from llama_ssp.tasks.certify.task import CertifyTask
from llama_ssp.tasks.chat import ChatTask
from llama_ssp.tasks.common import Task, memory_of_ranks
from llama_ssp.tasks.compare import CompareTask
from llama_ssp.tasks.eval import EvalTask
from llama_ssp.tasks.first_measurement import measure_first
from llama_ssp.tasks.generate import GenerateTask
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.tasks.machine.check import check_machine
from llama_ssp.tasks.measure import MeasureTask
from llama_ssp.tasks.replay import ReplayTask
from llama_ssp.text.prompts import Reading, TextPrompt

log = logging.getLogger(__name__)

WRITING: list[type[Task[Any]]] = [GenerateTask, ChatTask, BatchTask, EvalTask]
TRYING: list[type[Task[Any]]] = [CompareTask, MeasureTask, CertifyTask, AgreeTask, CalibrateTask]
TASKS = {task.__name__.removesuffix("Task").lower(): task for task in WRITING + TRYING}

# What names a model's files, and not what they are.
PLACES = {"name", "path", "adapter", "repo", "revision", "commit", "package", "file", "sha256"}

# A run of more than BUSY_S seconds warns if its main thread waited this share of the time for a core.
BUSY = 0.25
BUSY_S = 10.0


def execute(inputs: RunInputs) -> int:
    """Runs the task on this rank; the exit code. If several ranks fail, each raises what failed first."""
    inputs, ranks = _with_ranks(inputs)
    with first_cause(ranks):
        inputs = shared(inputs, ranks)
        used = max(pair.placement.world for pair in inputs.pairs)
        if used < ranks.world:
            is_idle = ranks.rank >= used
            ranks.close()
            if is_idle:
                return OK

    if used < ranks.world:  # the others meet again, without those that have nothing to do
        local = os.environ.get("LOCAL_WORLD_SIZE", "1")
        os.environ |= {"WORLD_SIZE": str(used), "LOCAL_WORLD_SIZE": str(min(int(local), used))}
        ranks = ranks_of(inputs.run)

    with first_cause(ranks):
        code = _run(inputs, ranks)
        if code == OK:
            measure_first(inputs.run, ranks)
        ranks.close()
    return code


def _with_ranks(inputs: RunInputs) -> tuple[RunInputs, Ranks]:
    """Returns the run's ranks; task=calibrate first checks the machine, which may have none that work."""
    if not isinstance(inputs.run.task, CalibrateConf):
        return inputs, ranks_of(inputs.run)
    if inputs.run.task.measure:
        require_place(inputs.run.task)
    check, ranks = check_machine(inputs.run)
    return replace(inputs, machine=check), ranks


def shared(inputs: RunInputs, ranks: Ranks) -> RunInputs:
    """Returns the inputs with the leader's seed, prompts and placements. Raises if configs differ."""
    if ranks.world == 1:
        return inputs
    compared = {**_settings(inputs), "versions": versions()}
    ranks.require_same("configuration or versions", json.dumps(compared, sort_keys=True, default=str))
    require_same_code(ranks)

    here = {
        "seed": inputs.seed,
        "reading": asdict(inputs.reading),
        "decisions": [for_ranks(pair.decision) for pair in inputs.pairs],
    }
    leaders = broadcast_json(here, ranks)
    prompts = [
        TextPrompt(
            id=prompt["id"],
            text=prompt["text"],
            where=prompt["where"],
            category=prompt["category"],
            later=prompt["later"],
        )
        for prompt in leaders["reading"]["prompts"]
    ]
    pairs = tuple(
        _as_decided(pair, plain) for pair, plain in zip(inputs.pairs, leaders["decisions"], strict=True)
    )
    return replace(
        inputs,
        run=inputs.run if inputs.run.task.pairs else pairs[0].run,
        seed=leaders["seed"],
        pairs=pairs,
        reading=Reading(prompts, leaders["reading"]["skipped"]),
    )


def _settings(inputs: RunInputs) -> dict[str, Any]:
    """Returns the settings that all ranks must have alike: not where a model's files lie, if it has files.

    The files themselves are compared before they are loaded.
    """
    settings = deciding(with_decided(inputs.run, dict.fromkeys(KEPT)))
    for role in (TARGET, DRAFT):
        if settings[role] is not None and all(pair.files.get(role) for pair in inputs.pairs):
            settings[role] = {key: value for key, value in settings[role].items() if key not in PLACES}
    return settings


def _as_decided(pair: PairSpec, plain: dict[str, Any]) -> PairSpec:
    """Returns the pair as the leader has decided it."""
    decision = of_leader(pair.decision, plain)
    return replace(pair, decision=decision, run=replace(pair.run, speculation=decision.drafts.value))


def _waited_s() -> float:
    """Returns how many seconds the main thread has waited for a core; 0 where Linux does not say so."""
    try:
        return int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _run(inputs: RunInputs, ranks: Ranks) -> int:
    """Runs the task; only the leader prints and writes. What was done is reported whatever stops it."""
    run = inputs.run
    device = device_of(run.placement.target_device, "placement.target_device")
    if not isinstance(run.task, CalibrateConf):
        for pair in inputs.pairs:
            say_nodes(ranks, device, pair.run, pair.placement)
    console = Console(silent=not ranks.is_leader)
    kept = run if ranks.is_leader else replace(run, out=None)
    folder = RunFolder(kept, inputs.seed, inputs.place, inputs.words)
    folder.keep_decisions({pair.name: pair.decision.document() for pair in inputs.pairs})
    ranks.keep_errors_in(folder.path)
    began = time.perf_counter()
    kind = TASKS[run.task.name] if inputs.texts is None else ReplayTask
    task = kind(inputs, console, folder, ranks)

    status = "error"
    memory = list[Bytes]()
    started_s = time.perf_counter()
    waited_before_s = _waited_s()
    try:
        status = task.run()
        if device.type == "cpu":
            _warn_if_busy(time.perf_counter() - started_s, _waited_s() - waited_before_s)
        if task.is_planned:
            held = max((measurement.held_bytes for measurement in task.measurements()), default=0)
            memory = memory_of_ranks(held, device, ranks)
    except Exception as error:
        raise task.full_gpu(error) or error from error.__cause__
    except KeyboardInterrupt as stop:
        status = "interrupted"
        if folder.path is not None:
            stop.add_note(f"what was finished is in {folder.path}")
        raise
    finally:
        run_figures = {
            "plan": compare_with_plan(task.measurements(), memory),
            "wall_s": time.perf_counter() - began,
            "gpus": [gpu.name for gpu in gpus_here()],
        }
        summary = folder.summary(status, {**task.figures(), **run_figures})
        try:
            folder.close(summary)
        finally:  # a full disk must not cost what was done
            compared = plan_against_actual(summary)
            if compared and ranks.is_leader:
                log.debug("%s", "\n".join(text_of([compared])))
            if status in ("done", "failed", "partial") or task.has_output():
                console.document(summary, run.output)
    return FAILED_CHECK if status == "failed" else OK


def _warn_if_busy(ran_s: float, waited_s: float) -> None:
    """Warns of a run of `ran_s` seconds that waited long for a core."""
    if ran_s <= BUSY_S or waited_s <= BUSY * ran_s:
        return
    message = "others use the cores: this run waited for one %.0f %% of its time"
    if 1 < torch.get_num_threads() <= len(own_cores()):  # it has not given cores away
        message += "; started again it leaves theirs to them"
    log.warning(message, 100 * waited_s / ran_s)
