"""The tensors of a decoder block: attention, linear attention, MLP, experts, norms. No torch.

The shapes of the matrices, and what ranks divide:

    outputs x inputs                                  on disk; a vector has outputs alone
    qkv      (heads + 2 KV heads) * head_dim x dim    split by heads
    output   dim x heads * head_dim                   split by heads, along its inputs
    up       ffn (twice with a gate) x dim            split by columns of the MLP
    down     dim x ffn                                split by columns, along its inputs
    delta_in (2 keys + 2 values + 2 heads) x dim      split by heads of values
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llama_ssp.models.formats.kept import in_full_layers, names_of
from llama_ssp.models.layout_sizes import BLOCK_NORMS, BlockHeads, Sizes
from llama_ssp.models.tensor_row import BUFFERS, EXPERTS, LAYERS, NORMS, Part, Split, TensorRow


def attention_rows(sizes: Sizes, inputs: int | None = None) -> Iterator[TensorRow]:
    """Yields the rows of attention, for each kind of heads.

    `inputs` is the width of what queries, keys and values are made of, by default the model's.
    """
    for heads in sizes.heads:
        yield from _attention_of(sizes, heads, inputs or sizes.dim)


def _attention_of(sizes: Sizes, heads: BlockHeads, inputs: int) -> Iterator[TensorRow]:
    """Yields the rows of attention in the blocks with these heads."""
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
        split = Split.qkv_by_group if family.qkv_by_group else Split.qkv
        splits = [(queries + 2 * keys, split)]
    named = list(zip(names.qkv, splits, strict=True))
    if not heads.has_values:
        named.pop()  # the keys are the values: there is no matrix of values

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
        query = norm_row(sizes, Part.query_norm, query_name, size=heads.head_dim, blocks=heads.blocks)
        key = norm_row(sizes, Part.key_norm, key_name, size=heads.head_dim, blocks=heads.blocks)
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


def delta_rows(sizes: Sizes) -> Iterator[TensorRow]:
    """Yields the rows of linear attention: products of the input, convolution, decays, norm, output."""
    delta = sizes.delta
    names = sizes.family.names.delta
    if delta is None or names is None:
        return

    in_gguf = names_of(sizes.family.names)
    heads = delta.value_heads
    splits = [
        (2 * delta.keys + delta.values, Split.delta_channels),  # queries, keys and values
        (delta.values, Split.delta_values),  # gates of the output
        (heads, Split.delta_heads),  # beta
        (heads, Split.delta_heads),  # decays
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

    yield norm_row(sizes, Part.delta_norm, names.norm, size=delta.value_dim, blocks=sizes.linear)

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


def mlp_rows(sizes: Sizes) -> Iterator[TensorRow]:
    """Yields the rows of the blocks' dense MLPs, with the parameters of their activation."""
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
    """Yields the two parameters and two constants of each block's xIELU, an activation."""
    above = TensorRow(
        part=Part.alpha_above,
        group=LAYERS,
        weight=f"{name}.alpha_p",
        outputs=1,
        blocks=blocks,
    )
    beta = TensorRow(
        part=Part.beta,
        group=BUFFERS,
        weight=f"{name}.beta",
        outputs=1,
        blocks=blocks,
        scalar=True,
    )
    yield above
    yield replace(above, part=Part.alpha_below, weight=f"{name}.alpha_n")
    yield beta
    yield replace(beta, part=Part.limit, weight=f"{name}.eps")


def expert_rows(sizes: Sizes) -> Iterator[TensorRow]:
    """Yields the rows of the router, of experts, and of what comes with them.

    Every rank has the whole router. On disk each expert has its own tensors, or one tensor has all
    experts.
    """
    if not sizes.sparse:
        return

    names = sizes.family.names
    is_stacked = sizes.family.clamped  # all experts of a block are in one tensor
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
    """Yields the norms that only blocks with both experts and a dense MLP have."""
    names = sizes.family.names
    yield TensorRow(
        part=Part.router_norm,
        group=NORMS,
        weight=names.router_norm,
        outputs=sizes.dim,
        blocks=sizes.sparse,
    )

    for part in (Part.before_experts, Part.after_experts, Part.after_dense):
        yield norm_row(sizes, part, getattr(names, part), blocks=sizes.sparse)


def _shared_experts(sizes: Sizes) -> Iterator[TensorRow]:
    """Yields the rows of experts that all tokens go through: one MLP in a block with experts."""
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


def block_norm_rows(sizes: Sizes) -> Iterator[TensorRow]:
    """Yields the norms of BLOCK_NORMS that the model has, and the factor of a block's result."""
    every = tuple(range(sizes.n_layers))
    for place, name in zip(BLOCK_NORMS, sizes.norms, strict=True):
        if name:
            yield norm_row(sizes, Part(place), name, blocks=every)

    if sizes.family.names.block_scale:
        yield TensorRow(
            part=Part.block_scale,
            group=BUFFERS,
            weight=sizes.family.names.block_scale,
            outputs=1,
            blocks=every,
        )


def norm_row(
    sizes: Sizes, part: Part, name: str, size: int = 0, blocks: tuple[int, ...] | None = None
) -> TensorRow:
    """Returns the row of a norm with `size` numbers, by default the model's width."""
    is_biased = sizes.family.layer_norm and not sizes.family.unbiased_norms
    return TensorRow(
        part=part,
        group=NORMS,
        weight=f"{name}.weight",
        bias=f"{name}.bias" if is_biased else "",
        outputs=size or sizes.dim,
        blocks=blocks,
    )
