"""Target and draft of any two tokenizers: what they share, and how one drafts for the other."""

from llama_ssp.vocab.bridges import Bridge, Intersection, Text
from llama_ssp.vocab.doctor import PROBES, Diagnosis, Verdict, diagnose
from llama_ssp.vocab.matching import NONE, Match, match
from llama_ssp.vocab.pairing import Paired, Pairing, chosen, pair
from llama_ssp.vocab.surface import Notation, notation_guessed, surface
from llama_ssp.vocab.vocabulary import (
    Vocabulary,
    at_work,
    before,
    end_ids_of,
    read_vocabularies,
    read_vocabulary,
    vocabulary_of,
)

__all__ = [
    "NONE", "PROBES", "Bridge", "Diagnosis", "Intersection", "Match", "Notation", "Paired", "Pairing",
    "Text", "Verdict", "Vocabulary", "at_work", "before", "chosen", "diagnose", "end_ids_of", "match",
    "notation_guessed", "pair", "read_vocabularies", "read_vocabulary", "surface", "vocabulary_of",
]  # fmt: skip
