"""The sizes that decide which tensors a model has, and how a ModelConf gives them. No torch.

shape.py takes them from a transformers config, and adds what the decoder needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llama_ssp.config import ModelConf
from llama_ssp.models.families import Family, family_of, full_layers

# Where a block may have norms: fields of families.Names, and members of Part.
BLOCK_NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """What a trained head has in addition to its blocks."""

    inputs: int  # numbers of a token's hidden states that it reads
    vocab: int  # how many tokens it can draft
    has_block: bool  # it drafts all tokens in one pass (DFlash), not one after the other (EAGLE-3)
    prefix: str = "layers.0"  # of the names in EAGLE-3's only block
    state_norms: tuple[tuple[str, int], ...] = ()  # names and widths of EAGLE-3's norms before `fc`
    embeds: bool = True  # it has an embedding of its own
    heads: bool = True  # it has an output matrix of its own
    shares_cache: bool = False  # it reads the target's keys and values (Gemma 4's assistants)
    centroids: int = 0  # groups of tokens, some of which have logits; 0: all tokens have logits


@dataclass(frozen=True)
class DeltaSizes:
    """The sizes of a Gated DeltaNet. Queries have the number of heads and the width of keys."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution sees

    @property
    def keys(self) -> int:
        """Returns the width of all heads of keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Returns the width of all heads of values."""
        return self.value_heads * self.value_dim

    @property
    def per_key(self) -> int:
        """Returns how many heads of values share one head of keys."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True, kw_only=True)
class BlockHeads:
    """The KV heads of some blocks. All blocks of a model have the same number of query heads."""

    blocks: tuple[int, ...]
    n_kv: int
    head_dim: int
    has_values: bool = True  # False: keys, before their norm, are the values too


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The integers and flags of a model that decide which tensors it has."""

    family: Family
    dim: int
    vocab: int
    n_layers: int
    n_heads: int
    n_kv: int
    head_dim: int
    ffn: int
    experts: int
    expert_ffn: int
    shared_ffn: int  # of the experts that all tokens go through, together
    sparse: tuple[int, ...]  # the blocks with experts
    position_rows: int  # of a learned table of positions; 0: rotary
    norms: tuple[str, ...]  # names of a block's norms, in the order of BLOCK_NORMS; empty: none
    qk_norm: bool  # queries and keys have norms
    attention_bias: bool | None  # None: the family says it (`Family.biased`)
    mlp_bias: bool | None
    tied: bool  # the head is the embedding
    trained_head: HeadSizes | None = None
    delta: DeltaSizes | None = None  # of the blocks `linear`
    linear: tuple[int, ...] = ()  # the blocks whose attention is linear, and keeps a state
    full: BlockHeads | None = None  # of blocks that see the whole text, if their heads differ

    @cached_property
    def attending(self) -> tuple[int, ...]:
        """Returns the blocks whose attention keeps keys and values."""
        return tuple(block for block in range(self.n_layers) if block not in self.linear)

    @cached_property
    def heads(self) -> tuple[BlockHeads, ...]:
        """Returns the kinds of heads: those of most blocks, then `full` if there is one."""
        others = () if self.full is None else self.full.blocks
        blocks = tuple(block for block in self.attending if block not in others)
        usual = BlockHeads(blocks=blocks, n_kv=self.n_kv, head_dim=self.head_dim)
        return (usual,) if self.full is None else (usual, self.full)

    def heads_of(self, full: bool) -> BlockHeads:
        """Returns the heads of most blocks, or with `full` those of `Sizes.full`."""
        usual, *others = self.heads
        return others[0] if full else usual

    def prefix(self, block: int) -> str:
        """Returns what the names of a block's tensors begin with."""
        if self.trained_head is None or self.trained_head.shares_cache:
            return f"{self.family.names.blocks}.{block}."
        if self.trained_head.has_block:
            return f"layers.{block}."
        return f"{self.trained_head.prefix}."

    def is_biased(self, name: str, said: bool | None) -> bool:
        """Returns whether a layer has a bias: `said` by the config, else as the family says."""
        if said is not None:
            return said
        return name.rpartition(".")[2] in self.family.biased


def sizes_of_model(model: ModelConf) -> Sizes:
    """Returns the sizes of a model that a preset describes, or a config.json that a plan has read."""
    family = family_of(model.family)
    norms = tuple(getattr(family.names, place) for place in BLOCK_NORMS)
    if family.multi_query and model.n_kv_heads == 1:  # a falcon, whose attention and MLP share a norm
        norms = (norms[0], "", "", "")

    trained_head = None
    if model.is_head:
        trained_head = HeadSizes(
            inputs=model.head_inputs,
            vocab=model.head_vocab,
            has_block=model.head_block > 0,
            shares_cache=model.head_shares_cache,
            centroids=model.head_centroids,
        )

    sparse = range(model.dense_layers, model.n_layers) if model.experts else ()
    delta: DeltaSizes | None = None
    if model.linear_layers:
        delta = DeltaSizes(
            key_heads=model.linear_key_heads,
            value_heads=model.linear_value_heads,
            key_dim=model.linear_key_dim,
            value_dim=model.linear_value_dim,
            kernel=model.linear_kernel,
        )

    full = None
    if model.full_layers:
        full = BlockHeads(
            blocks=full_layers(model.n_layers, model.full_layers),
            n_kv=model.full_kv_heads,
            head_dim=model.full_head_dim,
            has_values=not model.keys_are_values,
        )

    position_rows = 0
    if family.position_rows is not None:
        position_rows = model.context + family.position_rows

    return Sizes(
        family=family,
        dim=model.dim,
        vocab=model.vocab,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv=model.n_kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn,
        experts=model.experts,
        expert_ffn=model.expert_ffn,
        shared_ffn=model.shared_ffn,
        sparse=tuple(sparse),
        position_rows=position_rows,
        norms=norms,
        qk_norm=family.qk_norm(model.qk_norm),
        attention_bias=model.attention_bias,
        mlp_bias=model.mlp_bias,
        tied=model.tied and not model.is_head,  # a trained head's output matrix is not its embedding
        trained_head=trained_head,
        delta=delta,
        linear=linear_blocks(model.n_layers, model.linear_layers),
        full=full,
    )


def linear_blocks(layers: int, linear: int) -> tuple[int, ...]:
    """Returns which blocks have linear attention: `linear` of `layers`, the others at equal distances.

    With 6 of 8: l l l a l l l a.
    """
    others = layers - linear
    return tuple(
        block for block in range(layers) if (block + 1) * others // layers == block * others // layers
    )
