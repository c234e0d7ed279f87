"""What a run has been given, once everything that needs no model has been checked. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llama_ssp.config import Drafting, ModelConf, RunConf
from llama_ssp.job import Job
from llama_ssp.placement import Placement
from llama_ssp.prompts import Reading


@dataclass(frozen=True)
class Entry:
    """One pair: its run, where the models' files are (None: synthetic), and which ranks hold what."""

    run: RunConf
    target_path: Path | None
    draft_path: Path | None
    placement: Placement

    @property
    def files(self) -> dict[str, Path | None]:
        """The folders of the models that take part, by role."""
        draft = {"draft": self.draft_path} if drafts(self.run) else {}
        return {"model": self.target_path, **draft}

    @property
    def target(self) -> str:
        return _name(self.run.model, self.target_path)

    @property
    def drafter(self) -> str | None:
        """Who drafts, in a word; None where nobody does."""
        spec = self.run.speculation
        if spec.drafter is Drafting.ngram and (spec.k or spec.adaptive):
            return "ngram"
        return _name(self.run.draft, self.draft_path) if self.run.draft and drafts(self.run) else None


@dataclass(frozen=True)
class Inputs:
    """The checked config, the pairs it is about, and the prompts as text; the leader has a batch's `job`."""

    run: RunConf
    seed: int
    pairs: tuple[Entry, ...]
    reading: Reading
    job: Job | None = None


def drafts(run: RunConf) -> bool:
    """Whether a draft model takes part."""
    spec = run.speculation
    return run.draft is not None and spec.drafter is Drafting.model and (spec.k > 0 or spec.adaptive)


def _name(model: ModelConf, path: Path | None) -> str:
    """The preset's name; any folder, preset `local`, is called by its own."""
    return path.name if model.name == "local" and path is not None else model.name
