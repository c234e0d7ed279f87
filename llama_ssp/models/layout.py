"""The tensors of a model, a row each: name on disk, sizes, and what ranks divide. No torch.

The loader reads its rank's share of the rows (shares.py), and the planner sums their bytes. Modules:

    tensor_row.py             what a row says
    layout_sizes.py           the sizes of a model that its rows are made of
    block_tensors.py          the rows of blocks: attention, linear attention, MLP, experts, norms
    trained_head_tensors.py   the rows of trained heads
    cache_layout.py           what a cache keeps of a layer
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache

from llama_ssp.models.block_tensors import (
    attention_rows,
    block_norm_rows,
    delta_rows,
    expert_rows,
    mlp_rows,
    norm_row,
)
from llama_ssp.models.layout_sizes import Sizes
from llama_ssp.models.tensor_row import EMBEDDING, HEAD, POSITIONS, Part, Split, TensorRow
from llama_ssp.models.trained_head_tensors import trained_head_rows

RENAMED = {"embed_out.": "lm_head."}  # beginnings of names on disk, and in the model


@lru_cache(maxsize=256)
def layout(sizes: Sizes) -> tuple[TensorRow, ...]:
    """Returns the model's rows, in the order in which they are read."""
    rows = trained_head_rows(sizes) if sizes.trained_head is not None else _model(sizes)
    return tuple(row for row in rows if row.blocks is None or row.blocks)


def rows_of(sizes: Sizes, part: Part, full: bool = False) -> list[TensorRow]:
    """Returns the rows of a part; with `full` those of blocks that have the heads of `Sizes.full`."""
    return [row for row in layout(sizes) if row.part is part and row.full == full]


def tensors_on_disk(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Returns the sizes of each tensor by its name; also of a tied head, which may be absent."""
    tensors: dict[str, tuple[int, ...]] = {}
    for row in layout(sizes):
        prefixes = [""] if row.blocks is None else map(sizes.prefix, row.blocks)
        for prefix in prefixes:
            numbers = range(1) if row.stacked else range(max(1, row.experts))
            for number in numbers:
                tensors[prefix + row.weight.format(number)] = row.weight_sizes
                if row.bias:
                    tensors[prefix + row.bias.format(number)] = row.bias_sizes
    return tensors


def model_name(key: str, known: Collection[str], prefix: str) -> str:
    """Returns the model's name for a tensor on disk: with the prefix, without it, or renamed."""
    for old, new in RENAMED.items():
        if key not in known and key.startswith(old):
            key = new + key.removeprefix(old)
    candidates = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
    return next((name for name in candidates if name in known), key)


def _model(sizes: Sizes) -> Iterator[TensorRow]:
    """Yields the rows of a model that is not a trained head."""
    names = sizes.family.names
    yield TensorRow(
        part=Part.embedding,
        group=EMBEDDING,
        weight=f"{names.embedding}.weight",
        outputs=sizes.vocab,
        inputs=sizes.dim,
        split=Split.tokens,
    )
    if sizes.position_rows:
        yield TensorRow(
            part=Part.positions,
            group=POSITIONS,
            weight=f"{names.positions}.weight",
            outputs=sizes.position_rows,
            inputs=sizes.dim,
        )
    yield from block_norm_rows(sizes)
    yield from attention_rows(sizes)
    yield from delta_rows(sizes)
    yield from mlp_rows(sizes)
    yield from expert_rows(sizes)
    yield norm_row(sizes, Part.norm, names.norm)
    yield TensorRow(
        part=Part.head,
        group=HEAD,
        weight=f"{names.head}.weight",
        outputs=sizes.vocab,
        inputs=sizes.dim,
        split=Split.vocabulary,
    )
