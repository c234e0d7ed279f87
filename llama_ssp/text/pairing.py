"""Decides how a pair of vocabularies is used: directly, by the tokens of both, or not at all. No torch."""

from __future__ import annotations

from dataclasses import replace

from llama_ssp.config import Bridging
from llama_ssp.errors import ModelError
from llama_ssp.text.compatibility import Diagnosis, VocabularyMatch, diagnose
from llama_ssp.text.translation import Intersection
from llama_ssp.text.vocabulary import Vocabulary

# The least share of a sample text's tokens that the draft must have: a token that it lacks ends a round's
# drafts, so at one half a round keeps one draft on average, however good the draft is.
LEAST_SHARED = 0.5


def pair(target: Vocabulary, draft: Vocabulary, widths: tuple[int, int], how: Bridging) -> Diagnosis:
    """Returns how the two are used; `widths` are the logits of each. Raises ModelError if they cannot be."""
    found = diagnose(target, draft, widths)
    _require_usable(found, how)
    if not found.bridged:
        return found
    return replace(found, bridge=Intersection(target, draft, found.match, found.expansion))


def _require_usable(found: Diagnosis, how: Bridging) -> None:
    family = "choose a draft of the same family"
    misleading = found.verdict is VocabularyMatch.misleading
    if (misleading and how is Bridging.auto) or (found.bridged and how is Bridging.off):
        what = f"target and draft have different tokenizers{' of the same size' * misleading}"
        counts = f"{found.tokens[0]} and {found.tokens[1]} tokens, {found.differing} differ"
        differ = f"{counts} ({', '.join(found.examples)})"
        fix = f"{family}, or pair what tokens stand for: speculation.bridge=intersection"
        raise ModelError(what, "", differ, "the same tokens with the same ids", fix)
    if found.bridged and how is Bridging.auto and found.ceiling < LEAST_SHARED:
        what = "the vocabularies of target and draft share too little"
        share = f"the draft has {found.ceiling:.0%} of a sample text's tokens"
        fix = f"{family}, draft with n-grams (speculation=ngram draft=none), "
        fix += "or draft by the shared tokens all the same: speculation.bridge=intersection"
        raise ModelError(what, "", share, f"{LEAST_SHARED:.0%} or more", fix)
    if found.cut is not None:
        what = "target and draft have the same tokens but cut text differently"
        raise ModelError(what, "", repr(found.cut), "the same merges and special tokens", family)
    if found.beyond:
        what = "target and draft have the same tokens but not the same vocabulary sizes"
        only = f"{len(found.beyond)} tokens only in the larger ({', '.join(map(repr, found.beyond[:3]))})"
        logits = f"{found.widths[0]} and {found.widths[1]} logits, {only}"
        raise ModelError(what, "", logits, "sizes that differ by padding only", family)
