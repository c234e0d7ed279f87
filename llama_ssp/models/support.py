"""What runs of each architecture, and what may draft for it: for a plan and for a page of docs. No torch."""

from dataclasses import dataclass

from llama_ssp.config import ModelConf
from llama_ssp.models.families import FAMILIES
from llama_ssp.models.sharding import architecture, is_planned

ANY = "another model"
OWN_CODES = ("draft=int8", "draft=int4")
NGRAMS = "speculation=ngram"
HEADS = "EAGLE-3 and DFlash heads"


@dataclass(frozen=True, kw_only=True)
class Support:
    """What this program does with a model of this `model_type`."""

    kind: str
    has_row: bool  # in families.py: split over ranks, compiled, planned; else one process, by transformers

    @property
    def runs(self) -> str:
        """Says how it runs."""
        if self.has_row:
            return "split over ranks, with compiled steps, planned to the byte"
        return "in one process, by transformers' module, planned by its headers"

    @property
    def drafts(self) -> str:
        """Says what may draft for it."""
        codes = OWN_CODES if self.has_row else OWN_CODES[:1]
        return ", ".join([ANY, *codes, NGRAMS, HEADS])


def support_of(kind: str) -> Support:
    """Returns what runs of an architecture that is not refused."""
    return Support(kind=kind, has_row=kind in FAMILIES)


def line(role: str, model: ModelConf, whole: str | None) -> str:
    """Returns what a plan says of a folder; `whole`: the model_type whose text part it is."""
    kind = architecture(model)
    support = Support(kind=kind, has_row=is_planned(model))
    part = f", the text part of {whole}" if whole else ""
    return f"{role} {model.name} ({kind}{part}) runs {support.runs}; drafts: {support.drafts}"
