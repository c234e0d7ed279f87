"""What a plan is asked about, and the lines it answers with. No torch.

A role is a model in a number format, a workload is what it has to do; a line is some bytes of one role
on one rank, with how they are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from llama_ssp.config import Dtype, ModelConf

TARGET, DRAFT = "model", "draft"  # roles, by the names of their config groups


@dataclass(frozen=True)
class Role:
    """One model of the pair. `dtype` is resolved, never auto."""

    role: str
    model: ModelConf
    dtype: Dtype


@dataclass(frozen=True)
class Workload:
    """One batch: prompts of this length, so many new tokens each, K drafted a round (0: nobody drafts).

    `target_caches` and `draft_caches` are how many of them there are at once, one for each engine.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int
    k: int
    prefill_chunk: int = 512
    target_caches: int = 1
    draft_caches: int = 1

    @property
    def slots(self) -> int:
        """The capacity asked of the caches, which add one spare slot and stop at a model's context."""
        return self.prompt_tokens + self.new_tokens


class Kind(Enum):
    """How a line is known: from shapes alone, as an upper bound by a formula, or as a measured constant."""

    exact = "exact"
    bound = "bound"
    constant = "constant"


@dataclass(frozen=True)
class Line:
    """Bytes of one role on one rank. The lines of a rank add up: each byte stands in one of them."""

    role: str
    name: str
    bytes: int
    kind: Kind
    source: str = ""
