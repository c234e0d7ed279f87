"""Memory in pages of 2 MiB, for packed weights and caches: with small pages, reading takes a fifth longer."""

import mmap

import torch
from torch import Tensor

PAGE = 2 * 2**20
CHUNK = 64 * 2**20  # asked of the system at once; what is not used of it takes no memory
ALIGNED = 64


class LargePages:
    """Hands out tensors one after the other, of chunks for which large pages are asked."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor without values; the chunk lives as long as one of its tensors."""
        count = torch.Size(shape).numel()
        size = -(-count * dtype.itemsize // ALIGNED) * ALIGNED
        if self._used + size > len(self._chunk):
            self._chunk = _chunk(max(CHUNK, size))
            self._used = 0
        part = self._chunk[self._used : self._used + size]
        self._used += size
        return part.view(dtype)[:count].view(shape)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor without values, in memory of its own: compiled steps may write into it."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size < PAGE:
        return torch.empty(shape, dtype=dtype)
    return _chunk(size).view(dtype).view(shape)


def _chunk(size: int) -> Tensor:
    try:
        memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):  # a system without them; or without memory, which torch then says
        return torch.empty(size, dtype=torch.uint8)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=first)
