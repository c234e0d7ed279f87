"""task=calibrate: this machine's constants, measured, as a cluster that plans and runs can use.

Bandwidth is streamed. What passes attain of it, what more tokens in a pass cost, and what a token costs
besides bytes are found by least squares over rounds of small synthetic models of two depths and two
vocabularies and of a wide one, regular and speculative. A constant's share of a round is what the plan's
formula (planner/search.py) gives for that constant alone.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from llama_ssp.config import (
    CalibrateConf,
    ClusterConf,
    DraftSeat,
    Dtype,
    PlacementConf,
    RunConf,
    TimesConf,
    home_expanded,
)
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import StorageError
from llama_ssp.models.devices import describe, device_of, dtype_of
from llama_ssp.planner.engine import of_constants
from llama_ssp.planner.hardware import Machine, known, machine_of, matching
from llama_ssp.planner.search import PlanRequest, round_times
from llama_ssp.planner.speed import RoundTimes
from llama_ssp.planner.storage import CPU
from llama_ssp.planner.workload import DRAFT, GIB, MIB, TARGET, Role, Workload
from llama_ssp.report.machine import processor_name
from llama_ssp.report.run_folder import versions
from llama_ssp.tasks.common import Task
from llama_ssp.tasks.microbench import (
    GEMM_ROWS,
    PROMPT,
    Case,
    Player,
    in_turn,
    message_s,
    shape,
    streamed,
    streaming_s,
    sum_s,
)
from llama_ssp.tasks.rank_memory import process_bytes

log = logging.getLogger(__name__)

NEW = 28
DEPTHS, VOCABULARIES, LOOKAHEADS = (2, 8), (512, 16384), (0, 2, 6)
WIDTH, HEAD = 320, 40  # a layer costs less where it is narrower still; heads enough for several ranks
WIDE, WIDE_LAYERS, WIDE_VOCABULARY = 960, 3, 2048  # so wide that bytes count most
FAR = 17  # tokens of a pass at which the cost of more of them is noted
LONG_PART = 8  # one matrix in LONG_PART is multiplied with a long prompt's rows
FREE = 1e6  # GB/s and TFLOP/s at which bytes and sums cost nothing
MOST_SHARE = 2.0  # of the bandwidth: the most that a config may say; only a busy machine seems to give more
UNITS = {"us": 1e-6, "ns": 1e-9}
FITTED = ("layer_us", "step_us", "round_us", "check_us", "law_ns", "accept_ns")

NAME = "calibrated"  # of the cluster, and of its file
STARTING = ("groups", "scheduler", "slurm")  # how jobs start, which is not measured


class CalibrateTask(Task[CalibrateConf]):
    """Measures on every rank; the leader writes the file. It has no plan: plans are made of its constants."""

    def run(self) -> str:
        cluster, _ = measured(self._run, self._ranks, NAME, self._task.repeats)
        file = home_expanded(self._task.folder) / "cluster" / f"{cluster.name}.yaml"
        if self._ranks.is_leader:
            _write(file, cluster)
        self._found = [{"cluster_file": str(file), "cluster": plain(cluster)}]
        folder = shlex.quote(self._task.folder)
        log.info("wrote %s: use it with --config-dir %s cluster=%s", file, folder, cluster.name)
        return "done"

    def figures(self) -> dict[str, Any]:
        return {**self._found[0]} if self._found else {}


def measured(
    run: RunConf, ranks: Ranks, name: str, repeats: int, others: Sequence[Callable[[], float]] = ()
) -> tuple[ClusterConf, list[float]]:
    """The machine's constants, and the times of the functions `others`, which take turns with them.

    All ranks measure at once, so that they share what they share in a run.
    """
    device = device_of(run.placement.target_device, "placement.target_device")
    dtype = dtype_of(Dtype.auto, device, "model.dtype")
    player = Player(run, ranks, NEW)
    player.play(cases()[0])  # a first model brings libraries with it
    taken_by_libraries, weights = _taken(device, player.held_bytes), streamed(device, dtype)
    long = weights[: max(len(weights) // LONG_PART, 1)]
    works: dict[str, list[Callable[[], float]]] = {
        "gemv": [partial(streaming_s, 1, weights)],
        "gemm": [partial(streaming_s, GEMM_ROWS, long)],
        "sum": [partial(sum_s, ranks, device, dtype)],
        "message": [partial(message_s, ranks)],
        "cases": [partial(player.round_s, case) for case in cases()],
        "others": list(others),
    }
    taken = iter(in_turn([work for group in works.values() for work in group], repeats))
    found = {name: [next(taken) for _ in group] for name, group in works.items()}
    times = TimesConf(source=_source(device), bandwidth_share=1.0, flops_share=1.0)
    if ranks.world > 1:
        times.all_reduce_us = {ranks.world: _short(1e6 * found["sum"][0])}
        times.message_us = _short(1e6 * found["message"][0])
    cluster = ClusterConf(
        name=name,
        gpu=CPU if device.type == "cpu" else torch.cuda.get_device_name(device),
        gpus=ranks.world,
        reserve=0.1 if device.type == "cpu" else 0.0,
        bf16=dtype is Dtype.bf16,
        gb_s=_short(sum(weight.nbytes for weight in weights) / found["gemv"][0] / 1e9),
        tflops=_short(2 * GEMM_ROWS * sum(weight.numel() for weight in long) / found["gemm"][0] / 1e12),
        times=times,
        **taken_by_libraries,
    )
    cluster.times = fitted(cluster, found["cases"], dtype, ranks.world)
    log.info(
        "streams %.1f GB/s, multiplies %.2f TFLOP/s; a layer costs %.0f us, a pass %.0f us more",
        cluster.gb_s, cluster.tflops, cluster.times.layer_us, cluster.times.step_us,
    )  # fmt: skip
    return cluster, found["others"]


def _taken(device: torch.device, held: int) -> dict[str, Any]:
    """What libraries take besides tensors: the context measured, the rest from the preset of such a GPU.

    On a CPU the context is the program itself; `held` are the bytes of its tensors.
    """
    found = dict.fromkeys(("cublas_mib", "nccl_mib", "graph_mib"), 0.0)
    if device.type == "cpu":
        return {**found, "context_mib": _short(max(0, process_bytes() - held) / MIB)}
    free, whole = torch.cuda.mem_get_info(device)
    context, name = whole - free - torch.cuda.memory_reserved(device), torch.cuda.get_device_name(device)
    alike = [preset for preset in known().values() if matching(name, [str(preset["gpu"])])]
    found.update({key: float(alike[0][key]) for key in found} if alike else {})
    return {**found, "context_mib": _short(context / MIB), "gib": _short(whole / GIB)}


def cases() -> list[Case]:
    """What the constants are fitted to; a draft has two layers."""
    sizes = [(layers, WIDTH, HEAD, vocab) for layers, vocab in product(DEPTHS, VOCABULARIES)]
    sizes.append((WIDE_LAYERS, WIDE, WIDE // 12, WIDE_VOCABULARY))
    found = []
    for (layers, dim, head, vocab), k in product(sizes, LOOKAHEADS):
        target, draft = (shape(n, dim, vocab, head_dim=head) for n in (layers, DEPTHS[0]))
        found.append(Case(target, draft if k else None, k))
    return found


def fitted(cluster: ClusterConf, spent: list[float], dtype: Dtype, world: int) -> TimesConf:
    """The constants that explain the cases' rounds best; relative errors count."""
    zero: dict[str, Any] = {**dict.fromkeys(FITTED, 0.0), "rows_cost": {1: 1.0, FAR: 1.0}}
    nothing = replace(cluster.times, bandwidth_share=1.0, **zero)

    def rounds(times: TimesConf, **changes: Any) -> Any:
        machine = machine_of(replace(cluster, times=times, **changes))
        return np.array([predicted(case, machine, dtype, world).round_s(case.k, 1.0) for case in cases()])

    known = rounds(nothing, gb_s=FREE, tflops=FREE)  # sums and messages, which were measured
    whole = rounds(nothing)
    columns = [whole - known, rounds(replace(nothing, rows_cost={1: 1.0, FAR: 2.0})) - whole]
    for key in FITTED:
        one: dict[str, Any] = {key: 1 / UNITS[key[-2:]]}
        columns.append(rounds(replace(nothing, **one)) - whole)
    matrix, wanted = np.array(columns).T / np.array(spent)[:, None], 1 - known / np.array(spent)
    reading, more, *seconds = non_negative(matrix, wanted)
    share = 1 / reading if reading else 1.0
    found = replace(nothing, bandwidth_share=_short(min(share, MOST_SHARE)))
    found.rows_cost = {1: 1.0, FAR: _short(1 + (more / reading if reading else 0.0))}
    for key, value in zip(FITTED, seconds, strict=True):
        setattr(found, key, _short(value / UNITS[key[-2:]]))
    return found


def non_negative(matrix: Any, wanted: Any) -> list[float]:
    """Least squares; a constant that would be negative is left out, the worst first."""
    kept = list(range(matrix.shape[1]))
    while kept:
        found = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)[0]
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    values = [0.0] * matrix.shape[1]
    for index, value in zip(kept, found if kept else [], strict=True):
        values[index] = float(value)
    return values


def predicted(case: Case, machine: Machine, dtype: Dtype, world: int) -> RoundTimes:
    """The plan of a case: the draft on the leader, the target over all ranks."""
    draft = Role(DRAFT, case.draft, dtype) if case.draft else None
    work = Workload(1, len(PROMPT), NEW, case.k)
    engine = of_constants(machine.is_cpu)
    request = PlanRequest(machine, Role(TARGET, case.target, dtype), draft, work, 0.0, engine=engine)
    placement = resolve(PlacementConf(draft=DraftSeat.leader), world, drafts=draft is not None)
    return round_times(request, placement)


def _source(device: torch.device) -> str:
    where = f"{processor_name()}, " * (device.type == "cpu") + describe(device)
    return f"task=calibrate, {where}, torch {versions()['torch']}, {time.strftime('%Y-%m-%d')}"


def _short(value: float) -> float:
    """To four digits: more would be noise."""
    return float(f"{value:.4g}")


def plain(cluster: ClusterConf) -> dict[str, Any]:
    """The cluster as its yaml has it, without unknown values and without how jobs are started."""
    known = asdict(cluster).items()
    found = {key: value for key, value in known if value is not None and key not in STARTING}
    found["times"] = {key: value for key, value in found["times"].items() if value not in (None, {})}
    return found


def _write(file: Path, cluster: ClusterConf) -> None:
    text = yaml.safe_dump(plain(cluster), sort_keys=False, allow_unicode=True, width=200)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {cluster.times.source}\n{text}", encoding="utf-8")
    except OSError as error:
        what = f"cannot write the cluster: {error.strerror}"
        raise StorageError(what, file, fix="choose another task.folder") from None
