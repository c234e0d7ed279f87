"""Builds a decoder from a checkpoint: reads, cuts and fuses each weight, one after the other.

Of a model over several ranks each reads its own slices: whole KV heads with their queries, columns of the
MLP, rows of the vocabulary, in shares that may differ (sharding.py).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.models.attention import Rotary, Scores
from llama_ssp.models.decoder import Attention, Block, Decoder, HeadLayout, HeadNorms, Mlp, Norm, WholeNorms
from llama_ssp.models.experts import Experts, Gate, Layers, Routing, activation_of
from llama_ssp.models.formats.coded import Coded, joined, taken
from llama_ssp.models.host_memory import return_memory
from llama_ssp.models.kernels.expert_stacks import Stack
from llama_ssp.models.linear import Concatenated, Embedding, Head, LayerFormat, Summed, dense
from llama_ssp.models.safetensors_io import Source
from llama_ssp.models.shape import BlockShape, Shape, norms_of, rotary_parameters, shape_of
from llama_ssp.models.sharding import (
    COLUMNS,
    ROWS,
    Cut,
    Span,
    head_ranges,
    length,
    mlp_share,
    qkv_rows,
    shifted,
    times,
    vocab_share,
)

Sizes = tuple[int, ...]  # of a tensor
Pair = tuple[Tensor | Coded, Tensor | Coded]  # an expert's gate and up as one matrix (2F, H); down (H, F)
ReadExperts = Callable[[str, Span, bool], Iterator[Pair]]
META = torch.device("meta")  # of a model whose sizes alone are wanted
# Parts of a block, in the order of Family.bias_keys.
ATTENTION = 0
MLP = 1


def decoder(
    config: Any, source: Source, ranks: Ranks = ALONE, form: LayerFormat | None = None, drafts: bool = False
) -> Decoder:
    """Returns this rank's part of a model that `shape.reason_against` has nothing against.

    `form` makes its linear layers, by default in fp32 on the CPU. In a model that `drafts` the first rank
    alone has token ids, and the embedding.
    """
    return Assembly(config, source, ranks, form or LayerFormat(), drafts).whole()


def wanted(config: Any) -> dict[str, Sizes]:
    """Returns the tensors of the model on disk, by name; a tied model's head, too, which may be absent."""
    outline = Outline({f"{shape_of(config).family.names.head}.weight": ()})
    assembly = Assembly(config, outline, ALONE, LayerFormat(device=META), drafts=False)
    assembly.whole()
    return assembly.wanted


class Outline:
    """A source with names alone."""

    def __init__(self, shapes: dict[str, Sizes]) -> None:
        self.shapes = shapes

    def read(self, name: str, cut: Cut | None) -> Tensor:
        raise AssertionError(f"{name}: on the meta device nothing is read")


class Assembly:
    """What all weights of a model are read with."""

    def __init__(self, config: Any, source: Source, ranks: Ranks, form: LayerFormat, drafts: bool) -> None:
        self.config = config
        self.source = source
        self.ranks = ranks
        self.form = form
        self.device = form.device
        self.drafts = drafts
        self.shape: Shape = shape_of(config)
        self.names = self.shape.family.names
        self.heads = head_ranges(self.shape.n_heads, self.shape.n_kv, ranks.world, ranks.rank)
        self.mlp = mlp_share(self.shape.ffn, ranks.world, ranks.rank)
        self.split = ranks.world > 1
        self.norms = norms_of(config)
        self.wanted: dict[str, Sizes] = {}  # the tensors that were asked for, as they are on disk
        self.reduce = ranks.all_reduce if self.split else None
        self.attention_inputs = self.shape.dim

    def whole(self) -> Decoder:
        shape = self.shape
        names = self.names
        shares = [vocab_share(shape.vocab, self.ranks.world, rank) for rank in range(self.ranks.world)]
        embedding, head_VH = self.tables(shares[self.ranks.rank])
        offset = shape.family.position_rows
        positions = self.positions()
        rotaries = {} if offset is not None else self.rotaries()
        blocks = [self.block(f"{names.blocks}.{n}.", block) for n, block in enumerate(shape.blocks)]

        gather = self.ranks.all_gather if self.split else None
        result = Decoder(
            embedding=embedding,
            position_table=positions,
            position_offset=offset or 0,
            rotaries=rotaries,
            blocks=blocks,
            norm=self.norm(names.norm),
            head=Head(self.form.head(head_VH), list(map(length, shares)), gather),
            logit_divisor=shape.logit_divisor,
            logit_softcap=shape.logit_softcap,
        )
        return result.eval()

    def tables(self, own: Span) -> tuple[Embedding, Tensor]:
        """Returns the embedding, and the head's weight.

        Of a tied model that is rows of the same table, if they are here.
        """
        names = self.names
        vocab = self.shape.vocab
        whole = (vocab, self.shape.dim)
        held = own
        first = own[0]  # the token of the first row
        if self.drafts and self.split and self.ranks.rank == 0:
            held = (0, vocab)
            first = 0
        elif self.drafts and self.split:
            held = (0, 1)
            first = vocab  # no token's row
        table_VH = self.read(f"{names.embedding}.weight", whole, self._vocab_cut(held))

        same_VH = None  # this rank's rows of the head, if it is tied and they are here
        if held[0] <= own[0] and own[1] <= held[1]:
            same_VH = table_VH[own[0] - held[0] : own[1] - held[0]]
        cut = self._vocab_cut(own)
        head = f"{names.head}.weight"
        if self.shape.tied and head not in self.source.shapes:
            head_VH = same_VH
            if head_VH is None:
                head_VH = self.read(f"{names.embedding}.weight", whole, cut)
        else:
            head_VH = self.read(head, whole, cut)
            can_share = self.shape.tied and not head_VH.is_meta
            if can_share and same_VH is not None and torch.equal(head_VH, same_VH):
                head_VH = same_VH
        return Embedding(table_VH, self.shape.embedding_scale, first, self.reduce), head_VH

    def positions(self) -> Tensor | None:
        offset = self.shape.family.position_rows
        if offset is None:
            return None
        rows = int(self.config.max_position_embeddings) + offset
        return self.read(f"{self.names.positions}.weight", (rows, self.shape.dim))

    def _vocab_cut(self, rows: Span) -> Cut | None:
        return Cut(ROWS, (rows,)) if self.split else None

    def rotaries(self) -> dict[str, Rotary]:
        kinds = rotary_parameters(self.config)
        return {kind: Rotary.of(self.config, kind).to(self.device) for kind in kinds}

    def block(self, prefix: str, own: BlockShape) -> Block:
        norms: dict[str, nn.Module] = {
            place: self.norm(prefix + name) if name else nn.Identity() for place, name in self.norms.items()
        }
        attention = self.attention(prefix, own)
        mlp = self.experts(prefix) if own.experts else self.dense_mlp(prefix)
        return_memory()  # parts that were joined, or quantised
        return Block(attention, mlp, norms, self.shape.residual_scale, self.shape.parallel)

    def attention(self, prefix: str, own: BlockShape) -> Attention:
        shape = self.shape
        names = self.names
        heads = self.heads
        sinks = None
        if names.sinks:
            sinks = self.read(prefix + names.sinks, (shape.n_heads,), Cut(ROWS, (heads.query,)))
        qkv = [(prefix + name, *rows) for name, rows in zip(names.qkv, qkv_rows(shape, heads), strict=True)]
        inputs = shape.n_heads * shape.head_dim
        span = times(heads.query, shape.head_dim)
        layout = HeadLayout(
            sizes=[count * shape.head_dim for count in (heads.queries, heads.kvs, heads.kvs)],
            head_dim=shape.head_dim,
            scores=Scores(scale=shape.scale, window=own.window, softcap=shape.softcap),
            rotary=own.rotary,
        )
        return Attention(
            qkv=self.columns(qkv, ATTENTION, self.attention_inputs),
            output=self.rows(prefix + names.output, inputs, [span], ATTENTION),
            heads=layout,
            norms=self.qk_norms(prefix),
            sink_H=sinks,
        )

    def qk_norms(self, prefix: str) -> nn.Module | None:
        shape = self.shape
        size = shape.head_dim
        if not self.names.qk_norm:
            return None
        query_name, key_name = (prefix + name for name in self.names.qk_norm)
        if not shape.family.whole_qk_norm:
            return HeadNorms(query=self.norm(query_name, size), key=self.norm(key_name, size))

        copies = max(1, self.ranks.world // shape.n_kv)  # of a key, over the ranks
        return WholeNorms(
            weights=(
                self._norm_of_heads(query_name, self.heads.query, shape.n_heads),
                self._norm_of_heads(key_name, self.heads.kv, shape.n_kv),
            ),
            sizes=(shape.n_heads * size, copies * shape.n_kv * size),
            epsilon=shape.epsilon,
            reduce=self.reduce,
        )

    def _norm_of_heads(self, name: str, heads: Span, count: int) -> Tensor:
        """Returns the weights of some of `count` heads, (heads, D)."""
        size = self.shape.head_dim
        weight = self.read(f"{name}.weight", (count * size,), Cut(ROWS, (times(heads, size),)))
        return weight.view(-1, size)

    def dense_mlp(self, prefix: str) -> Mlp:
        family = self.shape.family
        width = self.shape.ffn
        outputs = width
        spans = [self.mlp]
        if family.fused_mlp:  # gate and up in one: their columns stand one after the other
            outputs = 2 * width
            spans = [self.mlp, shifted(self.mlp, width)]
        parts = [(prefix + name, outputs, spans) for name in self.names.up]
        return Mlp(
            up=self.columns(parts, MLP, self.shape.dim),
            down=self.rows(prefix + self.names.down, width, [self.mlp], MLP),
            activation=activation_of(self.shape.activation),
            gated=family.gated,
        )

    def experts(self, prefix: str) -> Experts:
        """Returns the router, which every rank has, and this rank's columns of all experts."""
        shape = self.shape
        name = prefix + self.names.router
        clamped = shape.family.clamped
        bias = self.read(f"{name}.bias", (shape.experts,)) if clamped else None
        router = dense(self.read(f"{name}.weight", (shape.experts, shape.dim)), bias)

        share = mlp_share(shape.expert_ffn, self.ranks.world, self.ranks.rank)
        up_bias: Tensor | None = None
        down_bias: Tensor | None = None
        if clamped:
            up_bias, down_bias = self._expert_biases(prefix, share)
        up, down = self._stacks(self._stacked if clamped else self._one_by_one, prefix, share)
        gate = Gate(activation=shape.activation, alpha=shape.gate_alpha, limit=shape.gate_limit)
        return Experts(
            router=router,
            layers=Layers(up=up, down=down, up_bias=up_bias, down_bias=down_bias, gate=gate),
            routing=Routing(top_k=shape.top_k, normed=shape.normed_top, after=clamped),
            reduce=self.reduce,
        )

    def _stacks(self, read: ReadExperts, prefix: str, share: Span) -> tuple[Stack, Stack]:
        """Falls back to plain numbers unless all experts share one code format."""
        for keeps in (self.form.keeps_codes, False):
            up = self.form.stacking(self.shape.experts)
            down = self.form.stacking(self.shape.experts)
            pairs = enumerate(read(prefix, share, keeps))
            alike = all(up.put(number, pair[0]) and down.put(number, pair[1]) for number, pair in pairs)
            if alike and bool(up.how) == bool(down.how):
                break
        return up.made(), down.made()

    def _one_by_one(self, prefix: str, share: Span, keeps: bool) -> Iterator[Pair]:
        """Stacks experts that have tensors of their own."""
        rows = Cut(ROWS, (share,))
        columns = Cut(COLUMNS, (share,))
        whole = self.shape.expert_ffn, self.shape.dim
        for number in range(self.shape.experts):
            names = [f"{prefix}{name.format(number)}.weight" for name in self.names.expert_up]
            halves = [self._part(name, whole, rows) for name in names]
            down = f"{prefix}{self.names.expert_down.format(number)}.weight"
            coded = [half for half in halves if isinstance(half, Coded) and keeps]
            alike = len(coded) == len(halves) and len({half.kind for half in coded}) == 1
            up = joined(coded) if alike else torch.cat([self._numbers(half) for half in halves])
            yield up, self._kept(self._part(down, whole[::-1], columns), keeps)

    def _stacked(self, prefix: str, share: Span, keeps: bool) -> Iterator[Pair]:
        """Reads all experts from one tensor: inputs first; an output has a gate, then what it multiplies."""
        up_name = prefix + self.names.expert_up[0]
        down_name = prefix + self.names.expert_down
        experts = self.shape.experts
        dim = self.shape.dim
        width = self.shape.expert_ffn
        for number in range(experts):
            up = self._part(up_name, (experts, dim, 2 * width), Cut(2, (times(share, 2),), number))
            down = self._part(down_name, (experts, width, dim), Cut(1, (share,), number))
            if isinstance(up, Coded):  # which has outputs first
                up = self._kept(up.changed(lambda part: _apart(part, 0)), keeps)
            else:
                up = _apart(self._numbers(up), 1).T
            yield up, self._kept(down, keeps) if isinstance(down, Coded) else self._numbers(down).T

    def _expert_biases(self, prefix: str, share: Span) -> tuple[Tensor, Tensor | None]:
        up_name = prefix + self.names.expert_up[0]
        down_name = prefix + self.names.expert_down
        experts = self.shape.experts
        dim = self.shape.dim
        width = self.shape.expert_ffn
        up = self.read(f"{up_name}_bias", (experts, 2 * width), Cut(1, (times(share, 2),)))
        down = self.read(f"{down_name}_bias", (experts, dim)) if self.ranks.rank == 0 else None
        return _apart(up, 1), down

    def columns(self, parts: list[tuple[str, int, list[Span]]], part: int, inputs: int) -> nn.Module:
        """Returns one layer that is split by its outputs, of the given rows of one or several on disk.

        Of each its name, the number of its outputs, and the rows.
        """
        weights: list[Tensor | Coded] = []
        biases: list[Tensor] = []
        for name, outputs, spans in parts:
            cut = Cut(ROWS, tuple(spans))
            weights.append(self._read_for_product(f"{name}.weight", (outputs, inputs), cut))
            if self.shape.family.has_bias(self.config, name, part):
                biases.append(self.read(f"{name}.bias", (outputs,), cut))

        coded = [weight for weight in weights if isinstance(weight, Coded)]
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        bias = _joined(biases) if biases else None
        whole: Tensor | Coded | None = None
        if not coded:
            whole = _joined(plain)
        elif not plain and len({weight.kind for weight in coded}) == 1:
            whole = joined(coded)
        if whole is not None:
            del weights, coded, plain  # a product may make a copy
            return self.form.linear(whole, bias)
        sizes = [weight.shape[0] for weight in weights]
        each = [None] * len(sizes) if bias is None else list(torch.split(bias, sizes))
        return Concatenated(list(map(self.form.linear, weights, each)))

    def rows(self, name: str, inputs: int, spans: list[Span], part: int) -> nn.Module:
        """Returns a layer that is split by its inputs; the first rank has the bias."""
        dim = self.shape.dim
        cut = Cut(COLUMNS, tuple(spans)) if self.split else None
        weight = self._read_for_product(f"{name}.weight", (dim, inputs), cut)
        has_bias = self.ranks.rank == 0 and self.shape.family.has_bias(self.config, name, part)
        bias = self.read(f"{name}.bias", (dim,)) if has_bias else None
        product = self.form.linear(weight, bias)
        return Summed(product, self.ranks.all_reduce) if self.split else product

    def norm(self, name: str, size: int | None = None) -> Norm:
        size = size or self.shape.dim
        family = self.shape.family
        return Norm(
            weight=self.read(f"{name}.weight", (size,)),
            bias=self.read(f"{name}.bias", (size,)) if family.layer_norm else None,
            epsilon=self.shape.epsilon,
            centred=family.layer_norm,
            offset=family.norm_offset,
        )

    def read(self, name: str, shape: Sizes, cut: Cut | None = None) -> Tensor:
        """Returns the tensor of this shape, or the cut part."""
        return self._numbers(self._part(name, shape, cut)).to(self.device)

    def _read_for_product(self, name: str, shape: Sizes, cut: Cut | None) -> Tensor | Coded:
        """Returns the weight. The product moves it to the device: quantising begins on the CPU."""
        return self._kept(self._part(name, shape, cut), self.form.keeps_codes)

    def _part(self, name: str, shape: Sizes, cut: Cut | None) -> Tensor | Coded:
        self.wanted[name] = shape
        if self.device.type == "meta":
            return taken(torch.empty(shape, dtype=self.form.numbers, device=META), cut)
        return self.source.read(name, cut)

    def _kept(self, part: Tensor | Coded, keeps: bool) -> Tensor | Coded:
        return part if keeps and isinstance(part, Coded) else self._numbers(part)

    def _numbers(self, part: Tensor | Coded) -> Tensor:
        numbers = self.form.numbers
        return part.decoded(numbers) if isinstance(part, Coded) else part.to(numbers)


def _apart(part: Tensor, dim: int) -> Tensor:
    """Returns every second number of this dimension, then the others."""
    return torch.cat([part[(slice(None),) * dim + (slice(first, None, 2),)] for first in (0, 1)], dim)


def _joined(parts: list[Tensor]) -> Tensor:
    if parts[0].is_meta:  # where torch.cat imports the compiler, which takes a second
        return parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
