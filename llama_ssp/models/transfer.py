"""Copies from the host to a device without waiting.

A copy from ordinary memory blocks the host until the device has finished earlier work. A copy from pinned
memory is queued, and torch keeps that memory until it is read. So the host waits for a GPU once a round: for
what was decided (tests/test_waits.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sent(numbers: Any, device: torch.device) -> Tensor:
    """A host tensor, or (nested) lists of numbers, as a tensor on the device."""
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")
