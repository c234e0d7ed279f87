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
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from functools import lru_cache

from llama_ssp.models.formats.kept import in_full_layers, names_of
from llama_ssp.models.layout_sizes import BLOCK_NORMS, BlockHeads, HeadSizes, Sizes

# The groups of tensors in a plan.
EMBEDDING = "embedding"
HEAD = "head"
LAYERS = "layers"
EXPERTS = "experts"
NORMS = "norms"
POSITIONS = "positions"
BUFFERS = "buffers"  # small tensors that are kept in fp32 whatever the number format, and no parameters

RENAMED = {"embed_out.": "lm_head."}  # a name on disk, and the model's


class Part(StrEnum):
    """What a row is of a model. Rows of one part, in the same blocks, are one matrix in memory."""

    embedding = auto()
    positions = auto()
    states = auto()  # of a trained head: what makes its input of the target's hidden states
    state_norm = auto()
    back = auto()  # what makes a hidden state of the target's width of a head's own
    centroids = auto()
    qkv = auto()
    query_norm = auto()
    key_norm = auto()
    sinks = auto()
    output = auto()
    delta_in = auto()  # of linear attention: all that is made of a layer's input
    delta_conv = auto()
    delta_decay = auto()
    delta_step = auto()
    delta_norm = auto()
    delta_out = auto()
    up = auto()
    down = auto()
    alpha_above = auto()  # of xIELU, above 0 and below; then its two constants
    alpha_below = auto()
    beta = auto()
    limit = auto()
    router = auto()
    correction = auto()  # of the router's scores
    expert_up = auto()
    expert_down = auto()
    shared_up = auto()  # of experts that all tokens go through
    shared_down = auto()
    shared_gate = auto()
    router_norm = auto()  # of what the router takes
    expert_scale = auto()  # a factor of each expert's weight
    before_experts = auto()
    after_experts = auto()
    after_dense = auto()  # of a dense MLP next to experts
    before_attention = auto()
    after_attention = auto()
    before_mlp = auto()
    after_mlp = auto()
    block_scale = auto()  # a factor of what a block gives
    norm = auto()
    head = auto()


class Split(Enum):
    """What ranks divide, of a row's outputs; of INPUT_SPLITS, of its inputs."""

    whole = auto()  # nothing
    first = auto()  # nothing: the first rank has all of it
    tokens = auto()  # rows of the vocabulary, in the embedding
    vocabulary = auto()  # rows of the vocabulary, in the head
    heads = auto()  # one number a query head, or one row
    kv_heads = auto()  # one row a KV head
    queries = auto()  # query heads
    gated_queries = auto()  # of each head its query, then its gate; queries come first in memory
    keys = auto()  # KV heads
    qkv = auto()  # query heads, keys' heads and values' heads, one after the other
    qkv_by_group = auto()  # the same, group by group of query heads
    columns = auto()  # columns of the MLP
    gated_columns = auto()  # columns of gates, then columns of what they multiply
    expert_columns = auto()
    expert_pairs = auto()  # by turns a gate, and what it multiplies
    head_inputs = auto()
    column_inputs = auto()
    expert_inputs = auto()
    shared_columns = auto()  # of experts that all tokens go through
    shared_inputs = auto()
    # Of linear attention:
    delta_heads = auto()  # one number a head of values
    delta_values = auto()  # heads of values
    delta_channels = auto()  # queries, keys and values, one after the other
    delta_by_group = auto()  # of each head of keys its query, its key, its values, then their gates
    delta_pairs = auto()  # of each head of keys beta of its values, then their decays
    delta_inputs = auto()


INPUT_SPLITS = (
    Split.head_inputs,
    Split.column_inputs,
    Split.expert_inputs,
    Split.shared_inputs,
    Split.delta_inputs,
)
# Parts that are quantised: a layer's products. Experts are, where the checkpoint has them in codes.
QUANTISED = (
    Part.qkv,
    Part.output,
    Part.delta_in,
    Part.delta_out,
    Part.up,
    Part.down,
    Part.shared_up,
    Part.shared_down,
)


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """A matrix or a vector of a model, with its bias; names and sizes are those on disk.

    A name in a block follows the block's prefix; `{}` is an expert's number.
    """

    part: Part
    group: str
    weight: str
    bias: str = ""  # empty: there is none
    outputs: int
    inputs: int = 0  # 0: a vector
    split: Split = Split.whole
    blocks: tuple[int, ...] | None = None  # that have it; None: the model has one
    experts: int = 0  # how many of it a block has; 0: it is no expert's
    scalar: bool = False  # a number: on disk it has no dimension
    stacked: bool = False  # all experts are in one tensor, with inputs before outputs
    by_channel: bool = False  # a convolution that sees one channel: on disk (outputs, 1, inputs)
    wide: bool = False  # in fp32 at least, whatever the number format
    full: bool = False  # of the blocks whose heads are those of `Sizes.full`
    in_gguf: str = ""  # its name where a checkpoint's codes are listed (formats/kept.py)

    @property
    def times(self) -> int:
        """How often the model has it, experts not counted."""
        return 1 if self.blocks is None else len(self.blocks)

    @property
    def weight_sizes(self) -> tuple[int, ...]:
        if self.scalar:
            return ()
        if self.stacked:
            return (self.experts, self.inputs, self.outputs)
        if self.by_channel:
            return (self.outputs, 1, self.inputs)
        return (self.outputs, self.inputs) if self.inputs else (self.outputs,)

    @property
    def bias_sizes(self) -> tuple[int, ...]:
        return (self.experts, self.outputs) if self.stacked else (self.outputs,)

    @property
    def splits_inputs(self) -> bool:
        return self.split in INPUT_SPLITS


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
