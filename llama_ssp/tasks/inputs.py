"""What a run has been given, once everything that needs no model has been checked. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llama_ssp.batch.job import Job
from llama_ssp.config import RunConf
from llama_ssp.planner.resolve import PairSpec
from llama_ssp.text.prompts import Reading


@dataclass(frozen=True)
class RunInputs:
    """The checked config, the pairs it is about, and the prompts as text; the leader has a batch's `job`."""

    run: RunConf
    seed: int
    pairs: tuple[PairSpec, ...]
    reading: Reading
    job: Job | None = None
