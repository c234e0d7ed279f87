"""What a run needs, from six integers a model: parameters, weights, caches. Closed form, no torch.

A figure per role, checked against what there is before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.errors import DistributedError

BYTES = {
    Dtype.fp64: 8, Dtype.fp32: 4, Dtype.bf16: 2, Dtype.fp16: 2, Dtype.int8: 1,
    Dtype.nf4: 0.5 + 4 / 64,  # half a byte a weight, and a scale in fp32 for every 64
}  # fmt: skip
GIB = 2**30


@dataclass(frozen=True)
class Bill:
    """Bytes of one role."""

    role: str
    name: str
    weights: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


def parameters(model: ModelConf) -> int:
    """How many weights the model has; a tied head counts once."""
    tables, blocks = _parameters(model)
    return tables + blocks


def _parameters(model: ModelConf) -> tuple[int, int]:
    """Embedding, head and final norm apart from the layers, whose matrices may be quantised."""
    dim, heads = model.dim, model.n_heads * model.head_dim
    keys = model.n_kv_heads * model.head_dim
    attention = 2 * dim * heads + 2 * dim * keys
    tables = model.vocab * dim * (1 if model.tied else 2)
    if model.family == "gpt_neox":
        layer = attention + heads + 2 * keys + dim + 2 * dim * model.ffn + model.ffn + dim + 4 * dim
        return tables + 2 * dim, model.n_layers * layer
    if model.family == "gpt_neo":
        layer = attention + dim + 2 * dim * model.ffn + model.ffn + dim + 4 * dim
        return tables + model.context * dim + 2 * dim, model.n_layers * layer
    if model.family == "opt":
        biases = heads + 2 * keys + dim + model.ffn + dim
        layer = attention + 2 * dim * model.ffn + biases + 4 * dim
        return tables + (model.context + 2) * dim + 2 * dim, model.n_layers * layer
    norms = {"gemma2": 4 * dim, "qwen3": 2 * dim + 2 * model.head_dim}.get(model.family, 2 * dim)
    biases = heads + 2 * keys if model.family == "qwen2" else 0
    layer = attention + 3 * dim * model.ffn + norms + biases
    return tables + dim, model.n_layers * layer


def bill(role: str, model: ModelConf, dtype: Dtype, rows: int, slots: int) -> Bill:
    """What one role holds: int8 and nf4 keep embedding and head in 16 bit, and caches are 16 bit."""
    tables, blocks = _parameters(model)
    wide = int(max(BYTES[dtype], 2))
    cache = 2 * model.n_layers * model.n_kv_heads * model.head_dim * wide * rows * (slots + 1)
    return Bill(role, model.name, tables * wide + int(blocks * BYTES[dtype]), cache)


def require_room(bills: list[Bill], device: str, capacity: int, reserve: float) -> None:
    """Refuses a run whose weights and caches cannot fit, before anything is loaded."""
    needed, usable = sum(b.total for b in bills), int(capacity * (1 - reserve))
    if needed > usable:
        raise DistributedError(
            f"the models do not fit on {device}",
            where="; ".join(
                f"{b.role} {b.name}: weights {b.weights / GIB:.1f} GiB, cache {b.cache / GIB:.1f} GiB"
                for b in bills
            ),
            found=f"{needed / GIB:.1f} GiB needed",
            allowed=f"{usable / GIB:.1f} GiB ({capacity / GIB:.1f} GiB less {reserve:.0%} reserve)",
            fix="take a smaller model, a smaller dtype (model.dtype=int8), fewer rows (task.batch_size) "
            "or shorter texts (task.max_new_tokens)",
        )
