"""What one rank has of each tensor of a model: spans of its outputs or inputs. No torch.

The rows of tensors are those of layout.py, their splits those of tensor_row.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from llama_ssp.models.layout_sizes import DeltaSizes, Sizes
from llama_ssp.models.sharding import (
    COLUMNS,
    ROWS,
    Cut,
    Heads,
    Span,
    head_ranges,
    length,
    mlp_share,
    shifted,
    times,
    vocab_share,
)
from llama_ssp.models.tensor_row import Split, TensorRow


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's share of all that ranks divide."""

    sizes: Sizes
    world: int
    rank: int
    heads: Heads
    full: Heads | None  # of the blocks of `Sizes.full`
    columns: Span  # of the MLP
    expert_columns: Span  # of each expert
    shared_columns: Span  # of the experts that all tokens go through
    vocab: Span  # the head's rows
    tokens: Span  # the embedding's rows
    first_token: int  # whose row is the first of these
    delta_heads: Heads  # of linear attention: of values, and of keys

    def heads_of(self, full: bool) -> Heads:
        """Returns the heads of most blocks, or of those of `Sizes.full`."""
        return self.full if full and self.full is not None else self.heads

    def first_of_equal_size(self) -> Share:
        """Returns the first share that has as many of everything; the first rank alone adds some biases."""
        return replace(
            self,
            rank=min(self.rank, 1),
            heads=self.heads.first(),
            full=None if self.full is None else self.full.first(),
            columns=(0, length(self.columns)),
            expert_columns=(0, length(self.expert_columns)),
            vocab=(0, length(self.vocab)),
            tokens=(0, length(self.tokens)),
            first_token=0,
            delta_heads=Heads(query=(0, self.delta_heads.queries), kv=(0, self.delta_heads.kvs)),
        )

    def spans(self, row: TensorRow) -> list[Span]:
        """Returns which of the row's outputs, or inputs, this rank has."""
        sizes = self.sizes
        heads = self.heads_of(row.full)
        of_all = sizes.heads_of(row.full)
        head_dim = of_all.head_dim
        queries = sizes.n_heads * head_dim
        keys = of_all.n_kv * head_dim
        query = times(heads.query, head_dim)
        key = times(heads.kv, head_dim)
        match row.split:
            case Split.whole:
                return [(0, row.outputs)]
            case Split.first:
                return [(0, 0 if self.rank else row.outputs)]
            case Split.tokens:
                return [self.tokens]
            case Split.vocabulary:
                return [self.vocab]
            case Split.heads:
                return [heads.query]
            case Split.kv_heads:
                return [heads.kv]
            case Split.queries | Split.head_inputs:
                return [query]
            case Split.gated_queries:
                spans = [times((2 * head, 2 * head + 1), head_dim) for head in range(*heads.query)]
                return [*spans, *(shifted(span, head_dim) for span in spans)]
            case Split.keys:
                return [key]
            case Split.qkv:
                return [query, shifted(key, queries), shifted(key, queries + keys)]
            case Split.qkv_by_group:
                return [times(span, head_dim) for span in _grouped_heads(sizes, heads)]
            case Split.columns | Split.column_inputs:
                return [self.columns]
            case Split.gated_columns:
                return [self.columns, shifted(self.columns, sizes.ffn)]
            case Split.expert_columns | Split.expert_inputs:
                return [self.expert_columns]
            case Split.shared_columns | Split.shared_inputs:
                return [self.shared_columns]
            case Split.expert_pairs:
                return [times(self.expert_columns, 2)]
            case _:
                return self._delta_spans(row.split)

    def _delta_spans(self, split: Split) -> list[Span]:
        """Returns the outputs of linear attention's parts, or inputs, that this rank has."""
        delta = self.sizes.delta
        assert delta is not None
        key = times(self.delta_heads.kv, delta.key_dim)
        value = times(self.delta_heads.query, delta.value_dim)
        match split:
            case Split.delta_heads:
                return [self.delta_heads.query]
            case Split.delta_values | Split.delta_inputs:
                return [value]
            case Split.delta_channels:
                return [key, shifted(key, delta.keys), shifted(value, 2 * delta.keys)]
            case Split.delta_pairs:
                return _grouped_values(delta, self.delta_heads, width=1)
            case _:
                return _grouped_delta(delta, self.delta_heads)

    def outputs(self, row: TensorRow) -> int:
        """Returns how many of the row's outputs this rank has."""
        return row.outputs if row.splits_inputs else sum(map(length, self.spans(row)))

    def inputs(self, row: TensorRow) -> int:
        """Returns how many of its inputs; 1 of a vector."""
        return sum(map(length, self.spans(row))) if row.splits_inputs else max(1, row.inputs)

    def first_input(self, row: TensorRow) -> int:
        """Returns the first of these inputs, by its place on disk."""
        return self.spans(row)[0][0] if row.splits_inputs else 0

    def has_bias(self, row: TensorRow) -> bool:
        """Returns whether this rank adds the bias; of terms that ranks sum, the first rank does."""
        return bool(row.bias) and (self.rank == 0 or not row.splits_inputs)

    def cut(self, row: TensorRow, expert: int | None = None) -> Cut | None:
        """Returns this rank's part of the weight on disk; None: all of it. `expert`: one of a stack."""
        spans = tuple(self.spans(row))
        of_all = row.inputs if row.splits_inputs else row.outputs
        if expert is None and spans == ((0, of_all),):
            return None
        dim = COLUMNS if row.splits_inputs else ROWS
        if row.stacked:  # (experts, inputs, outputs)
            dim = 1 if row.splits_inputs else 2
        return Cut(dim, spans, expert)

    def bias_cut(self, row: TensorRow) -> Cut | None:
        """Returns this rank's part of the bias on disk."""
        if row.splits_inputs:
            return None
        spans = tuple(self.spans(row))
        if spans == ((0, row.outputs),):
            return None
        return Cut(1 if row.stacked else ROWS, spans)


def _grouped_heads(sizes: Sizes, heads: Heads) -> list[Span]:
    """Returns the places of a rank's heads in one matrix of all, group by group of queries.

    Here with 2 queries a group, in units of head_dim outputs:

        q0 q1 k0 v0 | q2 q3 k1 v1 | ...

    A rank with queries 2..3 and keys 1..1 reads places 4 5, 6 and 7: its queries, its keys, its values.
    """
    per_group = sizes.n_heads // sizes.n_kv
    places = [head + 2 * (head // per_group) for head in range(*heads.query)]
    keys = [group * (per_group + 2) + per_group for group in range(*heads.kv)]
    places += [*keys, *(place + 1 for place in keys)]
    return _runs(places)


def _runs(places: list[int]) -> list[Span]:
    """Returns places as runs: 3, 4, 5, 9 is (3, 6), (9, 10)."""
    ends = [at for at, (a, b) in enumerate(pairwise(places), start=1) if b != a + 1]
    return [(places[a], places[b - 1] + 1) for a, b in pairwise([0, *ends, len(places)])]


def _grouped_delta(delta: DeltaSizes, heads: Heads) -> list[Span]:
    """Returns the places of a rank's heads in one matrix of all, group by group of a head of keys.

    Here with 2 heads of values a group; z are the gates of values:

        q0 k0 v0 v1 z0 z1 | q1 k1 v2 v3 z2 z3 | ...

    In memory queries come first, then keys, values and gates.
    """
    group = 2 * (delta.key_dim + delta.per_key * delta.value_dim)
    queries = [(head * group, head * group + delta.key_dim) for head in range(*heads.kv)]
    keys = [shifted(span, delta.key_dim) for span in queries]
    return [*queries, *keys, *_grouped_values(delta, heads, width=delta.value_dim, before=2 * delta.key_dim)]


def _grouped_values(delta: DeltaSizes, heads: Heads, width: int, before: int = 0) -> list[Span]:
    """Returns the places of two parts of a rank's heads of values, all of the first part, then the second.

    Both have `width` numbers a head; in each group there are other numbers `before` them.
    """
    per_key = delta.per_key
    group = before + 2 * per_key * width
    numbers = [divmod(head, per_key) for head in range(*heads.query)]  # of a group, and in it
    first = [which * group + before + number * width for which, number in numbers]
    second = [place + per_key * width for place in first]
    return _runs([place + i for places in (first, second) for place in places for i in range(width)])


def share_of(sizes: Sizes, world: int = 1, rank: int = 0, drafts: bool = False) -> Share:
    """Returns a rank's share. Of a model that `drafts` the first rank alone has token ids.

    It has the whole embedding then, and the others one row, which no token reads.
    """
    vocab = vocab_share(sizes.vocab, world, rank)
    tokens = vocab
    first_token = tokens[0]
    if drafts and world > 1:
        tokens = (0, 1) if rank else (0, sizes.vocab)
        first_token = sizes.vocab if rank else 0
    if sizes.trained_head is not None:
        vocab = (0, 0 if rank else sizes.trained_head.vocab)
    delta_heads = Heads(query=(0, 0), kv=(0, 0))
    if sizes.delta is not None:
        delta_heads = head_ranges(sizes.delta.value_heads, sizes.delta.key_heads, world, rank)
    full = None
    if sizes.full is not None:
        full = head_ranges(sizes.n_heads, sizes.full.n_kv, world, rank)
    return Share(
        sizes=sizes,
        world=world,
        rank=rank,
        heads=head_ranges(sizes.n_heads, sizes.n_kv, world, rank),
        full=full,
        columns=mlp_share(sizes.ffn, world, rank),
        expert_columns=mlp_share(sizes.expert_ffn, world, rank) if sizes.sparse else (0, 0),
        shared_columns=mlp_share(sizes.shared_ffn, world, rank) if sizes.shared_ffn else (0, 0),
        vocab=vocab,
        tokens=tokens,
        first_token=first_token,
        delta_heads=delta_heads,
    )
