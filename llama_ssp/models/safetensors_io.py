"""Reads weights a slice at a time from a folder of safetensors files, and reports how much has been read."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from llama_ssp.models.folder import weight_files
from llama_ssp.models.formats.coded import Coded, taken
from llama_ssp.models.layout import model_name
from llama_ssp.models.sharding import ROWS, Cut

ReadWatch = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Takes the model's name and the bytes to read; what it returns is called with the bytes of each tensor."""
NameOf = Callable[[str], str | None]
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

    def __init__(
        self, folder: Path, known: Collection[str], prefix: str, name_of: NameOf = lambda name: name
    ) -> None:
        """`known`: the model's names of its tensors; `prefix`: their first part, which may lack on disk.

        `name_of` gives the model's name of a tensor on disk, or None for one that is not read (wrapped.py).
        """
        self._opened = ExitStack()
        self._places: dict[str, tuple[Any, str]] = {}
        self._stacked: dict[str, Member] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(weight_files(folder)):
            handle = self._opened.enter_context(safe_open(file, framework="pt"))
            for key in handle.keys():  # noqa: SIM118, a handle cannot be iterated
                own = name_of(key)
                if own is None:
                    continue
                name = model_name(own, known, prefix)
                if name not in known and name.endswith(COMPUTED):
                    continue
                self._places[name] = (handle, key)
                self.shapes[name] = tuple(handle.get_slice(key).get_shape())
        self._take_apart(known)

    def _take_apart(self, known: Collection[str]) -> None:
        """Has each expert's matrices where a file has those of all experts in one tensor."""
        stacks: dict[str, dict[str, tuple[Any, str]]] = {}
        for name, place in self._places.items():
            stem, _, leaf = name.rpartition(".")
            if leaf in (GATE_UP, DOWN) and name not in known:
                stacks.setdefault(stem, {})[leaf] = place

        for stem, places in stacks.items():
            members = _members(stem, places)
            if not members or any(name not in known for name in members):
                continue
            for leaf in places:
                del self._places[f"{stem}.{leaf}"], self.shapes[f"{stem}.{leaf}"]
            self._stacked |= members
            self.shapes |= {name: member.shape for name, member in members.items()}

    def close(self) -> None:
        self._places.clear()
        self._stacked.clear()
        self._opened.close()

    def read(self, name: str, cut: Cut | None) -> Tensor | Coded:
        if name in self._stacked:
            return self._stacked[name].read(cut)
        handle, key = self._places[name]
        return taken(handle.get_slice(key) if cut else handle.get_tensor(key), cut)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A matrix of one expert, where a file has the experts of a layer in one tensor.

    The tensor is (experts, inputs, outputs) or (experts, outputs, inputs). The matrix has its outputs from
    `first` on: gates are half of them, and what they multiply is the other half.
    """

    handle: Any
    key: str
    number: int
    first: int
    shape: tuple[int, int]  # outputs and inputs
    inputs_first: bool

    def read(self, cut: Cut | None) -> Tensor:
        """Returns the cut part, or all, outputs before inputs."""
        outputs, inputs = self.shape
        rows = [(0, outputs)]
        columns = [(0, inputs)]
        if cut is not None and cut.dim == ROWS:
            rows = [*cut.spans]
        elif cut is not None:
            columns = [*cut.spans]

        stack = self.handle.get_slice(self.key)
        parts = []
        for row, column in product(rows, columns):
            row_slice = slice(self.first + row[0], self.first + row[1])
            column_slice = slice(*column)
            if self.inputs_first:
                part = stack[self.number : self.number + 1, column_slice, row_slice][0].T
            else:
                part = stack[self.number : self.number + 1, row_slice, column_slice][0]
            parts.append(part)
        dim = 0 if len(rows) > 1 else 1
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        copy: Tensor = whole.clone(memory_format=torch.contiguous_format)  # a slice may be a view of the file
        return copy


GATE_UP = "gate_up_proj"
DOWN = "down_proj"


def _members(stem: str, stacks: dict[str, tuple[Any, str]]) -> dict[str, Member]:
    """Returns the matrices of a layer's experts by the names that single ones have; empty if they are none.

    `stacks`: the tensors `gate_up_proj` and `down_proj` that have those of all experts.
    """
    if stacks.keys() != {GATE_UP, DOWN}:
        return {}
    sizes = {leaf: handle.get_slice(key).get_shape() for leaf, (handle, key) in stacks.items()}
    if any(len(each) != 3 for each in sizes.values()):
        return {}
    experts, first, last = sizes[GATE_UP]
    _, down_first, down_last = sizes[DOWN]
    inputs_first = first == down_last and last == 2 * down_first
    dim, width = (first, down_first) if inputs_first else (last, down_last)

    result = {}
    for number in range(experts):
        for name, leaf, place, shape in (
            ("gate_proj", GATE_UP, 0, (width, dim)),
            ("up_proj", GATE_UP, width, (width, dim)),
            ("down_proj", DOWN, 0, (dim, width)),
        ):
            handle, key = stacks[leaf]
            result[f"{stem}.{number}.{name}.weight"] = Member(
                handle=handle, key=key, number=number, first=place, shape=shape, inputs_first=inputs_first
            )
    return result


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
