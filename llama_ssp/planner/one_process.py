"""The plan of a pair that is not planned in full: transformers' own modules run it, in one process. No torch.

A model that the decoder does not have cannot be split or compiled, and what its layers read is not known. Its
weights are those that the headers of its files name; its caches are bounded by its sizes.
"""

from dataclasses import dataclass, replace
from typing import Any

from llama_ssp.config import PlacementConf
from llama_ssp.distributed.placement import LEADER, Placement, resolve
from llama_ssp.models.sharding import architecture
from llama_ssp.planner.fit import FitVerdict, RankMemory
from llama_ssp.planner.plan import gpu_document, subject
from llama_ssp.planner.search import PlanRequest
from llama_ssp.planner.storage import WEIGHTS, width
from llama_ssp.planner.workload import EXACT, GIB, MemoryLine

NAME = "weights"
SOURCE = "the headers of its files"


@dataclass(frozen=True, kw_only=True)
class OneProcess:
    """The memory of the one GPU, or of the CPU. `numbers` are those of models without a row, by role."""

    request: PlanRequest
    memory: RankMemory
    numbers: dict[str, int]

    @property
    def verdict(self) -> FitVerdict:
        return self.memory.verdict

    @property
    def runs(self) -> bool:
        """Returns whether it may fit."""
        return self.verdict is not FitVerdict.does_not_fit

    def sentence(self) -> str:
        """Says the answer in plain words."""
        needed = self.memory.total / GIB
        there = self.memory.capacity / GIB
        unknown = [architecture(role.model) for role in self.request.roles if role.role in self.numbers]
        families = " and ".join(dict.fromkeys(unknown))
        how = f"one process, by transformers' module, as {families} has no row in models/families.py"
        if not self.runs:
            return f"It does not fit: {needed:.1f} GiB needed where there are {there:.1f}; {how}."
        fit = "It fits" if self.verdict is FitVerdict.fits else "Whether it fits is uncertain"
        return f"{fit}, {needed:.1f} of {there:.1f} GiB; {how}. Times are not planned."

    def document(self) -> dict[str, Any]:
        """Returns the figures under the names of the JSON interface; those that are not known are null."""
        return {
            "verdict": self.verdict.value,
            "sentence": self.sentence(),
            **subject(self.request, self.request.work.k),
            "per_gpu": [gpu_document(self.memory)],
            "placements": [],
            "best": None,
            "by_acceptance": [],
            "break_even_acceptance": None,
            "largest": None,
            "advice": [],
        }


def one_process(request: PlanRequest, numbers: dict[str, int]) -> OneProcess:
    """Returns the plan. `numbers` are those of the weights, by role, where only the files' headers say them.

    The draft is with the target, whole.
    """
    place: Placement = resolve(PlacementConf(), 1, drafts=request.draft is not None)
    memory = request.memories(place, request.work)[LEADER]
    lines = [line for line in memory.lines if line.name not in WEIGHTS or line.role not in numbers]
    for role in request.roles:
        if role.role in numbers:
            size = numbers[role.role] * width(role.dtype)
            lines.append(MemoryLine(role=role.role, name=NAME, bytes=size, kind=EXACT, source=SOURCE))
    return OneProcess(
        request=request,
        memory=replace(memory, lines=tuple(lines)),
        numbers=numbers,
    )
