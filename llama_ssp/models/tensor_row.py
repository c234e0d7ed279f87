"""What the table of tensors says of each of them: a row, its part, its split, its group in a plan. No torch.

layout.py has the rows of a model; shares.py cuts them by their splits.
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
BUFFERS = "buffers"  # small tensors that are kept in fp32 whatever the number format, and no parameters


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
