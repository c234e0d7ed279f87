"""What one rank holds of a model: the size of every tensor, from the config's integers and the split.

With one rank the part is the whole model, so the same table counts parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.models.families import Family, family_of
from llama_ssp.models.formats.kept import EXPERT, Kept
from llama_ssp.models.sharding import head_ranges, length, mlp_share, vocab_share
from llama_ssp.planner.storage import (
    AS_THEY_ARE,
    BUFFERS,
    CPU,
    CUDA,
    EMBEDDING,
    EXPERTS,
    HEAD,
    LAYERS,
    NORMS,
    POSITIONS,
    SCALES,
    UNIT,
    Storage,
    Weight,
    sizes_of,
    table_of,
    width,
)
from llama_ssp.planner.workload import Role

CACHE = "cache"  # keys and values


@dataclass(frozen=True)
class ModelPart:
    """The sizes of one rank's part of a model; `widest` is the largest share of the vocabulary."""

    family: Family
    first: bool  # the first rank, which has the biases of layers that are split by their inputs
    layers: int
    dim: int
    head_dim: int
    context: int
    tied: bool
    whole_vocab: int
    world: int
    queries: int
    kvs: int
    ffn: int
    vocab: int
    widest: int
    embedding_rows: int
    experts: int
    experts_per_token: int
    expert_ffn: int
    expert_layers: int
    norms: int  # in a block
    first_query: int  # of this rank's, on disk
    first_column: int  # of the MLP's
    first_expert_column: int  # of each expert's
    codes: Kept  # of a quantised checkpoint
    code_mix: str = ""  # as of ModelConf
    biases: tuple[bool | None, bool | None] = (None, None)  # of attention and the MLP, if not as usual
    head_inputs: int = 0  # of a trained head: numbers of the target's states that it reads
    head_block: int = 0  # and how many drafts a pass gives; 0 is one after the other
    lent_head: bool = False  # its last matrix is the target's

    @staticmethod
    def of(model: ModelConf, world: int = 1, rank: int = 0, leader_looks_up: bool = False) -> ModelPart:
        """`leader_looks_up`: rank 0 holds the whole embedding, the others one unused row."""
        heads = head_ranges(model.n_heads, model.n_kv_heads, world, rank)
        vocab, widest = (length(vocab_share(model.vocab, world, index)) for index in (rank, 0))
        rows = vocab if not leader_looks_up or world == 1 else 1 if rank else model.vocab
        family, first = family_of(model.family), rank == 0
        whole = family, first, model.n_layers, model.dim, model.head_dim, model.context, model.tied
        mlp = mlp_share(model.ffn, world, rank)
        own = heads.queries, heads.kvs, length(mlp), vocab, widest, rows
        sparse = model.n_layers - model.dense_layers if model.experts else 0
        expert = mlp_share(model.expert_ffn, world, rank) if sparse else (0, 0)
        experts = model.experts, model.experts_per_token, length(expert), sparse
        norms = family.norms - (family.multi_query and model.n_kv_heads == 1)
        codes = Kept(model.code_bits, model.code_group, model.code_bytes)
        places = heads.query[0], mlp[0], expert[0]
        if model.is_head:  # its own tokens; what it embeds is not its output's table
            own = *own[:3], model.head_vocab, model.head_vocab, model.vocab
            whole = *whole[:-1], False
            norms += not model.head_block  # EAGLE-3 has that of the states in its block
        biases, sizes = (model.attention_bias, model.mlp_bias), (*own, *experts, norms, *places)
        others = codes, model.code_mix, biases, model.head_inputs, model.head_block
        return ModelPart(*whole, model.vocab, world, *sizes, *others)

    @property
    def query_width(self) -> int:
        return self.queries * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kvs * self.head_dim

    @property
    def largest_matrix(self) -> int:
        """Numbers in the largest of a layer's matrices that may be quantised; experts are not."""
        return max(outputs * inputs for outputs, inputs, *_ in _matrices(self))

    @property
    def rotary_width(self) -> int:
        """The rotated numbers of a head."""
        return int(self.head_dim * self.family.rotary)


def weights(part: ModelPart, packed: bool = False, own_head: bool = False) -> Iterator[Weight]:
    """Every parameter of the part. A tied head is the embedding, where that has the head's rows.

    `packed`: matrices are as a quantised checkpoint has them; `own_head`: a tied head has a copy of its own.
    """
    dim, layers, family = part.dim, part.layers, part.family
    vectors = 2 if family.layer_norm else 1
    yield Weight(EMBEDDING, part.embedding_rows, dim)
    if family.position_rows is not None:
        yield Weight(POSITIONS, part.context + family.position_rows, dim)
    for outputs, inputs, times, bias, before in _matrices(part):
        if not (packed and part.code_mix):
            yield Weight(LAYERS, outputs, inputs, times, linear=True, first=before, codes=part.codes)
        if bias:
            yield Weight(LAYERS, outputs, 1, times)
    if packed:
        yield from _mixed(part)
    if part.head_inputs:
        yield Weight(LAYERS, dim, part.head_inputs)
    if part.expert_layers:
        yield from _experts(part, packed)
    if family.names.sinks:
        yield Weight(LAYERS, part.queries, 1, layers)
    yield Weight(NORMS, dim, 1, layers * vectors * part.norms)
    if family.qk_norm:
        widths = part.query_width, part.key_width
        for width_ in widths if family.whole_qk_norm else 2 * (part.head_dim,):
            yield Weight(NORMS, width_, 1, layers)
    yield Weight(NORMS, dim, 1, vectors + (part.head_block > 0))  # a norm of the states, before the blocks
    if part.lent_head:
        return
    if not part.tied or own_head or part.embedding_rows < part.vocab:
        yield Weight(HEAD, part.vocab, dim)


def _matrices(part: ModelPart) -> Iterator[tuple[int, int, int, bool, int]]:
    """The matrices of attention and of MLPs, as they are held.

    Of each the outputs, the inputs, how many there are, whether with bias, and the first input on disk.

    Queries, keys and values are one matrix, and so are gate and up.
    """
    dim, queries, names = part.dim, part.query_width, part.family.names
    attention, mlp = part.biases

    def biased(name: str, said: bool | None) -> bool:
        return name.rpartition(".")[2] in part.family.biased if said is None else said

    # An EAGLE-3 head reads the states and a token's embedding.
    inputs = 2 * dim if part.head_inputs and not part.head_block else dim
    yield queries + 2 * part.key_width, inputs, part.layers, biased(names.qkv[0], attention), 0
    before = part.first_query * part.head_dim
    yield dim, queries, part.layers, part.first and biased(names.output, attention), before
    if dense := part.layers - part.expert_layers:
        yield part.ffn * (1 + part.family.gated), dim, dense, biased(names.up[0], mlp), 0
        yield dim, part.ffn, dense, part.first and biased(names.down, mlp), part.first_column


def _mixed(part: ModelPart) -> Iterator[Weight]:
    """The products of a checkpoint in which matrices have codes of their own, or none (kept.py)."""
    dim, ffn, queries, keys = part.dim, part.ffn, part.query_width, part.key_width
    wide = part.expert_ffn * (1 + part.family.clamped)  # of clamped experts with their gate
    sizes = {"attn_q": (queries, dim, 0), "attn_k": (keys, dim, 0), "attn_v": (keys, dim, 0)}
    sizes |= {"attn_qkv": (queries + 2 * keys, dim, 0)}
    sizes |= {"attn_output": (dim, queries, part.first_query * part.head_dim)}
    sizes |= {"ffn_gate": (ffn, dim, 0), "ffn_up": (ffn * (1 + part.family.fused_mlp), dim, 0)}
    sizes |= {"ffn_down": (dim, ffn, part.first_column), "expert_gate": (part.expert_ffn, dim, 0)}
    sizes |= {"expert_up": (wide, dim, 0)}
    sizes |= {"expert_down": (dim, part.expert_ffn, part.first_expert_column)}
    for word in part.code_mix.split():
        names, times, bits, group, bytes_, table = word.split(":")
        parts = [sizes[name] for name in names.split("+")]
        codes = Kept(int(bits), int(group), int(bytes_), table)
        outputs, (_, inputs, before) = sum(each[0] for each in parts), parts[0]
        group, each = (EXPERTS, part.experts) if names.startswith(EXPERT) else (LAYERS, 1)
        yield Weight(group, outputs, inputs, int(times) * each, True, before, codes)


def _experts(part: ModelPart, packed: bool) -> Iterator[Weight]:
    """Router and experts, of which each rank has some columns; those in codes are in `_mixed`."""
    count, times, wide = part.experts, part.expert_layers, 2 * part.expert_ffn
    yield Weight(LAYERS, count, part.dim, times)
    coded = sum(int(word.split(":")[1]) for word in part.code_mix.split() if word.startswith(EXPERT[-1]))
    if plain := times - coded * packed:
        yield Weight(EXPERTS, count * wide, part.dim, plain)
        yield Weight(EXPERTS, count * part.dim, part.expert_ffn, plain)
    if part.family.clamped:  # biases, also of the router
        yield Weight(LAYERS, count, 1, times)
        yield Weight(EXPERTS, count * wide, 1, times)
        yield Weight(EXPERTS, count * part.dim, 1, times * part.first)


def parameters(model: ModelConf) -> int:
    """How many parameters the model has; a tied head counts once."""
    return sum(weight.count * weight.times for weight in weights(ModelPart.of(model)))


def buffers(part: ModelPart) -> list[int]:
    """Bytes of the buffers that a model computes: frequencies of rotary positions, ids of a head's tokens."""
    if part.family.position_rows is not None:
        return []
    ids = [8 * part.vocab] if part.head_inputs and part.vocab < part.whole_vocab else []
    return part.family.rotary_kinds * [4 * (part.rotary_width // 2)] + ids


def held(part: ModelPart, dtype: Dtype, store: Storage = AS_THEY_ARE) -> dict[str, int]:
    """Bytes of each group of tensors, each tensor rounded up to the store's unit."""
    found: dict[str, int] = {}
    for group, bytes_, times in tensors(part, dtype, store):
        found[group] = found.get(group, 0) + -(-bytes_ // store.unit) * store.unit * times
    return found


def tensors(part: ModelPart, dtype: Dtype, store: Storage = AS_THEY_ARE) -> Iterator[tuple[str, int, int]]:
    """Every tensor as (group, bytes, how many)."""
    tables = set()
    for weight in weights(part, dtype is Dtype.packed, own_head=store.packs):
        for group, bytes_ in sizes_of(weight, dtype, store):
            yield group, bytes_, weight.times
        table = table_of(weight, dtype, store)
        if table and weight.group != EXPERTS:  # which hold none of their own
            tables.add(table)
    for _, bytes_ in tables:
        yield SCALES, bytes_, 1
    for bytes_ in buffers(part):
        yield BUFFERS, bytes_, 1


@dataclass(frozen=True)
class RolePart:
    """One rank's part of a role: weights, and caches of `capacity` tokens.

    Of a trained head, `waiting` is of how many positions of a row it keeps what it has not read yet.
    """

    role: str
    part: ModelPart
    dtype: Dtype
    capacity: int
    caches: int
    masks: int
    compiled: bool = False  # its steps
    waiting: int = 0
    spare: int = 0  # slots of a cache with graphs beyond those of its rows: for pads, in whole buckets

    @staticmethod
    def of(role: Role, part: ModelPart, capacity: int, caches: int = 1, compiled: bool = False) -> RolePart:
        masks = part.family.masks(role.model.sliding_window)
        return RolePart(role.role, part, role.dtype, capacity, caches, masks, compiled)

    def store(self, cpu: bool) -> Storage:
        """How a CPU or a GPU keeps its tensors."""
        return Storage(1 if cpu else UNIT, CPU if cpu else CUDA, self.compiled)

    def keys_bytes(self, rows: int) -> int:
        """The bytes of the keys of one layer, in one cache."""
        return (rows * self.capacity + self.spare) * self.part.key_width * width(self.dtype)

    def caches_bytes(self, rows: int, unit: int = 1) -> int:
        """Of all caches and layers, each layer's keys and values rounded up to `unit`."""
        keys = 2 * self.part.layers * (-(-self.keys_bytes(rows) // unit) * unit)
        states = rows * self.waiting * self.part.dim * width(self.dtype)
        return self.caches * (keys + -(-states // unit) * unit)
