"""Two figures a role, weights and cache, checked against what there is before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.errors import DistributedError
from llama_ssp.planner.weights import Part, held, weights, width

GIB = 2**30


@dataclass(frozen=True)
class Bill:
    """Bytes of one role."""

    role: str
    name: str
    weights: int
    cache: int
    passing: int = 0  # at the worst moment beside them, counted with one role of the two

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.passing

    def in_words(self) -> str:
        passing = f", passing through {self.passing / GIB:.1f} GiB" if self.passing else ""
        return (
            f"{self.role} {self.name}: weights {self.weights / GIB:.1f} GiB, "
            f"cache {self.cache / GIB:.1f} GiB{passing}"
        )


def parameters(model: ModelConf) -> int:
    """How many weights the model has; a tied head counts once."""
    return sum(weight.count * weight.times for weight in weights(Part.of(model)))


def bill(role: str, model: ModelConf, dtype: Dtype, rows: int, slots: int) -> Bill:
    """What one role holds: int8 and nf4 keep embedding and head in 16 bit, and caches are 16 bit."""
    cache = 2 * model.n_layers * model.n_kv_heads * model.head_dim * width(dtype) * rows * (slots + 1)
    return Bill(role, model.name, sum(held(Part.of(model), dtype).values()), cache)


def require_room(bills: list[Bill], device: str, capacity: int, reserve: float) -> None:
    """Refuses a run whose weights and caches cannot fit, before anything is loaded."""
    needed, usable = sum(b.total for b in bills), int(capacity * (1 - reserve))
    if needed > usable:
        raise DistributedError(
            f"the models do not fit on {device}",
            where="; ".join(b.in_words() for b in bills),
            found=f"{needed / GIB:.1f} GiB needed",
            allowed=f"{usable / GIB:.1f} GiB ({capacity / GIB:.1f} GiB less {reserve:.0%} reserve)",
            fix="take a smaller model, a smaller dtype (model.dtype=int8), fewer rows (task.batch_size) "
            "or shorter texts (task.max_new_tokens)",
        )
