"""task=calibrate: checks this machine, and measures its constants, which plans and runs use from then on.

The check (tasks/machine) comes first. Where it finds a fault nothing is measured.

Bandwidth, arithmetic, sums and messages are timed by themselves, and on a CPU the product of our own kernels
with packed weights, by which compiled steps are planned. Over several nodes sums inside of each are timed,
too, and what sums over all ranks take in addition is the network's. The other constants are fitted by least
squares to rounds of small synthetic models of several depths, widths and vocabularies, regular and
speculative: a constant's share of a round is what the plan's formula (planner/search.py) gives for that
constant alone. The rounds go through the engine of every task, and all works are timed in turn, because
machines drift.

The first run on a machine does the same in a short form when it ends (first_measurement.py).
"""

import logging
import math
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn import functional

from llama_ssp.config import (
    MADE_FAMILY,
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
from llama_ssp.config.environment import rank_environment
from llama_ssp.config.presets import machines
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import ModelError, writing
from llama_ssp.models.devices import TORCH_DTYPES, describe, device_of, dtype_of, now
from llama_ssp.models.host_memory import process_bytes
from llama_ssp.models.kernels import linear
from llama_ssp.models.kernels.build import complaint
from llama_ssp.pair.run import Run, RunSettings
from llama_ssp.pair.session import PairSession
from llama_ssp.placing.decision import as_asked
from llama_ssp.placing.engine import step_rule
from llama_ssp.placing.kept_constants import BY_CALIBRATE, is_switched_off, keep_constants, key_here
from llama_ssp.placing.pairs import PairSpec
from llama_ssp.placing.this_machine import machine_for
from llama_ssp.planner.engine import of_constants
from llama_ssp.planner.hardware import Machine, by_gpu, matching
from llama_ssp.planner.search import PlanRequest, round_times
from llama_ssp.planner.speed import RoundTimes, between, hops, times_of
from llama_ssp.planner.storage import CPU
from llama_ssp.planner.workload import DRAFT, GIB, MIB, TARGET, Role, Workload
from llama_ssp.report.machine import processor_name
from llama_ssp.report.run_folder import versions
from llama_ssp.report.task_tables import machine_rows
from llama_ssp.speculative.draft_length import lookahead_for
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts
from llama_ssp.tasks.common import Task

log = logging.getLogger(__name__)

NAME = "calibrated"  # the cluster's name, and its file's
ROOM = 2**16  # bytes: more than the file takes
STARTING = "groups", "scheduler", "slurm"  # how jobs are started is not measured
# Of every text: its prompt, and how many tokens are written.
PROMPT = tuple(range(4, 36))
NEW = 28
# The models: all of these depths and vocabularies, each at these K. A layer costs less where it is narrower
# still than WIDTH; a HEAD's width gives heads enough for several ranks.
DEPTHS = (2, 8)
VOCABULARIES = (512, 16384)
LOOKAHEADS = (0, 2, 6)
WIDTH = 320
HEAD = 40
# One more model, so wide that bytes count most.
WIDE = 960
WIDE_LAYERS = 3
WIDE_VOCABULARY = 2048
# Sides of the matrices that are streamed. On a GPU each has to take several times as long as its launch:
# 128 MiB of bf16 take 16 us at 8 TB/s, a launch about 5.
SIDE = {"cpu": 2048, "cuda": 8192}
STREAMED = {"cpu": 2**28, "cuda": 2**32}  # bytes: more than any cache holds
# One matrix in LONG_PART is multiplied with GEMM_ROWS rows, those of a long prompt's chunk.
GEMM_ROWS = 512
LONG_PART = 8
KERNEL_ROWS = 16  # with which our CPU kernels multiply: many rows of a batch, or several of a few drafts
RESIDUAL = 2048  # numbers of a token's residual, which ranks sum
LARGE_SUM = 2**22  # numbers of a sum that shows the network's bandwidth: those of a prompt's chunk
LARGE_CALLS = 3
MAX_NETWORK = 1e12  # bytes a second: more is noise
CALLS = 50  # sums and messages that are timed together
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
class Libraries:
    """What libraries take on a GPU, in MiB, and the GPU's memory in GiB; on a CPU only a context is known."""

    context_mib: float
    cublas_mib: float = 0.0
    nccl_mib: float = 0.0
    graph_mib: float = 0.0
    gib: float | None = None


@dataclass(frozen=True)
class Case:
    """A synthetic pair and its K; without a draft, regular sampling. By None: the steps of constants."""

    target: ModelConf
    draft: ModelConf | None = None
    k: int = 0
    rows: int = 1
    engine: Steps | None = None


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How exactly constants are measured: by which rounds of how many tokens, and by how many bytes.

    `builds`: our CPU kernels are measured even if they have to be compiled for it, and not only where this
    process has used them.

    Each is measured once, and then `repeats` times more, which alone count; but the first time counts where
    half of `limit_s` is over by then. Where it takes twice `limit_s`, measuring is given up.
    """

    cases: Sequence[Case]
    new: int
    streamed: int
    repeats: int
    limit_s: float = math.inf
    builds: bool = False


class TooSlow(Exception):
    """Measuring takes much longer than it may: other programs use the machine."""


class CalibrateTask(Task[CalibrateConf]):
    """Measures on every rank, if the machine is fit; the leader writes the file."""

    is_planned = False  # plans are made of its constants

    def run(self) -> str:
        machine = self._inputs.machine
        if machine is not None:
            self._results = [{"machine": machine.record()}]
            self._print(machine_rows(machine.record()))
            if not machine.is_fit:
                return "failed"
        if not self._task.measure:
            return "done"

        log.info("measuring constants")
        device = device_of(self._run.placement.target_device, "placement.target_device")
        effort = full_effort(device, self._task.repeats)
        cluster, _ = measured(self._run, self._ranks, NAME, effort)
        file = place_of_constants(self._task)
        if self._ranks.is_leader:
            text = yaml.safe_dump(plain(cluster), sort_keys=False, allow_unicode=True, width=200)
            with writing("cluster", file, fix="choose another task.folder"):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(f"# {cluster.times.source}\n{text}", encoding="utf-8")
            keep(cluster, self._ranks.world, BY_CALIBRATE)
        self._results.append({"cluster_file": str(file), "cluster": plain(cluster)})
        use = f"use it with --config-dir {shlex.quote(self._task.folder)} cluster={cluster.name}"
        log.info("wrote %s (%.1f GB/s, %.2f TFLOP/s): %s", file, cluster.gb_s, cluster.tflops, use)
        return "done"

    def figures(self) -> dict[str, Any]:
        return {name: value for part in self._results for name, value in part.items()}


def place_of_constants(task: CalibrateConf) -> Path:
    """Returns the file that the constants are written to."""
    return home_expanded(task.folder) / "cluster" / f"{NAME}.yaml"


def require_place(task: CalibrateConf) -> None:
    """Raises StorageError if the leader cannot write the constants: before minutes are spent on them."""
    if not rank_environment().is_leader:
        return
    file = place_of_constants(task)
    with writing("cluster", file, fix="choose another task.folder"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent) as room:
            room.write(bytes(ROOM))
        if file.exists():
            file.open("r+b").close()


def full_effort(device: torch.device, repeats: int) -> Effort:
    """Returns what a calibration takes: most of a minute on a CPU."""
    return Effort(
        cases=cases(),
        new=NEW,
        streamed=STREAMED[device.type],
        repeats=repeats,
        builds=True,
    )


def keep(cluster: ClusterConf, world: int, by: str) -> None:
    """Keeps the constants for later plans of this machine; says so, or why it cannot.

    Those of a CPU are for the ranks of one machine: of several nodes the cluster's file alone has them.
    """
    if is_switched_off() or (cluster.gpu == CPU and cluster.nodes > 1):
        return
    gpu = CPU if cluster.gpu == CPU else matching(str(cluster.gpu), list(by_gpu())) or str(cluster.gpu)
    try:
        place = keep_constants(cluster, key_here(gpu, world), by)
    except (OSError, RuntimeError) as error:
        log.info("what was measured is not kept for later plans: %s", error)
        return
    log.info("plans of this machine go by it from now on: %s", place)


def measured(
    run: RunConf, ranks: Ranks, name: str, effort: Effort, others: Sequence[Callable[[], float]] = ()
) -> tuple[ClusterConf, list[float]]:
    """Returns the machine's constants, measured on all ranks at once, and the times of `others`, in turn."""
    device = device_of(run.placement.target_device, "placement.target_device")
    dtype = dtype_of(Dtype.auto, device, "model.dtype")
    began = now()
    player = Player(run, ranks, effort.new)
    for case in effort.cases[:1]:
        player.play(case)  # a first model brings libraries with it
    libraries = _libraries(device, player.held_bytes)

    side = SIDE[device.type]
    new = partial(torch.ones, dtype=TORCH_DTYPES[dtype], device=device)
    count = max(effort.streamed // (side * side * TORCH_DTYPES[dtype].itemsize), 2)
    weights = [new(side, side) for _ in range(count)]
    multiplied = weights[: max(count // LONG_PART, 1)]
    residual = new(RESIDUAL).zero_()
    large = new(LARGE_SUM).zero_()
    nodes = rank_environment().nodes
    inside = of_own_node(ranks) if nodes > 1 else ranks
    row = new(1, side)
    rows = new(GEMM_ROWS, side)
    calls_by_kind: list[list[Callable[[], Any]]] = [
        [partial(functional.linear, row, weight) for weight in weights],
        [partial(functional.linear, rows, weight) for weight in multiplied],
        [partial(ranks.all_reduce, residual)] * CALLS,
        [partial(ranks.broadcast_ints, [1] * 8)] * CALLS,
    ]
    has_kernels = device.type == CPU and all_have_kernels(ranks, effort.builds)
    if has_kernels:
        packed = [linear.packed(weight) for weight in weights]
        calls_by_kind += [
            [partial(by_kernel, row, weight) for weight in packed],
            [partial(by_kernel, rows[:KERNEL_ROWS], weight) for weight in packed],
        ]
    if nodes > 1:
        calls_by_kind += [
            [partial(inside.all_reduce, residual)] * CALLS,
            [partial(inside.all_reduce, large)] * LARGE_CALLS,
            [partial(ranks.all_reduce, large)] * LARGE_CALLS,
        ]
    works: list[Callable[[], float]] = [
        *(partial(elapsed_s, calls, ranks) for calls in calls_by_kind),
        *(partial(player.median_round_s, case) for case in effort.cases),
    ]
    if effort.limit_s < math.inf:
        works = [partial(within, ranks, began + 2 * effort.limit_s, work) for work in works]
    taken_s = in_turn([*works, *others], effort.repeats, partial(has_time, ranks, effort.limit_s))
    read_s, multiply_s, all_reduce_s, broadcast_s, *spent = taken_s
    kernel_s = list[float]()
    if has_kernels:
        kernel_s = spent[:2]
        spent = spent[2:]
    network_s = list[float]()
    if nodes > 1:
        network_s = [all_reduce_s, *spent[:3]]
        spent = spent[3:]

    where = describe(device)
    if device.type == "cpu":
        where = f"{processor_name()}, {where}"
    source = f"task=calibrate, {where}, torch {versions()['torch']}, {time.strftime('%Y-%m-%d')}"
    times = TimesConf(source=source, bandwidth_share=1.0, flops_share=1.0)
    if ranks.world > 1:
        times.message_us = _short(1e6 * broadcast_s / CALLS)
    if ranks.world > 1 and nodes == 1:
        times.all_reduce_us = {ranks.world: _short(1e6 * all_reduce_s / CALLS)}
    if kernel_s:
        reading_s, multiplying_s = kernel_s
        times.kernel_gb_s = _short(sum(weight.nbytes for weight in weights) / reading_s / 1e9)
        products = 2 * KERNEL_ROWS * sum(weight.numel() for weight in weights)
        times.kernel_tflops = _short(products / multiplying_s / 1e12)
    cluster = ClusterConf(
        name=name,
        gpu=CPU if device.type == "cpu" else torch.cuda.get_device_name(device),
        nodes=nodes,
        gpus=-(-ranks.world // nodes),
        reserve=0.1 if device.type == "cpu" else 0.0,
        bf16=dtype is Dtype.bf16,
        gb_s=_short(sum(weight.nbytes for weight in weights) / read_s / 1e9),
        tflops=_short(2 * GEMM_ROWS * sum(weight.numel() for weight in multiplied) / multiply_s / 1e12),
        times=times,
        context_mib=libraries.context_mib,
        cublas_mib=libraries.cublas_mib,
        nccl_mib=libraries.nccl_mib,
        graph_mib=libraries.graph_mib,
        gib=libraries.gib,
    )
    if network_s:
        cluster = with_network(cluster, network_s, residual.nbytes, large.nbytes)
    rounds_s = spent[: len(effort.cases)]
    others_s = spent[len(effort.cases) :]
    if effort.cases:
        cluster.times = fitted(cluster, effort.cases, rounds_s, dtype, ranks.world)
    return cluster, others_s


def of_own_node(ranks: Ranks) -> Ranks:
    """Returns the ranks of this rank's node as a group; all ranks call it, and make all nodes' groups."""
    own: Ranks | None = None
    nodes = [node for (node,) in ranks.gather_ints([rank_environment().node])]
    for node in sorted(set(nodes)):
        members = tuple(rank for rank in range(ranks.world) if nodes[rank] == node)
        group = ranks.among(members)
        own = own or group
    return own or ranks


def with_network(cluster: ClusterConf, network_s: Sequence[float], small: int, large: int) -> ClusterConf:
    """Returns the cluster with the sums inside of a node, and what the network adds to them.

    `network_s` are the seconds of CALLS sums of `small` bytes over all ranks and over those of a node, and of
    LARGE_CALLS sums of `large` bytes over those of a node and over all. A rank that is alone on its node has
    nothing to sum there.
    """
    all_s, inside_s, large_inside_s, large_all_s = network_s
    of_node = cluster.gpus or 1
    times = cluster.times
    if of_node > 1:
        times = replace(times, all_reduce_us={of_node: _short(1e6 * inside_s / CALLS)})
    world = of_node * cluster.nodes
    share = 2 * (world - 1) / world  # of a sum's bytes, which pass each link
    slower_s = (large_all_s - large_inside_s) / LARGE_CALLS - (all_s - inside_s) / CALLS
    per_s = share * (large - small) / max(slower_s, share * large / MAX_NETWORK)
    # A plan adds the network to what it takes for a sum over so many ranks of one node.
    planned = times_of(times, cluster.gb_s or FREE, cluster.tflops or FREE, None)
    latency_s = all_s / CALLS - between(planned.reduce, world) - share * small / per_s
    return replace(
        cluster,
        times=times,
        between_us=_short(1e6 * max(latency_s / hops(cluster.nodes), 0.0)),
        between_gb_s=_short(per_s / 1e9),
    )


def all_have_kernels(ranks: Ranks, builds: bool) -> bool:
    """Returns whether all ranks have our CPU kernels; if it `builds`, they are compiled where they lack."""
    if builds and not linear.is_loaded():
        try:
            linear.operators()
        except Exception as error:  # whatever compiler and loader raise
            log.info("our CPU kernels are not measured: %s", complaint(error))
    return all(have for (have,) in ranks.gather_ints([int(linear.is_loaded())]))


def by_kernel(x_TK: Tensor, packed: Tensor) -> Tensor:
    """Returns the product with a packed matrix that is as wide as high."""
    product: Tensor = torch.ops.llama_ssp.linear(x_TK, packed, None, x_TK.shape[-1])
    return product


def within(ranks: Ranks, end_s: float, work: Callable[[], float]) -> float:
    """Returns the work's figure; raises TooSlow, on all ranks, if the leader's clock is past the end."""
    (goes_on,) = ranks.broadcast_ints([int(now() < end_s)])
    if not goes_on:
        raise TooSlow
    return work()


def has_time(ranks: Ranks, limit_s: float, spent_s: float) -> bool:
    """Returns whether the leader has as much time again as was spent; all ranks call it."""
    (goes_on,) = ranks.broadcast_ints([int(2 * spent_s <= limit_s)])
    return bool(goes_on)


def in_turn(
    works: Sequence[Callable[[], float]], repeats: int, goes_on: Callable[[float], bool] = lambda spent: True
) -> list[float]:
    """Returns each work's least figure, as disturbances only add; the first of each does not count.

    It does where `goes_on` says no to the seconds that the first ones took.
    """
    began = now()
    first = [work() for work in works]
    if not goes_on(now() - began):
        return first
    turns = list[list[float]]()
    for _ in range(repeats):
        turns.append([work() for work in works])
    return [min(figures) for figures in zip(*turns, strict=True)]


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
        self._run = run
        self._ranks = ranks
        self._new = new
        self._pairs: dict[str, PairSession] = {}

    @property
    def held_bytes(self) -> int:
        """Weights and caches of the models that are loaded."""
        return sum(pair.models.held_bytes for pair in self._pairs.values())

    def median_round_s(self, case: Case) -> float:
        spent, _ = self.play(case)
        return median(spent)

    def play(self, case: Case) -> tuple[list[float], Counts]:
        """Writes texts by the token rule, as plans assume; returns seconds of their rounds, and counters."""
        spec = replace(
            self._run.speculation,
            drafter=Drafting.model if case.draft else Drafting.none,
            k=case.k,
            adaptive=False,
            verification=Verification.token,
        )
        steps = case.engine or of_constants(self._device.type == "cpu")
        run = replace(self._run, model=case.target, draft=case.draft, speculation=spec, engine=steps)

        pair = self._pair(run, case)
        prompts = [Prompt(str(row), PROMPT) for row in range(case.rows)]
        requests = pair.requests(prompts, run, max_new_tokens=self._new)
        settings = RunSettings(rows=case.rows, lookahead=partial(lookahead_for, run))  # no token ends a text
        text_run = Run(pair.engine(0, run, frozenset()), requests, settings)
        return [step.seconds for step in text_run.rounds()], text_run.counts

    def _pair(self, run: RunConf, case: Case) -> PairSession:
        """Returns the run's pair, loaded. Refuses a GPU without graphs: plans take its times for theirs."""
        key = f"{run.model} {run.draft} {run.engine} {case.rows}"
        if key not in self._pairs:
            placement = resolve(run.placement, self._ranks.world, run.has_draft_model)
            pair = PairSession(PairSpec(run, None, None, as_asked(run, placement)), self._ranks)
            self._pairs[key] = pair.load(case.rows, len(PROMPT) + self._new)
            has_graphs = all(model.has_graphs for model in pair.models.loaded.values())
            if case.engine is None and run.engine is Steps.compiled and not has_graphs:
                raise ModelError(
                    "a GPU is calibrated with CUDA graphs, and steps run without them here",
                    where=describe(self._device),
                    fix="the warning above says why; plans of eager steps need no calibration",
                )
        return self._pairs[key]


def _libraries(device: torch.device, held: int) -> Libraries:
    """Returns what libraries take: the context measured, without `held` tensors; the rest by preset."""
    if device.type == "cpu":
        return Libraries(_short(max(0, process_bytes() - held) / MIB))

    free, total = torch.cuda.mem_get_info(device)
    context = total - free - torch.cuda.memory_reserved(device)
    name = torch.cuda.get_device_name(device)
    presets = (preset for preset in machines().values() if matching(name, [str(preset["gpu"])]))
    preset = next(presets, {"cublas_mib": 0.0, "nccl_mib": 0.0, "graph_mib": 0.0})
    return Libraries(
        context_mib=_short(context / MIB),
        cublas_mib=float(preset["cublas_mib"]),
        nccl_mib=float(preset["nccl_mib"]),
        graph_mib=float(preset["graph_mib"]),
        gib=_short(total / GIB),
    )


def shape(layers: int, dim: int, vocab: int, agreement: float = 0.8, head_dim: int = 64) -> ModelConf:
    """Returns a Llama of these sizes with weights from a seed."""
    heads = max(dim // head_dim, 1)
    return ModelConf(
        name=f"{layers}x{dim}, vocabulary {vocab}",
        family=MADE_FAMILY,
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
        target = shape(layers, dim, vocab, head_dim=head)
        draft = shape(DEPTHS[0], dim, vocab, head_dim=head) if k else None
        result.append(Case(target, draft, k))
    return result


def fitted(
    cluster: ClusterConf, played: Sequence[Case], spent: list[float], dtype: Dtype, world: int
) -> TimesConf:
    """Returns the constants that explain the rounds of these cases best; relative errors count."""
    no_cost: dict[str, Any] = {**dict.fromkeys(FITTED, 0.0), "bandwidth_share": 1.0}

    def rounds(cost: dict[str, Any], conf: ClusterConf = cluster) -> Any:
        """Returns the cases' rounds, in seconds, if nothing but this constant has a cost besides bytes."""
        times = replace(conf.times, **{**no_cost, **cost})
        machine = machine_for(replace(conf, times=times))
        return np.array([predicted(case, machine, dtype, world).round_s(case.k, 1.0) for case in played])

    # measured = known + reading * (bytes - known) + the sum over constants of value * (what one unit adds)
    measured_s = np.array(spent)
    bytes_s = rounds({})
    known_s = rounds({}, replace(cluster, gb_s=FREE, tflops=FREE))  # sums and messages
    units = [rounds({key: 1 / unit}) - bytes_s for key, unit in FITTED.items()]
    columns = [bytes_s - known_s, *units]
    matrix = np.array(columns).T / measured_s[:, None]
    reading, *values = non_negative(matrix, 1 - known_s / measured_s)

    share = 1 / reading if reading else 1.0
    constants: dict[str, Any] = {
        "bandwidth_share": _short(min(share, MAX_SHARE)),
        **{key: _short(value / unit) for (key, unit), value in zip(FITTED.items(), values, strict=True)},
    }
    return replace(cluster.times, **constants)


def non_negative(matrix: Any, wanted: Any) -> list[float]:
    """Solves by least squares; a constant that would be negative is left out, the worst first."""
    kept = list(range(matrix.shape[1]))
    values = np.zeros(matrix.shape[1])
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
    request = PlanRequest(
        machine=machine,
        target=Role(TARGET, case.target, dtype),
        draft=draft,
        work=Workload(rows=case.rows, prompt_tokens=len(PROMPT), new_tokens=NEW, k=case.k),
        acceptance=0.0,
        steps=step_rule(case.engine or of_constants(machine.is_cpu), NEW, machine.is_cpu),
    )
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
