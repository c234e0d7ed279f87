"""task=calibrate: measures this machine's constants, as a cluster that plans and runs can use.

Bandwidth, arithmetic, sums and messages are timed by themselves. The other constants are fitted by least
squares to rounds of small synthetic models of several depths, widths and vocabularies, regular and
speculative: a constant's share of a round is what the plan's formula (planner/search.py) gives for that
constant alone. The rounds go through the engine of every task, and all works are timed in turn, because
machines drift.
"""

import logging
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
import yaml
from torch.nn import functional
from torch.utils.benchmark import timer

from llama_ssp.config import (
    CalibrateConf,
    ClusterConf,
    Drafting,
    DraftSeat,
    Dtype,
    ModelConf,
    PlacementConf,
    RunConf,
    Steps,
    TimesConf,
    Verification,
    Weights,
    home_expanded,
)
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import ModelError, writing
from llama_ssp.models.devices import TORCH_DTYPES, describe, device_of, dtype_of
from llama_ssp.models.host_memory import process_bytes
from llama_ssp.pair.assembly import lookahead_for
from llama_ssp.pair.batches import TimedRun
from llama_ssp.pair.session import PairSession
from llama_ssp.planner.engine import of_constants
from llama_ssp.planner.hardware import Machine, known, machine_of, matching
from llama_ssp.planner.resolve import PairSpec
from llama_ssp.planner.search import PlanRequest, round_times
from llama_ssp.planner.speed import RoundTimes
from llama_ssp.planner.storage import CPU
from llama_ssp.planner.workload import DRAFT, GIB, MIB, TARGET, Role, Workload
from llama_ssp.report.machine import processor_name
from llama_ssp.report.run_folder import versions
from llama_ssp.speculative.generate import Limits
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts
from llama_ssp.tasks.common import Task

log = logging.getLogger(__name__)

NAME = "calibrated"  # the cluster's name, and its file's
now: Callable[[], float] = timer  # the clock: it waits for the GPU's work
STARTING = "groups", "scheduler", "slurm"  # how jobs are started is not measured
PROMPT, NEW = tuple(range(4, 36)), 28
DEPTHS, VOCABULARIES, LOOKAHEADS = (2, 8), (512, 16384), (0, 2, 6)
WIDTH, HEAD = 320, 40  # a layer costs less where it is narrower still; heads enough for several ranks
WIDE, WIDE_LAYERS, WIDE_VOCABULARY = 960, 3, 2048  # so wide that bytes count most
# Sides of the matrices that are streamed. On a GPU each has to take several times as long as its launch:
# 128 MiB of bf16 take 16 us at 8 TB/s, a launch about 5.
SIDE = {"cpu": 2048, "cuda": 8192}
STREAMED = {"cpu": 2**28, "cuda": 2**32}  # bytes: more than any cache holds
GEMM_ROWS, LONG_PART = 512, 8  # one matrix in LONG_PART is multiplied with the rows of a long prompt's chunk
RESIDUAL = 2048  # numbers of a token's residual, which ranks sum
CALLS = 50  # sums and messages that are timed together
FAR = 17  # tokens of a pass at which the cost of more of them is noted
FREE = 1e6  # GB/s and TFLOP/s at which bytes and sums cost nothing
MAX_SHARE = 2.0  # of the bandwidth: the most that a config may say; only a busy machine seems to give more
FITTED = {
    "layer_us": 1e-6,
    "step_us": 1e-6,
    "round_us": 1e-6,
    "check_us": 1e-6,
    "law_ns": 1e-9,
    "accept_ns": 1e-9,
}


@dataclass(frozen=True)
class Case:
    """A synthetic pair and its K; without a draft, regular sampling. By None: the steps of constants."""

    target: ModelConf
    draft: ModelConf | None = None
    k: int = 0
    rows: int = 1
    engine: Steps | None = None


class CalibrateTask(Task[CalibrateConf]):
    """Measures on every rank; the leader writes the file. It has no plan: plans are made of its constants."""

    def run(self) -> str:
        cluster, _ = measured(self._run, self._ranks, NAME, self._task.repeats)
        file = home_expanded(self._task.folder) / "cluster" / f"{cluster.name}.yaml"
        if self._ranks.is_leader:
            text = yaml.safe_dump(plain(cluster), sort_keys=False, allow_unicode=True, width=200)
            with writing("cluster", file, fix="choose another task.folder"):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(f"# {cluster.times.source}\n{text}", encoding="utf-8")
        self._found = [{"cluster_file": str(file), "cluster": plain(cluster)}]
        use = f"use it with --config-dir {shlex.quote(self._task.folder)} cluster={cluster.name}"
        log.info("wrote %s (%.1f GB/s, %.2f TFLOP/s): %s", file, cluster.gb_s, cluster.tflops, use)
        return "done"

    def figures(self) -> dict[str, Any]:
        return dict(*self._found)


def measured(
    run: RunConf, ranks: Ranks, name: str, repeats: int, others: Sequence[Callable[[], float]] = ()
) -> tuple[ClusterConf, list[float]]:
    """Returns the machine's constants, measured on all ranks at once, and the times of `others`, in turn."""
    device = device_of(run.placement.target_device, "placement.target_device")
    dtype = dtype_of(Dtype.auto, device, "model.dtype")
    player = Player(run, ranks, NEW)
    player.play(cases()[0])  # a first model brings libraries with it
    libraries, side = _libraries_mib(device, player.held_bytes), SIDE[device.type]
    new = partial(torch.ones, dtype=TORCH_DTYPES[dtype], device=device)
    count = max(STREAMED[device.type] // (side * side * TORCH_DTYPES[dtype].itemsize), 2)
    weights = [new(side, side) for _ in range(count)]
    long, residual = weights[: max(count // LONG_PART, 1)], new(RESIDUAL).zero_()
    row, rows = new(1, side), new(GEMM_ROWS, side)
    read = [partial(functional.linear, row, weight) for weight in weights]
    multiply = [partial(functional.linear, rows, weight) for weight in long]
    messages = [partial(ranks.all_reduce, residual)] * CALLS, [partial(ranks.broadcast_ints, [1] * 8)] * CALLS
    works: list[Callable[[], float]] = [
        *(partial(elapsed_s, calls, ranks) for calls in (read, multiply, *messages)),
        *(partial(lambda case: median(player.play(case)[0]), case) for case in cases()),
    ]
    read_s, multiply_s, all_reduce_s, broadcast_s, *spent = in_turn([*works, *others], repeats)
    where = f"{processor_name()}, " * (device.type == "cpu") + describe(device)
    source = f"task=calibrate, {where}, torch {versions()['torch']}, {time.strftime('%Y-%m-%d')}"
    times = TimesConf(source=source, bandwidth_share=1.0, flops_share=1.0)
    if ranks.world > 1:
        times.all_reduce_us = {ranks.world: _short(1e6 * all_reduce_s / CALLS)}
        times.message_us = _short(1e6 * broadcast_s / CALLS)
    cluster = ClusterConf(
        name=name,
        gpu=CPU if device.type == "cpu" else torch.cuda.get_device_name(device),
        gpus=ranks.world,
        reserve=0.1 if device.type == "cpu" else 0.0,
        bf16=dtype is Dtype.bf16,
        gb_s=_short(sum(weight.nbytes for weight in weights) / read_s / 1e9),
        tflops=_short(2 * GEMM_ROWS * sum(weight.numel() for weight in long) / multiply_s / 1e12),
        times=times,
        **libraries,
    )
    fit, rest = spent[: len(cases())], spent[len(cases()) :]
    cluster.times = fitted(cluster, fit, dtype, ranks.world)
    return cluster, rest


def in_turn(works: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Returns each work's least figure, as disturbances only add; the first of each does not count."""
    taken = [[work() for work in works] for _ in range(repeats + 1)]
    return [min(figures) for figures in zip(*taken[1:], strict=True)]


def elapsed_s(works: Sequence[Callable[[], Any]], ranks: Ranks) -> float:
    """Returns the seconds that these works take one after the other, on all ranks at once."""
    ranks.barrier()
    began = now()
    for work in works:
        work()
    ranks.barrier()
    return now() - began


class Player:
    """Runs cases; models that were loaded stay loaded."""

    def __init__(self, run: RunConf, ranks: Ranks, new: int) -> None:
        self._device = device_of(run.placement.target_device, "placement.target_device")
        self._run, self._ranks, self._new = run, ranks, new
        self._pairs: dict[str, PairSession] = {}

    @property
    def held_bytes(self) -> int:
        """Weights and caches of the models that are loaded."""
        return sum(pair.models.held_bytes for pair in self._pairs.values())

    def play(self, case: Case) -> tuple[list[float], Counts]:
        """Writes texts by the token rule, as plans assume; returns seconds of their rounds, and counters."""
        drafter = Drafting.model if case.draft else Drafting.none
        spec = replace(self._run.speculation, drafter=drafter, k=case.k, adaptive=False)
        spec.verification = Verification.token
        steps = case.engine or of_constants(self._device.type == "cpu")
        run = replace(self._run, model=case.target, draft=case.draft, speculation=spec, engine=steps)
        engine = self._pair(run, case).engine(0, run, frozenset())
        timed = TimedRun(engine, [Prompt(str(row), PROMPT) for row in range(case.rows)], self._new)
        spent = [seconds for _, seconds in timed.rounds(Limits(self._new), lookahead_for(run, case.rows))]
        return spent, timed.counts

    def _pair(self, run: RunConf, case: Case) -> PairSession:
        """Returns the run's pair, loaded. Refuses a GPU without graphs: plans take its times for theirs."""
        key = f"{run.model} {run.draft} {run.engine} {case.rows}"
        if key not in self._pairs:
            placement = resolve(run.placement, self._ranks.world, run.has_draft_model)
            pair = PairSession(PairSpec(run, None, None, placement), self._ranks)
            self._pairs[key] = pair.load(case.rows, len(PROMPT) + self._new)
            has_graphs = all(model.has_graphs for model in pair.models.loaded.values())
            if case.engine is None and run.engine is Steps.compiled and not has_graphs:
                what = "a GPU is calibrated with CUDA graphs, and steps run without them here"
                fix = "the warning above says why; plans of eager steps need no calibration"
                raise ModelError(what, describe(self._device), fix=fix)
        return self._pairs[key]


def _libraries_mib(device: torch.device, held: int) -> dict[str, Any]:
    """Returns what libraries take: the context measured, without `held` tensors; the rest by preset."""
    keys = "cublas_mib", "nccl_mib", "graph_mib"
    if device.type == "cpu":
        return {**dict.fromkeys(keys, 0.0), "context_mib": _short(max(0, process_bytes() - held) / MIB)}
    free, total = torch.cuda.mem_get_info(device)
    context, name = total - free - torch.cuda.memory_reserved(device), torch.cuda.get_device_name(device)
    presets = [preset for preset in known().values() if matching(name, [str(preset["gpu"])])]
    libraries = {key: float(presets[0][key]) if presets else 0.0 for key in keys}
    return {**libraries, "context_mib": _short(context / MIB), "gib": _short(total / GIB)}


def shape(layers: int, dim: int, vocab: int, agreement: float = 0.8, head_dim: int = 64) -> ModelConf:
    """Returns a Llama of these sizes with weights from a seed."""
    heads = max(dim // head_dim, 1)
    return ModelConf(
        name=f"{layers}x{dim}, vocabulary {vocab}",
        family="llama",
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=dim // heads,
        dim=dim,
        ffn=11 * dim // 4,
        vocab=vocab,
        context=1024,
        weights=Weights.synthetic,
        agreement=agreement,
    )


def cases() -> list[Case]:
    """Returns what the constants are fitted to; a draft has the smaller depth."""
    sizes = [(layers, WIDTH, vocab, HEAD) for layers, vocab in product(DEPTHS, VOCABULARIES)]
    sizes.append((WIDE_LAYERS, WIDE, WIDE_VOCABULARY, WIDE // 12))
    result = []
    for (layers, dim, vocab, head), k in product(sizes, LOOKAHEADS):
        target, draft = (shape(depth, dim, vocab, head_dim=head) for depth in (layers, DEPTHS[0]))
        result.append(Case(target, draft if k else None, k))
    return result


def fitted(cluster: ClusterConf, spent: list[float], dtype: Dtype, world: int) -> TimesConf:
    """Returns the constants that explain the cases' rounds best; relative errors count."""
    no_cost = {**dict.fromkeys(FITTED, 0.0), "bandwidth_share": 1.0, "rows_cost": {1: 1.0, FAR: 1.0}}

    def rounds(cost: dict[str, Any], **others: Any) -> Any:
        times = replace(cluster.times, **{**no_cost, **cost})
        machine = machine_of(replace(cluster, times=times, **others))
        return np.array([predicted(case, machine, dtype, world).round_s(case.k, 1.0) for case in cases()])

    measured_s, bytes_s = np.array(spent), rounds({})
    known_s = rounds({}, gb_s=FREE, tflops=FREE)  # sums and messages
    units: list[dict[str, Any]] = [{"rows_cost": {1: 1.0, FAR: 2.0}}]
    units += [{key: 1 / unit} for key, unit in FITTED.items()]
    columns = [bytes_s - known_s, *(rounds(unit) - bytes_s for unit in units)]
    matrix = np.array(columns).T / measured_s[:, None]
    reading, more, *values = non_negative(matrix, 1 - known_s / measured_s)
    share, rows_cost = (1 / reading, 1 + more / reading) if reading else (1.0, 1.0)
    constants: dict[str, Any] = {
        "bandwidth_share": _short(min(share, MAX_SHARE)),
        "rows_cost": {1: 1.0, FAR: _short(rows_cost)},
        **{key: _short(value / unit) for (key, unit), value in zip(FITTED.items(), values, strict=True)},
    }
    return replace(cluster.times, **constants)


def non_negative(matrix: Any, wanted: Any) -> list[float]:
    """Solves by least squares; a constant that would be negative is left out, the worst first."""
    kept, values = list(range(matrix.shape[1])), np.zeros(matrix.shape[1])
    while kept:
        solution = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)[0]
        if solution.min() >= 0:
            values[kept] = solution
            break
        kept.pop(int(solution.argmin()))
    return [float(value) for value in values]


def predicted(case: Case, machine: Machine, dtype: Dtype, world: int) -> RoundTimes:
    """Plans a case: the draft on the leader, the target over all ranks."""
    draft = Role(DRAFT, case.draft, dtype) if case.draft else None
    work, engine = Workload(case.rows, len(PROMPT), NEW, case.k), case.engine or of_constants(machine.is_cpu)
    request = PlanRequest(machine, Role(TARGET, case.target, dtype), draft, work, 0.0, engine=engine)
    placement = resolve(PlacementConf(draft=DraftSeat.leader), world, drafts=draft is not None)
    return round_times(request, placement)


def _short(value: float) -> float:
    """Rounds to four digits: more would be noise."""
    return float(f"{value:.4g}")


def plain(cluster: ClusterConf) -> dict[str, Any]:
    """Returns the cluster as its yaml has it, without unknown values and without how jobs are started."""
    result = {key: value for key, value in asdict(cluster).items() if key not in STARTING}
    result["times"] = {key: value for key, value in result["times"].items() if value != {}}
    return {key: value for key, value in result.items() if value is not None}
