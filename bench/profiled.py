"""What a torch profile says of one part of it: calls of the host, kernels of the GPU, and gaps between them.

The part is a `record_function`: a profile as a whole also has the wait by which the profiler itself ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch.autograd import DeviceType

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")  # triton: cu...
GRAPHS = ("cudaGraphLaunch",)
READBACK = "Memcpy DtoH"  # by which the host gets a round's decision
BINS_US = (2, 5, 20)  # limits of the lengths of gaps


def called(events: Iterable[Any], part: str) -> Counter[str]:
    """How often the host made each call in the part, from `profile.events()`.

    Raises ValueError unless the profile has the part once.
    """
    host = [event for event in events if event.device_type == DeviceType.CPU]  # a GPU's have the same names
    spans = [event.time_range for event in host if event.name == part]
    if len(spans) != 1:
        raise ValueError(f"the profile has {len(spans)} parts {part!r}, not one")
    (span,) = spans
    inside = [event for event in host if span.start <= event.time_range.start < span.end]
    return Counter(event.name for event in inside if event.name != part)


def total(calls: Counter[str], names: Iterable[str]) -> int:
    return sum(calls[name] for name in names)


def kernels(events: Iterable[Any], part: str) -> list[Any]:
    """Returns what the GPU ran, by its start; `part` is no kernel, although the GPU has a span for it."""
    device = [event for event in events if event.device_type == DeviceType.CUDA and event.name != part]
    return sorted(device, key=lambda event: event.time_range.start)


def by_name(events: Iterable[Any]) -> dict[str, tuple[int, float]]:
    """Returns the number and the microseconds of the kernels of each name, the longest total first."""
    counts, spent = Counter[str](), Counter[str]()
    for event in events:
        counts[event.name] += 1
        spent[event.name] += event.time_range.end - event.time_range.start
    return {name: (counts[name], us) for name, us in spent.most_common()}


def gaps(events: list[Any]) -> dict[str, list[float]]:
    """Returns the microseconds of the gaps between kernels, which are sorted by their start.

    `inside a graph` lie between two kernels of one launch, which have one id; `behind the readback` is the
    GPU without work while the host reads a decision; `between launches` are all others.
    """
    result: dict[str, list[float]] = {"inside a graph": [], "between launches": [], "behind the readback": []}
    end = float("-inf")
    for before, after in pairwise(events):
        end = max(end, before.time_range.end)
        if (gap := after.time_range.start - end) <= 0:
            continue
        if before.name.startswith(READBACK):
            result["behind the readback"].append(gap)
        elif before.id == after.id:
            result["inside a graph"].append(gap)
        else:
            result["between launches"].append(gap)
    return result


def binned(gaps_us: Iterable[float]) -> str:
    """Returns how many gaps there are of each length, and their microseconds together."""
    given, result = list(gaps_us), []
    for low, high in pairwise((0.0, *BINS_US, float("inf"))):
        inside = [gap for gap in given if low <= gap < high]
        result.append(f"{low:g} to {high:g} us: {len(inside)}, together {sum(inside):.0f} us")
    return "; ".join(result)
