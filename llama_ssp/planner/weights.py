"""What one rank holds of a model in memory: the rows of models/layout.py, by number format and device.

With one rank the part is the whole model, so the same rows count parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.models.cache_layout import STATES, TAILS, states
from llama_ssp.models.families import Family
from llama_ssp.models.formats.kept import EXPERT, Kept, products_of_mix
from llama_ssp.models.graph_sizes import ring_of
from llama_ssp.models.kernels.kernel_sizes import TORCH_HEAD
from llama_ssp.models.layout import layout
from llama_ssp.models.layout_sizes import BlockHeads, Sizes, sizes_of_model
from llama_ssp.models.sharding import Heads, length, vocab_share
from llama_ssp.models.shares import Share, share_of
from llama_ssp.models.tensor_row import BUFFERS, EXPERTS, QUANTISED, Part, TensorRow
from llama_ssp.planner.storage import (
    AS_THEY_ARE,
    CPU,
    CUDA,
    MADE,
    SCALES,
    UNIT,
    Storage,
    Weight,
    bytes_of,
    table_of,
    width,
)
from llama_ssp.planner.workload import Role

CACHE = "cache"  # keys and values, and states
PLACE_BYTES = 3 * 8  # what compiled steps need to find states


@dataclass(frozen=True, kw_only=True)
class PartHeads:
    """One rank's heads in some layers, and what the whole model has there."""

    heads: Heads
    of_all: BlockHeads

    @property
    def layers(self) -> int:
        return len(self.of_all.blocks)

    @property
    def queries(self) -> int:
        return self.heads.queries

    @property
    def kvs(self) -> int:
        return self.heads.kvs

    @property
    def query_width(self) -> int:
        return self.queries * self.of_all.head_dim

    @property
    def key_width(self) -> int:
        return self.kvs * self.of_all.head_dim


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """One rank's part of a model: the rank's share of its tensors, and how a checkpoint has them in codes."""

    share: Share
    codes: Kept  # of a quantised checkpoint
    code_mix: str  # as of ModelConf
    context: int
    experts_per_token: int
    head_block: int = 0  # of a trained head: how many drafts a pass gives; 0 is one after the other
    borrows_embedding: bool = False  # a head reads the target's
    borrows_head: bool = False

    @staticmethod
    def of(model: ModelConf, world: int = 1, rank: int = 0, leader_looks_up: bool = False) -> ModelPart:
        """`leader_looks_up`: rank 0 holds the whole embedding, the others one unused row."""
        return ModelPart(
            share=share_of(sizes_of_model(model), world, rank, drafts=leader_looks_up),
            codes=Kept(model.code_bits, model.code_group, model.code_bytes),
            code_mix=model.code_mix,
            context=model.context,
            experts_per_token=model.experts_per_token,
            head_block=model.head_block,
        )

    @property
    def sizes(self) -> Sizes:
        return self.share.sizes

    @property
    def family(self) -> Family:
        return self.sizes.family

    @property
    def world(self) -> int:
        return self.share.world

    @property
    def layers(self) -> int:
        return self.sizes.n_layers

    @property
    def expert_layers(self) -> int:
        return len(self.sizes.sparse)

    @property
    def dim(self) -> int:
        return self.sizes.dim

    @property
    def experts(self) -> int:
        return self.sizes.experts

    @property
    def tied(self) -> bool:
        return self.sizes.tied

    @property
    def head_inputs(self) -> int:
        """Counts the numbers of the target's states that a trained head reads; 0 of a model."""
        head = self.sizes.trained_head
        return 0 if head is None else head.inputs

    @property
    def shares_cache(self) -> bool:
        """Returns whether it is a head that reads the target's keys and values."""
        return self.sizes.trained_head is not None and self.sizes.trained_head.shares_cache

    @property
    def whole_vocab(self) -> int:
        return self.sizes.vocab

    @property
    def vocab(self) -> int:
        """Counts the tokens whose logits this rank computes."""
        return length(self.share.vocab)

    @property
    def widest_vocab(self) -> int:
        """Returns the largest number of tokens whose logits a rank computes."""
        if self.sizes.trained_head is not None:
            return self.vocab
        return length(vocab_share(self.sizes.vocab, self.world, 0))

    @cached_property
    def heads(self) -> list[PartHeads]:
        """Returns the rank's heads: those of most layers, and of layers that have others."""
        return [
            PartHeads(heads=self.share.heads_of(of_all is self.sizes.full), of_all=of_all)
            for of_all in self.sizes.heads
            if of_all.blocks
        ]

    @property
    def query_width(self) -> int:
        """Returns the most numbers of a token's queries."""
        return max(heads.query_width for heads in self.heads)

    @property
    def key_width(self) -> int:
        """Returns the most numbers of a token's keys."""
        return max(heads.key_width for heads in self.heads)

    @property
    def linear_layers(self) -> int:
        """Counts the layers whose attention is linear."""
        return len(self.sizes.linear)

    @property
    def linear_heads(self) -> int:
        """Counts the heads of values of linear attention."""
        return self.share.delta_heads.queries

    @property
    def state_numbers(self) -> int:
        """Counts the numbers of a layer's state after one token."""
        return sum(state.numbers for state in states(self.share) if state.name == STATES)

    @property
    def channels(self) -> int:
        """Counts the channels of the convolution of linear attention."""
        return sum(state.numbers for state in states(self.share) if state.name == TAILS)

    @property
    def ffn(self) -> int:
        """Counts the columns of the MLP."""
        return length(self.share.columns)

    @property
    def expert_ffn(self) -> int:
        """Counts the columns of each expert."""
        return length(self.share.expert_columns)

    @property
    def shared_ffn(self) -> int:
        """Counts the columns of the experts that all tokens go through."""
        return length(self.share.shared_columns)

    @property
    def rotary_widths(self) -> list[int]:
        """Returns how many numbers of a head each table of positions rotates."""
        if self.sizes.full is not None:
            return [heads.head_dim for heads in self.sizes.heads]
        return [int(self.sizes.head_dim * self.family.rotary)] * self.family.rotary_kinds

    @property
    def norms(self) -> int:
        """Counts the norms of a block, those of queries and keys left out."""
        return sum(map(bool, self.sizes.norms))

    @property
    def has_scores(self) -> bool:
        """Returns whether attention without our kernels has a matrix of scores on a GPU.

        It has one for a cap, a sink or a wide head.
        """
        is_wide = any(heads.of_all.head_dim > TORCH_HEAD for heads in self.heads)
        return self.family.softcap or bool(self.family.names.sinks) or is_wide

    @property
    def largest_matrix(self) -> int:
        """Counts the numbers in the largest of a layer's matrices that may be quantised; experts are not."""
        return max(weight.count for weight in weights(replace(self, code_mix="")) if weight.linear)


@lru_cache(maxsize=4096)
def weights(part: ModelPart, packed: bool = False, own_head: bool = False) -> tuple[Weight, ...]:
    """Returns every parameter of the part. A tied head is the embedding, where that has the head's rows.

    `packed`: matrices are as a quantised checkpoint has them; `own_head`: a tied head has a copy of its own.
    A search asks for the same parts again and again.
    """
    return tuple(_weights(part, packed, own_head))


def _weights(part: ModelPart, packed: bool, own_head: bool) -> Iterator[Weight]:
    mixed = packed and bool(part.code_mix)
    for product in _products(part):
        weight = _joined(part, product)
        row = product[0]
        if row.group == BUFFERS or (row.part is Part.head and not (own_head or _has_head(part))):
            continue
        if row.part in QUANTISED and mixed:
            pass  # in `_mixed`
        elif row.experts:
            plain = row.times - _coded_experts(part) * packed
            if plain:
                yield replace(weight, outputs=weight.outputs * row.experts, times=plain)
        else:
            yield weight

        biases = sum(part.share.outputs(each) for each in product if part.share.has_bias(each))
        if biases:
            count = biases * max(1, row.experts)
            yield Weight(group=row.group, outputs=count, inputs=1, times=row.times)
    if mixed:
        yield from _mixed(part)


def _products(part: ModelPart) -> list[list[TensorRow]]:
    """Returns the rows that this rank has; those that are one matrix in memory together."""
    products: dict[object, list[TensorRow]] = {}
    for row in layout(part.sizes):
        if row.part is Part.embedding and part.borrows_embedding:
            continue
        key = (row.part if row.inputs else row.weight, row.blocks)
        products.setdefault(key, []).append(row)
    return list(products.values())


def _joined(part: ModelPart, rows: list[TensorRow]) -> Weight:
    """Returns the matrix in memory that these rows are, one below the other."""
    share = part.share
    first = rows[0]
    is_product = first.part in QUANTISED
    return Weight(
        group=first.group,
        outputs=sum(map(share.outputs, rows)),
        inputs=share.inputs(first),
        times=first.times,
        linear=is_product,
        wide=first.wide,
        first=share.first_input(first),
        codes=part.codes if is_product else Kept(),
    )


def _has_head(part: ModelPart) -> bool:
    """Returns whether the head is a tensor of its own."""
    if part.borrows_head:
        return False
    return not part.tied or length(part.share.tokens) < part.vocab


def _mixed(part: ModelPart) -> Iterator[Weight]:
    """Yields the products of a checkpoint in which matrices have codes of their own, or none (kept.py)."""
    by_name = {row.in_gguf: row for row in layout(part.sizes) if row.in_gguf}
    for names, times, codes in products_of_mix(part.code_mix):
        rows = [by_name[name] for name in names]
        experts = max(1, rows[0].experts)
        yield replace(_joined(part, rows), times=times * experts, linear=True, codes=codes)


def _coded_experts(part: ModelPart) -> int:
    """Counts the layers whose experts are in codes; in `_mixed`."""
    return sum(times for names, times, _ in products_of_mix(part.code_mix) if names == [EXPERT[-1]])


def parameters(model: ModelConf) -> int:
    """Counts the parameters of the model; a tied head counts once."""
    return sum(weight.count * weight.times for weight in weights(ModelPart.of(model)))


def buffers(part: ModelPart) -> list[int]:
    """Returns the bytes of buffers: frequencies of positions, ids of a head's tokens, and those of files."""
    if part.family.position_rows is not None:
        return []
    ids = [8 * part.vocab] if part.head_inputs and part.vocab < part.whole_vocab else []
    if part.sizes.trained_head is not None and part.sizes.trained_head.centroids:
        ids = [8 * part.vocab]  # the group of each token
    stored = [4 * row.outputs for row in layout(part.sizes) if row.group == BUFFERS for _ in row.blocks or ()]
    return [4 * (numbers // 2) for numbers in part.rotary_widths] + ids + stored


def held(part: ModelPart, dtype: Dtype, store: Storage = AS_THEY_ARE) -> dict[str, int]:
    """Returns the bytes of each group of tensors, each rounded up to the store's unit."""
    sizes: dict[str, int] = {}
    for group, bytes_, times in tensors(part, dtype, store):
        sizes[group] = sizes.get(group, 0) + -(-bytes_ // store.unit) * store.unit * times
    return sizes


def tensors(part: ModelPart, dtype: Dtype, store: Storage = AS_THEY_ARE) -> Iterator[tuple[str, int, int]]:
    """Yields every tensor as (group, bytes, how many)."""
    tables = set()
    for weight in weights(part, dtype is Dtype.packed, own_head=store.packs):
        for group, bytes_ in bytes_of(weight, dtype, store):
            yield group, bytes_, weight.times
        table = table_of(weight, dtype, store)
        if table and weight.group != EXPERTS:  # which hold none of their own
            tables.add(table)
    for _, bytes_ in tables:
        yield SCALES, bytes_, 1
    for bytes_ in buffers(part):
        yield BUFFERS, bytes_, 1


@dataclass(frozen=True, kw_only=True)
class RolePart:
    """One rank's part of a role: weights, and caches of `capacity` tokens.

    Of a trained head, `waiting` is of how many positions of a row it keeps what it has not read yet. A row is
    rolled back by `rewinds` tokens at most.
    """

    role: str
    part: ModelPart
    dtype: Dtype
    capacity: int
    caches: int
    masks: int
    compiled: bool = False  # its steps
    waiting: int = 0
    rewinds: int = 0
    spare: int = 0  # slots of a cache with graphs beyond those of its rows: for pads, in whole buckets

    @staticmethod
    def of(role: Role, part: ModelPart, capacity: int, caches: int = 1, compiled: bool = False) -> RolePart:
        return RolePart(
            role=role.role,
            part=part,
            dtype=role.dtype,
            capacity=capacity,
            caches=caches,
            masks=part.family.masks(role.model.sliding_window),
            compiled=compiled,
        )

    def first_of_equal_size(self) -> RolePart:
        """Returns the first rank's part that holds as much. Of codes it also counts where a part begins."""
        if self.dtype in (Dtype.packed, *MADE):
            return self
        return replace(self, part=replace(self.part, share=self.part.share.first_of_equal_size()))

    def store(self, cpu: bool) -> Storage:
        """Returns how a CPU or a GPU keeps its tensors."""
        return Storage(1 if cpu else UNIT, CPU if cpu else CUDA, self.compiled)

    def caches_bytes(self, rows: int, unit: int = 1) -> int:
        """Returns the bytes of all caches, each tensor of each layer rounded up to `unit`."""
        slots = rows * self.capacity + self.spare
        texts = rows + 1 if self.spare else rows  # pads have states of their own
        total = 0
        for state in states(self.part.share):
            positions = texts * (ring_of(self.rewinds) + state.tail) if state.in_ring else slots
            size = positions * state.numbers * width(self.dtype, state.wide)
            total += len(state.blocks) * -(-size // unit) * unit
        if self.part.linear_layers:
            total += -(-PLACE_BYTES // unit) * unit
        numbers = self.part.head_inputs if self.part.shares_cache else self.part.dim
        waiting = rows * self.waiting * numbers * width(self.dtype)
        return self.caches * (total + -(-waiting // unit) * unit)
