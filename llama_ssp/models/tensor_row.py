"""What the table of tensors says of a tensor: its row, part, split, and group in a plan. No torch.

layout.py has the rows of a model; shares.py cuts each by its split.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

# The groups of tensors in a plan.
EMBEDDING = "embedding"
HEAD = "head"
LAYERS = "layers"
EXPERTS = "experts"
NORMS = "norms"
POSITIONS = "positions"
BUFFERS = "buffers"  # small tensors in fp32 whatever the number format; they are no parameters


class Part(StrEnum):
    """What a tensor is in the model.

    Matrices of one part in the same blocks become one matrix in memory.
    """

    embedding = auto()
    positions = auto()
    states = auto()  # of a trained head: makes its input from the target's hidden states
    state_norm = auto()
    back = auto()  # of a trained head: makes a state of the target's width from its own
    centroids = auto()  # of a trained head: one row for each group of tokens
    qkv = auto()
    query_norm = auto()
    key_norm = auto()
    sinks = auto()
    output = auto()
    delta_in = auto()  # of linear attention: all products of a layer's input
    delta_conv = auto()
    delta_decay = auto()
    delta_step = auto()
    delta_norm = auto()
    delta_out = auto()
    up = auto()
    down = auto()
    alpha_above = auto()  # of xIELU: its parameters above and below 0, then its two constants
    alpha_below = auto()
    beta = auto()
    limit = auto()
    router = auto()
    correction = auto()  # is added to the router's scores when experts are chosen
    expert_up = auto()
    expert_down = auto()
    shared_up = auto()  # of experts that all tokens go through
    shared_down = auto()
    shared_gate = auto()
    router_norm = auto()  # of the router's input
    expert_scale = auto()  # one factor for the weight of each expert
    before_experts = auto()
    after_experts = auto()
    after_dense = auto()  # of a dense MLP next to experts
    before_attention = auto()
    after_attention = auto()
    before_mlp = auto()
    after_mlp = auto()
    block_scale = auto()  # the factor of a block's result
    norm = auto()
    head = auto()


class Split(Enum):
    """What ranks divide of a tensor: its outputs, or its inputs if it is one of INPUT_SPLITS."""

    whole = auto()  # nothing
    first = auto()  # nothing: the first rank has all of it
    tokens = auto()  # rows of the vocabulary, in the embedding
    vocabulary = auto()  # rows of the vocabulary, in the head
    heads = auto()  # one number, or one row, for each query head
    kv_heads = auto()  # one row for each KV head
    queries = auto()  # query heads
    gated_queries = auto()  # each head's query, then its gate; in memory all queries come first
    keys = auto()  # KV heads
    qkv = auto()  # all query heads, then all heads of keys, then all heads of values
    qkv_by_group = auto()  # for each group of query heads: its queries, its keys, its values
    columns = auto()  # columns of the MLP
    gated_columns = auto()  # all columns of gates, then all columns that these multiply
    expert_columns = auto()  # columns of each expert
    expert_pairs = auto()  # pairs of a gate's column and the column that it multiplies
    head_inputs = auto()
    column_inputs = auto()
    expert_inputs = auto()
    shared_columns = auto()  # columns of the experts that all tokens go through
    shared_inputs = auto()
    # The splits of linear attention:
    delta_heads = auto()  # one number for each head of values
    delta_values = auto()  # heads of values
    delta_channels = auto()  # all queries, then all keys, then all values
    delta_by_group = auto()  # for each head of keys: its query, its key, its values, then their gates
    delta_pairs = auto()  # for each head of keys: beta of its values, then their decays
    delta_inputs = auto()


INPUT_SPLITS = (
    Split.head_inputs,
    Split.column_inputs,
    Split.expert_inputs,
    Split.shared_inputs,
    Split.delta_inputs,
)
# The parts that are quantised: the products of a layer.
# Experts are quantised only where the checkpoint has them in codes.
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
    blocks: tuple[int, ...] | None = None  # the blocks that have it; None: it is outside the blocks
    experts: int = 0  # how many experts of a block have it; 0: it is not an expert's
    scalar: bool = False  # a number: on disk it has no dimension
    stacked: bool = False  # all experts are in one tensor, with inputs before outputs
    by_channel: bool = False  # a convolution that sees one channel: on disk (outputs, 1, inputs)
    wide: bool = False  # in fp32 at least, whatever the number format
    full: bool = False  # its blocks have the heads of `Sizes.full`
    in_gguf: str = ""  # its name where a checkpoint's codes are listed (formats/kept.py)

    @property
    def times(self) -> int:
        """Returns how many blocks have it, 1 if it is outside the blocks. Experts are not counted."""
        return 1 if self.blocks is None else len(self.blocks)

    @property
    def weight_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of the weight on disk."""
        if self.scalar:
            return ()
        if self.stacked:
            return (self.experts, self.inputs, self.outputs)
        if self.by_channel:
            return (self.outputs, 1, self.inputs)
        return (self.outputs, self.inputs) if self.inputs else (self.outputs,)

    @property
    def bias_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of the bias on disk."""
        return (self.experts, self.outputs) if self.stacked else (self.outputs,)

    @property
    def splits_inputs(self) -> bool:
        """Returns whether ranks divide its inputs, and not its outputs."""
        return self.split in INPUT_SPLITS
