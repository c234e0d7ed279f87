"""Puts weights into a module that has none: all of them, or one rank's part of each.

A weight is read, cut, moved and, in 8 and 4 bit, quantised before the next one is read, so that at most one
is held whole. Weights without a cut, such as norms, are read whole.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.config import Dtype
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import ModelError
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.families import family_of
from llama_ssp.models.parallel_layers import RowParallel, cut_embedding, gather_head, set_head_counts
from llama_ssp.models.quantization import QUANTISED, quantised
from llama_ssp.models.safetensors_io import Source
from llama_ssp.models.shape import stored_shapes
from llama_ssp.models.sharding import COLUMNS, CUTS, ROWS, Cut, Sizes, unsplit, vocab_share

CPU = torch.device("cpu")
PLANNED = {"colwise": ROWS, "rowwise": COLUMNS}  # in transformers' plans, for y = x W^T with W on disk
HELD_BACK = 16 * 2**20  # bytes read between two returns of memory to the system


def cut_module(
    module: Any, source: Source, ranks: Ranks, dtype: Dtype, device: torch.device, drafts: bool = False
) -> int:
    """Makes a module without weights this rank's part, with weights; returns the size of the vocabulary.

    `differences` has compared the module with the source. Of a draft (`drafts`) rank 0 alone holds the
    embedding, and the other ranks need not know the token ids.
    """
    require_known(module)
    sizes = Sizes.of(module.config, ranks.world, ranks.rank)
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    vocab = int(head.weight.shape[0])
    shares = [vocab_share(vocab, ranks.world, rank) for rank in range(ranks.world)]
    looked_up = shares[ranks.rank]
    if drafts:
        looked_up = (0, vocab if ranks.is_leader else 0)
    cuts = cuts_of(module, sizes)
    for name, layer in module.named_modules():
        if layer is head:
            cuts[name] = Cut(ROWS, (shares[ranks.rank],))
        elif layer is embedding:
            cuts[name] = Cut(ROWS, (looked_up if looked_up[1] else (0, 1),))
    fill_module(module, source, dtype, device, cuts)
    for name, cut in cuts.items():
        if cut.dim == COLUMNS:
            module.set_submodule(name, RowParallel(module.get_submodule(name), ranks))
    cut_embedding(embedding, looked_up, ranks)
    gather_head(head, ranks, shares)
    set_head_counts(module, sizes)
    return vocab


def cuts_of(module: Any, sizes: Sizes) -> dict[str, Cut]:
    """The cut of every linear layer in the family's row, by the layer's full name."""
    layers, cuts = family_of(module.config.model_type).layers, {}
    for name, layer in module.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(layer, nn.Linear) and leaf in layers:
            dim, spans = CUTS[layers[leaf]]
            cuts[name] = Cut(dim, spans(sizes, layer.weight.shape[dim]))
    return cuts


def require_known(module: Any) -> None:
    """Refuses a family that is not split, or that transformers' own plan splits in another way."""
    name = module.config.model_type
    family = family_of(name)
    if not family.split:
        raise unsplit(type(module).__name__, name)
    for pattern, way in (getattr(module.config, "base_model_tp_plan", None) or {}).items():
        leaf, side = pattern.rpartition(".")[2], PLANNED.get(way.partition("_")[0])
        if side is not None and (leaf not in family.layers or CUTS[family.layers[leaf]][0] != side):
            what = "the architecture has a layer that this program cannot split"
            raise ModelError(what, name, f"{pattern}: {way}", fix="run it in one process")


def fill_module(
    module: Any, source: Source, dtype: Dtype, device: torch.device, cuts: dict[str, Cut] | None = None
) -> None:
    """Gives every parameter its value, or the part in `cuts`, on the device.

    In 8 and 4 bit every linear layer but the head is quantised.
    """
    cuts, held = cuts or {}, TORCH_DTYPES[dtype]
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = bool(getattr(module.config, "tie_word_embeddings", False))
    freed = 0
    for name, layer in list(module.named_modules()):
        cut = cuts.get(name)
        shrinks = dtype in QUANTISED and isinstance(layer, nn.Linear) and layer is not head
        values: dict[str, Tensor] = {}
        for leaf, parameter in layer._parameters.items():
            key = f"{name}.{leaf}" if name else leaf
            if parameter is None or (layer is head and key not in source.shapes and tied):
                continue
            whole = cut is None or (parameter.ndim == 1 and cut.dim == COLUMNS)
            part = source.read(key, None if whole else cut)
            # Quantising begins on the CPU, and ends on the device.
            values[leaf], freed = part.to(CPU if shrinks else device, held), freed + part.nbytes
        if freed > HELD_BACK:
            return_memory()
            freed = 0
        if shrinks:
            module.set_submodule(name, quantised(dtype, values["weight"], values.get("bias"), device))
            continue
        for leaf, value in values.items():
            layer._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        if isinstance(layer, nn.Linear) and cut is not None:
            layer.out_features, layer.in_features = layer.weight.shape
        for leaf, buffer in layer._buffers.items():
            layer._buffers[leaf] = None if buffer is None else buffer.to(device)
    if tied and head.weight.is_meta:
        head.weight = _tied(module, source, dtype, device, cuts)
    elif tied and torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
    return_memory()


def return_memory() -> None:
    """Has the C library return freed memory to the system: glibc keeps many megabytes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _tied(
    module: Any, source: Source, dtype: Dtype, device: torch.device, cuts: dict[str, Cut]
) -> nn.Parameter:
    """The head of a tied model: rows of the embedding, read again if this rank does not hold them."""
    names = {layer: name for name, layer in module.named_modules()}
    table, head = module.get_input_embeddings(), module.get_output_embeddings()
    wanted, held = cuts.get(names[head]), cuts.get(names[table])
    if wanted is None or wanted == held:
        weight: nn.Parameter = table.weight
        return weight
    first, last = wanted.spans[0]
    if table.weight.shape[0] >= last:
        return nn.Parameter(table.weight[first:last], requires_grad=False)
    rows = source.read(f"{names[table]}.weight", wanted).to(device, TORCH_DTYPES[dtype])
    return nn.Parameter(rows, requires_grad=False)


def differences(module: Any, source: Source) -> dict[str, list[str]]:
    """How the source's tensors differ from those of the module, in the words of transformers' report."""
    wanted = stored_shapes(module)
    tied = {"lm_head.weight"} if getattr(module.config, "tie_word_embeddings", False) else set()
    found = source.shapes
    other = [n for n in wanted.keys() & found.keys() if found[n] != wanted[n]]
    return {
        "missing_keys": sorted(wanted.keys() - found.keys() - tied),
        "mismatched_keys": sorted(f"{n}: {found[n]} not {wanted[n]}" for n in other),
        "unexpected_keys": sorted(found.keys() - wanted.keys()),
    }


def require_filled(module: nn.Module) -> None:
    """Refuses a module with a weight that was not read."""
    empty = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    if empty:
        what, found = "weights were not read", f"{len(empty)}: {empty[0]}"
        raise ModelError(what, type(module).__name__, found, fix="report it")
