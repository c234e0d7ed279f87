"""What is counted of a profile: the calls in one part, not those by which the profiler ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from bench.profiled import GRAPHS, LAUNCHES, WAITS, busy_ms, called, total


def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CPU) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)


# As torch profiles one round on a GPU: the part is on the GPU's track, too; torch.cuda.synchronize() comes
# before the recording stops.
ROUND = [
    event("cudaLaunchKernel", 1, 2),
    event("round", 10, 50),
    event("cudaGraphLaunch", 12, 13),
    event("cudaLaunchKernel", 14, 15),
    event("cuLaunchKernel", 16, 17),
    event("kernel", 14, 60, DeviceType.CUDA),
    event("round", 14, 70, DeviceType.CUDA),
    event("cudaStreamSynchronize", 20, 49),
    event("cudaDeviceSynchronize", 80, 90),
]


def test_the_profilers_own_wait_does_not_count() -> None:
    calls = called(ROUND, "round")
    assert total(calls, WAITS) == 1
    assert total(calls, LAUNCHES) == 2 and total(calls, GRAPHS) == 1
    assert sum(one.name in WAITS for one in ROUND) == 2  # of the whole profile


def test_a_second_wait_counts() -> None:
    assert total(called([*ROUND, event("cudaEventSynchronize", 30, 31)], "round"), WAITS) == 2


@pytest.mark.parametrize("events", [ROUND[:1], [*ROUND, event("round", 100, 110)]], ids=["none", "two"])
def test_there_is_one_part(events: list[Any]) -> None:
    with pytest.raises(ValueError, match="parts 'round', not one"):
        called(events, "round")


def test_torchs_own_events_have_what_is_read() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        x = torch.ones(3) + 1
        with record_function("round"):
            x = x.mul(2).mul(3)
        x.mul(4)
    calls = called(seen.events(), "round")
    assert calls["aten::mul"] == 2 and calls["aten::add"] == 0


def test_busy_time_is_what_a_kernel_covers() -> None:
    spans = [SimpleNamespace(start=start, end=end) for start, end in ((10, 14), (0, 4), (1, 2), (13, 20))]
    assert busy_ms(spans) == pytest.approx(0.014)  # all but 4 to 10, in microseconds
