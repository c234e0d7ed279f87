"""Adds a LoRA adapter to a model's weights while they are read: W + scale * B A, of a rank's slices alone.

Product and sum are in fp32, and are rounded once, to the number format that the model is loaded in.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from llama_ssp.config import ModelConf
from llama_ssp.models.adapter import (
    Adapter,
    Base,
    Changes,
    LowRank,
    adapter_folder,
    changes,
    coded,
    read_adapter,
)
from llama_ssp.models.families import family_of
from llama_ssp.models.folder import adapter_file
from llama_ssp.models.formats.coded import DECODED_AT_ONCE, Coded, taken
from llama_ssp.models.safetensors_io import Source
from llama_ssp.models.sharding import COLUMNS, ROWS, Cut, Span, length, shifted

WIDE = torch.float32  # of products and sums, where nothing is wider
Spans = tuple[Span, ...] | None  # None: all


class AdapterFile:
    """The tensors of an adapter whose file is open."""

    def __init__(self, adapter: Adapter, changes: Changes, opened: ExitStack) -> None:
        self.changes = changes
        self._handle: Any = opened.enter_context(safe_open(adapter_file(adapter.path), framework="pt"))

    def replaced(self, name: str, cut: Cut | None) -> Tensor | None:
        """Returns the cut part of a table that the adapter has whole; None if it does not have this one."""
        key = self.changes.replaced.get(name)
        if key is None:
            return None
        return taken(self._handle.get_slice(key) if cut else self._handle.get_tensor(key), cut)

    def added_to(self, name: str, weight: Tensor, cut: Cut | None, numbers: torch.dtype) -> Tensor:
        """Returns the cut part of a weight with what the adapter adds to it, in this number format.

        The part may be changed in place.
        """
        low_rank = self.changes.added.get(name)
        if low_rank is None:
            return weight
        rows: Spans = None
        columns: Spans = None
        expert = low_rank.expert
        if cut is not None:
            dim = cut.dim
            if cut.number is not None:  # a stack's dimension 0
                expert = cut.number
                dim -= 1
            rows = cut.spans if dim == ROWS else None
            columns = cut.spans if dim == COLUMNS else None
        left, right = self._factors(low_rank, rows, columns, expert)
        return summed(weight, left, right, low_rank.scale, numbers)

    def _factors(self, low_rank: LowRank, rows: Spans, columns: Spans, expert: int) -> tuple[Tensor, Tensor]:
        """Returns left, (rows, rank), and right, (rank, columns), of these parts of the weight."""
        outputs, inputs = (columns, rows) if low_rank.transposed else (rows, columns)
        ranks = slice(None)  # of the expert, in A
        if low_rank.experts > 1:
            ranks = slice(expert * low_rank.rank, (expert + 1) * low_rank.rank)
        if low_rank.outputs is not None:
            spans = outputs or ((0, length(low_rank.outputs)),)
            outputs = tuple(shifted(span, low_rank.outputs[0]) for span in spans)
        a = self._part(low_rank.a, COLUMNS, inputs, ranks)  # (rank, inputs)
        b = self._part(low_rank.b, ROWS, outputs)[:, expert :: low_rank.experts]  # (outputs, rank)
        return (a.T, b.T) if low_rank.transposed else (b, a)

    def _part(self, key: str, dim: int, spans: Spans, across: slice = slice(None)) -> Tensor:
        """Returns the spans of one dimension of a matrix, and the places `across` of the other one."""
        whole = self._handle.get_slice(key)
        places = [slice(None)] if spans is None else [slice(first, last) for first, last in spans]
        parts = [whole[(place, across) if dim == ROWS else (across, place)] for place in places]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class AdaptedSource:
    """The weights of a model's files with those that an adapter changes."""

    def __init__(self, source: Source, adapter: AdapterFile, numbers: torch.dtype) -> None:
        """`numbers`: the format in which the model is loaded."""
        self._source = source
        self._adapter = adapter
        self._numbers = numbers
        self.shapes = source.shapes

    def read(self, name: str, cut: Cut | None) -> Tensor | Coded:
        """Returns the cut part, or all, in memory of its own; what is changed is in `numbers`."""
        weight: Tensor | Coded | None = self._adapter.replaced(name, cut)
        if weight is None:
            weight = self._source.read(name, cut)
        if isinstance(weight, Coded):
            if name in self._adapter.changes.added:
                raise coded(name)
            return weight
        return self._adapter.added_to(name, weight, cut, self._numbers)


def summed(weight: Tensor, left: Tensor, right: Tensor, scale: float, numbers: torch.dtype) -> Tensor:
    """Returns weight + scale * left @ right in this number format, in place if it is the weight's.

    Sums are in fp32, or wider where a format is, some rows at a time, whose copies take little memory.
    """
    wide = torch.promote_types(WIDE, torch.promote_types(weight.dtype, numbers))
    result = weight if weight.dtype == numbers else torch.empty_like(weight, dtype=numbers)
    rows = max(1, DECODED_AT_ONCE // max(1, weight.shape[1]))
    right = right.to(weight.device, wide)
    for first in range(0, len(weight), rows):
        part = slice(first, first + rows)
        left_part = left[part].to(weight.device, wide)
        result[part] = torch.addmm(weight[part].to(wide), left_part, right, alpha=scale)
    return result


@contextmanager
def adapted(
    source: Source, model: ModelConf, config: Any, role: str, numbers: torch.dtype
) -> Iterator[Source]:
    """Opens the model's adapter and yields the source with its changes; without one the source itself."""
    folder = adapter_folder(model)
    if folder is None:
        yield source
        return
    family = family_of(config.model_type)
    base = Base(
        shapes=source.shapes,
        family=family,
        prefix=family.names.embedding.partition(".")[0],
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )
    adapter = read_adapter(folder, role)
    with ExitStack() as opened:
        yield AdaptedSource(source, AdapterFile(adapter, changes(adapter, base), opened), numbers)


@torch.no_grad()
def merge(module: Any, model: ModelConf, role: str) -> None:
    """Merges the model's adapter, if it has one, into the weights of transformers' module."""
    folder = adapter_folder(model)
    if folder is None:
        return
    weights = dict(module.named_parameters(remove_duplicate=False))
    if getattr(module, "is_quantized", False):
        raise coded(f"{role} {model.name}")
    base = Base(
        shapes={name: tuple(weight.shape) for name, weight in weights.items()},
        family=family_of(module.config.model_type),
        prefix=module.base_model_prefix,
        tied=bool(module.config.tie_word_embeddings),
        flipped={f"{name}.weight" for name, layer in module.named_modules() if _is_flipped(layer)},
    )
    adapter = read_adapter(folder, role)
    with ExitStack() as opened:
        file = AdapterFile(adapter, changes(adapter, base), opened)
        for name in {*file.changes.added, *file.changes.replaced}:
            weight = weights[name]
            if (table := file.replaced(name, None)) is not None:
                weight.copy_(table)
            file.added_to(name, weight.data, None, weight.dtype)


def _is_flipped(layer: nn.Module) -> bool:
    """Returns whether the layer's weight has inputs before outputs: transformers' Conv1D, of GPT-2."""
    return type(layer).__name__ == "Conv1D"
