"""Reads weights a slice at a time from a folder of safetensors files, and reports how much has been read."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from llama_ssp.models.folder import weight_files
from llama_ssp.models.formats.coded import Coded, taken
from llama_ssp.models.layout import model_name
from llama_ssp.models.sharding import Cut

ReadWatch = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Takes the model's name and the bytes to read; what it returns is called with the bytes of each tensor."""
# Tables that old checkpoints hold and that models compute.
COMPUTED = (".inv_freq", ".masked_bias", ".attention.bias", ".attn.bias")


class Source(Protocol):
    """Weights by the names that the model gives them."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, cut: Cut | None) -> Tensor | Coded:
        """The cut part, or all, in memory of its own; quantised matrices as their codes, or decoded."""


class Files(Source, Protocol):
    """The weights of files that are open."""

    def close(self) -> None: ...


class FileSource:
    """The weights of a folder, which `inspect` has checked."""

    def __init__(self, folder: Path, known: Collection[str], prefix: str) -> None:
        """`known`: the model's names of its tensors; `prefix`: their first part, which may lack on disk."""
        self._opened = ExitStack()
        self._places: dict[str, tuple[Any, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(weight_files(folder)):
            handle = self._opened.enter_context(safe_open(file, framework="pt"))
            for key in handle.keys():  # noqa: SIM118, a handle cannot be iterated
                name = model_name(key, known, prefix)
                if name not in known and name.endswith(COMPUTED):
                    continue
                self._places[name] = (handle, key)
                self.shapes[name] = tuple(handle.get_slice(key).get_shape())

    def close(self) -> None:
        self._places.clear()
        self._opened.close()

    def read(self, name: str, cut: Cut | None) -> Tensor | Coded:
        handle, key = self._places[name]
        return taken(handle.get_slice(key) if cut else handle.get_tensor(key), cut)


@contextmanager
def unwatched(_name: str, _total: int) -> Iterator[Callable[[int], None]]:
    yield lambda _count: None


class WatchedSource:
    """A source that reports each tensor when it is first read, by its share of `total` bytes.

    A rank that reads a part of a tensor reports the whole, so that every rank ends at the total.
    """

    def __init__(self, source: Source, total: int, report: Callable[[int], None]) -> None:
        self._source = source
        self.shapes = source.shapes
        self._report = report
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
