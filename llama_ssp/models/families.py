"""What this program knows of each tested architecture, beyond its config.json: one row each. No torch.

A row says how layers are cut over ranks, what the planner counts, and what config.json leaves out. To add a
family, add a row here and a small configuration to tests/families.py. An architecture without a row runs too,
but in one process, without a plan, and after a trial (self_check.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


class Linear(Enum):
    """What a linear layer computes; sharding.py has the part of its weight that a rank holds."""

    QUERY = auto()
    KV = auto()  # keys, or values
    QKV = auto()  # all queries, then all keys, then all values
    QKV_BY_HEAD = auto()  # query, key and value of the first head, then of the next
    OUTPUT = auto()  # of attention
    UP = auto()  # into the MLP: gate, too
    GATE_UP = auto()  # all of gate, then all of up
    DOWN = auto()  # out of the MLP


SEPARATE_QKV = {"q_proj": Linear.QUERY, "k_proj": Linear.KV, "v_proj": Linear.KV}
GATED_MLP = {"gate_proj": Linear.UP, "up_proj": Linear.UP, "down_proj": Linear.DOWN}
LLAMA = {**SEPARATE_QKV, "o_proj": Linear.OUTPUT, **GATED_MLP}
NEOX = {
    "query_key_value": Linear.QKV_BY_HEAD,
    "dense": Linear.OUTPUT,
    "dense_h_to_4h": Linear.UP,
    "dense_4h_to_h": Linear.DOWN,
}
GPT_NEO = {**SEPARATE_QKV, "out_proj": Linear.OUTPUT, "c_fc": Linear.UP, "c_proj": Linear.DOWN}
OPT = {**SEPARATE_QKV, "out_proj": Linear.OUTPUT, "fc1": Linear.UP, "fc2": Linear.DOWN}
PHI3 = {
    "qkv_proj": Linear.QKV,
    "o_proj": Linear.OUTPUT,
    "gate_up_proj": Linear.GATE_UP,
    "down_proj": Linear.DOWN,
}


@dataclass(frozen=True)
class Window:
    """A sliding window of attention, as config.json describes it."""

    key: str = "sliding_window"
    default: int | None = None  # where config.json does not say
    partial: bool = False  # some layers have it, the others see the whole text
    switched: bool = False  # only with use_sliding_window; a partial one from layer max_window_layers on


@dataclass(frozen=True, eq=False)  # a row is one object, compared by identity
class Family:
    """One architecture; the defaults are Llama's."""

    layers: Mapping[str, Linear]  # the linear layers of a block by name, in the order of the forward pass
    biased: tuple[str, ...] = ()  # those with a bias
    split: bool = True  # over ranks by tensor_parallel.py, and planned
    deepspeed: bool = True  # DeepSpeed splits it right; it cuts fused MLPs wrongly

    grouped: bool = True  # config.json has a number of KV heads and a head size
    multi_query: bool = False  # one KV head, where config.json does not say otherwise
    qk_norm: bool = False  # queries and keys have norms
    softcap: bool = False  # of scores and logits
    masks_inside: bool = False  # attention makes its own masks, from slot numbers, and fp32 scores
    window: Window | None = None

    layer_norm: bool = False  # norms have a weight and a bias; an RMS norm has a weight
    norms: int = 2  # in a block
    norm_offset: int = 0  # a norm multiplies by this plus its weight
    scaled_embedding: bool = False
    rotary: float = 1.0  # how much of a head is rotated
    position_rows: int | None = None  # of a learned table of positions, beyond the context; None: rotary
    mlp_key: str = "intermediate_size"  # of the MLP's width in config.json
    mlp_states: int = 3  # tensors of the MLP's width that exist at once: gate, activation, product
    tied: bool = False  # where config.json does not say
    context: int | None = None  # where config.json does not say

    @property
    def eager(self) -> bool:
        """Attention is plain products, with scores as tensors."""
        return self.softcap or self.masks_inside

    @property
    def fused_qkv(self) -> bool:
        return not {Linear.QKV, Linear.QKV_BY_HEAD}.isdisjoint(self.layers.values())

    @property
    def fused_mlp(self) -> bool:
        return Linear.GATE_UP in self.layers.values()

    def masks(self, sliding_window: int | None) -> int:
        """How many masks a model with this window has: one for each kind of attention layer."""
        window = self.window
        has_both = window is not None and window.partial and (sliding_window or not window.switched)
        return 2 if has_both else 1


QWEN_WINDOW = Window(partial=True, switched=True)
FAMILIES = {
    "falcon": Family(NEOX, split=False, grouped=False, multi_query=True, context=2048),
    "gemma2": Family(
        LLAMA, softcap=True, window=Window(default=4096, partial=True), norms=4, norm_offset=1,
        scaled_embedding=True, tied=True,
    ),
    "gpt_neo": Family(
        GPT_NEO, ("out_proj", "c_fc", "c_proj"), grouped=False, masks_inside=True,
        window=Window("window_size", 256, partial=True), layer_norm=True, position_rows=0,
        mlp_states=5, tied=True,  # its GELU is made of several steps
    ),
    "gpt_neox": Family(NEOX, tuple(NEOX), grouped=False, layer_norm=True, rotary=0.25, mlp_states=2),
    "llama": Family(LLAMA),
    "mistral": Family(LLAMA, window=Window(default=4096)),
    "mixtral": Family(LLAMA, split=False, window=Window()),
    "opt": Family(
        OPT, tuple(OPT), grouped=False, layer_norm=True, position_rows=2, mlp_key="ffn_dim",
        mlp_states=2, tied=True,
    ),
    "phi3": Family(PHI3, deepspeed=False, window=Window(), mlp_states=4),
    "qwen2": Family(LLAMA, ("q_proj", "k_proj", "v_proj"), window=QWEN_WINDOW),
    "qwen3": Family(LLAMA, qk_norm=True, window=QWEN_WINDOW),
    "qwen3_moe": Family(LLAMA, split=False, qk_norm=True, window=Window(switched=True)),
}  # fmt: skip
UNKNOWN = Family(LLAMA, split=False)

TESTED_FAMILIES = tuple(FAMILIES)
TESTED = ", ".join(FAMILIES)
SPLIT_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.split)
DEEPSPEED_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.split and family.deepspeed)

# Limits of architectures without a row. Rotary positions with two scales (longrope), one of them for all rows
# of a pass, by its longest text:
SCALED_BY_PASS = ("phimoe",)
# A choice among the tokens of a pass that has more of them than this key of the config says:
READ_TOGETHER_BEYOND = {"doge": "keep_window_size"}


def family_of(name: str) -> Family:
    """The row of transformers' `model_type`; Llama's defaults, unsplit, where there is none."""
    return FAMILIES.get(name, UNKNOWN)
