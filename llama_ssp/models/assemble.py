"""Builds a decoder from a checkpoint: reads, cuts and fuses each weight, one after the other.

Of a model over several ranks each reads its own slices: whole KV heads with their queries, columns of the
MLP, rows of the vocabulary, in shares that may differ (sharding.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.models.attention import Rotary, Scores
from llama_ssp.models.decoder import Attention, Block, Decoder, HeadNorms, Mlp, Norm, WholeNorms
from llama_ssp.models.experts import Experts, Gate, Routing
from llama_ssp.models.linear import Embedding, Head, Summed, dense
from llama_ssp.models.safetensors_io import Source
from llama_ssp.models.shape import BlockShape, Shape, rotary_parameters, shape_of
from llama_ssp.models.sharding import COLUMNS, ROWS, Cut, Span, head_ranges, length, mlp_share, vocab_share

Product = Callable[[Tensor, Tensor | None], nn.Module]  # of a weight and a bias: a format of linear layers
Stacks = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # of experts: up and down, and their biases


def decoder(
    config: Any, source: Source, ranks: Ranks = ALONE, dtype: torch.dtype = torch.float32,
    product: Product = dense, head: Product | None = None, device: torch.device | None = None,
) -> Decoder:  # fmt: skip
    """This rank's part of the model; `shape.reason_against` has found nothing against it.

    `product` is the format of linear layers; `head` that of the last one, which is not quantised.
    """
    where = device or torch.device("cpu")
    return Assembly(config, source, ranks, dtype, product, head or product, where).whole()


class Assembly:
    """What all weights of a model are read with."""

    def __init__(
        self, config: Any, source: Source, ranks: Ranks, dtype: torch.dtype, product: Product,
        head: Product, device: torch.device,
    ) -> None:  # fmt: skip
        self.config, self.source, self.ranks, self.dtype = config, source, ranks, dtype
        self.product, self.head, self.device = product, head, device
        self.shape: Shape = shape_of(config)
        self.names = self.shape.family.names
        self.heads = head_ranges(self.shape.n_heads, self.shape.n_kv, ranks.world, ranks.rank)
        self.mlp = mlp_share(self.shape.ffn, ranks.world, ranks.rank)
        self.split = ranks.world > 1
        self.reduce = ranks.all_reduce if self.split else None

    def whole(self) -> Decoder:
        shape, names, world = self.shape, self.names, self.ranks.world
        vocab = self.source.shapes[f"{names.embedding}.weight"][0]
        shares = [vocab_share(vocab, world, rank) for rank in range(world)]
        own = shares[self.ranks.rank]
        table_VH = self.read(f"{names.embedding}.weight", Cut(ROWS, (own,)) if self.split else None)
        assert table_VH is not None
        embedding = Embedding(table_VH, shape.embedding_scale, own[0], self.reduce)
        rows = Cut(ROWS, (own,)) if self.split else None
        head_VH = self.read(f"{names.head}.weight", rows)
        product = self.head(table_VH if head_VH is None else head_VH, self.read(f"{names.head}.bias", rows))
        gather = self.ranks.all_gather if self.split else None
        offset = shape.family.position_rows
        found = Decoder(
            embedding, self.read(f"{names.positions}.weight"), offset or 0,
            {} if offset is not None else self.rotaries(),
            [self.block(f"{names.blocks}.{number}.", block) for number, block in enumerate(shape.blocks)],
            self.norm(names.norm), Head(product, list(map(length, shares)), gather),
            shape.logit_divisor, shape.logit_softcap,
        )  # fmt: skip
        return found.eval().to(self.device)

    def rotaries(self) -> dict[str, Rotary]:
        return {kind: Rotary.of(self.config, kind) for kind in rotary_parameters(self.config)}

    def block(self, prefix: str, own: BlockShape) -> Block:
        names, kinds = self.names, ("before_attention", "after_attention", "before_mlp", "after_mlp")
        norms = {kind: self._first_norm(prefix, getattr(names, kind)) for kind in kinds}
        attention = self.attention(prefix, own)
        mlp = self.experts(prefix) if own.experts else self.dense_mlp(prefix)
        shared = self.shape.parallel and isinstance(norms["before_mlp"], nn.Identity)
        return Block(attention, mlp, norms, self.shape.residual_scale, self.shape.parallel, shared)

    def attention(self, prefix: str, own: BlockShape) -> Attention:
        shape, names, heads = self.shape, self.names, self.heads
        sizes = [count * shape.head_dim for count in (heads.queries, heads.kvs, heads.kvs)]
        sinks = None
        if names.sinks:
            sinks = self.read(prefix + names.sinks, Cut(ROWS, (heads.query,)))
        qkv = [(prefix + name, spans) for name, spans in zip(names.qkv, self._qkv(), strict=True)]
        return Attention(
            self.columns(qkv),
            self.rows(prefix + names.output, [_times(heads.query, shape.head_dim)]),
            sizes, shape.head_dim, Scores(shape.scale, own.window, shape.softcap), own.rotary,
            self.qk_norms(prefix), sinks,
        )  # fmt: skip

    def qk_norms(self, prefix: str) -> nn.Module | None:
        shape, heads, names = self.shape, self.heads, [prefix + name for name in self.names.qk_norm]
        if not names:
            return None
        if not shape.family.whole_qk_norm:
            return HeadNorms(*map(self.norm, names))
        cuts = (Cut(ROWS, (_times(span, shape.head_dim),)) for span in (heads.query, heads.kv))
        query, key = (
            self._need(f"{name}.weight", cut).view(-1, shape.head_dim)
            for name, cut in zip(names, cuts, strict=True)
        )
        copies = max(1, self.ranks.world // shape.n_kv)  # of a key, over the ranks
        sizes = shape.n_heads * shape.head_dim, copies * shape.n_kv * shape.head_dim
        return WholeNorms((query, key), sizes, shape.epsilon, self.reduce)

    def dense_mlp(self, prefix: str) -> Mlp:
        names, width = self.names, self.shape.ffn
        fused = self.shape.family.fused_mlp
        gated = fused or len(names.up) == 2
        spans = [self.mlp, _behind(self.mlp, width)] if fused else [self.mlp]
        up = self.columns([(prefix + name, spans) for name in names.up])
        return Mlp(up, self.rows(prefix + names.down, [self.mlp]), self.activation(), gated)

    def experts(self, prefix: str) -> Experts:
        """Every rank has the router, and its columns of all experts."""
        shape = self.shape
        router = dense(*self._plain(prefix + self.names.router))
        routing = Routing(shape.top_k, shape.normed_top, after=shape.family.clamped)
        gate = Gate(shape.activation, shape.gate_alpha, shape.gate_limit)
        stacks = self._stacked if shape.family.clamped else self._one_by_one
        share = mlp_share(shape.expert_ffn, self.ranks.world, self.ranks.rank)
        return Experts(router, *stacks(prefix, share), gate, routing, self.reduce)

    def _one_by_one(self, prefix: str, share: Span) -> Stacks:
        """Of experts with tensors of their own."""
        shape, width, rows, columns = self.shape, length(share), Cut(ROWS, (share,)), Cut(COLUMNS, (share,))
        how: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        up_EFH = torch.empty(shape.experts, 2 * width, shape.dim, **how)
        down_EHF = torch.empty(shape.experts, shape.dim, width, **how)
        for number in range(shape.experts):
            for half_FH, name in zip(up_EFH[number].chunk(2), self.names.expert_up, strict=True):
                half_FH.copy_(self.source.read(f"{prefix}{name.format(number)}.weight", rows))
            down = f"{prefix}{self.names.expert_down.format(number)}.weight"
            down_EHF[number].copy_(self.source.read(down, columns))
        return up_EFH, down_EHF, None, None

    def _stacked(self, prefix: str, share: Span) -> Stacks:
        """Of all experts in one tensor: inputs first, and of each output a gate, then what it multiplies."""
        up_name, down_name = prefix + self.names.expert_up[0], prefix + self.names.expert_down
        up, up_bias = (
            self._need(name, Cut(dim, (_times(share, 2),)))
            for name, dim in ((up_name, 2), (f"{up_name}_bias", 1))
        )
        up, up_bias = (torch.cat([each[..., ::2], each[..., 1::2]], -1) for each in (up, up_bias))
        down = self._need(down_name, Cut(1, (share,)))
        up_EFH, down_EHF = (weight.transpose(1, 2).contiguous() for weight in (up, down))
        down_bias = self._need(f"{down_name}_bias") if self.ranks.rank == 0 else None
        return up_EFH, down_EHF, up_bias, down_bias

    def columns(self, parts: list[tuple[str, list[Span]]]) -> nn.Module:
        """One layer that is split by its outputs, of the given rows of one or several on disk."""
        weights, biases = [], []
        for name, spans in parts:
            cut = Cut(ROWS, tuple(spans))
            weights.append(self._need(f"{name}.weight", cut))
            bias = self.read(f"{name}.bias", cut)
            biases += [] if bias is None else [bias]
        return self.product(_joined(weights), _joined(biases) if biases else None)

    def rows(self, name: str, spans: list[Span]) -> nn.Module:
        """A layer that is split by its inputs."""
        weight = self._need(f"{name}.weight", Cut(COLUMNS, tuple(spans)) if self.split else None)
        bias = self.read(f"{name}.bias") if self.ranks.rank == 0 else None
        made = self.product(weight, bias)
        return Summed(made, self.ranks.all_reduce) if self.split else made

    def norm(self, name: str) -> Norm:
        weight, bias = self._plain(name)
        family = self.shape.family
        return Norm(weight, bias, self.shape.epsilon, family.layer_norm, family.norm_offset)

    def activation(self) -> Callable[[Tensor], Tensor]:
        from transformers.activations import ACT2FN

        made: Callable[[Tensor], Tensor] = ACT2FN[self.shape.activation]
        return made

    def read(self, name: str, cut: Cut | None = None) -> Tensor | None:
        """The tensor, or the cut part; None if the checkpoint does not have it."""
        if name not in self.source.shapes:
            return None
        return self.source.read(name, cut).to(self.device, self.dtype)

    def _need(self, name: str, cut: Cut | None = None) -> Tensor:
        return self.source.read(name, cut).to(self.device, self.dtype)

    def _plain(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self._need(f"{name}.weight"), self.read(f"{name}.bias")

    def _first_norm(self, prefix: str, names: tuple[str, ...]) -> nn.Module:
        found = (prefix + name for name in names if f"{prefix}{name}.weight" in self.source.shapes)
        name = next(found, None)
        return nn.Identity() if name is None else self.norm(name)

    def _qkv(self) -> list[list[Span]]:
        """Which rows of each weight on disk this rank has, in the order of queries, keys, values."""
        shape, heads, size = self.shape, self.heads, self.shape.head_dim
        if len(self.names.qkv) == 3:
            return [[_times(span, size)] for span in (heads.query, heads.kv, heads.kv)]
        if not shape.family.qkv_by_group:
            keys, values = shape.n_heads * size, (shape.n_heads + shape.n_kv) * size
            kv = _times(heads.kv, size)
            return [[_times(heads.query, size), _behind(kv, keys), _behind(kv, values)]]
        per = shape.n_heads // shape.n_kv  # queries of a group; its key and its value follow them
        query = [head + 2 * (head // per) for head in range(*heads.query)]
        keys_ = [group * (per + 2) + per for group in range(*heads.kv)]
        order = [*query, *keys_, *(place + 1 for place in keys_)]
        return [[_times(span, size) for span in _runs(order)]]


def _times(span: Span, size: int) -> Span:
    return span[0] * size, span[1] * size


def _behind(span: Span, before: int) -> Span:
    return before + span[0], before + span[1]


def _runs(order: list[int]) -> list[Span]:
    """The numbers as runs: 3, 4, 5, 9 is (3, 6), (9, 10)."""
    breaks = [0, *(i for i, (a, b) in enumerate(pairwise(order), start=1) if b != a + 1), len(order)]
    return [(order[a], order[b - 1] + 1) for a, b in pairwise(breaks)]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
