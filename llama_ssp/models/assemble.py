"""Builds a decoder from a checkpoint: reads, cuts and fuses each weight, one after the other.

Which tensors there are stands in layout.py, and which part of each a rank has, in shares.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.models.attention import Rotary, Scores
from llama_ssp.models.cache_layout import cache_shapes
from llama_ssp.models.decoder import (
    Attention,
    Block,
    Decoder,
    ExpertsBranch,
    HeadLayout,
    HeadNorms,
    Mlp,
    Norm,
    WholeNorms,
    Xielu,
)
from llama_ssp.models.delta import DeltaNet
from llama_ssp.models.experts import Experts, Gate, GatedExperts, Layers, Routing, activation_of
from llama_ssp.models.formats.coded import Coded, joined, taken
from llama_ssp.models.host_memory import return_memory
from llama_ssp.models.kernels.expert_stacks import Stack
from llama_ssp.models.layout import rows_of, tensors_on_disk
from llama_ssp.models.layout_sizes import BLOCK_NORMS
from llama_ssp.models.linear import Concatenated, Embedding, Head, LayerFormat, Summed, dense
from llama_ssp.models.safetensors_io import Source
from llama_ssp.models.shape import BlockShape, Shape, rotary_parameters, shape_of
from llama_ssp.models.sharding import Cut, length, vocab_share
from llama_ssp.models.shares import share_of
from llama_ssp.models.tensor_row import Part, TensorRow

Pair = tuple[Tensor | Coded, Tensor | Coded]  # an expert's gate and up as one matrix (2F, H); down (H, F)
ReadExperts = Callable[[str, bool], Iterator[Pair]]
META = torch.device("meta")  # of a model whose sizes alone are wanted


def decoder(
    config: Any, source: Source, ranks: Ranks = ALONE, form: LayerFormat | None = None, drafts: bool = False
) -> Decoder:
    """Returns this rank's part of a model that `shape.reason_against` has nothing against.

    `form` makes its linear layers, by default in fp32 on the CPU. In a model that `drafts` the first rank
    alone has token ids, and the embedding.
    """
    assembly = Assembly(shape_of(config), config, source, ranks, form or LayerFormat(), drafts)
    return assembly.whole()


def wanted(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of the model on disk, by name; a tied model's head, too, which may be absent."""
    return tensors_on_disk(shape_of(config))


class Assembly:
    """What all weights of a model are read with."""

    def __init__(
        self, shape: Shape, config: Any, source: Source, ranks: Ranks, form: LayerFormat, drafts: bool
    ) -> None:
        self.shape = shape
        self.config = config
        self.source = source
        self.ranks = ranks
        self.form = form
        self.device = form.device
        self.share = share_of(shape, ranks.world, ranks.rank, drafts)
        self.reduce = ranks.all_reduce if ranks.world > 1 else None

    def whole(self) -> Decoder:
        shape = self.shape
        offset = shape.family.position_rows
        embedding, head_VH = self.tables()
        positions = None if offset is None else self.read(self.row(Part.positions))
        rotaries = {} if offset is not None else self.rotaries()
        blocks = [self.block(shape.prefix(n), block) for n, block in enumerate(shape.blocks)]

        world = self.ranks.world
        head_rows = [length(vocab_share(shape.vocab, world, rank)) for rank in range(world)]
        gather = self.ranks.all_gather if world > 1 else None
        result = Decoder(
            embedding=embedding,
            position_table=positions,
            position_offset=offset or 0,
            rotaries=rotaries,
            blocks=blocks,
            norm=self.norm(self.row(Part.norm)),
            head=Head(self.form.head(head_VH), head_rows, gather),
            cache_shapes=cache_shapes(self.share),
            logit_divisor=shape.logit_divisor,
            logit_softcap=shape.logit_softcap,
        )
        return result.eval()

    def tables(self) -> tuple[Embedding, Tensor]:
        """Returns the embedding, and the head's weight.

        Of a tied model that is rows of the same table, if they are here.
        """
        embedding_row = self.row(Part.embedding)
        head_row = self.row(Part.head)
        own = self.share.vocab  # rows of the head
        held = self.share.tokens  # rows of the embedding
        table_VH = self.read(embedding_row)

        same_VH = None  # this rank's rows of the head, if it is tied and they are here
        if held[0] <= own[0] and own[1] <= held[1]:
            same_VH = table_VH[own[0] - held[0] : own[1] - held[0]]
        if self.shape.tied and head_row.weight not in self.source.shapes:
            head_VH = same_VH
            if head_VH is None:
                head_VH = self.read(head_row, name=embedding_row.weight)
        else:
            head_VH = self.read(head_row)
            can_share = self.shape.tied and not head_VH.is_meta
            if can_share and same_VH is not None and torch.equal(head_VH, same_VH):
                head_VH = same_VH

        embedding = Embedding(table_VH, self.shape.embedding_scale, self.share.first_token, self.reduce)
        return embedding, head_VH

    def rotaries(self) -> dict[str, Rotary]:
        kinds = rotary_parameters(self.config)
        return {kind: Rotary.of(self.config, kind).to(self.device) for kind in kinds}

    def block(self, prefix: str, own: BlockShape) -> Block:
        norms: dict[str, nn.Module] = {}
        for place in BLOCK_NORMS:
            rows = rows_of(self.shape, Part(place))
            norms[place] = self.norm(rows[0], prefix) if rows else nn.Identity()
        attention = self.delta(prefix) if own.linear else self.attention(prefix, own)
        has_both = own.experts and self.shape.family.dense_too
        mlp = self.experts(prefix) if own.experts and not has_both else self.dense_mlp(prefix)
        branch = self.experts_branch(prefix) if has_both else None
        factor = None
        if self.shape.family.names.block_scale:
            factor = self.read_buffer(self.row(Part.block_scale), prefix)
        return_memory()  # parts that were joined, or quantised
        return Block(
            attention,
            mlp,
            norms,
            self.shape.residual_scale,
            self.shape.parallel,
            branch=branch,
            factor=factor,
        )

    def attention(self, prefix: str, own: BlockShape) -> Attention:
        shape = self.shape
        heads = self.share.heads_of(own.full)
        of_all = shape.heads_of(own.full)
        counts = [heads.queries, heads.kvs, heads.kvs]
        if not of_all.has_values:
            counts.pop()
        if shape.family.gated_attention:
            counts = [heads.queries, *counts]
        sinks = self.read(self.row(Part.sinks), prefix) if shape.family.names.sinks else None
        layout = HeadLayout(
            sizes=[count * of_all.head_dim for count in counts],
            head_dim=of_all.head_dim,
            scores=Scores(scale=shape.scale, window=own.window, softcap=shape.softcap),
            rotary=own.rotary,
            gated=shape.family.gated_attention,
            in_pairs=shape.family.rotary_pairs,
            norm_turned=shape.family.norm_turned,
            growth=shape.growth,
            value_epsilon=shape.epsilon if shape.family.normed_values else None,
        )
        return Attention(
            qkv=self.columns(prefix, Part.qkv, own.full),
            output=self.rows(prefix, Part.output, own.full),
            heads=layout,
            norms=self.qk_norms(prefix, own.full),
            sink_H=sinks,
        )

    def delta(self, prefix: str) -> DeltaNet:
        shape = self.shape
        assert shape.delta is not None
        return DeltaNet(
            inputs=self.columns(prefix, Part.delta_in),
            output=self.rows(prefix, Part.delta_out),
            kernel_CK=self.read(self.row(Part.delta_conv), prefix)[:, 0],
            decay_H=self.read(self.row(Part.delta_decay), prefix),
            step_H=self.read(self.row(Part.delta_step), prefix),
            norm_E=self.read(self.row(Part.delta_norm), prefix),
            key_heads=self.share.delta_heads.kvs,
            key_dim=shape.delta.key_dim,
            activation=shape.activation,
            epsilon=shape.epsilon,
        )

    def qk_norms(self, prefix: str, full: bool) -> nn.Module | None:
        shape = self.shape
        if not shape.qk_norm:
            return None
        query_row = self.row(Part.query_norm, full)
        key_row = self.row(Part.key_norm, full)
        if not shape.family.whole_qk_norm:
            return HeadNorms(query=self.norm(query_row, prefix), key=self.norm(key_row, prefix))

        size = shape.head_dim
        copies = max(1, self.ranks.world // shape.n_kv)  # of a key, over the ranks
        return WholeNorms(
            weights=(
                self.read(query_row, prefix).view(-1, size),  # (heads, D)
                self.read(key_row, prefix).view(-1, size),
            ),
            sizes=(shape.n_heads * size, copies * shape.n_kv * size),
            epsilon=shape.epsilon,
            reduce=self.reduce,
        )

    def dense_mlp(self, prefix: str) -> Mlp:
        family = self.shape.family
        activation = self.xielu(prefix) if family.names.activation else activation_of(self.shape.activation)
        return Mlp(
            up=self.columns(prefix, Part.up),
            down=self.rows(prefix, Part.down),
            activation=activation,
            gated=family.gated,
        )

    def xielu(self, prefix: str) -> Xielu:
        return Xielu(
            above=self.read(self.row(Part.alpha_above), prefix),
            below=self.read(self.row(Part.alpha_below), prefix),
            beta=self.read_buffer(self.row(Part.beta), prefix),
            limit=self.read_buffer(self.row(Part.limit), prefix),
        )

    def shared_experts(self, prefix: str) -> nn.Module | None:
        """Returns this rank's term of the experts that all tokens go through."""
        if not self.shape.shared_ffn:
            return None
        mlp = Mlp(
            up=self.columns(prefix, Part.shared_up),
            down=self.form.linear(self._read_for_product(self.row(Part.shared_down), prefix)),
            activation=activation_of(self.shape.activation),
            gated=True,
        )
        if not self.shape.family.names.shared_gate:
            return mlp
        return GatedExperts(gate=dense(self.read(self.row(Part.shared_gate), prefix)), mlp=mlp)

    def experts_branch(self, prefix: str) -> ExpertsBranch:
        """Returns the experts of a block that has a dense MLP, too."""
        return ExpertsBranch(
            experts=self.experts(prefix),
            before=self.norm(self.row(Part.before_experts), prefix),
            router=self.norm(self.row(Part.router_norm), prefix),
            after=self.norm(self.row(Part.after_experts), prefix),
            after_dense=self.norm(self.row(Part.after_dense), prefix),
        )

    def experts(self, prefix: str) -> Experts:
        """Returns the router, which every rank has, and this rank's columns of all experts."""
        shape = self.shape
        clamped = shape.family.clamped
        router_row = self.row(Part.router)
        router = dense(self.read(router_row, prefix), self.read_bias(router_row, prefix))

        up_bias: Tensor | None = None
        down_bias: Tensor | None = None
        if clamped:
            pairs = self.read_bias(self.row(Part.expert_up), prefix)
            up_bias = None if pairs is None else _apart(pairs, 1)
            down_bias = self.read_bias(self.row(Part.expert_down), prefix)
        correction: Tensor | None = None
        if shape.family.names.correction:
            correction = self.read_buffer(self.row(Part.correction), prefix)
        scale: Tensor | None = None
        if shape.family.names.expert_scale:
            scale = self.read(self.row(Part.expert_scale), prefix)
        up, down = self._stacks(self._stacked if clamped else self._one_by_one, prefix)
        gate = Gate(activation=shape.activation, alpha=shape.gate_alpha, limit=shape.gate_limit)
        return Experts(
            router=router,
            layers=Layers(up=up, down=down, up_bias=up_bias, down_bias=down_bias, gate=gate),
            routing=Routing(top_k=shape.top_k, normed=shape.normed_top, after=clamped, groups=shape.groups),
            reduce=self.reduce,
            correction=correction,
            shared=self.shared_experts(prefix),
            scale=scale,
        )

    def _stacks(self, read: ReadExperts, prefix: str) -> tuple[Stack, Stack]:
        """Falls back to plain numbers unless all experts share one code format."""
        for keeps in (self.form.keeps_codes, False):
            up = self.form.stacking(self.shape.experts)
            down = self.form.stacking(self.shape.experts)
            pairs = enumerate(read(prefix, keeps))
            alike = all(up.put(number, pair[0]) and down.put(number, pair[1]) for number, pair in pairs)
            if alike and bool(up.how) == bool(down.how):
                break
        return up.made(), down.made()

    def _one_by_one(self, prefix: str, keeps: bool) -> Iterator[Pair]:
        """Stacks experts that have tensors of their own."""
        up_rows = rows_of(self.shape, Part.expert_up)
        down_row = self.row(Part.expert_down)
        for number in range(self.shape.experts):
            halves = [self._part(row, prefix + row.weight.format(number)) for row in up_rows]
            down = self._part(down_row, prefix + down_row.weight.format(number))
            coded = [half for half in halves if isinstance(half, Coded) and keeps]
            alike = len(coded) == len(halves) and len({half.kind for half in coded}) == 1
            up = joined(coded) if alike else torch.cat([self._numbers(half) for half in halves])
            yield up, self._kept(down, keeps)

    def _stacked(self, prefix: str, keeps: bool) -> Iterator[Pair]:
        """Reads all experts from one tensor: inputs first; an output has a gate, then what it multiplies."""
        up_row = self.row(Part.expert_up)
        down_row = self.row(Part.expert_down)
        for number in range(self.shape.experts):
            up = self._part(up_row, prefix + up_row.weight, number)
            down = self._part(down_row, prefix + down_row.weight, number)
            if isinstance(up, Coded):  # which has outputs first
                up = self._kept(up.changed(lambda part: _apart(part, 0)), keeps)
            else:
                up = _apart(self._numbers(up), 1).T
            yield up, self._kept(down, keeps) if isinstance(down, Coded) else self._numbers(down).T

    def columns(self, prefix: str, part: Part, full: bool = False) -> nn.Module:
        """Returns one layer that is split by its outputs, of one or several rows."""
        weights: list[Tensor | Coded] = []
        biases: list[Tensor] = []
        for row in rows_of(self.shape, part, full):
            weights.append(self._read_for_product(row, prefix))
            bias = self.read_bias(row, prefix)
            if bias is not None:
                biases.append(bias)

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

    def rows(self, prefix: str, part: Part, full: bool = False) -> nn.Module:
        """Returns a layer that is split by its inputs; the first rank has the bias."""
        row = self.row(part, full)
        weight = self._read_for_product(row, prefix)
        product = self.form.linear(weight, self.read_bias(row, prefix))
        return product if self.reduce is None else Summed(product, self.reduce)

    def norm(self, row: TensorRow, prefix: str = "") -> Norm:
        family = self.shape.family
        return Norm(
            weight=self.read(row, prefix),
            bias=self.read_bias(row, prefix),
            epsilon=self.shape.epsilon,
            centred=family.layer_norm,
            offset=family.norm_offset,
        )

    def row(self, part: Part, full: bool = False) -> TensorRow:
        """Returns the only row of a part; `full`: of blocks whose heads are those of `Sizes.full`."""
        (row,) = rows_of(self.shape, part, full)
        return row

    def read(self, row: TensorRow, prefix: str = "", name: str = "") -> Tensor:
        """Returns this rank's part of the weight; `name`: of another tensor of these sizes."""
        part = self._part(row, name or prefix + row.weight)
        if row.wide:
            assert isinstance(part, Tensor)
            return part.to(torch.promote_types(self.form.numbers, torch.float32)).to(self.device)
        return self._numbers(part).to(self.device)

    def read_buffer(self, row: TensorRow, prefix: str) -> Tensor:
        """Returns a tensor that is in fp32 whatever the number format."""
        part = self._part(row, prefix + row.weight)
        assert isinstance(part, Tensor)
        return part.float().to(self.device)

    def read_bias(self, row: TensorRow, prefix: str = "") -> Tensor | None:
        """Returns this rank's part of the bias; None where there is none, or another rank adds it."""
        if not self.share.has_bias(row):
            return None
        part = self._taken(prefix + row.bias, row.bias_sizes, self.share.bias_cut(row))
        return self._numbers(part).to(self.device)

    def _read_for_product(self, row: TensorRow, prefix: str) -> Tensor | Coded:
        """Returns the weight. The product moves it to the device: quantising begins on the CPU."""
        return self._kept(self._part(row, prefix + row.weight), self.form.keeps_codes)

    def _part(self, row: TensorRow, name: str, expert: int | None = None) -> Tensor | Coded:
        return self._taken(name, row.weight_sizes, self.share.cut(row, expert))

    def _taken(self, name: str, sizes: tuple[int, ...], cut: Cut | None) -> Tensor | Coded:
        if self.device.type == "meta":
            return taken(torch.empty(sizes, dtype=self.form.numbers, device=META), cut)
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
