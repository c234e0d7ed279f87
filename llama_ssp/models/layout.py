"""Every tensor of a model, a row each: its name on disk, its sizes, and how ranks share it. No torch.

The loader reads its rank's share of the rows (shares.py), and the planner sums their bytes: both take sizes
from here. A layer with other tensors has other rows (`_attention`, `_delta`, `_mlp`, `_experts`). What a
cache keeps of a layer stands in cache_layout.py.

    outputs x inputs                                  on disk; a vector has outputs alone
    qkv      (heads + 2 KV heads) * head_dim x dim    split by heads
    output   dim x heads * head_dim                   split by heads, along its inputs
    up       ffn (twice with a gate) x dim            split by columns of the MLP
    down     dim x ffn                                split by columns, along its inputs
    delta_in (2 keys + 2 values + 2 heads) x dim      split by heads of values
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import lru_cache

from llama_ssp.models.formats.kept import in_full_layers, names_of
from llama_ssp.models.layout_sizes import BLOCK_NORMS, BlockHeads, HeadSizes, Sizes
from llama_ssp.models.tensor_row import (
    BUFFERS,
    EMBEDDING,
    EXPERTS,
    HEAD,
    LAYERS,
    NORMS,
    POSITIONS,
    Part,
    Split,
    TensorRow,
)

RENAMED = {"embed_out.": "lm_head."}  # a name on disk, and the model's


@lru_cache(maxsize=256)
def layout(sizes: Sizes) -> tuple[TensorRow, ...]:
    """Returns the model's rows, in the order in which they are read."""
    rows = _trained_head(sizes) if sizes.trained_head is not None else _model(sizes)
    return tuple(row for row in rows if row.blocks is None or row.blocks)


def rows_of(sizes: Sizes, part: Part, full: bool = False) -> list[TensorRow]:
    """Returns the rows of a part; `full`: those of blocks whose heads are those of `Sizes.full`."""
    return [row for row in layout(sizes) if row.part is part and row.full == full]


def tensors_on_disk(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Returns every tensor's sizes by its name; a tied model's head, too, which may be absent."""
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
    """The model's name for a tensor on disk."""
    for old, new in RENAMED.items():
        if key not in known and key.startswith(old):
            key = new + key.removeprefix(old)
    candidates = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
    return next((name for name in candidates if name in known), key)


def _model(sizes: Sizes) -> Iterator[TensorRow]:
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
    yield from _block_norms(sizes)
    yield from _attention(sizes)
    yield from _delta(sizes)
    yield from _mlp(sizes)
    yield from _experts(sizes)
    yield _norm(sizes, Part.norm, names.norm)
    yield TensorRow(
        part=Part.head,
        group=HEAD,
        weight=f"{names.head}.weight",
        outputs=sizes.vocab,
        inputs=sizes.dim,
        split=Split.vocabulary,
    )


def _attention(sizes: Sizes, inputs: int | None = None) -> Iterator[TensorRow]:
    """`inputs`: of queries, keys and values, where these are not the model's width."""
    for heads in sizes.heads:
        yield from _attention_of(sizes, heads, inputs or sizes.dim)


def _attention_of(sizes: Sizes, heads: BlockHeads, inputs: int) -> Iterator[TensorRow]:
    """Yields the rows of blocks with these heads."""
    family = sizes.family
    names = family.names
    is_full = heads is sizes.full
    queries = sizes.n_heads * heads.head_dim
    keys = heads.n_kv * heads.head_dim
    in_gguf = names_of(names)
    if is_full:
        in_gguf = in_full_layers(in_gguf)

    splits = [(queries, Split.queries), (keys, Split.keys), (keys, Split.keys)]
    if family.gated_attention:
        splits[0] = (2 * queries, Split.gated_queries)
    if len(names.qkv) == 1:
        splits = [(queries + 2 * keys, Split.qkv_by_group if family.qkv_by_group else Split.qkv)]
    named = list(zip(names.qkv, splits, strict=True))
    if not heads.has_values:
        named.pop()
    for name, (outputs, split) in named:
        yield TensorRow(
            part=Part.qkv,
            group=LAYERS,
            weight=f"{name}.weight",
            bias=f"{name}.bias" if sizes.is_biased(name, sizes.attention_bias) else "",
            outputs=outputs,
            inputs=inputs,
            split=split,
            blocks=heads.blocks,
            full=is_full,
            in_gguf=in_gguf[name],
        )
    if sizes.qk_norm:
        query_name, key_name = names.qk_norm
        query = _norm(sizes, Part.query_norm, query_name, size=heads.head_dim, blocks=heads.blocks)
        key = _norm(sizes, Part.key_norm, key_name, size=heads.head_dim, blocks=heads.blocks)
        if family.whole_qk_norm:
            query = replace(query, outputs=queries, split=Split.queries)
            key = replace(key, outputs=keys, split=Split.keys)
        elif family.norm_by_head:  # (heads, head_dim)
            query = replace(query, outputs=sizes.n_heads, inputs=heads.head_dim, split=Split.heads)
            key = replace(key, outputs=heads.n_kv, inputs=heads.head_dim, split=Split.kv_heads)
        yield replace(query, full=is_full)
        yield replace(key, full=is_full)
    if names.sinks:
        yield TensorRow(
            part=Part.sinks,
            group=LAYERS,
            weight=names.sinks,
            outputs=sizes.n_heads,
            split=Split.heads,
            blocks=heads.blocks,
            full=is_full,
        )
    said = False if family.unbiased_output else sizes.attention_bias
    yield TensorRow(
        part=Part.output,
        group=LAYERS,
        weight=f"{names.output}.weight",
        bias=f"{names.output}.bias" if sizes.is_biased(names.output, said) else "",
        outputs=sizes.dim,
        inputs=queries,
        split=Split.head_inputs,
        blocks=heads.blocks,
        full=is_full,
        in_gguf=in_gguf[names.output],
    )


def _delta(sizes: Sizes) -> Iterator[TensorRow]:
    """Linear attention: one product of a layer's input, a short convolution, decays, a norm, the output."""
    delta = sizes.delta
    names = sizes.family.names.delta
    if delta is None or names is None:
        return
    in_gguf = names_of(sizes.family.names)
    heads = delta.value_heads
    splits = [
        (2 * delta.keys + delta.values, Split.delta_channels),
        (delta.values, Split.delta_values),
        (heads, Split.delta_heads),
        (heads, Split.delta_heads),
    ]
    if len(names.inputs) == 2:
        splits = [
            (2 * (delta.keys + delta.values), Split.delta_by_group),
            (2 * heads, Split.delta_pairs),
        ]
    for name, (outputs, split) in zip(names.inputs, splits, strict=True):
        yield TensorRow(
            part=Part.delta_in,
            group=LAYERS,
            weight=f"{name}.weight",
            outputs=outputs,
            inputs=sizes.dim,
            split=split,
            blocks=sizes.linear,
            in_gguf=in_gguf[name],
        )
    yield TensorRow(
        part=Part.delta_conv,
        group=LAYERS,
        weight=f"{names.convolution}.weight",
        outputs=2 * delta.keys + delta.values,
        inputs=delta.kernel,
        split=Split.delta_channels,
        blocks=sizes.linear,
        by_channel=True,
    )
    for part, name in ((Part.delta_decay, names.decay), (Part.delta_step, names.step)):
        yield TensorRow(
            part=part,
            group=LAYERS,
            weight=name,
            outputs=heads,
            split=Split.delta_heads,
            blocks=sizes.linear,
            wide=True,
        )
    yield _norm(sizes, Part.delta_norm, names.norm, size=delta.value_dim, blocks=sizes.linear)
    yield TensorRow(
        part=Part.delta_out,
        group=LAYERS,
        weight=f"{names.output}.weight",
        outputs=sizes.dim,
        inputs=delta.values,
        split=Split.delta_inputs,
        blocks=sizes.linear,
        in_gguf=in_gguf[names.output],
    )


def _mlp(sizes: Sizes) -> Iterator[TensorRow]:
    names = sizes.family.names
    every = range(sizes.n_layers)
    dense = tuple(block for block in every if sizes.family.dense_too or block not in sizes.sparse)
    is_fused = sizes.family.fused_mlp  # gate and up are one matrix on disk
    in_gguf = names_of(names)
    for name in names.up:
        yield TensorRow(
            part=Part.up,
            group=LAYERS,
            weight=f"{name}.weight",
            bias=f"{name}.bias" if sizes.is_biased(name, sizes.mlp_bias) else "",
            outputs=2 * sizes.ffn if is_fused else sizes.ffn,
            inputs=sizes.dim,
            split=Split.gated_columns if is_fused else Split.columns,
            blocks=dense,
            in_gguf=in_gguf[name],
        )
    yield TensorRow(
        part=Part.down,
        group=LAYERS,
        weight=f"{names.down}.weight",
        bias=f"{names.down}.bias" if sizes.is_biased(names.down, sizes.mlp_bias) else "",
        outputs=sizes.dim,
        inputs=sizes.ffn,
        split=Split.column_inputs,
        blocks=dense,
        in_gguf=in_gguf[names.down],
    )
    if names.activation:
        yield from _xielu(names.activation, dense)


def _xielu(name: str, blocks: tuple[int, ...]) -> Iterator[TensorRow]:
    """The parameters and constants of one activation a block."""
    above = TensorRow(part=Part.alpha_above, group=LAYERS, weight=f"{name}.alpha_p", outputs=1, blocks=blocks)
    beta = TensorRow(
        part=Part.beta, group=BUFFERS, weight=f"{name}.beta", outputs=1, blocks=blocks, scalar=True
    )
    yield above
    yield replace(above, part=Part.alpha_below, weight=f"{name}.alpha_n")
    yield beta
    yield replace(beta, part=Part.limit, weight=f"{name}.eps")


def _experts(sizes: Sizes) -> Iterator[TensorRow]:
    """The router, which every rank has, and experts with tensors of their own, or with one for all."""
    if not sizes.sparse:
        return
    names = sizes.family.names
    is_stacked = sizes.family.clamped
    yield TensorRow(
        part=Part.router,
        group=LAYERS,
        weight=f"{names.router}.weight",
        bias=f"{names.router}.bias" if is_stacked else "",
        outputs=sizes.experts,
        inputs=sizes.dim,
        blocks=sizes.sparse,
    )
    if names.expert_scale:
        yield TensorRow(
            part=Part.expert_scale,
            group=LAYERS,
            weight=names.expert_scale,
            outputs=sizes.experts,
            blocks=sizes.sparse,
        )
    if names.correction:
        yield TensorRow(
            part=Part.correction,
            group=BUFFERS,
            weight=names.correction,
            outputs=sizes.experts,
            blocks=sizes.sparse,
        )
    in_gguf = ["expert_up"] if is_stacked else ["expert_gate", "expert_up"]
    for name, place in zip(names.expert_up, in_gguf, strict=True):
        yield TensorRow(
            part=Part.expert_up,
            group=EXPERTS,
            weight=name if is_stacked else f"{name}.weight",
            bias=f"{name}_bias" if is_stacked else "",
            outputs=2 * sizes.expert_ffn if is_stacked else sizes.expert_ffn,
            inputs=sizes.dim,
            split=Split.expert_pairs if is_stacked else Split.expert_columns,
            blocks=sizes.sparse,
            experts=sizes.experts,
            stacked=is_stacked,
            in_gguf=place,
        )
    yield TensorRow(
        part=Part.expert_down,
        group=EXPERTS,
        weight=names.expert_down if is_stacked else f"{names.expert_down}.weight",
        bias=f"{names.expert_down}_bias" if is_stacked else "",
        outputs=sizes.dim,
        inputs=sizes.expert_ffn,
        split=Split.expert_inputs,
        blocks=sizes.sparse,
        experts=sizes.experts,
        stacked=is_stacked,
        in_gguf="expert_down",
    )
    if sizes.shared_ffn:
        yield from _shared_experts(sizes)
    if sizes.family.dense_too:
        yield from _norms_of_experts(sizes)


def _norms_of_experts(sizes: Sizes) -> Iterator[TensorRow]:
    """The norms of blocks with experts and a dense MLP, apart from those that every block has."""
    names = sizes.family.names
    yield TensorRow(
        part=Part.router_norm,
        group=NORMS,
        weight=names.router_norm,
        outputs=sizes.dim,
        blocks=sizes.sparse,
    )
    for part in (Part.before_experts, Part.after_experts, Part.after_dense):
        yield _norm(sizes, part, getattr(names, part), blocks=sizes.sparse)


def _shared_experts(sizes: Sizes) -> Iterator[TensorRow]:
    """The experts that all tokens go through: one MLP in each block that has experts."""
    names = sizes.family.names
    in_gguf = names_of(names)
    for name in names.shared_up:
        yield TensorRow(
            part=Part.shared_up,
            group=LAYERS,
            weight=f"{name}.weight",
            outputs=sizes.shared_ffn,
            inputs=sizes.dim,
            split=Split.shared_columns,
            blocks=sizes.sparse,
            in_gguf=in_gguf[name],
        )
    yield TensorRow(
        part=Part.shared_down,
        group=LAYERS,
        weight=f"{names.shared_down}.weight",
        outputs=sizes.dim,
        inputs=sizes.shared_ffn,
        split=Split.shared_inputs,
        blocks=sizes.sparse,
        in_gguf=in_gguf[names.shared_down],
    )
    if names.shared_gate:
        yield TensorRow(
            part=Part.shared_gate,
            group=LAYERS,
            weight=f"{names.shared_gate}.weight",
            outputs=1,
            inputs=sizes.dim,
            blocks=sizes.sparse,
        )


def _block_norms(sizes: Sizes) -> Iterator[TensorRow]:
    every = tuple(range(sizes.n_layers))
    for place, name in zip(BLOCK_NORMS, sizes.norms, strict=True):
        if name:
            yield _norm(sizes, Part(place), name, blocks=every)
    if sizes.family.names.block_scale:
        yield TensorRow(
            part=Part.block_scale,
            group=BUFFERS,
            weight=sizes.family.names.block_scale,
            outputs=1,
            blocks=every,
        )


def _norm(
    sizes: Sizes, part: Part, name: str, size: int = 0, blocks: tuple[int, ...] | None = None
) -> TensorRow:
    return TensorRow(
        part=part,
        group=NORMS,
        weight=f"{name}.weight",
        bias=f"{name}.bias" if sizes.family.layer_norm and not sizes.family.unbiased_norms else "",
        outputs=size or sizes.dim,
        blocks=blocks,
    )


def _trained_head(sizes: Sizes) -> Iterator[TensorRow]:
    """EAGLE-3: one block that reads a token's embedding and the states. DFlash: usual blocks."""
    head = sizes.trained_head
    assert head is not None
    if head.shares_cache:
        yield from _assistant(sizes, head)
        return
    if head.embeds:
        yield TensorRow(
            part=Part.embedding,
            group=EMBEDDING,
            weight="embed_tokens.weight",
            outputs=sizes.vocab,
            inputs=sizes.dim,
            split=Split.tokens,
        )
    if head.heads:
        yield TensorRow(
            part=Part.head,
            group=HEAD,
            weight="lm_head.weight",
            outputs=head.vocab,
            inputs=sizes.dim,
            split=Split.vocabulary,
        )
    yield TensorRow(part=Part.states, group=LAYERS, weight="fc.weight", outputs=sizes.dim, inputs=head.inputs)
    every = tuple(range(sizes.n_layers))
    if head.has_block:
        yield _norm(sizes, Part.state_norm, "hidden_norm")
        yield from _block_norms(sizes)
        yield from _attention(sizes)
    else:
        for name, size in head.state_norms:
            yield _norm(sizes, Part.state_norm, name, size=size)
        yield _norm(sizes, Part.before_attention, "input_layernorm", blocks=every)
        yield _norm(sizes, Part.before_attention, "hidden_norm", blocks=every)
        yield _norm(sizes, Part.before_mlp, "post_attention_layernorm", blocks=every)
        yield from _attention(sizes, inputs=2 * sizes.dim)
    yield from _mlp(sizes)
    yield _norm(sizes, Part.norm, "norm")


def _assistant(sizes: Sizes, head: HeadSizes) -> Iterator[TensorRow]:
    """Usual blocks without keys and values, which ranks share; the first has what is around them."""
    yield TensorRow(
        part=Part.head,
        group=HEAD,
        weight=f"{sizes.family.names.embedding}.weight",
        outputs=head.vocab,
        inputs=sizes.dim,
        split=Split.first,
    )
    before = TensorRow(
        part=Part.states,
        group=LAYERS,
        weight="pre_projection.weight",
        outputs=sizes.dim,
        inputs=2 * head.inputs,
        split=Split.first,
    )
    yield before
    yield replace(
        before, part=Part.back, weight="post_projection.weight", outputs=head.inputs, inputs=sizes.dim
    )
    if head.centroids:
        yield replace(
            before,
            part=Part.centroids,
            weight="masked_embedding.centroids.weight",
            outputs=head.centroids,
            inputs=sizes.dim,
        )
    yield from _block_norms(sizes)
    for row in _attention(sizes):
        if row.part in (Part.query_norm, Part.output) or row.split is Split.queries:
            yield row
    yield from _mlp(sizes)
    yield replace(_norm(sizes, Part.norm, sizes.family.names.norm), split=Split.first)
