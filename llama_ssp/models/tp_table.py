"""Which part of each weight a rank holds: what a layer's name says, given heads, MLP and vocabulary.

A layer's output is cut over ranks (rows of its weight: no talk), or its input (columns: one sum over
ranks). transformers' own plan, where a family has one, must agree with the table here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from llama_ssp.errors import ModelError
from llama_ssp.models.sharding import SPLIT_FAMILIES, Heads, Span, head_ranges, mlp_share

ROWS, COLUMNS = 0, 1


@dataclass(frozen=True)
class Cut:
    """Which rows, or which columns, of a weight a rank holds: one span, or one for each fused part."""

    dim: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        return sum(last - first for first, last in self.spans)


@dataclass(frozen=True)
class Sizes:
    """What cuts are made of: this rank's heads, and the model's."""

    heads: Heads
    head_dim: int
    n_heads: int
    n_kv: int
    world: int
    rank: int

    @staticmethod
    def of(config: Any, world: int, rank: int) -> Sizes:
        n_heads = int(config.num_attention_heads)
        n_kv = int(getattr(config, "num_key_value_heads", None) or n_heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // n_heads)
        return Sizes(head_ranges(n_heads, n_kv, world, rank), size, n_heads, n_kv, world, rank)

    def queries(self, unit: int = 1) -> Span:
        return _scaled(self.heads.query, self.head_dim * unit)

    def keys(self) -> Span:
        return _scaled(self.heads.kv, self.head_dim)

    def mlp(self, width: int) -> Span:
        return mlp_share(width, self.world, self.rank)


def _fused_attention(sizes: Sizes, _width: int) -> tuple[Span, ...]:
    """Queries, keys, values, one block after the other (phi3)."""
    keys = sizes.n_heads * sizes.head_dim
    values = keys + sizes.n_kv * sizes.head_dim
    return sizes.queries(), _moved(sizes.keys(), keys), _moved(sizes.keys(), values)


def _fused_mlp(sizes: Sizes, width: int) -> tuple[Span, ...]:
    """Gate and up, one block after the other (phi3)."""
    half = sizes.mlp(width // 2)
    return half, _moved(half, width // 2)


Spans = Callable[[Sizes, int], tuple[Span, ...]]

# By a layer's name: which side is cut, and where, given the length of that side.
TABLE: dict[str, tuple[int, Spans]] = {
    "q_proj": (ROWS, lambda s, _: (s.queries(),)),
    "k_proj": (ROWS, lambda s, _: (s.keys(),)),
    "v_proj": (ROWS, lambda s, _: (s.keys(),)),
    "qkv_proj": (ROWS, _fused_attention),
    "query_key_value": (ROWS, lambda s, _: (s.queries(3),)),  # gpt_neox: query, key, value of each head
    **dict.fromkeys(("o_proj", "out_proj", "dense"), (COLUMNS, lambda s, _: (s.queries(),))),
    **dict.fromkeys(
        ("gate_proj", "up_proj", "fc1", "c_fc", "dense_h_to_4h"), (ROWS, lambda s, n: (s.mlp(n),))
    ),
    "gate_up_proj": (ROWS, _fused_mlp),
    **dict.fromkeys(("down_proj", "fc2", "c_proj", "dense_4h_to_h"), (COLUMNS, lambda s, n: (s.mlp(n),))),
}
ATTENTION_OUTPUTS = ("o_proj", "out_proj", "dense")
PLANNED = {"colwise": ROWS, "rowwise": COLUMNS}  # transformers' words, for y = x W^T with W on disk


def cuts_of(module: Any, sizes: Sizes) -> dict[str, Cut]:
    """The cut of every linear layer that the table names, by the layer's full name."""
    found = {}
    for name, layer in module.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(layer, nn.Linear) and leaf in TABLE:
            dim, spans = TABLE[leaf]
            found[name] = Cut(dim, spans(sizes, layer.weight.shape[dim]))
    return found


def require_known(module: Any) -> None:
    """Refuses a family that is untested in parts, or that transformers cuts another way than the table."""
    if module.config.model_type not in SPLIT_FAMILIES:
        raise ModelError(
            "the architecture cannot be split over ranks", where=type(module).__name__,
            found=module.config.model_type, allowed=", ".join(SPLIT_FAMILIES), fix="run it in one process",
        )  # fmt: skip
    for pattern, way in (getattr(module.config, "base_model_tp_plan", None) or {}).items():
        leaf, side = pattern.rpartition(".")[2], PLANNED.get(way.partition("_")[0])
        if side is not None and (leaf not in TABLE or TABLE[leaf][0] != side):
            raise ModelError(
                "the architecture has a layer that this program cannot split", where=module.config.model_type,
                found=f"{pattern}: {way}", fix="run it in one process",
            )  # fmt: skip


def _scaled(span: Span, unit: int) -> Span:
    return span[0] * unit, span[1] * unit


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
