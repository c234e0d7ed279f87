"""What a run has been given, once everything that needs no model has been checked. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llama_ssp.config import RunConf
from llama_ssp.prompts import Reading


@dataclass(frozen=True)
class Inputs:
    """The checked config, where the models' files are (None: synthetic), and the prompts as text."""

    run: RunConf
    seed: int
    target_path: Path | None
    draft_path: Path | None
    reading: Reading
