"""Memory for packed weights in pages of 2 MiB: read from end to end, small pages take a fifth longer."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 * 2**20
CHUNK = 64 * 2**20  # asked of the system at once; what is not used of it takes no memory
ALIGNED = 64


class LargePages:
    """Hands out tensors one after the other, of chunks for which large pages are asked."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor without values; the chunk lives as long as one of its tensors."""
        size = -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNED) * ALIGNED
        if self._used + size > len(self._chunk):
            self._chunk, self._used = _chunk(max(CHUNK, size)), 0
        part = self._chunk[self._used : self._used + size]
        self._used += size
        return part.view(dtype)[: torch.Size(shape).numel()].view(shape)


def _chunk(size: int) -> Tensor:
    memory = torch.empty(-(-size // PAGE) * PAGE + PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % PAGE
    chunk = memory[first : len(memory) - PAGE + first]
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError, AttributeError):  # no system that can is needed
            ctypes.CDLL(None).madvise(ctypes.c_void_p(chunk.data_ptr()), ctypes.c_size_t(len(chunk)), advice)
    return chunk
