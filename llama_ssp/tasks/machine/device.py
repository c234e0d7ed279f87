"""Measures one device, and the sums over the ranks' devices, one step after the other.

On a GPU this runs in a small process of its own (small.py): a driver or NCCL may hang there.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from llama_ssp.config import Dtype
from llama_ssp.distributed.comm import Ranks
from llama_ssp.models.devices import dtype_of, now
from llama_ssp.models.host_memory import memory_here
from llama_ssp.models.steps import has_kernels
from llama_ssp.tasks.machine.facts import DEVICE, KERNELS, LAUNCH, MEMORY, PEERS, SUMS, Figures

GPU = "cuda"
COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes of a copy: more than a cache holds
ROOM = 16  # a copy and its source take at most two of so many parts of the memory that is free
COPIES = 5
LAUNCHES = 2000
SIZES = (2**14, 2**20, 2**26)  # bytes that are summed: one token of a wide model, a prompt's chunk, a lot
SUMMED_S = 0.3  # for the sums of one size
MOST_SUMS = 200
PEER_BYTES = 2**22
HEADS = (8, 2, 64)  # of queries, of keys, and their size

Measure = tuple[str, Callable[[], Figures]]


def steps(device: torch.device, open_group: Callable[[], Ranks], tries_peers: bool) -> Iterator[Measure]:
    """Yields what is measured, with its name, in order: what may hang comes late.

    `open_group` connects the ranks that sum. `tries_peers`: whether this rank copies between all GPUs that it
    sees.
    """
    if device.type == "cuda":
        yield DEVICE, partial(facts_of, device)
    yield MEMORY, partial(copy_speed, device)
    yield LAUNCH, partial(launch_cost, device)
    if tries_peers:
        yield PEERS, peer_copies
    yield SUMS, lambda: sum_times(open_group(), device)
    if device.type == "cuda":
        yield KERNELS, partial(try_kernels, device)


def facts_of(device: torch.device) -> Figures:
    """Returns what torch knows of the GPU. Raises what torch raises where it cannot be used."""
    torch.cuda.set_device(device)  # the clock waits for the current one
    torch.zeros(1, device=device).add_(1).item()
    facts = torch.cuda.get_device_properties(device)
    library: Any = torch.cuda.nccl
    return {
        "name": facts.name,
        "capability": [facts.major, facts.minor],
        "built_for": torch.cuda.get_arch_list(),
        "count": torch.cuda.device_count(),
        "nccl": ".".join(map(str, library.version())),
    }


def copy_speed(device: torch.device) -> Figures:
    """Returns the bandwidth of copies within the memory, in GB/s: what is read and what is written."""
    free = memory_here() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    size = max(min(COPIED[device.type], free // ROOM), 1)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    copy.copy_(source)  # its pages are there from now on

    times = list[float]()
    for _ in range(COPIES):
        began = now()
        copy.copy_(source)
        times.append(now() - began)
    return {"gb_s": 2 * size / min(times) / 1e9}


def launch_cost(device: torch.device) -> Figures:
    """Returns the microseconds in which the host calls one operation of torch on a small tensor."""
    numbers = torch.zeros(64, device=device)
    for _ in range(LAUNCHES // 10):
        numbers.add_(1)
    began = now()
    for _ in range(LAUNCHES):
        numbers.add_(1)
    return {"us": 1e6 * (now() - began) / LAUNCHES}


def peer_copies() -> Figures:
    """Returns which GPUs reach each other's memory, and between which of them a copy arrives wrong.

    Each pair is asked, and each GPU copies to the next: a chipset may say yes, and lose what is copied.
    """
    count = torch.cuda.device_count()
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    reachable = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    wrong = list[tuple[int, int]]()
    for one, other in reachable:
        if (one + 1) % count != other:
            continue
        source = torch.arange(PEER_BYTES // 4, dtype=torch.int32, device=torch.device(GPU, one))
        copy = source.to(torch.device(GPU, other))
        if not torch.equal(copy.cpu(), source.cpu()):
            wrong.append((one, other))
    return {"pairs": len(pairs), "reachable": len(reachable), "wrong": wrong}


def sum_times(ranks: Ranks, device: torch.device) -> Figures:
    """Returns the microseconds of a sum over the ranks, by its bytes; all ranks call it."""
    result: Figures = {"world": ranks.world, "through_host": ranks.through_host, "us": {}, "is_right": True}
    if ranks.world == 1:
        return result
    for size in SIZES:
        numbers = torch.ones(size // 4, device=device)
        ranks.all_reduce(numbers)
        if not bool((numbers == ranks.world).all()):
            result["is_right"] = False
        numbers.zero_()

        spent = _spent_s(ranks, numbers, 2)
        (count,) = ranks.broadcast_ints([min(max(int(SUMMED_S / spent), 2), MOST_SUMS)])
        result["us"][size] = 1e6 * _spent_s(ranks, numbers, count)
    return result


def _spent_s(ranks: Ranks, numbers: torch.Tensor, count: int) -> float:
    """Returns the seconds of one of so many sums."""
    ranks.barrier()
    began = now()
    for _ in range(count):
        ranks.all_reduce(numbers)
    return max(now() - began, 1e-9) / count


def try_kernels(device: torch.device) -> Figures:
    """Tries our kernels for GPUs, as a model does before it relies on them; returns why they fail, if so."""
    said = _Warnings()
    log = logging.getLogger("llama_ssp")
    log.addHandler(said)
    try:
        usual = dtype_of(Dtype.auto, device, "model.dtype")
        works = all(has_kernels(dtype.value, dtype, device, HEADS) for dtype in (usual, Dtype.int8))
    finally:
        log.removeHandler(said)
    return {"fails": "" if works else "; ".join(said.lines) or "the log says why"}


class _Warnings(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
