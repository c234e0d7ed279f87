"""What a plan is about: two roles and a batch of work; and the lines that a memory estimate consists of."""

from collections.abc import Callable
from dataclasses import dataclass

from llama_ssp.config import Dtype, ModelConf, Splitting

# Roles, by the names of their config groups.
TARGET = "model"
DRAFT = "draft"

MIB = 2**20
GIB = 2**30

# How the bytes of a line are known: from shapes alone, as an upper bound by a formula, or as measured.
EXACT = "exact"
BOUND = "bound"
CONSTANT = "constant"


@dataclass(frozen=True)
class Role:
    """One model of the pair. `dtype` is resolved, never auto."""

    role: str
    model: ModelConf
    dtype: Dtype


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """Which steps are compiled, as the run decides it (placing/engine.py)."""

    why_eager: Callable[[Role, Splitting], str | None]  # None: they are compiled
    needs_trial: bool = False  # whether compiled steps over several GPUs have to pass a trial first


ALL_COMPILED = StepRule(why_eager=lambda _role, _splitting: None)
ALL_EAGER = StepRule(why_eager=lambda _role, _splitting: "as asked")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One batch: rows of `prompt_tokens`, `new_tokens` each, K drafted a round (0: no drafting).

    `target_caches` and `draft_caches` are how many caches there are at once, one for each engine.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int
    k: int
    prefill_chunk: int = 512
    target_caches: int = 1
    draft_caches: int = 1

    @property
    def columns(self) -> int:
        """Counts the positions of a row that the target verifies in a round."""
        return self.k + 1

    @property
    def slots(self) -> int:
        """Returns the capacity requested of the caches, which stop at a model's context."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of one role on one rank. The lines of a rank add up: each byte is in one of them."""

    role: str
    name: str
    bytes: int
    kind: str = EXACT
    source: str = ""
