"""The sizes that decide which tensors a model has; `sizes_of_model` takes them from a ModelConf. No torch.

shape.py makes them of a config.json, with what the decoder needs in addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llama_ssp.config import ModelConf
from llama_ssp.models.families import Family, family_of, full_layers

BLOCK_NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """What a trained head has in addition to its blocks."""

    inputs: int  # numbers of the target's hidden states
    vocab: int  # tokens that it drafts
    has_block: bool  # it drafts all in one pass (DFlash), not one after the other (EAGLE-3)
    prefix: str = "layers.0"  # of EAGLE-3's one block
    state_norms: tuple[tuple[str, int], ...] = ()  # EAGLE-3's norms of the states, before they are fused
    embeds: bool = True  # it has an embedding of its own
    heads: bool = True  # and an output matrix
    shares_cache: bool = False  # it reads the target's keys and values (Gemma 4's assistants)
    centroids: int = 0  # of groups of tokens, some of which have logits; 0: all tokens have


@dataclass(frozen=True)
class DeltaSizes:
    """The sizes of linear attention by a Gated DeltaNet. Queries have the heads and the width of keys."""

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
        """Returns how many heads of values share one of keys."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True, kw_only=True)
class BlockHeads:
    """The heads of some blocks; all blocks have as many query heads."""

    blocks: tuple[int, ...]
    n_kv: int
    head_dim: int
    has_values: bool = True  # else keys, before their norm, are values


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
    norms: tuple[str, ...]  # names of a block's norms, as of BLOCK_NORMS; empty where there is none
    qk_norm: bool  # queries and keys have norms
    attention_bias: bool | None  # None: as usual in the family
    mlp_bias: bool | None
    tied: bool  # the head is the embedding
    trained_head: HeadSizes | None = None
    delta: DeltaSizes | None = None  # of the blocks `linear`
    linear: tuple[int, ...] = ()  # the blocks whose attention is linear, and keeps a state
    full: BlockHeads | None = None  # of blocks that see the whole text, where their heads differ from others

    @cached_property
    def attending(self) -> tuple[int, ...]:
        """Returns the blocks whose attention keeps keys and values."""
        return tuple(block for block in range(self.n_layers) if block not in self.linear)

    @cached_property
    def heads(self) -> tuple[BlockHeads, ...]:
        """Returns the kinds of heads: those of most blocks, and those of `full`."""
        others = () if self.full is None else self.full.blocks
        blocks = tuple(block for block in self.attending if block not in others)
        usual = BlockHeads(blocks=blocks, n_kv=self.n_kv, head_dim=self.head_dim)
        return (usual,) if self.full is None else (usual, self.full)

    def heads_of(self, full: bool) -> BlockHeads:
        """Returns the heads of most blocks, or of those of `full`."""
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
        """Returns whether a layer has a bias: what the config says, or what is usual in the family."""
        if said is not None:
            return said
        return name.rpartition(".")[2] in self.family.biased


def sizes_of_model(model: ModelConf) -> Sizes:
    """Returns the sizes of a preset, or of a folder that a plan has read the config of."""
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
        tied=model.tied and not model.is_head,  # what a head embeds is not its output's table
        trained_head=trained_head,
        delta=delta,
        linear=linear_blocks(model.n_layers, model.linear_layers),
        full=full,
    )


def linear_blocks(layers: int, linear: int) -> tuple[int, ...]:
    """Returns which blocks have linear attention, if so many do; the others come at equal distances.

    Of 8 blocks of which 6 are linear: l l l a l l l a.
    """
    others = layers - linear
    return tuple(
        block for block in range(layers) if (block + 1) * others // layers == block * others // layers
    )
