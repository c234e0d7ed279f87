"""How a pair of vocabularies is used: directly, through a bridge, or refused with examples. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llama_ssp.config import USUAL_COST_RATIO, Bridging, RunConf
from llama_ssp.errors import ModelError, UsageError
from llama_ssp.text.compatibility import Diagnosis, VocabularyMatch, diagnose
from llama_ssp.text.translation import Intersection, Text
from llama_ssp.text.vocabulary import Vocabulary

# The usual acceptance of a draft with the target's vocabulary, and what a draft that is proposed as a
# certainty keeps of it while the target samples (0.75 for 0.89 at temperature 1, measured).
USUAL_ACCEPTANCE, CERTAINTY_LOSS, LONGEST = 0.8, 0.84, 16


@dataclass(frozen=True)
class Pairing:
    """The requested bridge, and what the choice of one depends on."""

    how: Bridging = Bridging.auto
    greedy: bool = False
    cost_ratio: float = USUAL_COST_RATIO
    siblings: int = 0

    @staticmethod
    def of(run: RunConf) -> Pairing:
        spec = run.speculation
        ratio = USUAL_COST_RATIO if spec.cost_ratio is None else spec.cost_ratio
        return Pairing(spec.bridge, run.sampling.temperature == 0, ratio, spec.siblings)


def pair(target: Vocabulary, draft: Vocabulary, widths: tuple[int, int], pairing: Pairing) -> Diagnosis:
    """How the two are used; `widths` are the logits of each. Raises where they cannot be."""
    found = diagnose(target, draft, widths)
    _require_usable(found, pairing.how)
    if not found.bridged:
        return found
    how = chosen(found, pairing) if pairing.how is Bridging.auto else pairing.how
    bridge = Intersection if how is Bridging.intersection else Text
    require_chains(bridge is Text, pairing.siblings)
    return replace(found, bridge=bridge(target, draft, found.match, found.expansion))


def require_chains(by_text: bool, siblings: int) -> None:
    """Refuses siblings of drafts that are certainties: no other token is left to draw."""
    if by_text and siblings:
        what, key = "a draft that is paired by its text has no siblings", "speculation.siblings"
        raise UsageError(what, key, siblings, "0", "use speculation.bridge=intersection, or no siblings")


def chosen(found: Diagnosis, pairing: Pairing) -> Bridging:
    """The bridge with the higher expected speed, by what it can propose and what that costs."""
    by_token = USUAL_ACCEPTANCE * found.ceiling
    by_text = USUAL_ACCEPTANCE * (1.0 if pairing.greedy else CERTAINTY_LOSS)
    cost = max(pairing.cost_ratio, 1e-3)
    gain = _best(by_token, cost, 0)
    text_gain = _best(by_text, cost * found.expansion, 1)  # one more is drafted than is proposed
    return Bridging.intersection if gain >= text_gain else Bridging.text


def _best(rate: float, cost: float, ahead: int) -> float:
    """The most expected tokens for the time of a target step, over all K."""
    return max(sum(rate**i for i in range(k + 1)) / (1 + (k + ahead) * cost) for k in range(1, LONGEST + 1))


def _require_usable(found: Diagnosis, how: Bridging) -> None:
    family = "choose a draft of the same family"
    misleading = found.verdict is VocabularyMatch.misleading
    if (misleading and how is Bridging.auto) or (found.bridged and how is Bridging.off):
        what = f"target and draft have different tokenizers{' of the same size' * misleading}"
        counts = f"{found.tokens[0]} and {found.tokens[1]} tokens, {found.differing} differ"
        differ = f"{counts} ({', '.join(found.examples)})"
        fix = f"{family}, or pair what tokens stand for: speculation.bridge=intersection (or text)"
        raise ModelError(what, "", differ, "the same tokens with the same ids", fix)
    if found.cut is not None:
        what = "target and draft have the same tokens but cut text differently"
        raise ModelError(what, "", repr(found.cut), "the same merges and special tokens", family)
    if found.beyond:
        what = "target and draft have the same tokens but not the same vocabulary sizes"
        only = f"{len(found.beyond)} tokens only in the larger ({', '.join(map(repr, found.beyond[:3]))})"
        logits = f"{found.widths[0]} and {found.widths[1]} logits, {only}"
        raise ModelError(what, "", logits, "sizes that differ by padding only", family)
