"""Numbers of the host on their way to a device, for which nobody waits.

A copy from ordinary memory has the host wait until the device has done all it was asked before. One from
pinned memory takes its place in the queue, and torch keeps that memory until it has been read. So of a round
on a GPU the host waits once: for what was decided (tests/test_waits.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sent(numbers: Any, device: torch.device) -> Tensor:
    """A host tensor, or (nested) lists of numbers, as a tensor of the device."""
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")
