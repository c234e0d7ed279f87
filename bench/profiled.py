"""What the host called within one part of a torch profile: its waits for a GPU, and its launches.

The part is a `record_function`: a profile as a whole also has the wait by which the profiler itself ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")  # triton: cu...
GRAPHS = ("cudaGraphLaunch",)


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


def busy_ms(spans: Iterable[Any]) -> float:
    """Milliseconds in which at least one of the spans, in microseconds, runs."""
    found = sorted(spans, key=lambda span: span.start)
    busy, end = 0.0, found[0].start
    for span in found:
        busy += max(span.end - max(span.start, end), 0.0)
        end = max(end, span.end)
    return float(busy / 1000)
