"""Measures this machine when a run has ended well, if nothing is kept of it yet: for later plans.

It takes a calibration's way (calibrate.py) with fewer and shorter rounds, in 3 s. The run itself has ended by
then: it is not slower, and not decided by what is measured. While other programs use the cores nothing is
measured, and the next run tries again.

Our CPU kernels are measured where the run has used them, or else by the first run that does.

Of GPUs only sums over ranks and messages are measured. Their other constants are of CUDA graphs, which take
long to make: those of the GPU's preset hold until a calibration.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import torch

from llama_ssp.config import CalibrateConf, ClusterConf, PlacementConf, RunConf, TimesConf
from llama_ssp.config.environment import rank_environment
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import RunError
from llama_ssp.models.devices import device_of, now
from llama_ssp.models.host_cores import LEAST_S, core_times, free_cores
from llama_ssp.models.host_memory import memory_here
from llama_ssp.models.kernels import linear
from llama_ssp.placing.kept_constants import BY_RUN, Constants, can_keep, threads_of
from llama_ssp.placing.this_machine import kept_of
from llama_ssp.planner.storage import CPU
from llama_ssp.tasks.calibrate import (
    DEPTHS,
    HEAD,
    NAME,
    VOCABULARIES,
    WIDE,
    WIDE_LAYERS,
    WIDE_VOCABULARY,
    WIDTH,
    Case,
    Effort,
    TooSlow,
    keep,
    measured,
    shape,
)

log = logging.getLogger(__name__)

MOST_S = 2.5  # without the looks at what other programs do, before and after
NEW = 8  # tokens of a text
K = 2
STREAMED = {"cpu": 2**27, "cuda": 2**31}  # bytes
ROOM = 4  # the streamed bytes take at most one of so many parts of the free memory
LOOK_S = LEAST_S + 0.05  # at what other programs do
QUIET = 0.3  # of a core: others may use that much of those that a run needs


def measure_first(run: RunConf, ranks: Ranks) -> None:
    """Measures and keeps this machine's constants, if it should; all ranks call it, after a run.

    What fails here must not make a run fail that has ended well.
    """
    if not _is_wanted(run, ranks):
        return
    device = device_of(run.placement.target_device, "placement.target_device")
    effort = short_effort(device)
    needed = ROOM * effort.streamed
    is_short = any(free < needed for (free,) in ranks.gather_ints([_free_bytes(device)]))
    if is_short or _others_compute(ranks, device):
        log.debug("this machine is not measured: its memory or its cores are in use; the next run tries")
        return

    began = now()
    try:
        with _errors_alone():
            cluster, _ = measured(_of_calibration(run), ranks, NAME, effort)
    except TooSlow:
        log.debug("this machine is not measured: it takes too long; the next run tries again")
        return
    except (RunError, RuntimeError) as error:
        if ranks.world > 1:  # the other ranks wait for this one
            raise
        log.debug("this machine cannot be measured: %s", error)
        return
    if _others_compute(ranks, device):
        log.debug("this machine is not measured: others began to use its cores; the next run tries")
    elif ranks.is_leader:
        log.debug("this machine was measured in %.1f s", now() - began)
        keep(_what_holds(cluster), ranks.world, BY_RUN)


def _what_holds(cluster: ClusterConf) -> ClusterConf:
    """Returns what of the measured figures later plans may go by."""
    if cluster.gpu == CPU:
        return replace(cluster, context_mib=None)  # the run's own memory is in it
    times = TimesConf(all_reduce_us=cluster.times.all_reduce_us, message_us=cluster.times.message_us)
    return ClusterConf(
        gpu=cluster.gpu, times=times, between_us=cluster.between_us, between_gb_s=cluster.between_gb_s
    )


def short_effort(device: torch.device) -> Effort:
    """Returns what a run takes. On a GPU no rounds: their graphs take long to make."""
    played = short_cases() if device.type == CPU else []
    return Effort(cases=played, new=NEW, streamed=STREAMED[device.type], repeats=1, limit_s=MOST_S)


def short_cases() -> list[Case]:
    """Returns texts without drafts by every size of a calibration's models, and with drafts by some."""
    sizes = [(layers, WIDTH, vocab, HEAD) for layers, vocab in product(DEPTHS, VOCABULARIES)]
    sizes.append((WIDE_LAYERS, WIDE, WIDE_VOCABULARY, WIDE // 12))
    regular = [Case(shape(layers, dim, vocab, head_dim=head)) for layers, dim, vocab, head in sizes]

    drafted = []
    for layers, dim, vocab, head in (sizes[0], sizes[3], sizes[4]):
        target = shape(layers, dim, vocab, head_dim=head)
        drafted.append(Case(target, shape(DEPTHS[0], dim, vocab, head_dim=head), K))
    return [*regular, *drafted]


def _is_wanted(run: RunConf, ranks: Ranks) -> bool:
    """Whether the leader knows too little of this machine, and the run has planned for it."""
    is_wanted = False
    if ranks.is_leader and can_keep() and not isinstance(run.task, CalibrateConf):
        kept = kept_of(run, ranks.world)
        if kept is not None:
            constants = kept.constants or Constants()
            here = rank_environment()
            is_wanted = constants.lacks_sums(here.of_node, here.nodes)
            if kept.on_cpu and here.nodes > 1:
                is_wanted = False  # what is kept of a CPU is for the ranks of one machine
            elif kept.on_cpu:
                lacks_kernels = constants.lacks_kernels and linear.is_loaded()
                is_wanted = is_wanted or kept.constants is None or lacks_kernels
    (answer,) = ranks.broadcast_ints([int(is_wanted)])
    return bool(answer)


def _of_calibration(run: RunConf) -> RunConf:
    """Returns what a calibration's run would be: where the models are is as in the run, nothing else."""
    place = run.placement
    placement = PlacementConf(target_device=place.target_device, timeout_s=place.timeout_s)
    return RunConf(placement=placement, task=CalibrateConf())


def _free_bytes(device: torch.device) -> int:
    return memory_here() if device.type == CPU else torch.cuda.mem_get_info(device)[0]


def _others_compute(ranks: Ranks, device: torch.device) -> bool:
    """Whether other programs use cores that the ranks need, which do nothing meanwhile; all ranks call it."""
    ranks.barrier()
    before = core_times()
    time.sleep(LOOK_S)
    free = free_cores(before)
    is_busy = False
    if free is not None:
        threads = threads_of(ranks.world) if device.type == CPU else 1
        needed = min(threads * ranks.world, len(free.cores))
        is_busy = len(free.cores) - free.taken < needed - QUIET
    (answer,) = ranks.broadcast_ints([int(is_busy)])
    return bool(answer)


@contextmanager
def _errors_alone() -> Iterator[None]:
    """Opens a context in which the loading of the small models says nothing on the screen."""
    package = logging.getLogger("llama_ssp")
    level = package.level
    package.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        package.setLevel(level)
