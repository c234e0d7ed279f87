"""What a run has been given, once everything that needs no model has been checked. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llama_ssp.config import Drafting, ModelConf, RunConf
from llama_ssp.prompts import Reading


@dataclass(frozen=True)
class Entry:
    """One pair: the run as it is for it, and where the models' files are (None: synthetic)."""

    run: RunConf
    target_path: Path | None
    draft_path: Path | None

    @property
    def target(self) -> str:
        return _name(self.run.model, self.target_path)

    @property
    def drafter(self) -> str | None:
        """Who drafts, in a word; None where nobody does."""
        spec = self.run.speculation
        if spec.drafter is Drafting.ngram and (spec.k or spec.adaptive):
            return "ngram"
        drafts = spec.drafter is Drafting.model and (spec.k > 0 or spec.adaptive)
        return _name(self.run.draft, self.draft_path) if drafts and self.run.draft is not None else None


@dataclass(frozen=True)
class Inputs:
    """The checked config, the pairs it is about, and the prompts as text."""

    run: RunConf
    seed: int
    pairs: tuple[Entry, ...]
    reading: Reading


def _name(model: ModelConf, path: Path | None) -> str:
    """The preset's name; any folder, preset `local`, is called by its own."""
    return path.name if model.name == "local" and path is not None else model.name
