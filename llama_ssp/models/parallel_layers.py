"""Layers of which each rank holds a part, and the messages that ranks exchange in a forward pass."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.distributed.comm import Ranks
from llama_ssp.models.families import Linear, family_of
from llama_ssp.models.sharding import Sizes, Span, length


class RowParallel(nn.Module):
    """A linear layer, in any number format, with some of the inputs: sums over ranks, adds the bias once."""

    def __init__(self, inner: Any, ranks: Ranks) -> None:
        super().__init__()
        self.bias: Tensor | None = inner.bias
        inner.bias = None
        self.inner, self.ranks = inner, ranks

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.inner.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.ranks.all_reduce(self.inner(x))
        return y if self.bias is None else y + self.bias


class GatheredHead(nn.Linear):
    """Holds some rows of the vocabulary; returns all logits on every rank."""

    ranks: Ranks
    shares: list[int]

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight, self.bias)
        padded = functional.pad(y, (0, max(self.shares) - y.shape[-1])).contiguous()
        parts = self.ranks.all_gather(padded)
        return torch.cat([part[..., :n] for part, n in zip(parts, self.shares, strict=True)], -1)


def gather_head(head: Any, ranks: Ranks, shares: list[Span]) -> None:
    head.__class__, head.ranks, head.shares = GatheredHead, ranks, list(map(length, shares))


def cut_embedding(embedding: Any, held: Span, ranks: Ranks) -> None:
    """Gives zeros for tokens of other ranks' rows, so that the sum over ranks has every row once.

    By hooks, because an embedding's class may do more than look up (gemma2 scales).
    """
    first, last = held
    embedding.padding_idx = None

    def before(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        row = args[0] - first
        module.elsewhere = (row < 0) | (row >= last - first)
        return (row.masked_fill(module.elsewhere, 0),)

    def after(module: Any, _args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return ranks.all_reduce(y.masked_fill(module.elsewhere[..., None], 0))

    embedding.register_forward_pre_hook(before)
    embedding.register_forward_hook(after)


def set_head_counts(module: Any, sizes: Sizes) -> None:
    """Gives every attention module the number of this rank's heads."""
    queries, kvs = sizes.heads.queries, sizes.heads.kvs
    counts = {"num_heads": queries, "num_key_value_heads": kvs, "num_key_value_groups": queries // kvs}
    layers = family_of(module.config.model_type).layers
    outputs = [name for name, linear in layers.items() if linear is Linear.OUTPUT]
    for attention in module.modules():
        if not any(isinstance(getattr(attention, name, None), RowParallel) for name in outputs):
            continue
        for name, count in counts.items():
            if hasattr(attention, name):
                setattr(attention, name, count)
        if Linear.QKV in layers.values():  # the config says where queries end; the model's stays
            attention.config = copy.copy(attention.config)
            attention.config.num_attention_heads = queries
