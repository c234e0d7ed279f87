"""What is counted of a profile: the calls in one part, not those by which the profiler ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from bench.profiled import GRAPHS, LAUNCHES, WAITS, binned, by_name, called, gaps, kernels, total


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


def test_gaps_are_told_apart() -> None:
    """Kernels that overlap leave no gap; a gap behind the readback is the host's, whatever comes next."""
    cuda = DeviceType.CUDA
    events = [
        event("cast", 40, 41, cuda, 3), event("gemm", 0, 4, cuda, 1), event("norm", 1, 2, cuda, 1),
        event("gemm", 7, 11, cuda, 1), event("Memcpy DtoH (Device -> Pinned)", 14, 15, cuda, 2), *ROUND[6:7],
        event("gemm", 61, 62, cuda, 3),
    ]  # fmt: skip
    ran = kernels(events, "round")
    assert gaps(ran) == {
        "inside a graph": [3, 20], "between launches": [3], "behind the readback": [25],
    }  # fmt: skip
    assert by_name(ran)["gemm"] == (3, 9) and next(iter(by_name(ran))) == "gemm"
    assert binned([1, 1.5, 20]) == (
        "0 to 2 us: 2, together 2 us; 2 to 5 us: 0, together 0 us; 5 to 20 us: 0, together 0 us; "
        "20 to inf us: 1, together 20 us"
    )
