"""How much of a model's weights has been read, for those that show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import prod
from pathlib import Path

from torch import Tensor

from llama_ssp.models.folder import weight_files
from llama_ssp.models.formats.coded import Coded
from llama_ssp.models.safetensors_io import Source
from llama_ssp.models.sharding import Cut

ReadWatch = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Takes the model's name and the bytes to read; what it returns is called with the bytes of each tensor."""


@contextmanager
def unwatched(_name: str, _total: int) -> Iterator[Callable[[int], None]]:
    yield lambda _count: None


class WatchedSource:
    """A source that reports each tensor when it is first read, by its share of `total` bytes.

    A rank that reads a part of a tensor reports the whole, so that every rank ends at the total.
    """

    def __init__(self, source: Source, total: int, report: Callable[[int], None]) -> None:
        self._source, self.shapes, self._report = source, source.shapes, report
        self._bytes_each = total / max(sum(map(prod, self.shapes.values())), 1)
        self._seen: set[str] = set()

    def read(self, name: str, cut: Cut | None) -> Tensor | Coded:
        part = self._source.read(name, cut)
        if name not in self._seen:
            self._seen.add(name)
            self._report(round(prod(self.shapes[name]) * self._bytes_each))
        return part


def bytes_on_disk(path: Path) -> int:
    """The size of a model's weight files."""
    return sum(file.stat().st_size for file in weight_files(path))
