"""What is counted of a profile: the calls in one part, not those by which the profiler ends."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from bench.profiled import GRAPHS, LAUNCHES, WAITS, called, total


def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CPU, id: int = 0) -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=device, id=id)


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


def test_torchs_own_events_have_what_is_read() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        x = torch.ones(3) + 1
        with record_function("round"):
            x = x.mul(2).mul(3)
        x.mul(4)
    calls = called(seen.events(), "round")
    assert calls["aten::mul"] == 2 and calls["aten::add"] == 0
